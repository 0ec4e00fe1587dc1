//! Requests at and past the end, and disks of odd sizes.

use std::time::{Duration, Instant};

use polypath_vm_tests::front_end::{Disk, IOERR, OK, Op, Segment, request::UNMAP};
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::{Program, Server};

use crate::common::{Image, MIB, SOON, filled, need, serve, status, statuses};

/// Sends `op` in two data pieces or more, which the plain framing does not do.
fn in_pieces(len: usize) -> polypath_vm_tests::front_end::Framing {
    let cut = polypath_vm_tests::front_end::Cut {
        out: std::iter::once(16).chain(std::iter::repeat_n(512, len / 512)).collect(),
        into: vec![512; len / 512],
        ..Default::default()
    };
    polypath_vm_tests::front_end::Framing::Cut(cut)
}

#[test]
fn f06_the_sum_of_the_pieces_is_checked_against_the_end() {
    let image = Image::filled(MIB);
    let n = image.sectors();
    let (_server, mut disk) = serve(&image);
    let write = Op::write(n - 1, vec![9; 1024]);
    assert_eq!(disk.q().run_framed(&write, &in_pieces(1024)).unwrap().status, IOERR);
    let read = Op::read(n - 1, 8);
    assert_eq!(disk.q().run_framed(&read, &in_pieces(4096)).unwrap().status, IOERR);
    assert_eq!(image.file().metadata().unwrap().len(), image.bytes, "the file did not grow");
    image.assert_filled(0..n);
    let write = Op::write(n - 8, vec![9; 4096]);
    assert_eq!(disk.q().run_framed(&write, &in_pieces(4096)).unwrap().status, OK);
    assert_eq!(image.at(n - 8, 8), [9; 4096]);
}

#[test]
fn f06_a_legal_request_beside_an_illegal_one_is_done() {
    let image = Image::filled(MIB);
    let n = image.sectors();
    let (_server, mut disk) = serve(&image);
    let ops = [
        Op::write(n - 16, vec![1; 4096]),
        Op::write(n - 8, vec![2; 4096]),
        Op::write(n, vec![3; 4096]),
        Op::write(n - 4, vec![4; 4096]),
    ];
    assert_eq!(statuses(disk.q(), &ops), [OK, OK, IOERR, IOERR]);
    let ops = [Op::read(n - 16, 8), Op::read(n - 8, 8), Op::read(n, 8)];
    assert_eq!(statuses(disk.q(), &ops), [OK, OK, IOERR]);
    assert_eq!(image.at(n - 16, 16), [[1; 4096], [2; 4096]].concat());
    assert_eq!(image.file().metadata().unwrap().len(), image.bytes);
}

#[test]
fn f23_sector_arithmetic_does_not_wrap() {
    let image = Image::filled(MIB);
    let n = image.sectors();
    let (mut server, mut disk) = serve(&image);
    let starts = [u64::MAX, 1 << 55, (1 << 55) - 1, 1 << 54, u64::MAX / 512, n, u64::MAX - 7];
    for sector in starts {
        for num in [1, 8] {
            let ops = [
                Op::read(0, 8),
                Op::read(sector, num),
                Op::write(sector, vec![5; num * 512]),
                Op::Discard(vec![Segment::new(sector, num.try_into().unwrap())]),
                Op::WriteZeroes(vec![Segment::new(sector, num.try_into().unwrap())]),
                Op::WriteZeroes(vec![Segment::new(sector, num.try_into().unwrap()).flags(UNMAP)]),
                Op::read(8, 8),
            ];
            let statuses = statuses(disk.q(), &ops);
            assert_eq!(
                statuses,
                [OK, IOERR, IOERR, IOERR, IOERR, IOERR, OK],
                "sector {sector:#x}, {num} sectors"
            );
        }
    }
    let ops = [
        Op::read(n - 1, 2),
        Op::write(n - 1, vec![5; 1024]),
        Op::Discard(vec![Segment::new(n - 1, 2)]),
        Op::WriteZeroes(vec![Segment::new(n - 1, 2)]),
        Op::Discard(vec![Segment::new(0, u32::MAX)]),
        Op::WriteZeroes(vec![Segment::new(0, u32::MAX)]),
        Op::WriteZeroes(vec![Segment::new(u64::MAX, u32::MAX)]),
        // The first segment is legal: nothing of a request may be done when a part of it is illegal.
        Op::WriteZeroes(vec![Segment::new(0, 8), Segment::new(n, 8)]),
    ];
    let expected = if server.program() == Program::Polypath { 8 } else { 7 };
    assert_eq!(statuses(disk.q(), &ops[..expected]), vec![IOERR; expected]);
    // A write at the very end of the numbers must not join one at the start.
    let ops = [Op::write(u64::MAX, vec![6; 512]), Op::write(0, filled(0, 1))];
    assert_eq!(statuses(disk.q(), &ops), [IOERR, OK]);
    image.assert_filled(0..n);
    assert_eq!(image.file().metadata().unwrap().len(), image.bytes);
    assert!(server.is_alive());
}

