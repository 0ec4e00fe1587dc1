//! The form without a VM: a front-end of our own.
//!
//! For most of a life the process stays the same: legs of load with faults of paths, commands, front-ends that come and go and
//! a guest that keeps no rules on a fifth queue; at the end of each leg everything is mended, flushed and compared, and a
//! sample is taken. Then come legs in which the process itself is killed, restarted and moved away from, and in the end the
//! power goes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::drift::Sample;
use super::events::Events;
use super::leg::{self, End};
use super::storage::Setup;
use super::world::World;
use super::{CALM_PERCENT, Options, Record, lives};
use crate::front_end::durable::Mix;
use crate::front_end::verify::Rng;
use crate::front_end::{BlkQueue, Op};

/// Shortest life.
const LIFE_MIN: Duration = Duration::from_secs(40);
/// Part of a life, in percent, after which the power goes.
const ROUGH_PERCENT: u32 = 90;
/// Reads of the load without faults, for the latencies of a sample.
const NR_TIMED: usize = 400;

/// What is counted, in the order in which it is shown.
const FACTS: [&str; 9] = [
    "lives",
    "legs",
    "requests verified",
    "sectors read and compared",
    "power cuts",
    "requests given up by power cuts",
    "sectors whose last version survived a cut",
    "sectors with a version in between",
    "sectors with what was flushed",
];

/// Lives, one after the other, until the time is over.
pub(super) fn run(options: &Options, begun: Instant, record: &mut Record) -> Result<()> {
    record.facts = FACTS.map(|fact| (fact, 0)).into();
    lives(options, begun, LIFE_MIN, |seed, time, _| life(seed, time, record))
}

fn life(seed: u64, time: Duration, record: &mut Record) -> Result<()> {
    record.count("lives", 1);
    record.process += 1;
    let mut rng = Rng::new(seed);
    let mut world = World::start(Setup::random(&mut rng))?;
    let stranger = world.beside("stranger");
    let foreign = vec![0xDD; usize::try_from(world.setup.bytes)?];
    std::fs::write(&stranger, &foreign)?;
    let mut writers = world.writers(seed);
    let mut events = Events::new(rng, stranger.clone(), world.image());
    let leg_time = if time < Duration::from_secs(300) { time / 24 } else { Duration::from_secs(4) };
    let begun = Instant::now();
    let mut has_cut = false;
    let lived = (|| -> Result<()> {
        while begun.elapsed() < time || !has_cut {
            let percent = begun.elapsed().as_secs_f64() / time.as_secs_f64() * 100.0;
            let end = if percent < ROUGH_PERCENT.into() { End::Peace } else { End::Power };
            events.may_end_process = percent >= CALM_PERCENT.into();
            if events.may_end_process && record.samples.last().is_some_and(|s| s.process == record.process) {
                record.process += 1;
            }
            let depth = usize::try_from(1 + events.rng.below(32))?;
            let mix =
                Mix { depth, batch: 1 + depth / 2, sectors_max: 1 + events.rng.below(64), ..Mix::default() };
            let until = Instant::now() + leg_time;
            let outcome = leg::run(&mut world, &mut writers, &mut events, &mix, until, end)?;
            record.count("legs", 1);
            record.count("requests verified", outcome.tally.total());
            record.count("sectors read and compared", outcome.tally.sectors_checked);
            record.count("requests given up by power cuts", outcome.tally.given_up);
            for (kind, number) in outcome.tally.answered {
                *record.requests.entry(kind).or_default() += number;
            }
            if let Some(survived) = outcome.survived {
                has_cut = true;
                record.count("power cuts", 1);
                record.count("sectors whose last version survived a cut", survived.last);
                record.count("sectors with a version in between", survived.between);
                record.count("sectors with what was flushed", survived.durable);
            }
            ensure!(std::fs::read(&stranger)? == foreign, "another file was written to");
            if !events.may_end_process {
                let [p50_us, p99_us] = latencies_us(&mut world)?;
                let at_s = begun.elapsed().as_secs_f64();
                record.samples.push(Sample {
                    at_s,
                    p50_us,
                    p99_us,
                    ..Sample::of(&world.server, record.process)
                });
            }
        }
        Ok(())
    })();
    record.take(&mut events);
    if lived.is_err() {
        record.log = world.server.stderr();
    }
    lived.with_context(|| format!("{:?}", world.setup))
}

/// Times to answers, half of all and the slowest hundredth, with everything well and nothing else under way.
fn latencies_us(world: &mut World) -> Result<[u64; 2]> {
    let q: &mut BlkQueue = world.disk.q();
    let mut us = Vec::with_capacity(NR_TIMED);
    for i in 0..NR_TIMED {
        let done = q.run(&Op::read(i as u64 * 8 % 4096, 8))?;
        ensure!(done.status == 0, "status {} for a read", done.status);
        us.push(u64::try_from(done.latency.as_micros())?);
    }
    us.sort_unstable();
    Ok([us[NR_TIMED / 2], us[NR_TIMED - NR_TIMED / 100]])
}
