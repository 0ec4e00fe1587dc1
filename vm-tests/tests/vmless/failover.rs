//! Paths that fail, are slow, are taken away and come back, under a load that knows what it must read.

use std::time::{Duration, Instant};

use polypath_vm_tests::control::Status;
use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::verify::Plan;
use polypath_vm_tests::front_end::{Disk, OK, Op};
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need, status};
use crate::rig::{Progress, Rig, controlled, under_load};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// What a path that is dead answers. An EIO of a flush is none of it: it says that data was lost.
fn dead(errno: i32) -> Rule {
    Rule::errno(errno).on(&[Kind::Read, Kind::Write, Kind::Fallocate])
}

/// Errors of all data beyond the block that is probed.
fn data_errors() -> Rule {
    Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]).sectors(8..u64::MAX / 512)
}

/// A loaded disk over three names, and what happens to it.
fn loaded(args: &[&str], events: impl FnOnce(&Rig, &Progress)) {
    let rig = Rig::start(Image::empty(8 * MIB), &NAMES, args);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    let plan = Plan { depth: 16, ..Plan::default() };
    let report = under_load(&mut disk, &rig.image, plan, |progress| events(&rig, progress));
    assert_eq!(report.errors, 0);
}

#[test]
fn each_path_in_turn_fails_and_returns_under_load() {
    need!(faulty);
    loaded(&[], |rig, progress| {
        for name in NAMES {
            rig.fs.rule(name, dead(libc::EIO));
            let path = rig.fs.path(name);
            rig.wait_status("a failed path to be at rest", |status| {
                !status.is_active(&path) && status.path(&path)["in_flight"] == 0
            });
            let before = rig.fs.counts(name).writes;
            progress.wait(100, SOON).unwrap();
            assert_eq!(rig.fs.counts(name).writes, before, "a failed path is written to");
            rig.fs.clear(name);
            rig.wait_active(name, true);
            rig.wait_used(name, 100);
        }
        NAMES.iter().for_each(|name| assert_eq!(rig.status().path(&rig.fs.path(name))["fail_count"], 1));
    });
}

#[test]
fn each_path_in_turn_is_slow_under_load_and_gets_its_share_back() {
    need!(faulty);
    for selector in ["service-time", "learned-service-time"] {
        loaded(&["--selector", selector], |rig, progress| {
            for name in NAMES {
                rig.fs.rule(name, Rule::delay_ms(50));
                progress.wait(300, SOON).unwrap();
                rig.fs.clear(name);
                // A quarter of all, where a third would be fair.
                let before = NAMES.map(|name| rig.fs.counts(name).data());
                wait_until(&format!("{selector}: a fair share for {name}"), SOON, || {
                    let now = NAMES.map(|name| rig.fs.counts(name).data());
                    let of = |at: usize| now[at] - before[at];
                    let mine = of(NAMES.iter().position(|n| *n == name).unwrap());
                    let all: u64 = (0..3).map(of).sum();
                    all > 600 && mine * 4 > all
                })
                .unwrap();
            }
            assert_eq!(rig.server.count_log("path failed"), 0, "slow is not dead: {}", rig.server.stderr());
        });
    }
}

#[test]
fn each_path_in_turn_is_removed_and_added_under_load() {
    need!(faulty);
    loaded(&[], |rig, progress| {
        let mut control = rig.control();
        for name in NAMES {
            control.run(&format!("remove_path {}", rig.dev(name))).unwrap();
            let before = rig.fs.counts(name).data();
            progress.wait(100, SOON).unwrap();
            assert_eq!(rig.fs.counts(name).data(), before, "a removed path is used");
            control.run(&format!("add_path 1 {}", rig.dev(name))).unwrap();
            rig.wait_used(name, 100);
        }
    });
}

#[test]
fn all_paths_are_lost_and_return_under_load() {
    need!(faulty);
    loaded(&["--no-path-retry", "queue"], |rig, progress| {
        for errno in [libc::EIO, libc::ENODEV] {
            NAMES.iter().for_each(|name| rig.fs.rule(name, dead(errno)));
            rig.wait_status("no path", |status| status.nr_active() == 0);
            rig.wait_status("requests to be held", |status| status.nr_held() > 0);
            assert!(progress.wait(1, Duration::from_millis(200)).is_err(), "answers without a path");
            NAMES.iter().for_each(|name| rig.fs.clear(name));
            progress.wait(100, SOON).unwrap();
            rig.wait_status("all paths back, nothing held", |s| s.nr_active() == 3 && s.nr_held() == 0);
        }
    });
}

