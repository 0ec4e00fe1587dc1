//! Requests without a path: held, shown, sent on in order, failed in time; and every way to stop meanwhile.

use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{BlkQueue, Disk, IOERR, OK, Op, Region};
use polypath_vm_tests::server::wait_until;

use crate::common::{Image, MIB, SOON, filled, need, status};
use crate::rig::Rig;

/// Well above what an answer takes on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

const NAMES: [&str; 2] = ["a", "b"];

/// A disk of two paths of which none is usable.
fn without_paths(args: &[&str]) -> (Rig, Disk) {
    let rig = Rig::start(Image::filled(MIB), &NAMES, args);
    let mut disk = rig.disk(2);
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    NAMES.iter().for_each(|name| rig.fs.rule(name, Rule::errno(libc::ENODEV)));
    NAMES.iter().for_each(|name| rig.tell("fail_path", name));
    NAMES.iter().for_each(|name| rig.tell("reinstate_path", name));
    rig.wait_status("no path", |status| status.nr_active() == 0);
    (rig, disk)
}

/// Sends reads apart from each other, none of the block that is probed.
fn send_reads(q: &mut BlkQueue, nr: u64) {
    for i in 1..=nr {
        q.stage(&Op::read(i * 16, 8)).unwrap();
    }
    q.kick();
}

/// All answers, each within `limits` of `start` in seconds.
fn answers(q: &mut BlkQueue, expected: u8, start: Instant, limits: std::ops::Range<f64>) {
    q.timeout = Duration::from_secs_f64(limits.end + 1.0);
    while q.nr_pending() != 0 {
        let done = q.done().unwrap();
        let at = start.elapsed().as_secs_f64();
        assert_eq!(done.status, expected, "after {at} s");
        assert!(limits.contains(&at), "answered after {at} s, expected {limits:?}");
    }
}

fn heal(rig: &Rig) {
    NAMES.iter().for_each(|name| rig.fs.clear(name));
}

#[test]
fn f14_reads_fail_when_the_time_is_up_and_later_ones_at_once() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "2"]);
    // The time counts from the loss of the last path, not from each request.
    let lost = Instant::now();
    send_reads(disk.q(), 16);
    let held = rig.wait_status("16 requests to be held", |status| status.nr_held() == 16);
    assert!(held.0["held"]["time_left_ms"].as_u64().unwrap() <= 2000, "{:#}", held.0["held"]);
    answers(disk.q(), IOERR, lost, 1.0..3.0);
    send_reads(disk.q(), 16);
    answers(disk.q(), IOERR, Instant::now(), 0.0..0.5);
    heal(&rig);
    rig.wait_status("a path", |status| status.nr_active() != 0);
    for i in 0..8 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8));
    }
    // And the next loss has its full time again.
    NAMES.iter().for_each(|name| rig.fs.rule(name, Rule::errno(libc::ENODEV)));
    let lost = Instant::now();
    send_reads(disk.q(), 16);
    answers(disk.q(), IOERR, lost, 1.5..4.0);
}

#[test]
fn f14_reads_are_queued_for_as_long_as_it_takes() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    send_reads(disk.q(), 16);
    let held = rig.wait_status("16 requests to be held", |status| status.nr_held() == 16);
    assert!(held.0["held"]["time_left_ms"].is_null());
    assert_eq!(held.0["held"]["bytes"], 16 * 4096);
    assert!(disk.q().done_within(Duration::from_secs(2)).is_err(), "answered without a path");
    let age = rig.status().0["held"]["oldest_age_ms"].as_u64().unwrap();
    assert!((1900..10_000).contains(&age), "{age}");
    rig.fs.clear("b");
    answers(disk.q(), OK, Instant::now(), 0.0..6.0);
    rig.wait_status("nothing to be held", |status| status.nr_held() == 0);
}

