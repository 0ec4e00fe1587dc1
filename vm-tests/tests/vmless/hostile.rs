//! A queue whose driver keeps no rules, at full speed, beside queues whose drivers do.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::front_end::hostile::{Hostile, Nonsense};
use polypath_vm_tests::front_end::verify::{Plan, Verifier};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON};
use crate::rig::{SetAtEnd, start_loads};

/// How long each kind of nonsense goes on.
const MOMENT: Duration = Duration::from_millis(120);

/// The other queues' data stays right, the log stays short, the queue costs nothing once its driver is silent, and a reset
/// makes it good again.
#[test]
fn f20_f25_nonsense_at_full_speed_harms_no_other_queue() {
    let image = Image::empty(8 * MIB);
    let mut server = Server::polypath().path(&image.path).num_queues(3).start().unwrap();
    let mut verifiers = Verifier::share(image.sectors(), 2, 25);
    for (seed, what) in (0..).zip(Nonsense::ALL) {
        let lines = server.stderr().lines().count();
        // The largest ring, which the worst chains are made for.
        let mut disk = Disk::at(server.socket()).queues(3).queue_size(1024).open().unwrap();
        let stop = AtomicBool::new(false);
        let plan = Plan { requests: u64::MAX, stop: Some(&stop), ..Plan::default() };
        let (good, bad) = disk.queues.split_at_mut(2);
        let queue = &mut bad[0].queue;
        queue.reset();
        let mut hostile = Hostile::new(queue, what, seed);
        std::thread::scope(|scope| {
            let loads = start_loads(scope, good, &mut verifiers, &plan);
            let stop_at_end = SetAtEnd(&stop);
            let end = Instant::now() + MOMENT;
            while Instant::now() < end {
                hostile.poke(queue);
            }
            drop(stop_at_end);
            for load in loads {
                let report = load.join().unwrap().unwrap_or_else(|e| panic!("{what:?}: {e:#}"));
                assert!(report.answered > 0, "{what:?}: the others are not served");
            }
        });
        assert!(server.is_alive(), "{what:?}: {}", server.stderr());
        println!("{:16} {:6} rings, {:6} kicks", what.name(), hostile.nr_rings, hostile.nr_kicks);
        // What it had asked for is done soon; then nothing is left to do.
        let idle = || {
            let cpu = server.stats().cpu;
            std::thread::sleep(Duration::from_millis(200));
            server.stats().cpu.saturating_sub(cpu) < Duration::from_millis(60)
        };
        polypath_vm_tests::server::wait_until(&format!("{what:?}: rest"), SOON, idle).unwrap();
        let more = server.stderr().lines().count() - lines;
        // Came, broke a rule, gives way, went; the last one may have gone late.
        assert!(more <= 5, "{what:?}: {more} lines of log\n{}", server.stderr());
        disk.session.stop(2).unwrap();
        disk.queues[2].reset();
        disk.session.start(&disk.queues[2].queue, 0).unwrap();
        for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
            verifier.check_all(q).unwrap();
        }
        disk.queues[2].read(0, 8).unwrap_or_else(|e| panic!("{what:?}: after a reset: {e:#}"));
    }
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
}

/// A queue that was left alone costs nothing, however often it is kicked.
#[test]
fn a_broken_queue_is_not_woken_by_kicks() {
    let image = Image::empty(MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).open().unwrap();
    let queue = &mut disk.queues[1].queue;
    let mut hostile = Hostile::new(queue, Nonsense::Index, 1);
    hostile.poke(queue);
    server.wait_for_log("available index is impossible", SOON).unwrap();
    let turns = |server: &Server| server.stats().voluntary_switches;
    std::thread::sleep(Duration::from_millis(50));
    let before = turns(&server);
    for _ in 0..2000 {
        hostile.poke(queue);
        std::thread::sleep(Duration::from_micros(20));
    }
    let woken = turns(&server) - before;
    assert!(woken < 200, "woken {woken} times by 2000 kicks");
    // Broken in the middle of a storm of kicks, it costs nothing either.
    disk.session.stop(1).unwrap();
    disk.queues[1].reset();
    disk.session.start(&disk.queues[1].queue, 0).unwrap();
    let queue = &mut disk.queues[1].queue;
    let mut hostile = Hostile::new(queue, Nonsense::Index, 2);
    let storm = |hostile: &mut Hostile, ms| {
        let end = Instant::now() + Duration::from_millis(ms);
        while Instant::now() < end {
            hostile.poke(queue);
        }
    };
    storm(&mut hostile, 100);
    let cpu = server.stats().cpu;
    storm(&mut hostile, 400);
    let cpu = server.stats().cpu.saturating_sub(cpu);
    assert!(cpu < Duration::from_millis(100), "{cpu:?} of CPU in 400 ms of kicks");
}

/// A guest that breaks the same rule after each of many resets does not fill the log.
#[test]
fn resets_do_not_fill_the_log() {
    let image = Image::empty(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    for round in 0..100 {
        let queue = &mut disk.queues[0].queue;
        let mut hostile = Hostile::new(queue, Nonsense::Indices, round);
        hostile.poke(queue);
        // It comes back from the stop with everything taken.
        disk.session.stop(0).unwrap();
        disk.q().reset();
        disk.session.start(&disk.queues[0].queue, 0).unwrap();
    }
    let lines = server.count_log("guest broke a rule");
    assert!((1..=30).contains(&lines), "{lines} lines for 100 resets");
    disk.q().read(0, 8).unwrap();
}
