//! Paths that give no answer: what is on them waits for them, everything else goes on.

use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::verify::Plan;
use polypath_vm_tests::front_end::{Disk, Framing, OK, Op, Segment};
use polypath_vm_tests::server::wait_until;

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, Two, under_load};

/// Well above what a healthy path needs on a busy machine.
const TIMEOUT_MS: u64 = 300;
const SHORT: [&str; 2] = ["--path-timeout", "300"];

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

#[test]
fn f10_a_stopped_server_holds_up_only_what_it_has() {
    need!(faulty);
    let image = Image::empty(8 * MIB);
    let two = Two::start(&image, &["--selector", "queue-length", "--path-timeout", "300"]);
    let mut disk = two.disk(4);
    let report = under_load(&mut disk, &image, Plan { depth: 32, ..Plan::default() }, |_progress| {
        for _ in 0..2 {
            two.a.stop();
            let stopped = Instant::now();
            two.wait_a(false);
            let took = stopped.elapsed();
            assert!(took >= Duration::from_millis(TIMEOUT_MS - 100), "given up after {took:?}");
            // (All that one queue has outstanding may be stuck by bad luck, so not each queue is waited for.)
            let before = two.b.counts("b").data();
            wait_until("I/O to flow by the other path", SOON, || two.b.counts("b").data() > before + 600)
                .unwrap();
            let mut control = two.socket.connect().unwrap();
            for command in ["status", "table", "json", "toml", "queue_if_no_path", "no_path_retry 60"] {
                let start = Instant::now();
                control.run(command).unwrap();
                assert!(start.elapsed() < Duration::from_secs(1), "{command} took {:?}", start.elapsed());
            }
            two.a.cont();
            two.wait_a(true);
            let before = two.a.counts("a").data();
            wait_until("the path to be used again", SOON, || two.a.counts("a").data() > before + 100)
                .unwrap();
        }
    });
    assert_eq!(report.errors, 0);
    // On a machine that is busy elsewhere the other path may seem to hang for a moment as well.
    assert!(two.server.count_log("path failed") >= 2, "{}", two.server.stderr());
}

/// A path may answer most requests and never answer others (a controller that has lost one command): it is known by
/// its oldest request and not by its silence, whatever the other queues hear from it.
#[test]
fn f10_a_path_that_answers_some_requests_and_never_answers_others() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &SHORT);
    rig.fs.logging(false);
    let mut disk = rig.disk(2);
    for kind in [Kind::Read, Kind::Write] {
        rig.fs.rule("a", Rule::hold().on(&[kind]).sectors(1024..1032));
        let op = || match kind {
            Kind::Read => Op::read(1024, 8),
            _ => Op::write(1024, filled(1024, 8)),
        };
        let failures = rig.server.count_log("path failed");
        // Two in a row go by one path each.
        let begun = Instant::now();
        let tags = [(); 2].map(|()| disk.q().submit(&op()).unwrap());
        rig.fs.wait_held("a", 1, SOON).unwrap();
        assert!(tags.contains(&disk.q().done().unwrap().tag));
        while rig.server.count_log("path failed") == failures {
            assert!(begun.elapsed() < SOON, "it is never taken out: {}", rig.server.stderr());
            // By both paths, on both queues: none of them is ever silent for long.
            for q in &mut disk.queues {
                for sector in [0, 16, 32, 48] {
                    q.submit(&Op::read(sector, 8)).unwrap();
                    assert_eq!(q.done_within(Duration::from_secs(1)).unwrap().data, filled(sector, 8));
                }
            }
        }
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(TIMEOUT_MS), "given up after {took:?}");
        println!("a {kind:?} that gets no answer is noticed after {took:?}");
        let line = rig.server.wait_for_log("path failed", SOON).unwrap();
        assert!(line.contains("no answer") && line.contains(rig.fs.path("a").to_str().unwrap()), "{line}");
        // Its probe is answered, so it comes back, and what it owes is waited for.
        rig.wait_active("a", true);
        rig.fs.release("a");
        assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
        rig.forgive("a");
    }
    rig.image.assert_filled(0..rig.image.sectors());
}

