//! Several paths, some of which fail.

use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::verify::{Plan, Verifier};
use polypath_vm_tests::front_end::{Disk, IOERR, OK, Op, Segment, UNSUPP, feature, request::UNMAP};
use polypath_vm_tests::loopdev::{LoopDev, Mount};
use polypath_vm_tests::server::Server;

use crate::common::{
    Image, MIB, SOON, filled, need, no_path_failed, serve_faulty, serve_faulty_sync, status, statuses,
};

/// Errors that speak of the path.
const PATH_ERRORS: [i32; 8] = [
    libc::EIO,
    libc::ENODEV,
    libc::ENXIO,
    libc::ENOLINK,
    libc::ETIMEDOUT,
    libc::ENOTCONN,
    libc::ESTALE,
    libc::ECONNABORTED,
];

/// Errors that speak of the target, or of ourselves.
const TARGET_ERRORS: [i32; 12] = [
    libc::EOPNOTSUPP,
    libc::EREMOTEIO,
    libc::ENODATA,
    libc::EILSEQ,
    libc::EBADE,
    libc::ENOSPC,
    libc::EDQUOT,
    libc::EFBIG,
    libc::EPERM,
    libc::EROFS,
    libc::EINVAL,
    libc::EFAULT,
];

/// Both names are in use: of a few reads apart from each other, each serves some.
fn both_used(fs: &FaultyFs, disk: &mut Disk) {
    let before = [fs.counts("a").reads, fs.counts("b").reads];
    for i in 0..16 {
        assert!(disk.q().read(i * 64, 8).unwrap() == filled(i * 64, 8));
    }
    for (name, before) in ["a", "b"].iter().zip(before) {
        assert!(fs.counts(name).reads > before, "{name} is not used");
    }
}

#[test]
fn f01_refusals_of_the_target_fail_no_path() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty_sync(&image, &["a", "b"]);
    for errno in TARGET_ERRORS {
        for op in [Op::read(8, 8), Op::write(8, filled(8, 8))] {
            let before = fs.counts("a").data() + fs.counts("b").data();
            for name in ["a", "b"] {
                fs.rule(name, Rule::errno(errno).on(&[Kind::Read, Kind::Write]));
            }
            assert_eq!(status(disk.q(), &op), IOERR, "errno {errno}");
            let tries = fs.counts("a").data() + fs.counts("b").data() - before;
            // The kernel itself repeats what came back with EOPNOTSUPP a hundred times: a sign of "would block" to it.
            assert!(tries <= 2 || errno == libc::EOPNOTSUPP, "errno {errno}: {tries} tries on two paths");
            fs.clear("a");
            fs.clear("b");
            both_used(&fs, &mut disk);
        }
    }
    no_path_failed(&server);
    image.assert_filled(0..image.sectors());
}

#[test]
fn f01_a_refused_discard_is_unsupported_or_has_no_effect() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
    assert!(disk.has(feature::DISCARD), "the paths can discard when it starts");
    for name in ["a", "b"] {
        fs.rule(name, Rule::errno(libc::EOPNOTSUPP).fallocates());
    }
    let before = fs.counts("a").fallocates + fs.counts("b").fallocates;
    assert_eq!(status(disk.q(), &Op::Discard(vec![Segment::new(8, 8)])), UNSUPP);
    let tries = fs.counts("a").fallocates + fs.counts("b").fallocates - before;
    // (See f01_refusals_of_the_target_fail_no_path.)
    assert!(tries % 2 == 0, "each path is asked alike: {tries} tries");
    // One of them can: it does it, whoever is asked first.
    fs.clear("b");
    for i in 0..4 {
        disk.q().write(512 + i * 8, &[1; 4096]).unwrap();
        assert_eq!(status(disk.q(), &Op::Discard(vec![Segment::new(512 + i * 8, 8)])), OK);
        image_is_blank(&image, 512 + i * 8);
        disk.q().write(512 + i * 8, &filled(512 + i * 8, 8)).unwrap();
    }
    fs.rule("b", Rule::errno(libc::EOPNOTSUPP).fallocates());
    disk.q().write_zeroes(16, 8, UNMAP).unwrap();
    assert!(disk.q().read(16, 8).unwrap().iter().all(|&b| b == 0), "write-zeroes always works");
    disk.q().write(8, &filled(8, 8)).unwrap();
    disk.q().write(16, &filled(16, 8)).unwrap();
    both_used(&fs, &mut disk);
    no_path_failed(&server);
    image.assert_filled(0..image.sectors());
}

