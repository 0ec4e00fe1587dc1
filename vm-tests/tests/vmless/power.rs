//! The power goes at random moments: what was answered as durable is there, whatever else happened before.
//!
//! Each round is made from its number: storage (one cache, or one for each port), selectors, write back or write through,
//! load, events (paths fail, hang, come and go; polypath is killed; front-ends come and go), and the moments of the cuts.
//! `POLYPATH_POWER_SEED` chooses the first number and `POLYPATH_POWER_ROUNDS` how many; what falls together is up to the
//! machine's timing, so a number repeats the events and not always what they meet.

use std::time::{Duration, Instant, SystemTime};

use polypath_vm_tests::front_end::durable::{Mix, Survived};
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::soak::events::Events;
use polypath_vm_tests::soak::leg::{self, End};
use polypath_vm_tests::soak::storage::Setup;
use polypath_vm_tests::soak::world::World;

use crate::common::need;

/// Rounds; `POLYPATH_POWER_ROUNDS` says otherwise.
const ROUNDS: u64 = 12;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: no number")))
}

/// Two cuts in one life. Gives what survived, and the requests that were answered.
fn round(seed: u64) -> (Survived, u64) {
    let mut rng = Rng::new(seed);
    let setup = Setup::random(&mut rng);
    let mut world = World::start(setup).unwrap();
    let stranger = world.beside("stranger");
    std::fs::write(&stranger, vec![0xDD; 8 << 20]).unwrap();
    let mut writers = world.writers(seed);
    let mut events = Events::new(rng, stranger, world.image());
    let (mut sum, mut answered) = (Survived::default(), 0);
    for _ in 0..2 {
        let depth = usize::try_from(1 + events.rng.below(32)).unwrap();
        let mix = Mix {
            depth,
            batch: depth.min(8),
            // Where few are written, a flush may find that there is nothing left to do.
            write_percent: 2 + events.rng.below(55),
            flush_percent: 1 + events.rng.below(12),
            zero_percent: events.rng.below(4),
            discard_percent: events.rng.below(4),
            sectors_max: 1 + events.rng.below(64),
            ..Mix::default()
        };
        let until = Instant::now() + Duration::from_millis(20 + events.rng.below(250));
        let outcome = leg::run(&mut world, &mut writers, &mut events, &mix, until, End::Power);
        let outcome = outcome.unwrap_or_else(|e| {
            let shown: Vec<_> = events.history().collect();
            panic!(
                "POLYPATH_POWER_SEED={seed} POLYPATH_POWER_ROUNDS=1: {e:#}\n{shown:#?}\n{}",
                world.server.stderr()
            )
        });
        answered += outcome.tally.total();
        let survived = outcome.survived.unwrap();
        sum.last += survived.last;
        sum.between += survived.between;
        sum.durable += survived.durable;
    }
    (sum, answered)
}

#[test]
fn f16_f03_what_a_flush_covered_survives_a_power_cut() {
    need!(faulty);
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into();
    let first = number("POLYPATH_POWER_SEED").unwrap_or_else(clock);
    let rounds = number("POLYPATH_POWER_ROUNDS").unwrap_or(ROUNDS);
    let (begun, mut sum, mut answered) = (Instant::now(), Survived::default(), 0);
    for seed in first..first + rounds {
        let (survived, requests) = round(seed);
        sum.last += survived.last;
        sum.between += survived.between;
        sum.durable += survived.durable;
        answered += requests;
    }
    println!(
        "rounds {first} to {}: {answered} requests, {} cuts in {:?}; sectors whose last version survived: {}, one in \
         between: {}, the one that was flushed: {}",
        first + rounds - 1,
        2 * rounds,
        begun.elapsed(),
        sum.last,
        sum.between,
        sum.durable
    );
    // Else nothing was at stake.
    assert!(rounds < ROUNDS || (sum.durable > 0 && sum.between > 0), "{sum:?}");
}