#[test]
fn f14_reads_fail_at_once_if_that_is_the_policy() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "fail"]);
    send_reads(disk.q(), 16);
    answers(disk.q(), IOERR, Instant::now(), 0.0..0.5);
    assert_eq!(rig.status().nr_held(), 0);
    heal(&rig);
    rig.wait_status("a path", |status| status.nr_active() != 0);
    disk.q().read(0, 8).unwrap();
}

#[test]
fn everything_that_is_held_is_shown() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    // One after the other, on both queues: each by itself, with nothing else happening.
    for nr in 1..=4 {
        for q in &mut disk.queues {
            q.submit(&Op::read(nr * 16, 8)).unwrap();
        }
        rig.wait_status(&format!("{} held", nr * 2), |status| {
            status.nr_held() == nr * 2 && status.0["held"]["bytes"] == nr * 2 * 4096
        });
    }
    heal(&rig);
    for q in &mut disk.queues {
        answers(q, OK, Instant::now(), 0.0..6.0);
    }
    rig.wait_status("nothing to be held", |status| status.nr_held() == 0);
}

#[test]
fn what_is_held_goes_out_in_order() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    let sectors: Vec<u64> = (0..30).map(|i| (i * 7 % 30) * 64 + 8).collect();
    for sector in &sectors {
        disk.q().submit(&Op::write(*sector, filled(*sector, 8))).unwrap();
    }
    rig.wait_status("something to be held", |status| status.nr_held() > 0);
    rig.fs.clear_log();
    rig.fs.clear("a");
    answers(disk.q(), OK, Instant::now(), 0.0..6.0);
    let came: Vec<u64> = rig.fs.log_of("a", Kind::Write).iter().map(|op| op.offset / 512).collect();
    let place = |sector: &u64| came.iter().position(|s| s == sector).expect("every write came");
    // The kernel's threads may swap neighbours on the way to the server.
    let swaps: usize = sectors.iter().enumerate().map(|(i, sector)| place(sector).abs_diff(i)).sum();
    assert!(swaps < 4 * sectors.len(), "{sectors:?} came as {came:?}");
    rig.image.assert_filled(0..rig.image.sectors());
}

#[test]
fn f14_the_policy_changes_while_requests_are_held() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    let mut control = rig.control();
    send_reads(disk.q(), 16);
    rig.wait_status("requests to be held", |status| status.nr_held() == 16);
    control.run("fail_if_no_path").unwrap();
    answers(disk.q(), IOERR, Instant::now(), 0.0..1.0);
    assert_eq!(rig.status().0["queue_if_no_path"], false);
    send_reads(disk.q(), 16);
    answers(disk.q(), IOERR, Instant::now(), 0.0..1.0);
    control.run("queue_if_no_path").unwrap();
    send_reads(disk.q(), 16);
    rig.wait_status("requests to be held", |status| status.nr_held() == 16);
    assert!(disk.q().done_within(Duration::from_millis(300)).is_err());
    assert_eq!(rig.status().0["no_path_retry"], "queue");
    // The time counts from the loss of the last path, which is long ago by now.
    control.run("no_path_retry 1").unwrap();
    answers(disk.q(), IOERR, Instant::now(), 0.0..2.0);
    control.run("no_path_retry 3600").unwrap();
    send_reads(disk.q(), 16);
    rig.wait_status("requests to be held", |status| status.nr_held() == 16);
    heal(&rig);
    answers(disk.q(), OK, Instant::now(), 0.0..6.0);
}

/// However the last path goes, the time begins to run.
#[test]
fn f14_the_time_runs_when_the_last_path_is_removed_or_failed_by_hand() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &NAMES, &["--no-path-retry", "1"]);
    let mut disk = rig.disk(1);
    disk.q().read(0, 8).unwrap();
    rig.tell("fail_path", "a");
    rig.tell("remove_path", "b");
    let start = Instant::now();
    send_reads(disk.q(), 4);
    answers(disk.q(), IOERR, start, 0.0..2.5);
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    disk.q().read(0, 8).unwrap();
    rig.tell("fail_path", "a");
    let start = Instant::now();
    send_reads(disk.q(), 4);
    answers(disk.q(), IOERR, start, 0.5..2.5);
}

