//! Random events under load, from a seed: paths fail, hang, are slow, swapped, removed and added; groups, messages,
//! memory tables and front-ends change. Every request is answered once, with OK and the right data.
//!
//! `POLYPATH_SOAK_SECONDS` and `POLYPATH_SOAK_SEED` make it longer and choose the events. How they fall together is up to
//! the machine's timing, so a seed repeats the events and not always what they meet.

mod events;

use std::time::{Duration, Instant, SystemTime};

use polypath_vm_tests::faulty::FaultyFs;
use polypath_vm_tests::front_end::verify::{Plan, Rng, Verifier};
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, verify::Report};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, need};
use crate::rig::{Rig, SetAtEnd, start_loads};
use events::{Events, NAMES};

const QUEUES: u16 = 4;
const SECONDS_DEFAULT: u64 = 20;

/// How long one load goes on before everything is mended and checked.
const LEG: Duration = Duration::from_secs(4);

/// One load with events; the requests that were answered.
fn leg(events: &mut Events, disk: &mut Disk, verifiers: &mut [Verifier], end: Instant) -> u64 {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), depth: 24, flush_percent: 2, ..Plan::default() };
    let Disk { session, memory, queues, .. } = disk;
    std::thread::scope(|scope| {
        let stop_at_end = SetAtEnd(&stop);
        queues.iter_mut().for_each(|q| q.timeout = Duration::from_secs(30));
        let loads = start_loads(scope, queues, verifiers, &plan);
        while Instant::now() < end {
            events.one(session, memory);
            events.look();
            assert!(!loads.iter().any(|load| load.is_finished()), "the load has ended early");
            events.pause();
        }
        events.mend_all();
        drop(stop_at_end);
        let answered = |report: Report| report.answered;
        loads.into_iter().map(|load| answered(load.join().unwrap().unwrap_or_else(|e| panic!("{e:#}")))).sum()
    })
}

/// What a guest does between two loads: goes on, stops and starts its queues, resets, or comes anew.
fn between(events: &mut Events, mut disk: Disk) -> Disk {
    match events.rng.below(4) {
        0 => events.note("front-end", "goes on"),
        1 => {
            for (base, q) in disk.stop().unwrap().into_iter().zip(&disk.queues) {
                assert_eq!(base, q.queue.next_avail());
                disk.session.start(&q.queue, base).unwrap();
            }
            events.note("front-end", "stops and starts");
        }
        2 => {
            disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
            disk.session.set_features(disk.session.features).unwrap();
            for q in &mut disk.queues {
                q.reset();
                disk.session.start(&q.queue, 0).unwrap();
            }
            events.note("front-end", "resets");
        }
        _ => {
            drop(disk);
            disk = events.rig.disk(QUEUES);
            events.note("front-end", "comes anew");
        }
    }
    disk
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: no number")))
}

/// Two groups of two, with selectors and a failback policy from the seed.
fn start(rng: &mut Rng, image: Image) -> Rig {
    let fs = FaultyFs::mount(&image.path, &NAMES).unwrap();
    fs.logging(false);
    let mut pick = |words: &[&'static str]| words[usize::try_from(rng.below(words.len() as u64)).unwrap()];
    let selectors = ["round-robin", "queue-length", "historical-service-time", "learned-service-time"];
    let mut group = |names: [&str; 2]| {
        let [a, b] = names.map(|name| fs.path(name).display().to_string());
        format!("{} 0 2 0 {a} {b}", pick(&selectors))
    };
    let (first, second) = (group(["a", "b"]), group(["c", "d"]));
    let line = format!("0 {} multipath 0 0 2 1 {first} {second}", image.sectors());
    let failback = pick(&["manual", "immediate", "followover", "1"]);
    println!("--failback {failback} --table {line:?}");
    let mut builder = Server::polypath().arg("--table").arg(line);
    for arg in ["--failback", failback, "--path-timeout", "200", "--no-path-retry", "600"] {
        builder = builder.arg(arg);
    }
    Rig::start_with(image, fs, builder)
}

#[test]
fn random_events_under_load() {
    need!(faulty);
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into();
    let seed = number("POLYPATH_SOAK_SEED").unwrap_or_else(clock);
    let seconds = number("POLYPATH_SOAK_SECONDS").unwrap_or(SECONDS_DEFAULT);
    println!("POLYPATH_SOAK_SEED={seed}");
    let mut rng = Rng::new(seed);
    let image = Image::empty(8 * MIB);
    let stranger = image.dir().join("stranger");
    let foreign = vec![0xDD; usize::try_from(image.bytes).unwrap()];
    std::fs::write(&stranger, &foreign).unwrap();
    let rig = start(&mut rng, image);
    let mut disk = rig.disk(QUEUES);
    let mut verifiers = Verifier::share(rig.image.sectors(), QUEUES.into(), seed);
    let mut events = Events::new(&rig, seed, rng, stranger);
    let (begun, mut answered, mut fds) = (Instant::now(), 0, None);
    let end = begun + Duration::from_secs(seconds);
    while Instant::now() < end {
        answered += leg(&mut events, &mut disk, &mut verifiers, end.min(Instant::now() + LEG));
        for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
            assert_eq!(q.nr_pending(), 0);
            verifier.check_all(q).unwrap();
            q.flush().unwrap();
            verifier.check_file(&rig.image.path).unwrap();
        }
        assert!(std::fs::read(&events.stranger).unwrap() == foreign, "another file was written to");
        // Descriptors of before are closed a moment later.
        let before = *fds.get_or_insert(rig.server.stats().fds);
        wait_until("descriptors to be closed", SOON, || rig.server.stats().fds <= before + 2).unwrap();
        disk = between(&mut events, disk);
    }
    println!("{answered} requests verified in {:?}; events: {:?}", begun.elapsed(), events.counts);
}
