//! Paths that are added, removed, re-weighted and moved while the disk is in use.

use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::request::Cut;
use polypath_vm_tests::front_end::verify::Plan;
use polypath_vm_tests::front_end::{Disk, Framing, OK, Op};
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, SetAtEnd, controlled, under_load};

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

/// How often each path comes and goes.
const NR_CHANGES: usize = 150;

#[test]
fn f38_paths_come_and_go_twenty_times_a_second() {
    need!(faulty);
    let rig = Rig::start(Image::empty(8 * MIB), &["a", "b", "c"], &["--selector", "queue-length"]);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    let (done, mut most_fds) = (AtomicBool::new(false), 0);
    let before = rig.server.stats();
    let report = under_load(&mut disk, &rig.image, Plan { depth: 64, ..Plan::default() }, |progress| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Looks at everything all the time, which opens files of its own.
                let mut control = rig.control();
                while !done.load(Ordering::Relaxed) {
                    for command in ["status", "json", "toml", "table"] {
                        control.run(command).unwrap();
                    }
                    rig.control().run("status").unwrap();
                }
            });
            let _done = SetAtEnd(&done);
            let mut control = rig.control();
            let start = Instant::now();
            for i in 0..NR_CHANGES {
                let name = ["a", "b", "c"][i % 3];
                if i % 5 == 0 {
                    // Some of its requests take longer than the removal takes to begin.
                    rig.fs.rule(name, Rule::delay_ms(20).next(20));
                }
                let dev = rig.dev(name);
                control.run(&format!("remove_path {dev}")).unwrap();
                assert!(!rig.server.open_files().contains(&dev), "answered with the descriptor open");
                control.run(&format!("add_path 1 {dev}")).unwrap();
                most_fds = most_fds.max(rig.server.stats().fds);
            }
            println!("{NR_CHANGES} removals and additions in {:?}", start.elapsed());
        });
        progress.wait(100, SOON).unwrap();
    });
    assert_eq!(report.errors, 0);
    assert_eq!(rig.server.count_log("path failed"), 0, "{}", rig.server.stderr());
    assert!(most_fds <= before.fds + 8, "{most_fds} descriptors, {} before", before.fds);
    wait_until("descriptors and threads as before", SOON, || {
        let now = rig.server.stats();
        now.fds <= before.fds && now.threads <= before.threads
    })
    .unwrap_or_else(|e| panic!("{e:#}: {:?} before {before:?}", rig.server.stats()));
    let grown_kib = rig.server.stats().rss_kib.saturating_sub(before.rss_kib);
    assert!(grown_kib < 16 << 10, "{grown_kib} KiB more");
}

