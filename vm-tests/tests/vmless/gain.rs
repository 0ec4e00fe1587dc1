//! What two paths give, and how long a change takes: measured, printed, and held to loose limits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::{BlkQueue, Disk, OK, Op};
use polypath_vm_tests::server::wait_until;

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, SetAtEnd, Two};

const SELECTORS: [&str; 6] = [
    "round-robin",
    "queue-length",
    "service-time",
    "historical-service-time",
    "io-affinity",
    "learned-service-time",
];

/// What each path serves at a time, and how many requests each queue keeps outstanding.
const PATH_DEPTH: usize = 4;
const DEPTH: usize = 4;
const QUEUES: u16 = 4;

/// How long a path takes for what it serves at a time.
const SERVICE_TIME: Duration = Duration::from_millis(2);

/// Requests answered per round, where each path serves [`PATH_DEPTH`] in a round. The machine's own speed does not count:
/// a round begins when all requests have come to the paths.
fn served_per_round(names: &[&str], selector: &str) -> f64 {
    let rig = Rig::start(Image::filled(MIB), names, &["--selector", selector]);
    rig.fs.logging(false);
    let mut disk = rig.disk(QUEUES);
    names.iter().for_each(|name| rig.fs.rule(name, Rule::hold().reads()));
    let stop = AtomicBool::new(false);
    let outstanding = u64::from(QUEUES) * DEPTH as u64;
    let held = || names.iter().map(|name| rig.fs.counts(name).held).sum::<u64>();
    std::thread::scope(|scope| {
        let _stop = SetAtEnd(&stop);
        for q in &mut disk.queues {
            scope.spawn(|| keep_reading(q, &stop));
        }
        let (mut rounds, mut served) = (0_u32, 0_u64);
        // The first rounds fill the selectors' memories.
        while rounds < 120 {
            wait_until("all requests at the paths", SOON, || held() >= outstanding).unwrap();
            let begun = Instant::now();
            let of_path = |name: &&str| rig.fs.counts(name).held.min(PATH_DEPTH as u64);
            let now: u64 = names.iter().map(of_path).sum();
            served += if rounds >= 20 { now } else { 0 };
            rounds += 1;
            std::thread::sleep(SERVICE_TIME.saturating_sub(begun.elapsed()));
            names.iter().for_each(|name| rig.fs.release_some(name, PATH_DEPTH));
        }
        stop.store(true, Ordering::Relaxed);
        names.iter().for_each(|name| rig.fs.release(name));
        served as f64 / 100.0
    })
}

fn keep_reading(q: &mut BlkQueue, stop: &AtomicBool) {
    let mut sector = u64::from(q.queue.index()) * 512;
    let mut next = || {
        // Apart from each other, so that no two become one.
        sector = (sector + 16) % 2040;
        Op::read(sector, 8)
    };
    for _ in 0..DEPTH {
        q.stage(&next()).unwrap();
    }
    q.kick();
    while q.nr_pending() != 0 {
        assert_eq!(q.done().unwrap().status, OK);
        if !stop.load(Ordering::Relaxed) {
            q.submit(&next()).unwrap();
        }
    }
}

#[test]
fn two_equal_paths_give_nearly_twice_as_much() {
    need!(faulty);
    let one = served_per_round(&["a"], "round-robin");
    assert!((one - PATH_DEPTH as f64).abs() < 0.01, "one path serves {one} in a round of {PATH_DEPTH}");
    for selector in SELECTORS {
        let gain = served_per_round(&["a", "b"], selector) / one;
        println!("two paths give {gain:.2} times one, {selector}");
        // What is counted does not depend on the machine's speed.
        assert!(gain >= 1.9, "{selector}: two paths give {gain:.2} times one");
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn the_time_from_the_first_error_to_the_answer_by_another_path() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    let (mut plain, mut failed_over) = (Vec::new(), Vec::new());
    while failed_over.len() < 25 {
        rig.fs.rule("a", Rule::errno(libc::ENODEV).reads().sectors(8..2048).next(1));
        let nr = failed_over.len();
        while failed_over.len() == nr {
            let refused = rig.fs.counts("a").refused;
            let done = disk.q().run(&Op::read(64, 8)).unwrap();
            assert!(done.status == OK && done.data == filled(64, 8));
            if rig.fs.counts("a").refused > refused {
                failed_over.push(done.latency);
            }
        }
        rig.forgive("a");
        plain.extend((0..3).map(|_| disk.q().run(&Op::read(64, 8)).unwrap().latency));
    }
    // The request's whole way, by both paths.
    let (plain, failed_over) = (median(plain), median(failed_over));
    println!(
        "a read takes {plain:?}, one that meets an error {failed_over:?}: {:?} from there to the answer (medians)",
        failed_over.saturating_sub(plain)
    );
    assert!(failed_over < plain + Duration::from_millis(20), "{failed_over:?} in place of {plain:?}");
}

/// How long after the timeout of a path that hangs it is out, and a disk that waits only for new requests goes on.
#[test]
fn the_time_from_a_hang_to_the_use_of_another_path() {
    need!(faulty);
    let image = Image::filled(MIB);
    let timeout = Duration::from_millis(200);
    let two = Two::start(&image, &["--path-timeout", "200"]);
    let mut disk = two.disk(1);
    let mut late = Vec::new();
    for _ in 0..7 {
        two.a.stop();
        let failures = two.server.count_log("path failed");
        let sent = Instant::now();
        // Two in a row go by one path each; the other stays.
        for sector in [64, 128] {
            disk.q().submit(&Op::read(sector, 8)).unwrap();
        }
        disk.q().done().unwrap();
        wait_until("the path to be taken out", SOON, || two.server.count_log("path failed") > failures)
            .unwrap();
        late.push(sent.elapsed().saturating_sub(timeout));
        all_by_b(&mut disk);
        two.a.cont();
        assert_eq!(disk.q().done().unwrap().status, OK);
        let mut control = two.socket.connect().unwrap();
        control.run(&format!("reinstate_path {}", two.paths[0].display())).unwrap();
        two.wait_a(true);
    }
    let late = median(late);
    println!("a path that hangs is out {late:?} after the timeout of {timeout:?} (median, seen in the log)");
    assert!(late < Duration::from_millis(100), "{late:?}");
}

/// None of these waits for the path that hangs.
fn all_by_b(disk: &mut Disk) {
    for i in 0..8 {
        let tag = disk.q().submit(&Op::read(i * 8, 8)).unwrap();
        let done = disk.q().done_within(Duration::from_secs(1)).unwrap();
        assert!(done.tag == tag && done.data == filled(i * 8, 8));
    }
}