/// Three ways to end the ring, with requests held that nothing will ever answer.
#[test]
fn f14_f18_stopping_never_waits_for_a_path() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    send_reads(disk.q(), 16);
    rig.wait_status("requests to be held", |status| status.nr_held() == 16);
    let start = Instant::now();
    let base = disk.session.stop(0).unwrap();
    assert!(start.elapsed() < AT_ONCE, "GET_VRING_BASE took {:?}", start.elapsed());
    assert_eq!(base, disk.q().queue.next_avail());
    // What was taken is answered, each once, and nothing comes later.
    for _ in 0..16 {
        assert_eq!(disk.q().done_now().unwrap().expect("an answer before the stop").status, IOERR);
    }
    assert_eq!(rig.status().nr_held(), 0);
    disk.session.start(&disk.queues[0].queue, base).unwrap();

    send_reads(disk.q(), 16);
    rig.wait_status("requests to be held", |status| status.nr_held() == 16);
    let start = Instant::now();
    disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
    assert!(start.elapsed() < AT_ONCE, "a reset took {:?}", start.elapsed());

    let memory = disk.memory.clone();
    let mut disk = {
        drop(disk);
        let start = Instant::now();
        let mut disk = Disk::at(rig.server.socket()).connect_with(&memory).unwrap();
        disk.session.start(&disk.queues[0].queue, 0).unwrap();
        send_reads(disk.q(), 16);
        rig.wait_status("requests to be held", |status| status.nr_held() == 16);
        drop(disk);
        let disk = rig.disk(1);
        assert!(start.elapsed() < AT_ONCE * 2, "coming back took {:?}", start.elapsed());
        disk
    };
    rig.wait_status("nothing to be held", |status| status.nr_held() == 0);
    heal(&rig);
    rig.wait_status("a path", |status| status.nr_active() != 0);
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    assert!(disk.q().done_now().unwrap().is_none());
}

#[test]
fn f14_ending_the_program_never_waits_for_a_path() {
    need!(faulty);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let (mut rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
        for q in &mut disk.queues {
            send_reads(q, 16);
        }
        rig.wait_status("requests to be held", |status| status.nr_held() == 32);
        let start = Instant::now();
        rig.server.signal(signal);
        assert_eq!(rig.server.wait_exit(SOON).unwrap().code(), Some(0));
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        assert!(!rig.socket.path().exists() && !rig.server.socket().exists(), "sockets are left");
        for q in &mut disk.queues {
            assert!(q.drain().unwrap().iter().all(|done| done.status == IOERR));
        }
    }
}

/// The guest's memory changes (a reboot, a hot-plugged DIMM) while requests are held.
#[test]
fn f14_f19_memory_changes_while_requests_are_held() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    for q in &mut disk.queues {
        for i in 0..8 {
            q.stage(&Op::read(i * 16, 8)).unwrap();
            q.stage(&Op::write(1024 + i * 16, filled(1024 + i * 16, 8))).unwrap();
        }
        q.kick();
    }
    rig.wait_status("requests to be held", |status| status.nr_held() == 32);
    disk.session.channel.timeout = Duration::from_secs(3);
    let (memory, session) = (&disk.memory, &disk.session);
    let region = memory.add(Region::new(memory.end() + MIB, MIB, 0).unwrap());
    session.add_region(&region).expect("a region is added at once");
    session.remove_region(&region).expect("a region is removed at once");
    memory.remove(region.guest);
    session.set_mem_table(memory).expect("a memory table is taken at once");
    assert_eq!(rig.status().nr_held(), 32);
    heal(&rig);
    for q in &mut disk.queues {
        for (i, done) in (0..).zip(q.drain().unwrap()) {
            assert_eq!(done.status, OK);
            let is_write = i % 2 == 1;
            assert!(is_write || done.data == filled(i / 2 * 16, 8), "request {i}");
        }
    }
    rig.image.assert_filled(0..rig.image.sectors());
}