#[test]
fn f38_a_removal_is_answered_when_the_descriptor_is_closed() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::hold().on(&[Kind::Read, Kind::Write]));
    for i in 0..4 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
        disk.q().stage(&Op::write(512 + i * 16, filled(512 + i * 16, 8))).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("a", 4, SOON).unwrap();
    let mut control = rig.control();
    control.send(&format!("remove_path {}", rig.dev("a"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("a")));
    let before = rig.fs.counts("a").data();
    (0..4).for_each(|_| assert_eq!(disk.q().done().unwrap().status, OK));
    for i in 0..8 {
        disk.q().submit(&Op::read(i * 16, 8)).unwrap();
        assert_eq!(disk.q().done().unwrap().data, filled(i * 16, 8));
    }
    assert_eq!(rig.fs.counts("a").data(), before, "a removed path is used");
    assert!(control.answer_within(MOMENT).unwrap().is_none(), "answered with requests in flight");
    assert!(rig.server.open_files().contains(&rig.dev("a")));
    rig.fs.release("a");
    control.answer_within(SOON).unwrap().expect("an answer").unwrap();
    assert!(!rig.server.open_files().contains(&rig.dev("a")), "answered with the descriptor open");
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
    // Late errors of a removed path concern nobody either.
    rig.fs.add_name("c");
    control.run(&format!("add_path 1 {}", rig.dev("c"))).unwrap();
    rig.fs.rule("c", Rule::hold().reads());
    (0..4).for_each(|i| assert!(disk.q().submit(&Op::read(i * 16, 8)).is_ok()));
    rig.fs.wait_held("c", 1, SOON).unwrap();
    control.send(&format!("remove_path {}", rig.dev("c"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("c")));
    rig.fs.release_with("c", libc::EIO);
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
    control.answer_within(SOON).unwrap().expect("an answer").unwrap();
    assert_eq!(rig.status().nr_active(), 1);
}

/// A probe may be out on a path that is removed: with the path's own descriptor, or with one that it has just opened.
#[test]
fn f38_a_removal_waits_for_the_probe_as_well() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    rig.tell("fail_path", "a");
    rig.fs.rule("a", Rule::hold().reads());
    rig.tell("reinstate_path", "a");
    rig.fs.wait_held("a", 1, SOON).unwrap();
    let mut control = rig.control();
    control.send(&format!("remove_path {}", rig.dev("a"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("a")));
    if let Some(Ok(_)) = control.answer_within(MOMENT).unwrap() {
        assert!(!rig.server.open_files().contains(&rig.dev("a")), "answered with the descriptor open");
    }
    rig.fs.release("a");
    rig.server.wait_for_log("path closed", SOON).unwrap();
    wait_until("the descriptor to be closed", SOON, || !rig.server.open_files().contains(&rig.dev("a")))
        .unwrap();
}

#[test]
fn f38_a_late_probe_is_not_taken_for_the_same_name_added_again() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    rig.tell("fail_path", "a");
    rig.fs.rule("a", Rule::hold().reads());
    rig.tell("reinstate_path", "a");
    rig.fs.wait_held("a", 1, SOON).unwrap();
    rig.control().send(&format!("remove_path {}", rig.dev("a"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("a")));
    let mut control = rig.control();
    control.send(&format!("add_path 1 {}", rig.dev("a"))).unwrap();
    rig.fs.wait_held("a", 2, SOON).unwrap();
    // The old probe ends: that is no answer to the new question.
    rig.fs.release_some("a", 1);
    let early = control.answer_within(MOMENT).unwrap();
    assert!(early.is_none(), "{early:?} while the new path has not been read");
    assert!(!rig.status().has(&rig.fs.path("a")));
    rig.fs.release("a");
    control.answer_within(SOON).unwrap().expect("an answer").unwrap();
    assert!(rig.is_active("a"));
}

#[test]
fn weights_and_groups_change_under_load() {
    need!(faulty);
    let rig = Rig::start(Image::empty(8 * MIB), &["a", "b", "c"], &["--selector", "service-time"]);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    let report = under_load(&mut disk, &rig.image, Plan { depth: 32, ..Plan::default() }, |progress| {
        let shares = |wanted: &str, good: &dyn Fn([u64; 3]) -> bool| {
            wait_until(wanted, SOON, || {
                let before = ["a", "b", "c"].map(|name| rig.fs.counts(name).data());
                progress.wait(100, SOON).unwrap();
                let mut now = ["a", "b", "c"].map(|name| rig.fs.counts(name).data());
                now.iter_mut().zip(before).for_each(|(now, before)| *now -= before);
                good(now)
            })
            .unwrap_or_else(|e| panic!("{e:#}\n{}", rig.server.stderr()));
        };
        let mut control = rig.control();
        let dev = |name| rig.dev(name);
        shares("equal shares", &|[a, b, c]| a.min(b).min(c) * 2 > a.max(b).max(c));
        control.run(&format!("path_args {} 1 10", dev("a"))).unwrap();
        shares("most by a", &|[a, b, c]| a > 2 * (b + c));
        control.run(&format!("path_args {} 1 0", dev("a"))).unwrap();
        // A probe may come.
        shares("nothing by a", &|[a, b, c]| a < 5 && b > 50 && c > 50);
        control.run(&format!("path_args {} 1 1", dev("a"))).unwrap();
        shares("equal shares again", &|[a, b, c]| a.min(b).min(c) * 2 > a.max(b).max(c));
        // Into a new group, there alone, and back.
        control.run(&format!("remove_path {}", dev("c"))).unwrap();
        control.run(&format!("add_path 2 {}", dev("c"))).unwrap();
        shares("nothing by group 2", &|[a, b, c]| c < 5 && a > 50 && b > 50);
        control.run(&format!("regroup_path {} 2", dev("a"))).unwrap();
        shares("all by b", &|[a, b, c]| a + c < 5 && b > 100);
        control.run("switch_group 2").unwrap();
        shares("all by a and c", &|[a, b, c]| b < 5 && a > 50 && c > 50);
        control.run(&format!("regroup_path {} 2", dev("b"))).unwrap();
        assert_eq!(control.json().unwrap().0["groups"].as_array().unwrap().len(), 1);
        shares("equal shares in one group", &|[a, b, c]| a.min(b).min(c) * 2 > a.max(b).max(c));
        // Tables as fast as they go.
        for i in 0..500 {
            control.run(&format!("path_args {} 1 {}", dev("b"), 1 + i % 3)).unwrap();
        }
    });
    assert_eq!(report.errors, 0);
    assert_eq!(rig.server.count_log("path failed"), 0, "{}", rig.server.stderr());
}

/// Another table thousands of times a second, while four queues check what they read.
#[test]
fn tables_are_swapped_thousands_of_times_a_second_under_load() {
    need!(faulty);
    const NR_SWAPS: u32 = 20_000;
    let rig = Rig::start(Image::empty(8 * MIB), &["a", "b", "c"], &["--selector", "service-time"]);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    let mut rate = 0.0;
    let report = under_load(&mut disk, &rig.image, Plan { depth: 32, ..Plan::default() }, |progress| {
        let mut control = rig.control();
        let (mut begun, devs) = (Instant::now(), ["a", "b", "c"].map(|name| rig.dev(name)));
        for batch in 0..NR_SWAPS / 100 {
            // Sent together: it is the tables that are to come fast, not the answers.
            let of = |i: u32| format!("path_args {} 1 {}\n", devs[(i % 3) as usize], 1 + (batch + i) % 9);
            control.send_bytes((0..100).map(of).collect::<String>().as_bytes()).unwrap();
            for _ in 0..100 {
                control.answer_within(SOON).unwrap().expect("an answer").unwrap();
            }
            if batch % 40 == 0 {
                // Time that the load needs is not the tables'.
                let waited = Instant::now();
                progress.wait(20, SOON).unwrap();
                begun += waited.elapsed();
            }
        }
        rate = f64::from(NR_SWAPS) / begun.elapsed().as_secs_f64();
        progress.wait(100, SOON).unwrap();
    });
    println!("{rate:.0} tables a second; {} requests verified", report.answered);
    assert_eq!(report.errors, 0);
    // How fast they went is the machine's affair: some thousands a second on two cores that have nothing else to do.
    assert_eq!(rig.server.count_log("path failed"), 0, "{}", rig.server.stderr());
}

/// A flush covers what a path wrote that is not there any more.
#[test]
fn f03_a_flush_covers_the_writes_of_a_path_that_was_removed() {
    need!(faulty);
    for late in [false, true] {
        let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
        let mut disk = rig.disk(1);
        disk.q().flush().unwrap();
        // One write, by either path; that path goes.
        let before = ["a", "b"].map(|name| rig.fs.counts(name));
        if late {
            rig.fs.rule("a", Rule::hold().writes());
            rig.fs.rule("b", Rule::hold().writes());
        }
        disk.q().submit(&Op::write(8, filled(8, 8))).unwrap();
        let wrote = |name: &str, at: usize| rig.fs.counts(name).writes > before[at].writes;
        wait_until("the write to come", SOON, || wrote("a", 0) || wrote("b", 1)).unwrap();
        let (gone, left, at) = if wrote("a", 0) { ("a", "b", 1) } else { ("b", "a", 0) };
        let mut control = rig.control();
        if !late {
            assert_eq!(disk.q().done().unwrap().status, OK);
        }
        control.send(&format!("remove_path {}", rig.dev(gone))).unwrap();
        rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path(gone)));
        if late {
            rig.fs.release(gone);
            assert_eq!(disk.q().done().unwrap().status, OK);
        }
        disk.q().flush().unwrap();
        assert!(
            rig.fs.counts(left).fsyncs > before[at].fsyncs,
            "the flush reached nothing (the write ended {} the removal)",
            if late { "after" } else { "before" }
        );
    }
}

