//! What is tried again: by the same path, by another, and how much of it.

use std::time::Duration;

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::verify::{Plan, Verifier};
use polypath_vm_tests::front_end::{Cut, Disk, Framing, OK, Op};
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, filled, need, no_path_failed, serve_faulty, serve_faulty_sync, statuses};

#[test]
fn f12_try_again_reaches_no_guest() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty_sync(&image, &["a"]);
    for errno in [libc::EAGAIN, libc::EINTR, libc::ENOMEM] {
        fs.rule("a", Rule::errno(errno).on(&[Kind::Read, Kind::Write]).next(3));
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "errno {errno}");
        fs.clear("a");
        fs.rule("a", Rule::errno(errno).on(&[Kind::Read, Kind::Write]).next(3));
        disk.q().write(0, &filled(0, 8)).unwrap();
        fs.clear("a");
        fs.rule("a", Rule::errno(errno).fsyncs().next(3));
        disk.q().flush().unwrap();
        fs.clear("a");
    }
    no_path_failed(&server);
}

#[test]
fn f12_f36_try_again_for_a_while_costs_no_request() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, server, mut disk) = serve_faulty_sync(&image, &["a", "b"]);
    // More often than polypath tries. (For FUSE files the kernel itself repeats it; what polypath does is tested with
    // its transfers.)
    fs.rule("a", Rule::errno(libc::EAGAIN).reads().next(50));
    disk.q().timeout = Duration::from_secs(30);
    for i in 0..4 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8));
    }
    assert!(server.stats().threads < 100);
}

#[test]
fn f12_deep_reads_on_a_device_with_few_slots() {
    need!(loopdev);
    let image = Image::filled(16 * MIB);
    let device = LoopDev::on(&image.path).attach().unwrap();
    device.set_nr_requests(4).unwrap();
    let server = Server::polypath().path(device.path()).queue_size(256).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(1024).memory_bytes(2 << 30).open().unwrap();
    let expected = filled(0, 2048);
    let ops = vec![Op::read(0, 2048); 256];
    disk.q().timeout = Duration::from_secs(60);
    for done in disk.q().run_all(&ops).unwrap() {
        assert_eq!(done.status, OK);
        assert!(done.data == expected);
    }
    no_path_failed(&server);
}

#[test]
fn f30_a_retry_moves_the_rest_and_nothing_twice() {
    need!(faulty);
    for failing in [&["a"][..], &["a", "b", "c"]] {
        for write in [true, false] {
            let image = if write { Image::empty(MIB) } else { Image::filled(MIB) };
            let (fs, _server, mut disk) = serve_faulty_sync(&image, &["a", "b", "c", "d"]);
            for name in failing {
                fs.rule(name, Rule::short(12288).next(1));
                fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
            }
            let cut = Cut {
                out: std::iter::once(16).chain([4096; 8]).collect(),
                into: vec![4096; 8],
                ..Default::default()
            };
            let framing = Framing::Cut(cut);
            let letters: Vec<u8> = (b'A'..=b'H').flat_map(|letter| [letter; 4096]).collect();
            // Round-robin starts somewhere: a few requests make sure that the failing ones are met.
            for i in 0..4_u64 {
                let sector = i * 128;
                if write {
                    let done = disk.q().run_framed(&Op::write(sector, letters.clone()), &framing).unwrap();
                    assert_eq!(done.status, OK, "write {i}, failing: {failing:?}");
                    assert!(image.at(sector, 64) == letters, "write {i}, failing: {failing:?}");
                } else {
                    let done = disk.q().run_framed(&Op::read(sector, 64), &framing).unwrap();
                    assert_eq!(done.status, OK, "read {i}, failing: {failing:?}");
                    assert!(done.data == filled(sector, 64), "read {i}, failing: {failing:?}");
                }
            }
        }
    }
}

#[test]
fn f30_a_run_of_three_is_finished_by_another_path() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty_sync(&image, &["a", "b"]);
    fs.rule("a", Rule::short(6144).writes().next(1));
    fs.rule("a", Rule::errno(libc::EIO).writes());
    let ops: Vec<_> = (0..3).map(|i| Op::write(i * 8, filled(i * 8, 8))).collect();
    assert_eq!(statuses(disk.q(), &ops), [OK; 3]);
    image.assert_filled(0..24);
}

#[test]
fn short_reads_are_resumed() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
    fs.rule("a", Rule::short(512).reads().every(3));
    fs.rule("b", Rule::short(4096).reads().every(2));
    let mut verifier = Verifier::new(0..image.sectors(), 9);
    verifier.set_all(1);
    verifier.run(disk.q(), &Plan { requests: 1500, ..Plan::default() }).unwrap();
    verifier.check_all(disk.q()).unwrap();
    no_path_failed(&server);
}