#[test]
fn f31_reads_past_a_truncated_end_fail_soon_and_do_not_spin() {
    let image = Image::filled(2 * MIB);
    let (mut server, mut disk) = serve(&image);
    image.file().set_len(MIB).unwrap();
    let end = MIB / 512;
    let cpu = server.stats().cpu;
    for op in [Op::read(end + 8, 8), Op::read(end - 8, 16)] {
        let start = Instant::now();
        let status = status(disk.q(), &op);
        assert!(start.elapsed() < Duration::from_secs(1), "{op:?} took {:?}", start.elapsed());
        if server.program() == Program::Polypath {
            assert_eq!(status, IOERR, "{op:?}");
        }
    }
    assert_eq!(disk.q().read(end - 8, 8).unwrap(), filled(end - 8, 8));
    let used = server.stats().cpu.checked_sub(cpu).unwrap();
    assert!(used < Duration::from_millis(500), "{used:?} of CPU for three reads");
    // Writing there is legal for the file and for the guest.
    assert_eq!(status(disk.q(), &Op::write(end + 8, filled(end + 8, 8))), OK);
    assert_eq!(disk.q().read(end + 8, 8).unwrap(), filled(end + 8, 8));
    assert!(server.is_alive());
}

#[test]
fn f32_odd_sizes_are_rounded_down_with_a_warning() {
    for bytes in [512_u64, 513, 1023, 123_456_789, 7_000_000_000] {
        let image = Image::empty(bytes);
        let server = Server::polypath().path(&image.path).start().unwrap();
        let mut disk = Disk::open(server.socket()).unwrap();
        assert_eq!(disk.config.capacity, bytes / 512, "{bytes} bytes");
        let last = disk.config.capacity - 1;
        disk.q().write(last, &filled(last, 1)).unwrap();
        assert_eq!(disk.q().read(last, 1).unwrap(), filled(last, 1));
        assert_eq!(status(disk.q(), &Op::read(last + 1, 1)), IOERR);
        assert_eq!(image.file().metadata().unwrap().len(), bytes, "the size stays");
        if bytes % 512 != 0 {
            let line = server.wait_for_log("WARN", SOON).unwrap();
            assert!(line.contains("size") || line.contains("bytes"), "{line}");
        }
    }
}

#[test]
fn f32_empty_files_are_refused() {
    for bytes in [0, 1, 511] {
        let image = Image::empty(bytes);
        let exited = Server::polypath().path(&image.path).run_to_exit(SOON).unwrap();
        assert!(exited.code > 0, "{bytes} bytes: {exited:?}");
        assert!(exited.stderr.contains(image.path.to_str().unwrap()), "{bytes} bytes: {exited:?}");
        assert!(!exited.socket_left);
    }
}

#[test]
fn f32_on_4096_byte_sectors_the_capacity_is_a_multiple_of_them() {
    need!(loopdev);
    let image = Image::filled(512 * 9);
    // The kernel cuts the device itself: 9 sectors of 512 are one of 4096.
    let device = LoopDev::on(&image.path).sector_size(4096).attach().unwrap();
    let server = Server::polypath().path(device.path()).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    assert_eq!(disk.config.capacity, 8);
    assert_eq!(disk.q().read(0, 8).unwrap(), filled(0, 8));
}

#[test]
fn f11_single_sectors_can_be_read_from_a_4096_byte_sector_path() {
    need!(loopdev);
    let image = Image::filled(4 * MIB);
    let device = LoopDev::on(&image.path).sector_size(4096).direct_io(true).attach().unwrap();
    let server = Server::polypath().path(device.path()).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let config = disk.config;
    assert_eq!((config.capacity, config.blk_size), (image.sectors(), 4096), "{config:?}");
    for (sector, num) in [(1, 1), (0, 1), (7, 1), (7, 2), (3, 13), (15, 1)] {
        assert_eq!(disk.q().read(sector, num).unwrap(), filled(sector, num as u64), "sector {sector}, {num}");
    }
    // Pieces that are whole sectors but no whole blocks, at addresses that are no multiple of the block size.
    let read = disk.q().run_framed(&Op::read(8, 16), &in_pieces(8192)).unwrap();
    assert_eq!((read.status, read.data), (OK, filled(8, 16)));
    disk.q().write(8, &[3; 4096]).unwrap();
    let write = disk.q().run_framed(&Op::write(16, vec![4; 8192]), &in_pieces(8192)).unwrap();
    assert_eq!(write.status, OK);
    assert_eq!(disk.q().read(8, 24).unwrap(), [vec![3; 4096], vec![4; 8192]].concat());
    // As documented: a write of less than a block is refused, it could not be done without reading first.
    let partial = [
        Op::write(1, vec![5; 512]),
        Op::write(8, vec![5; 512]),
        Op::WriteZeroes(vec![Segment::new(1, 1)]),
        Op::WriteZeroes(vec![Segment::new(0, 9)]),
    ];
    assert_eq!(statuses(disk.q(), &partial), [IOERR; 4]);
    assert_eq!(disk.q().read(0, 8).unwrap(), filled(0, 8));
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
}

#[test]
fn f11_limits_on_512_byte_sectors_are_512() {
    need!(loopdev);
    let image = Image::filled(MIB);
    let device = LoopDev::on(&image.path).attach().unwrap();
    let server = Server::any().path(device.path()).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    assert_eq!(disk.config.blk_size, 512);
    disk.q().write(1, &[5; 512]).unwrap();
    assert_eq!(disk.q().read(0, 3).unwrap(), [filled(0, 1), vec![5; 512], filled(2, 1)].concat());
}