/// A flush visits one path after the other; one of them may go meanwhile.
#[test]
fn f38_a_flush_under_way_does_not_go_by_a_path_that_was_removed() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::hold().fsyncs());
    disk.q().submit(&Op::Flush).unwrap();
    rig.fs.wait_held("a", 1, SOON).unwrap();
    rig.control().send(&format!("remove_path {}", rig.dev("b"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("b")));
    rig.fs.release("a");
    assert_eq!(disk.q().done().unwrap().status, OK);
    let fsyncs = ["a", "b", "c"].map(|name| rig.fs.counts(name).fsyncs);
    assert_eq!(fsyncs[1], 0, "a removed path is flushed: {fsyncs:?}");
    assert!(fsyncs[2] > 0, "the others are: {fsyncs:?}");
}

/// The books are right after a flush of several paths: nothing is in flight, so nobody can be late.
#[test]
fn f10_f16_a_flush_by_several_paths_leaves_nothing_in_flight() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &["--path-timeout", "300"]);
    let mut disk = rig.disk(2);
    for round in 0..4 {
        for i in 0..8 {
            disk.q().write(i * 16, &filled(i * 16, 8)).unwrap();
        }
        disk.queues[round % 2].flush().unwrap();
    }
    let status = rig.status();
    for (_, path) in status.paths() {
        assert_eq!(
            (path["in_flight"].as_u64(), path["in_flight_bytes"].as_u64()),
            (Some(0), Some(0)),
            "{path:#}"
        );
    }
    std::thread::sleep(Duration::from_millis(900));
    assert_eq!(rig.server.count_log("path failed"), 0, "an idle path was late: {}", rig.server.stderr());
    rig.tell("remove_path", "a");
    rig.tell("remove_path", "b");
}

