//! Discard and write-zeroes: flags, limits, and file systems that cannot.

use std::path::Path;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::{Disk, OK, Op, Segment, UNSUPP, feature, request::UNMAP};
use polypath_vm_tests::loopdev::{LoopDev, Mount};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, filled, need, serve, status};

#[test]
fn f50_flags_are_looked_at() {
    let image = Image::filled(4 * MIB);
    let (_server, mut disk) = serve(&image);
    for flags in [1, 2, 3, 0x8000_0000] {
        let op = Op::Discard(vec![Segment::new(0, 8).flags(flags)]);
        assert_eq!(status(disk.q(), &op), UNSUPP, "discard with flags {flags:#x}");
    }
    for flags in [2, 3, 0x8000_0000] {
        let op = Op::WriteZeroes(vec![Segment::new(0, 8).flags(flags)]);
        assert_eq!(status(disk.q(), &op), UNSUPP, "write-zeroes with flags {flags:#x}");
    }
    image.assert_filled(0..image.sectors());
    for (i, flags) in [(0, 0), (1, UNMAP)] {
        disk.q().write_zeroes(i * 8, 8, flags).unwrap();
        assert_eq!(disk.q().read(i * 8, 8).unwrap(), [0; 4096]);
    }
    image.assert_filled(16..image.sectors());
    disk.q().discard(16, 8).unwrap();
    image.assert_filled(24..image.sectors());
}

#[test]
fn f50_one_bad_flag_among_good_segments_changes_nothing() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let segments = vec![Segment::new(0, 8), Segment::new(16, 8).flags(4)];
    assert_eq!(status(disk.q(), &Op::WriteZeroes(segments.clone())), UNSUPP);
    assert_eq!(status(disk.q(), &Op::Discard(segments)), UNSUPP);
    image.assert_filled(0..image.sectors());
}

#[test]
fn odd_segment_lists_are_refused() {
    let image = Image::filled(MIB);
    let (_server, mut disk) = serve(&image);
    for kind in [11, 13] {
        for len in [0, 1, 15, 17, 31] {
            let mut out = Segment::new(0, 8).bytes();
            out.resize(len.max(16), 0);
            out.truncate(len);
            let op = Op::Other { kind, sector: 0, out, in_len: 0 };
            assert_ne!(status(disk.q(), &op), OK, "type {kind} with a list of {len} bytes");
        }
    }
    image.assert_filled(0..image.sectors());
}

fn assert_limits(disk: &Disk, what: &str) {
    let config = disk.config;
    if disk.has(feature::DISCARD) {
        assert!(config.max_discard_sectors > 0 && config.max_discard_seg > 0, "{what}: {config:?}");
        let alignment = config.discard_sector_alignment;
        assert!(
            alignment > 0 && alignment.is_multiple_of((config.blk_size / 512).max(1)),
            "{what}: {config:?}"
        );
    }
    if disk.has(feature::WRITE_ZEROES) {
        assert!(config.max_write_zeroes_sectors > 0 && config.max_write_zeroes_seg > 0, "{what}: {config:?}");
    }
}

#[test]
fn f51_offered_features_have_limits() {
    let image = Image::filled(MIB);
    let (_server, disk) = serve(&image);
    assert!(disk.has(feature::DISCARD | feature::WRITE_ZEROES));
    assert_limits(&disk, "a plain file");

    let server = Server::any().path(&image.path).read_only().start().unwrap();
    let disk = Disk::open(server.socket()).unwrap();
    assert!(disk.has(feature::RO));
    assert_limits(&disk, "read-only");
}

#[test]
fn f51_limits_follow_the_strictest_path() {
    need!(loopdev);
    for sector_size in [512, 4096] {
        let image = Image::filled(4 * MIB);
        let device = LoopDev::on(&image.path).sector_size(sector_size).attach().unwrap();
        let server = Server::polypath().path(device.path()).start().unwrap();
        let mut disk = Disk::open(server.socket()).unwrap();
        assert_eq!(disk.config.blk_size, sector_size);
        assert_limits(&disk, &format!("a loop device of {sector_size}"));
        let n = sector_size / 512;
        disk.q().write_zeroes(u64::from(n), n, 0).unwrap();
        disk.q().write_zeroes(u64::from(2 * n), n, UNMAP).unwrap();
        if disk.has(feature::DISCARD) {
            disk.q().discard(u64::from(4 * n), 4 * n).unwrap();
        }
        assert!(disk.q().read(u64::from(n), 2 * n as usize).unwrap().iter().all(|&b| b == 0));
        assert!(disk.q().read(0, n as usize).unwrap() == filled(0, u64::from(n)));
        assert_eq!(server.count_log("path failed"), 0);
    }
}

/// Zeroes and discards on `path`, which holds the filled pattern of `bytes`; only write-zeroes has to work.
fn exercise(server: &Server, path: &Path, bytes: u64, what: &str) {
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.has(feature::WRITE_ZEROES), "{what}");
    assert_limits(&disk, what);
    for (sector, num, flags) in [(8, 8, 0), (32, 1, 0), (33, 5, UNMAP), (64, 512, UNMAP), (1024, 513, 0)] {
        disk.q().write_zeroes(sector, num, flags).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        assert!(disk.q().read(sector, num as usize).unwrap().iter().all(|&b| b == 0), "{what}");
    }
    if disk.has(feature::DISCARD) {
        let discard = status(disk.q(), &Op::Discard(vec![Segment::new(1600, 64)]));
        assert!(discard == OK || discard == UNSUPP, "{what}: discard gave {discard}");
    }
    for (sector, num) in [(0, 8), (16, 16), (38, 26), (576, 448), (1537, 63)] {
        assert_eq!(
            disk.q().read(sector, num as usize).unwrap(),
            filled(sector, num),
            "{what}: beside a range"
        );
    }
    assert_eq!(std::fs::metadata(path).unwrap().len(), bytes, "{what}: the size stays");
    disk.q().write(0, &filled(0, 8)).unwrap();
    disk.q().flush().unwrap();
    assert_eq!(server.count_log("path failed"), 0, "{what}: {}", server.stderr());
}

fn on_file_system(mount: &Mount, what: &str) {
    let image = Image::filled(MIB);
    let path = mount.path().join("disk");
    std::fs::copy(&image.path, &path).unwrap();
    let server = Server::polypath().path(&path).start().unwrap();
    exercise(&server, &path, image.bytes, what);
}

#[test]
fn f52_tmpfs() {
    on_file_system(&Mount::tmpfs(16 * MIB).unwrap(), "tmpfs");
}

#[test]
fn f52_ext4() {
    need!(loopdev);
    let backing = Image::empty(64 * MIB);
    on_file_system(&Mount::file_system("ext4", &backing.path).unwrap(), "ext4");
}

#[test]
fn f52_fuse_without_fallocate() {
    need!(faulty);
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS] {
        let image = Image::filled(MIB);
        let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
        for name in ["a", "b"] {
            fs.rule(name, Rule::errno(errno).fallocates());
        }
        let server = Server::polypath().paths(fs.paths(&["a", "b"])).start().unwrap();
        exercise(&server, &image.path, image.bytes, &format!("FUSE, fallocate gives {errno}"));
    }
}