fn image_is_blank(image: &Image, sector: u64) {
    assert!(image.at(sector, 8).iter().all(|byte| *byte == 0), "not discarded at {sector}");
}

#[test]
fn path_errors_move_io_to_the_other_path() {
    need!(faulty);
    for errno in PATH_ERRORS {
        for write in [false, true] {
            let image = Image::filled(MIB);
            let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
            fs.rule("a", Rule::errno(errno).on(&[Kind::Read, Kind::Write]));
            for i in 0..16 {
                if write {
                    disk.q().write(i * 8, &[7; 4096]).unwrap();
                    assert_eq!(image.at(i * 8, 8), [7; 4096]);
                } else {
                    assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8), "errno {errno}");
                }
            }
            assert_eq!(server.count_log("path failed"), 1, "errno {errno}: {}", server.stderr());
            let line = server.wait_for_log("path failed", SOON).unwrap();
            assert!(line.contains(fs.path("a").to_str().unwrap()), "{line}");
            // What is read there now are probes: one block at the start of the disk, again and again in vain.
            disk.q().read(8, 8).unwrap();
            assert_eq!(server.count_log("path reinstated"), 0, "{}", server.stderr());
            let writes = fs.counts("a").writes;
            disk.q().write(8, &[8; 4096]).unwrap();
            assert_eq!(fs.counts("a").writes, writes, "a failed path is used no more");
        }
    }
}

#[test]
fn f14_with_no_path_left_requests_fail_at_once_if_that_is_the_policy() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount_sync(&image.path, &["a", "b"]).unwrap();
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).arg("--no-path-retry").arg("fail");
    let mut server = server.start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    for name in ["a", "b"] {
        fs.rule(name, Rule::errno(libc::EIO).reads());
    }
    for _ in 0..4 {
        assert_eq!(status(disk.q(), &Op::read(0, 8)), IOERR, "with no path left the guest must hear of it");
    }
    fs.clear("a");
    fs.clear("b");
    server.wait_for_log("path reinstated", SOON).unwrap();
    for i in 0..8 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8), "a path has come back");
    }
    assert!(server.is_alive());
}

#[test]
fn f36_a_single_path_that_fails_once_serves_on_and_the_guest_sees_nothing() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a"]);
    fs.rule("a", Rule::errno(libc::EIO).reads().next(1));
    for i in 0..8 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8));
    }
    assert_eq!(server.count_log("path failed"), 1, "{}", server.stderr());
    assert_eq!(server.count_log("path reinstated"), 1, "{}", server.stderr());
}

#[test]
fn a_path_lost_under_load_costs_no_request() {
    need!(faulty);
    for kill_with in [libc::EIO, libc::ENOTCONN] {
        let image = Image::empty(16 * MIB);
        let fs = FaultyFs::mount(&image.path, &["a", "b", "c"]).unwrap();
        fs.logging(false);
        let server = Server::polypath().paths(fs.paths(&["a", "b", "c"])).start().unwrap();
        let mut disk = Disk::at(server.socket()).queues(4).open().unwrap();
        let mut verifiers = Verifier::share(image.sectors(), 4, 1);
        let plan = Plan { requests: 1500, flush_percent: 0, ..Plan::default() };
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                polypath_vm_tests::front_end::verify::load_with(&mut disk.queues, &mut verifiers, &plan)
            });
            for name in ["a", "c"] {
                let goal = fs.counts(name).data() + 200;
                polypath_vm_tests::server::wait_until("some load", SOON, || fs.counts(name).data() > goal)
                    .unwrap();
                fs.rule(name, Rule::errno(kill_with));
            }
            let report = load.join().unwrap().unwrap_or_else(|e| panic!("errno {kill_with}: {e:#}"));
            assert_eq!(report.errors, 0);
        });
        assert_eq!(server.count_log("path failed"), 2, "{}", server.stderr());
        for verifier in &verifiers {
            verifier.check_file(&image.path).unwrap();
        }
    }
}

