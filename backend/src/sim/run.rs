//! Runs, one per seed.

use std::cell::RefCell;
use std::rc::Rc;

use super::engine::SimEngine;
use super::fixture::Links;
use super::lun::NR_PORTS;
use super::plan::NR_SECTORS;
use super::profile::Profile;
use super::rng::Rng;
use super::world::World;
use crate::worker::Worker;

/// Runs in every test run.
const NR_RUNS: u64 = 2000;
const NR_SHARES: u64 = 4;

/// Names the seed when a run fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let name = std::thread::current().name().unwrap_or("sim").to_owned();
            println!("to see it again: POLYPATH_SIM_SEED={} cargo test --lib {name}", self.0);
        }
    }
}

/// One run. `adjust` makes a profile of what a test is about.
pub(crate) fn run(links: &Rc<Links>, seed: u64, adjust: &dyn Fn(&mut Profile), trace: bool) {
    let _seed = Seed(seed);
    let mut rng = Rng::new(seed);
    let mut profile = Profile::any(&mut rng);
    adjust(&mut profile);
    let mut next_avail = profile.index;
    let world = World::new(rng, profile, Rc::clone(links), trace);
    world.say(format_args!("{:?}", world.profile));
    let world = Rc::new(RefCell::new(world));
    loop {
        let (config, commands) = world.borrow_mut().start_worker(next_avail);
        let worker = Worker::new(config, SimEngine(Rc::clone(&world)), commands).expect("worker");
        next_avail = worker.run();
        let mut world = world.borrow_mut();
        world.worker_ended(next_avail);
        if world.is_over() {
            break;
        }
    }
    world.borrow().check_end();
}

/// The names of the ports. No run does I/O on the file.
fn links() -> Rc<Links> {
    Rc::new(Links::new(NR_PORTS, NR_SECTORS * 512))
}

/// A few runs of what a test is about. `POLYPATH_SIM_SEED` repeats one.
pub(crate) fn runs(nr: u64, adjust: impl Fn(&mut Profile)) {
    let links = links();
    match number("POLYPATH_SIM_SEED") {
        Some(seed) => run(&links, seed, &adjust, true),
        None => (0..nr).for_each(|seed| run(&links, seed, &adjust, false)),
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// One share of the seeds, so that every processor has one.
///
/// `POLYPATH_SIM_SEED` repeats one seed and says what happens; `POLYPATH_SIM_RUNS` says how many there are in all.
fn run_share(share: u64) {
    let links = links();
    if let Some(seed) = number("POLYPATH_SIM_SEED") {
        if seed % NR_SHARES == share {
            run(&links, seed, &|_| {}, true);
        }
        return;
    }
    let nr_runs = number("POLYPATH_SIM_RUNS").unwrap_or(NR_RUNS);
    for seed in (0..nr_runs).filter(|seed| seed % NR_SHARES == share) {
        run(&links, seed, &|_| {}, false);
    }
}

#[test]
fn the_worker_keeps_its_promises_whatever_happens_0() {
    run_share(0);
}

#[test]
fn the_worker_keeps_its_promises_whatever_happens_1() {
    run_share(1);
}

#[test]
fn the_worker_keeps_its_promises_whatever_happens_2() {
    run_share(2);
}

#[test]
fn the_worker_keeps_its_promises_whatever_happens_3() {
    run_share(3);
}