/// A path that is slow and always has something outstanding is not late as long as each request is answered in time.
#[test]
fn f10_a_busy_path_is_not_late_because_it_is_never_idle() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--path-timeout", "1000"]);
    rig.fs.logging(false);
    let mut disk = rig.disk(2);
    rig.fs.rule("a", Rule::delay_ms(100).reads().sectors(8..2048));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for q in &mut disk.queues {
            scope.spawn(move || {
                for i in 0..8 {
                    q.submit(&Op::read(64 + i * 16, 8)).unwrap();
                }
                for i in 8.. {
                    assert_eq!(q.done().unwrap().status, OK);
                    if begun.elapsed() > Duration::from_millis(3500) {
                        break;
                    }
                    q.submit(&Op::read(64 + i % 64 * 16, 8)).unwrap();
                }
                q.drain().unwrap();
            });
        }
    });
    assert_eq!(rig.server.count_log("path failed"), 0, "{}", rig.server.stderr());
}

#[test]
fn f10_all_paths_hang_and_go_on() {
    need!(faulty);
    let rig = Rig::start(Image::empty(8 * MIB), &["a", "b"], &SHORT);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    let report = under_load(&mut disk, &rig.image, Plan { depth: 16, ..Plan::default() }, |progress| {
        rig.fs.stop();
        rig.wait_status("both paths to be taken out", |status| status.nr_active() == 0);
        rig.fs.cont();
        rig.wait_status("both paths to come back", |status| status.nr_active() == 2);
        progress.wait(200, SOON).unwrap();
    });
    assert_eq!(report.errors, 0);
}

/// A path on which each request occupies a kernel thread until it is answered must not use up the threads that the
/// other path needs.
#[test]
fn f10_a_path_that_blocks_its_callers_does_not_block_the_other() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let fs = FaultyFs::mount_sync(&image.path, &["a", "b"]).unwrap();
    let rig = Rig::start_on(image, fs, &["a", "b"], &SHORT);
    let mut disk = rig.disk(2);
    let ops: [fn(u64) -> Op; 2] =
        [|sector| Op::read(sector, 8), |sector| Op::write(sector, filled(sector, 8))];
    for op in ops {
        rig.fs.rule("a", Rule::hold());
        let q = &mut disk.queues[0];
        // Round-robin: half of them go to each.
        for i in 0..100 {
            q.stage_framed(&op(i * 16 + 64), &Framing::Indirect).unwrap();
        }
        q.kick();
        for i in 0..50 {
            let done =
                q.done_within(Duration::from_secs(3)).unwrap_or_else(|e| panic!("answer {i} of 50: {e:#}"));
            assert_eq!(done.status, OK);
        }
        rig.wait_active("a", false);
        for q in &mut disk.queues {
            let tag = q.submit(&op(8)).unwrap();
            let done = q.done_within(Duration::from_secs(1)).unwrap();
            assert!(done.tag == tag && done.status == OK);
        }
        rig.fs.release("a");
        let q = &mut disk.queues[0];
        assert!(q.drain().unwrap().iter().all(|done| done.status == OK));
        rig.forgive("a");
    }
    rig.image.assert_filled(0..rig.image.sectors());
}

/// Flushes and discards sleep in the kernel until they are answered. Many of them on a path that hangs must not keep those
/// of other paths from their turn.
#[test]
fn f10_many_flushes_and_discards_that_hang_do_not_hold_up_those_of_another_path() {
    need!(faulty);
    for kind in [Kind::Fsync, Kind::Fallocate] {
        let op = |i| match kind {
            Kind::Fsync => Op::Flush,
            _ => Op::WriteZeroes(vec![Segment::new(1024 + i * 8, 8)]),
        };
        let rig = Rig::start(Image::filled(MIB), &["a", "b"], &SHORT);
        let mut disk = rig.disk(1);
        for i in 0..8 {
            disk.q().write(i * 8, &filled(i * 8, 8)).unwrap();
        }
        rig.fs.rule("a", Rule::hold().on(&[kind]));
        // More than the kernel has threads for by itself (4 per processor), with those that go by the other path.
        let nr = 8 * std::thread::available_parallelism().unwrap().get() as u64 + 16;
        for i in 0..nr {
            disk.q().stage_framed(&op(i), &Framing::Indirect).unwrap();
        }
        disk.q().kick();
        rig.fs.wait_held("a", 1, SOON).unwrap();
        // (A probe is answered, so it may be back in between; what it then gets stays there as well.)
        rig.server.wait_for_log("path failed", SOON).unwrap();
        rig.fs.rule("a", Rule::errno(libc::ENODEV).on(&[Kind::Read, Kind::Write]));
        rig.tell("fail_path", "a");
        for i in 0..4 {
            let tag = disk.q().submit(&Op::write(i * 8, filled(i * 8, 8))).unwrap();
            let flush = disk.q().submit(&Op::Flush).unwrap();
            let zeroes = disk.q().submit(&Op::WriteZeroes(vec![Segment::new(512 + i * 8, 8)])).unwrap();
            let mut left = vec![tag, flush, zeroes];
            while !left.is_empty() {
                let done = disk.q().done_within(Duration::from_secs(2));
                let done = done.unwrap_or_else(|e| panic!("{kind:?}: held up by the other path: {e:#}"));
                assert_eq!(done.status, OK);
                left.retain(|tag| *tag != done.tag);
            }
        }
        rig.fs.release("a");
        assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
    }
}