#[test]
fn f09_one_bad_sector_fails_one_request() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
    for name in ["a", "b"] {
        fs.rule(name, Rule::errno(libc::ENODATA).on(&[Kind::Read, Kind::Write]).sectors(20..21));
    }
    let expected = [OK, OK, IOERR, OK, OK, OK, OK, OK];
    for _ in 0..10 {
        let reads: Vec<_> = (0..8).map(|i| Op::read(i * 8, 8)).collect();
        for (i, done) in disk.q().run_all(&reads).unwrap().iter().enumerate() {
            assert_eq!(done.status, expected[i], "read {i}");
            assert!(done.status != OK || done.data == filled(i as u64 * 8, 8), "read {i}");
        }
        let writes: Vec<_> = (0..8).map(|i| Op::write(i * 8, filled(i * 8, 8))).collect();
        assert_eq!(statuses(disk.q(), &writes), expected);
    }
    // A run whose last member is past the end.
    let n = image.sectors();
    let reads: Vec<_> = (0..4).map(|i| Op::read(n - 24 + i * 8, 8)).collect();
    assert_eq!(statuses(disk.q(), &reads), [OK, OK, OK, IOERR]);
    no_path_failed(&server);
    image.assert_filled(0..n);
}

#[test]
fn f09_the_same_with_a_path_error() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a", "b"]);
    for name in ["a", "b"] {
        fs.rule(name, Rule::errno(libc::EIO).reads().sectors(20..21));
    }
    let reads: Vec<_> = (0..8).map(|i| Op::read(i * 8, 8)).collect();
    assert_eq!(statuses(disk.q(), &reads), [OK, OK, IOERR, OK, OK, OK, OK, OK]);
}

#[test]
fn f35_a_full_disk_is_not_a_dead_path() {
    let mount = Mount::tmpfs(4 * MIB).unwrap();
    let (a, b) = (mount.path().join("a"), mount.path().join("b"));
    std::fs::File::create(&a).unwrap().set_len(64 * MIB).unwrap();
    std::fs::hard_link(&a, &b).unwrap();
    let server = Server::polypath().path(&a).path(&b).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    disk.q().write(0, &filled(0, 8)).unwrap();
    let filler = mount.path().join("filler");
    let _ = std::fs::write(&filler, vec![1; 5 * MIB as usize]);
    for i in 0..4 {
        assert_eq!(status(disk.q(), &Op::write(4096 + i * 64, vec![2; 32768])), IOERR);
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "old data can be read");
    }
    no_path_failed(&server);
    std::fs::remove_file(&filler).unwrap();
    disk.q().write(4096, &filled(0, 64)).unwrap();
    assert!(disk.q().read(4096, 64).unwrap() == filled(0, 64));
}