#[test]
fn f36_hiccups_are_not_seen_and_every_path_comes_back() {
    need!(faulty);
    loaded(&[], |rig, progress| {
        for name in NAMES {
            for _ in 0..2 {
                let count = |status: &Status| status.path(&rig.fs.path(name))["fail_count"].as_u64();
                let before = count(&rig.status());
                // An error of a request that another path has failed is not held against this one: once more then.
                rig.wait_status("a failure", |status| {
                    let failed = count(status) > before;
                    if !failed {
                        rig.fs.rule(name, data_errors().next(1));
                    }
                    failed
                });
                rig.fs.clear(name);
                rig.wait_active(name, true);
            }
        }
        // All at the same moment.
        NAMES.iter().for_each(|name| rig.forgive(name));
        NAMES.iter().for_each(|name| rig.fs.rule(name, data_errors().next(5)));
        progress.wait(200, SOON).unwrap();
        rig.wait_status("all paths back", |status| status.nr_active() == 3);
    });
}

#[test]
fn f37_f36_a_path_that_flaps_is_held_back_and_the_log_stays_small() {
    need!(faulty);
    loaded(&[], |rig, progress| {
        // The probe reads the first block, which works.
        rig.fs.rule("a", data_errors());
        rig.server.wait_for_log("path quarantined", SOON).unwrap();
        let lines = rig.server.stderr().lines().count();
        progress.wait(200, SOON).unwrap();
        let more = rig.server.stderr().lines().count() - lines;
        assert!(more < 10, "{more} lines more: {}", rig.server.stderr());
        assert!(
            rig.status().path(&rig.fs.path("a"))["quarantine_left_ms"].as_u64().is_some_and(|ms| ms <= 5000)
        );
        rig.fs.clear("a");
        // An operator need not wait.
        rig.tell("reinstate_path", "a");
        rig.wait_active("a", true);
        rig.wait_used("a", 50);
    });
}

#[test]
fn f37_a_path_in_quarantine_is_used_when_it_is_the_last() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", data_errors());
    let read = |disk: &mut Disk| assert!(disk.q().read(64, 8).unwrap() == filled(64, 8));
    wait_until("a quarantined path", SOON, || {
        read(&mut disk);
        rig.server.count_log("path quarantined") != 0
    })
    .unwrap();
    rig.fs.clear("a");
    // Its probe says that it is well by now; only the quarantine keeps it out.
    let opens = rig.fs.counts("a").opens;
    wait_until("a probe in quarantine", SOON, || rig.fs.counts("a").opens > opens || !rig.is_active("a"))
        .unwrap();
    rig.fs.rule("b", Rule::errno(libc::ENODEV));
    let start = Instant::now();
    read(&mut disk);
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(1),
        "the last path left was kept out for {took:?}: {}",
        rig.server.stderr()
    );
}

#[test]
fn f37_the_probe_says_well_and_the_data_says_eio_on_every_path() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--no-path-retry", "4"]);
    for name in ["a", "b"] {
        rig.fs.rule(name, data_errors());
    }
    let mut disk = rig.disk(1);
    let start = Instant::now();
    for sector in [64, 128] {
        assert_eq!(status(disk.q(), &Op::read(sector, 8)), polypath_vm_tests::front_end::IOERR);
    }
    assert!(start.elapsed() < Duration::from_secs(12), "{:?}", start.elapsed());
    // A guest that goes on asking must not fill the log.
    disk.q().timeout = Duration::from_secs(30);
    let (lines, start) = (rig.server.stderr().lines().count(), Instant::now());
    let mut asked = 0;
    while start.elapsed() < Duration::from_secs(3) {
        let ops: Vec<_> = (8..24).map(|i| Op::read(i * 64, 8)).collect();
        asked += disk.q().run_all(&ops).unwrap().len();
    }
    let more = rig.server.stderr().lines().count() - lines;
    assert!(more < 60, "{more} lines for {asked} requests: {}", rig.server.stderr());
    for name in ["a", "b"] {
        rig.fs.clear(name);
    }
    wait_until("well again", SOON, || status(disk.q(), &Op::read(64, 8)) == OK).unwrap();
}

/// While a path is out, errors of the ones that are left are more likely the storage's trouble than the request's own.
#[test]
fn f37_data_errors_for_a_while_on_the_only_path_left_are_not_seen() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::errno(libc::ENODEV));
    assert_eq!(status(disk.q(), &Op::read(64, 8)), OK);
    rig.wait_active("a", false);
    rig.fs.rule("b", data_errors());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(2));
            rig.fs.clear("b");
        });
        assert!(disk.q().read(128, 8).unwrap() == filled(128, 8));
    });
}