/// Stages a write by path `a` that stays there, with path `b` well.
fn write_stuck_on_a(rig: &Rig, disk: &mut Disk, op: &Op) {
    rig.fs.rule("a", Rule::hold().on(&[Kind::Write, Kind::Fallocate]));
    wait_until("the write to go by path a", SOON, || {
        disk.q().submit(op).unwrap();
        // By path b it is answered at once, by path a it stays.
        wait_until("an answer or a hold", SOON, || {
            rig.fs.counts("a").held == 1 || disk.q().done_now().unwrap().is_some()
        })
        .unwrap();
        rig.fs.counts("a").held == 1
    })
    .unwrap();
    // The probe, too, or the path would come back at once.
    rig.fs.rule("a", Rule::hold().reads());
    wait_until("the path to be taken out", SOON, || !rig.is_active("a")).unwrap();
    wait_until("the write to be guarded", SOON, || rig.status().0["nr_troubled_writes"] != 0).unwrap();
}

#[test]
fn f02_a_write_that_lands_late_destroys_nothing() {
    need!(faulty);
    // The later one on the same queue, and on another; an exact copy, a part, one that reaches over; and ranges.
    let ops = [
        Op::write(96, vec![2; 4096]),
        Op::write(98, vec![2; 512]),
        Op::write(90, vec![2; 8192]),
        Op::WriteZeroes(vec![Segment::new(98, 2)]),
        Op::Discard(vec![Segment::new(0, 8), Segment::new(96, 8)]),
    ];
    for (i, later) in ops.iter().enumerate() {
        for queue in [0, 1] {
            let rig = Rig::start(Image::filled(MIB), &["a", "b"], &SHORT);
            let mut disk = rig.disk(2);
            write_stuck_on_a(&rig, &mut disk, &Op::write(96, vec![1; 4096]));
            let tag = disk.queues[queue].submit(later).unwrap();
            // Beside it everything goes on, reads of the same sectors too.
            for op in [Op::write(88, filled(88, 2)), Op::write(112, filled(112, 8)), Op::read(96, 8)] {
                let other = &mut disk.queues[1 - queue];
                other.submit(&op).unwrap();
                assert_eq!(other.done_within(Duration::from_secs(1)).unwrap().status, OK);
            }
            let early = disk.queues[queue].done_within(MOMENT);
            assert!(early.is_err(), "case {i} on queue {queue}: {early:?} with an older write on its way");
            rig.fs.release("a");
            for q in &mut disk.queues {
                for done in q.drain().unwrap() {
                    assert_eq!(done.status, OK, "case {i} on queue {queue}");
                }
            }
            assert!(tag < 100);
            let expected: Vec<u8> = match later {
                Op::Write { sector, data } => {
                    let at = |s: u64| usize::try_from((s - sector) * 512).unwrap();
                    (96..104)
                        .flat_map(|s| match (*sector..sector + data.len() as u64 / 512).contains(&s) {
                            true => data[at(s)..at(s) + 512].to_vec(),
                            false => vec![1; 512],
                        })
                        .collect()
                }
                Op::WriteZeroes(_) => [vec![1; 1024], vec![0; 1024], vec![1; 2048]].concat(),
                _ => vec![0; 4096],
            };
            assert!(rig.image.at(96, 8) == expected, "case {i} on queue {queue}: the older write is back");
        }
    }
}

#[test]
fn f02_the_case_of_two_servers() {
    need!(faulty);
    let image = Image::filled(MIB);
    let two = Two::start(&image, &SHORT);
    let mut disk = two.disk(1);
    disk.q().read(0, 8).unwrap();
    two.a.stop();
    // Two in a row go by one path each.
    let tags = [100, 200].map(|sector| disk.q().submit(&Op::write(sector, vec![1; 512])).unwrap());
    let first = disk.q().done().unwrap();
    assert!(first.status == OK && tags.contains(&first.tag));
    let stuck = if first.tag == tags[0] { 200 } else { 100 };
    two.wait_a(false);
    disk.q().submit(&Op::write(stuck, vec![2; 512])).unwrap();
    let early = disk.q().done_within(MOMENT);
    assert!(early.is_err(), "{early:?} with the older write on its way");
    two.a.cont();
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
    two.wait_a(true);
    assert_eq!(image.at(stuck, 1), [2; 512], "the older write is back");
}