#[test]
fn f40_equal_paths_get_equal_shares() {
    need!(faulty);
    let image = Image::filled(MIB);
    let names = ["a", "b", "c"];
    let fs = FaultyFs::mount(&image.path, &names).unwrap();
    let server = Server::polypath().paths(fs.paths(&names)).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(8).open().unwrap();
    fs.logging(false);
    let before = names.map(|name| fs.counts(name).reads);
    let (queues, each) = (8, 300_u64);
    std::thread::scope(|scope| {
        for q in &mut disk.queues {
            scope.spawn(move || (0..each).for_each(|i| drop(q.read(i % 1024, 1).unwrap())));
        }
    });
    let shares: Vec<u64> =
        names.iter().zip(before).map(|(name, before)| fs.counts(name).reads - before).collect();
    assert_eq!(shares.iter().sum::<u64>(), queues * each);
    let fair = queues * each / 3;
    for share in &shares {
        assert!(share.abs_diff(fair) * 20 <= fair, "{shares:?} of {fair} each");
    }
}

#[test]
fn f40_few_requests_on_many_queues_do_not_all_start_at_the_first_path() {
    need!(faulty);
    let image = Image::filled(MIB);
    let names = ["a", "b", "c", "d"];
    let fs = FaultyFs::mount(&image.path, &names).unwrap();
    let server = Server::polypath().paths(fs.paths(&names)).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(8).open().unwrap();
    let before = names.map(|name| fs.counts(name).reads);
    for q in &mut disk.queues {
        q.read(0, 8).unwrap();
    }
    let used = names.iter().zip(before).filter(|(name, before)| fs.counts(name).reads > *before).count();
    assert!(used > 1, "one read on each of 8 queues went down one path of 4");
}

#[test]
fn f11_a_4096_and_a_512_byte_path_to_one_file() {
    need!(loopdev);
    let image = Image::filled(4 * MIB);
    let coarse = LoopDev::on(&image.path).sector_size(4096).direct_io(true).attach().unwrap();
    let fine = LoopDev::on(&image.path).sector_size(512).direct_io(true).attach().unwrap();
    let server = Server::polypath().path(fine.path()).path(coarse.path()).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    assert_eq!((disk.config.blk_size, disk.config.capacity), (4096, image.sectors()));
    for i in 0..32 {
        assert!(disk.q().read(i * 3 + 1, 1).unwrap() == filled(i * 3 + 1, 1), "one sector at {}", i * 3 + 1);
    }
    for i in 0..8 {
        disk.q().write(i * 8, &[5; 4096]).unwrap();
        disk.q().flush().unwrap();
        assert_eq!(disk.q().read(i * 8, 8).unwrap(), [5; 4096]);
        assert_eq!(disk.q().read(i * 8, 8).unwrap(), [5; 4096], "by the other path too");
    }
    no_path_failed(&server);
}

#[test]
fn f33_f05_names_that_show_other_sizes_or_files_are_refused() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    fs.set_size("b", Some(MIB + 65536));
    let exited = Server::polypath().paths(fs.paths(&["a", "b"])).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains("size"), "{exited:?}");
    assert!(exited.stderr.contains(fs.path("b").to_str().unwrap()), "{exited:?}");
    fs.set_size("b", None);
    fs.set_inode("b", 77);
    let exited = Server::polypath().paths(fs.paths(&["a", "b"])).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains(fs.path("b").to_str().unwrap()), "{exited:?}");
    // By two mounts there is no common identifier: contents decide, and blank ones prove nothing.
    let other = FaultyFs::mount(&image.path, &["b"]).unwrap();
    drop(Server::polypath().path(fs.path("a")).path(other.path("b")).start().unwrap());
    let blank = Image::empty(MIB);
    let (stranger, twin) =
        (FaultyFs::mount(&blank.path, &["c"]).unwrap(), FaultyFs::mount(&blank.path, &["c"]).unwrap());
    for (first, second, word) in
        [(&fs.path("a"), &stranger.path("c"), "differs"), (&stranger.path("c"), &twin.path("c"), "blank")]
    {
        let exited = Server::polypath().path(first).path(second).run_to_exit(SOON).unwrap();
        assert!(exited.code > 0 && exited.stderr.contains(word), "{exited:?}");
    }
    assert_eq!(fs.counts("a").writes + fs.counts("b").writes + other.counts("b").writes, 0);
}