#[test]
fn a_path_with_larger_blocks_is_not_added() {
    need!(loopdev);
    let image = Image::filled(2 * MIB);
    let part = |offset| LoopDev::on(&image.path).part(offset, MIB).direct_io(true);
    let [fine, other] = [(); 2].map(|()| part(0).attach().unwrap());
    let coarse = part(0).sector_size(4096).attach().unwrap();
    let shifted = part(4096).attach().unwrap();
    let (_server, socket) = controlled(Server::polypath().path(fine.path()));
    let mut control = socket.connect().unwrap();
    let mut refused =
        |device: &LoopDev| control.refused(&format!("add_path 1 {}", device.path().display())).unwrap();
    let why = refused(&coarse);
    assert!(why.contains("4096") && why.contains("512"), "{why}");
    assert!(refused(&shifted).contains("offset 4096"));
    control.run(&format!("add_path 1 {}", other.path().display())).unwrap();
    control.run(&format!("remove_path {}", fine.path().display())).unwrap();
}

/// dm prints devices by their numbers, and takes them so in table lines and messages.
#[test]
fn devices_by_their_numbers() {
    need!(loopdev);
    let image = Image::filled(MIB);
    let [one, two] = [(); 2].map(|()| LoopDev::on(&image.path).direct_io(true).attach().unwrap());
    let numbers = |device: &LoopDev| {
        let rdev = std::fs::metadata(device.path()).unwrap().rdev();
        format!("{}:{}", libc::major(rdev), libc::minor(rdev))
    };
    let line = format!("0 2048 multipath 0 0 1 1 service-time 0 2 1 {} 1 {} 1", numbers(&one), numbers(&two));
    let (server, socket) = controlled(Server::polypath().arg("--table").arg(line));
    let mut disk = Disk::at(server.socket()).open().unwrap();
    let mut control = socket.connect().unwrap();
    assert!(control.run("table").unwrap().contains(&format!(" {} 1", numbers(&two))), "as it was given");
    control.run(&format!("fail_path {}", numbers(&one))).unwrap();
    assert_eq!(control.json().unwrap().nr_active(), 1);
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    control.run(&format!("reinstate_path {}", numbers(&one))).unwrap();
    control.run(&format!("remove_path {}", numbers(&two))).unwrap();
    // By its node this time; the numbers mean it all the same.
    control.run(&format!("add_path 1 {}", two.path().display())).unwrap();
    control.run(&format!("fail_path {}", numbers(&two))).unwrap();
    assert!(!control.json().unwrap().is_active(two.path()));
    assert!(control.refused("fail_path 7:9999").unwrap().contains("no path 7:9999"));
    assert!(disk.q().read(16, 8).unwrap() == filled(16, 8));
}