/// Two loop devices on one file, one of which refuses writes for a while.
#[test]
fn f01_f54_a_path_made_read_only_under_load() {
    need!(loopdev);
    let image = Image::empty(8 * MIB);
    let devices = [(); 2].map(|()| LoopDev::on(&image.path).direct_io(true).attach().unwrap());
    let (server, socket) = controlled(Server::polypath().paths(devices.iter().map(LoopDev::path)));
    let mut disk = Disk::at(server.socket()).queues(4).open().unwrap();
    let plan = Plan { depth: 16, ..Plan::default() };
    let report = under_load(&mut disk, &image, plan, |progress| {
        for device in &devices {
            device.set_read_only(true).unwrap();
            progress.wait(200, SOON).unwrap();
            device.set_read_only(false).unwrap();
            progress.wait(200, SOON).unwrap();
        }
    });
    assert_eq!(report.errors, 0, "the other path takes writes");
    let status = socket.connect().unwrap().json().unwrap();
    assert_eq!(status.nr_active(), 2, "no path is dead: {}", server.stderr());
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
}

#[test]
fn f01_f54_writes_are_refused_when_every_path_is_read_only() {
    need!(loopdev);
    let image = Image::filled(MIB);
    let devices = [(); 2].map(|()| LoopDev::on(&image.path).direct_io(true).attach().unwrap());
    let server = Server::polypath().paths(devices.iter().map(LoopDev::path)).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    devices.iter().for_each(|device| device.set_read_only(true).unwrap());
    for _ in 0..4 {
        assert_eq!(status(disk.q(), &Op::write(8, vec![1; 4096])), polypath_vm_tests::front_end::IOERR);
        assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    }
    devices.iter().for_each(|device| device.set_read_only(false).unwrap());
    disk.q().write(8, &filled(8, 8)).unwrap();
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
}

/// The table changes while a path is asked that may not write: the others are those of the new table.
#[test]
fn f38_f54_a_write_that_is_refused_does_not_go_by_a_path_that_was_removed() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &NAMES, &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::hold().writes());
    wait_until("a write on path a", SOON, || {
        let done = disk.q().submit(&Op::write(64, filled(64, 8))).is_ok();
        wait_until("an answer or a hold", SOON, || {
            rig.fs.counts("a").held == 1 || disk.q().done_now().unwrap().is_some()
        })
        .unwrap();
        done && rig.fs.counts("a").held == 1
    })
    .unwrap();
    rig.control().send(&format!("remove_path {}", rig.dev("b"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("b")));
    let before = ["b", "c"].map(|name| rig.fs.counts(name).writes);
    rig.fs.rule("a", Rule::errno(libc::EROFS).writes());
    rig.fs.release_with("a", libc::EROFS);
    assert_eq!(disk.q().done().unwrap().status, OK);
    let after = ["b", "c"].map(|name| rig.fs.counts(name).writes);
    assert_eq!(after, [before[0], before[1] + 1], "writes by b, which was removed, and by c");
}

/// A request that every path refuses waits a moment before it asks again, and waiting costs nothing.
#[test]
fn f12_f37_waiting_for_another_try_is_no_spinning() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    ["a", "b"].iter().for_each(|name| rig.fs.rule(name, data_errors().sectors(64..72)));
    let (start, before) = (Instant::now(), rig.server.stats().cpu);
    while start.elapsed() < Duration::from_secs(2) {
        assert_eq!(status(disk.q(), &Op::read(64, 8)), polypath_vm_tests::front_end::IOERR);
        ["a", "b"].iter().for_each(|name| rig.forgive(name));
    }
    let (cpu, elapsed) = (rig.server.stats().cpu - before, start.elapsed());
    assert!(cpu * 4 < elapsed, "{cpu:?} of processor time in {elapsed:?}");
}

#[test]
fn names_that_vanish_and_reappear() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.remove_name("a");
    // The open descriptor goes on.
    for i in 0..8 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8));
    }
    rig.fs.rule("a", Rule::errno(libc::ESTALE).next(1));
    wait_until("a failure", SOON, || {
        disk.q().read(64, 8).unwrap();
        !rig.is_active("a")
    })
    .unwrap();
    rig.wait_status("the reason to be shown", |status| {
        status.path(&rig.fs.path("a"))["last_error"].as_str().is_some_and(|e| e.contains("No such file"))
    });
    rig.fs.add_name("a");
    rig.wait_active("a", true);
    assert!(rig.status().path(&rig.fs.path("a"))["last_error"].is_null());
}

/// One mount whose server dies: every path fails for good, and the program lives.
#[test]
fn a_server_that_dies_fails_its_paths() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let mut rig = Rig::start_on(image, fs, &["a", "b"], &["--no-path-retry", "1"]);
    let mut disk = rig.disk(1);
    disk.q().read(0, 8).unwrap();
    rig.fs.kill();
    let start = Instant::now();
    assert_eq!(status(disk.q(), &Op::read(0, 8)), polypath_vm_tests::front_end::IOERR);
    assert!((500..5000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    assert!(rig.server.is_alive());
    assert_eq!(rig.server.terminate(SOON).unwrap(), 0);
}