/// The same with requests that are on a path when the memory changes, and held only then.
#[test]
fn f14_f19_memory_changes_while_requests_lose_their_path() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &NAMES, &["--no-path-retry", "queue"]);
    let mut disk = rig.disk(2);
    rig.tell("fail_path", "b");
    rig.fs.rule("a", Rule::hold().on(&[Kind::Read, Kind::Write]));
    for q in &mut disk.queues {
        for i in 1..5 {
            q.stage(&Op::read(i * 16, 8)).unwrap();
            q.stage(&Op::write(1024 + i * 16, filled(1024 + i * 16, 8))).unwrap();
        }
        q.kick();
    }
    rig.fs.wait_held("a", 16, SOON).unwrap();
    let Disk { session, memory, queues, .. } = &mut disk;
    session.channel.timeout = Duration::from_secs(5);
    std::thread::scope(|scope| {
        let changed = scope.spawn(|| {
            let region = memory.add(Region::new(memory.end() + MIB, MIB, 0).unwrap());
            session.add_region(&region)
        });
        // The old memory is in use by the path until then.
        std::thread::sleep(Duration::from_millis(100));
        rig.tell("fail_path", "a");
        rig.fs.release_with("a", libc::ENODEV);
        rig.wait_status("all to be held", |status| status.nr_held() == 16);
        changed.join().unwrap().expect("a region is added when no path has a request");
    });
    NAMES.iter().for_each(|name| rig.tell("reinstate_path", name));
    for q in queues {
        for (i, done) in (0..).zip(q.drain().unwrap()) {
            assert!(
                done.status == OK && (i % 2 == 1 || done.data == filled((i / 2 + 1) * 16, 8)),
                "request {i}"
            );
        }
    }
    rig.image.assert_filled(0..rig.image.sectors());
}

#[test]
fn every_kind_of_request_is_held_and_goes_on() {
    need!(faulty);
    let (rig, mut disk) = without_paths(&["--no-path-retry", "queue"]);
    use polypath_vm_tests::front_end::Segment;
    let ops = [
        Op::read(8, 8),
        Op::write(16, filled(16, 8)),
        Op::WriteZeroes(vec![Segment::new(64, 8)]),
        Op::Discard(vec![Segment::new(128, 8)]),
        Op::Flush,
        Op::read(3, 1),
    ];
    for op in &ops {
        disk.q().submit(op).unwrap();
    }
    // What needs no path is answered.
    disk.q().submit(&Op::GetId).unwrap();
    assert_eq!(disk.q().done_within(AT_ONCE).unwrap().status, OK);
    rig.wait_status("all to be held", |status| status.nr_held() == ops.len() as u64);
    heal(&rig);
    answers(disk.q(), OK, Instant::now(), 0.0..6.0);
    assert_eq!(rig.image.at(64, 8), [0; 4096]);
    rig.image.assert_filled(0..64);
}

/// Errors that requests met before do not count as long as paths come and go in time.
#[test]
fn f36_held_requests_survive_paths_that_come_and_go() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &NAMES, &["--no-path-retry", "30"]);
    let mut disk = rig.disk(1);
    // The probe's block is well, so a path comes back as soon as its name is there to be opened.
    for name in NAMES {
        rig.fs.rule(name, Rule::errno(libc::ENODEV).sectors(8..u64::MAX / 512));
        rig.fs.remove_name(name);
    }
    send_reads(disk.q(), 16);
    for name in ["a", "b", "a"] {
        rig.wait_status("requests to be held", |status| status.nr_held() == 16);
        let failures = rig.server.count_log("path failed");
        rig.fs.add_name(name);
        wait_until("another failure", SOON, || rig.server.count_log("path failed") > failures).unwrap();
        rig.fs.remove_name(name);
    }
    for name in NAMES {
        rig.fs.clear(name);
        rig.fs.add_name(name);
    }
    answers(disk.q(), OK, Instant::now(), 0.0..10.0);
    assert_eq!(status(disk.q(), &Op::read(8, 8)), OK);
}