/// A path that takes less at a time than those that were there: what is too large for it is split on the way, and
/// fails nothing.
#[test]
fn a_path_with_tighter_limits_is_added_and_gets_its_share() {
    need!(loopdev);
    let image = Image::filled(16 * MIB);
    let attach = || LoopDev::on(&image.path).direct_io(true).attach().unwrap();
    let (wide, tight) = (attach(), attach());
    tight.set_max_sectors_kb(4).unwrap();
    // Requests and sectors written: devices count on from their last use.
    let written = || {
        let name = tight.path().file_name().unwrap().to_str().unwrap().to_owned();
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        let fields: Vec<u64> = stat.split_whitespace().map(|word| word.parse().unwrap()).collect();
        (fields[4], fields[6])
    };
    let before = written();
    let (server, socket) = controlled(Server::polypath().path(wide.path()));
    let mut disk = Disk::at(server.socket()).queues(2).memory_bytes(64 << 20).open().unwrap();
    let mut control = socket.connect().unwrap();
    control.run(&format!("add_path 1 {}", tight.path().display())).unwrap();
    // Every second one goes by it; the others it is left alone with.
    for alone in [false, true] {
        if alone {
            control.run(&format!("fail_path {}", wide.path().display())).unwrap();
        }
        for (i, q) in (0_u64..).zip(&mut disk.queues) {
            for sector in [0, 1, 2049, 4096].map(|sector| sector + i * 16384) {
                // 1 MiB in one piece, and in many.
                let pieces = [vec![16], vec![12 << 10; 80]].concat();
                for framing in [Framing::Plain, Framing::Cut(Cut { out: pieces, ..Cut::default() })] {
                    assert!(q.read(sector, 2048).unwrap() == filled(sector, 2048));
                    let op = Op::write(sector, filled(sector, 2048));
                    q.stage_framed(&op, &framing).unwrap();
                    q.kick();
                    assert_eq!(q.done().unwrap().status, OK);
                }
            }
            q.flush().unwrap();
        }
    }
    let (nr, sectors) = (written().0 - before.0, written().1 - before.1);
    assert!(sectors >= 16 * 2048 && sectors <= nr * 8, "{sectors} sectors in {nr} requests of 4 KiB at most");
    assert_eq!(server.count_log("path failed"), 1, "the operator's: {}", server.stderr());
    image.assert_filled(0..image.sectors());
}