#[test]
fn f29_late_completions_belong_to_their_own_requests() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--path-timeout", "50"]);
    rig.fs.logging(false);
    let mut disk = rig.disk(1);
    for round in 0..20_u64 {
        rig.fs.rule("a", Rule::hold().reads());
        for i in 0..16 {
            disk.q().stage(&Op::read(1024 + i * 16, 8)).unwrap();
        }
        disk.q().kick();
        for _ in 0..8 {
            assert_eq!(disk.q().done().unwrap().status, OK);
        }
        rig.wait_active("a", false);
        // The same heads again and again, by path b, while the late ones are out.
        for i in 0..50 {
            let sector = (round * 50 + i) * 8 % 1000;
            let tag = disk.q().submit(&Op::read(sector, 8)).unwrap();
            let done = disk.q().done().unwrap();
            assert!(done.tag == tag && done.data == filled(sector, 8), "round {round}");
        }
        rig.fs.release("a");
        let late = disk.q().drain().unwrap();
        assert_eq!(late.len(), 8, "round {round}");
        for done in late {
            let at = u64::from_le_bytes(done.data[..8].try_into().unwrap());
            assert!((1024..1280).contains(&at) && done.data == filled(at, 8), "round {round}: sector {at}");
        }
        rig.tell("reinstate_path", "a");
        rig.wait_active("a", true);
    }
}

#[test]
fn f29_probes_that_hang_are_waited_for_and_not_piled_up() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &SHORT);
    let mut disk = rig.disk(1);
    disk.q().read(0, 8).unwrap();
    let before = rig.server.stats();
    rig.fs.rule("a", Rule::hold().on(&[Kind::Open, Kind::Read]));
    rig.tell("fail_path", "a");
    for _ in 0..5 {
        rig.tell("reinstate_path", "a");
        disk.q().read(64, 8).unwrap();
    }
    rig.fs.wait_held("a", 1, SOON).unwrap();
    std::thread::sleep(Duration::from_millis(TIMEOUT_MS * 3));
    assert_eq!(rig.fs.counts("a").held, 1, "one probe at a time");
    assert!(rig.server.stats().threads <= before.threads + 1, "{:?} before {before:?}", rig.server.stats());
    rig.fs.release("a");
    rig.wait_active("a", true);
    wait_until("threads and descriptors as before", SOON, || {
        let now = rig.server.stats();
        now.threads == before.threads && now.fds == before.fds
    })
    .unwrap_or_else(|e| panic!("{e:#}: {:?} before {before:?}", rig.server.stats()));
}

#[test]
fn f13_a_probe_under_way_does_not_undo_the_operators_word() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    // A failed path is probed at once; the probe takes its time.
    rig.fs.rule("a", Rule::hold().reads().sectors(0..1));
    rig.fs.rule("a", Rule::errno(libc::ENODEV).next(1));
    wait_until("a failure", SOON, || {
        disk.q().read(64, 8).unwrap();
        !rig.is_active("a")
    })
    .unwrap();
    rig.fs.wait_held("a", 1, SOON).unwrap();
    rig.tell("fail_path", "a");
    rig.fs.release("a");
    // What it found is known when it has closed what it opened.
    let opened = rig.fs.counts("a").opens;
    wait_until("the probe to end", SOON, || rig.fs.counts("a").releases >= opened - 1).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!rig.is_active("a"), "put back against the operator's word: {}", rig.server.stderr());
    assert_eq!(rig.status().path(&rig.fs.path("a"))["failed_by_operator"], true);
    assert_eq!(rig.fs.counts("a").opens, opened, "probed against the operator's word");
    for i in 0..8 {
        disk.q().read(i * 8, 8).unwrap();
    }
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
}

#[test]
fn f13_old_errors_do_not_undo_a_reinstate() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::hold().reads().sectors(8..u64::MAX / 512));
    for i in 1..9 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("a", 4, SOON).unwrap();
    rig.forgive("a");
    rig.fs.release_with("a", libc::ENODEV);
    for done in disk.q().drain().unwrap() {
        assert_eq!(done.status, OK);
    }
    for i in 0..8 {
        disk.q().read(i * 8, 8).unwrap();
    }
    assert!(rig.is_active("a"), "{}", rig.server.stderr());
    assert_eq!(rig.server.count_log("path failed"), 1, "the operator's: {}", rig.server.stderr());
}
