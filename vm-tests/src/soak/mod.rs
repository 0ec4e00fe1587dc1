//! Load and faults for as long as wanted, from a seed: everything that is read is checked, and what the process uses is
//! watched for drift.
//!
//! The time is cut into lives. A life begins with storage and a back-end made from the seed. For most of it the process
//! stays the same: legs of load with faults of paths, commands, front-ends that come and go and a guest that keeps no rules
//! on a fifth queue; at the end of each leg everything is mended, flushed and compared, and a sample is taken. Then come legs
//! in which the process itself is killed, restarted and moved away from, and in the end the power goes.

pub mod drift;
pub mod events;
pub mod leg;
pub mod options;
pub mod report;
pub mod world;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::front_end::durable::{Mix, Survived, Tally};
use crate::front_end::verify::Rng;
use crate::front_end::{BlkQueue, Op};
use crate::server::Stats;
use drift::Sample;
use events::Events;
use leg::End;
pub use options::{HELP, Options};
use report::Report;
use world::{Setup, World};

/// Shortest life.
const LIFE_MIN: Duration = Duration::from_secs(40);
/// Parts of a life, in percent, after which the process does not stay the same, and after which the power goes.
const CALM_PERCENT: u32 = 70;
const ROUGH_PERCENT: u32 = 90;
/// Reads of the load without faults, for the latencies of a sample.
const NR_TIMED: usize = 400;

/// All that came of it so far.
#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    tally: Tally,
    survived: Survived,
    nr_cuts: u64,
    nr_lives: u64,
    nr_legs: u64,
    process: usize,
    samples: Vec<Sample>,
    /// What happened last, and the log of the process, after a finding.
    last: Vec<String>,
    log: String,
}

/// Runs it and writes the results; whether nothing was found.
pub fn main(options: &Options) -> Result<bool> {
    println!("{}", options.command());
    let begun = Instant::now();
    let mut state = State::default();
    let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(options, begun, &mut state)));
    let ran = ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!("panic: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a word")))
    });
    let report = Report::new(options, begun.elapsed(), &state, ran.err());
    report.write(&options.out)?;
    print!("{}", report.text());
    Ok(report.is_good())
}

fn run(options: &Options, begun: Instant, state: &mut State) -> Result<()> {
    let end = begun + options.time;
    let life_time = LIFE_MIN.max(options.time / 8).min(options.time);
    let mut rng = Rng::new(options.seed);
    while Instant::now() < end {
        let seed = rng.next_u64();
        let left = end.saturating_duration_since(Instant::now());
        // What would be too short for a life belongs to this one.
        let time = if left < life_time + life_time / 2 { left } else { life_time };
        life(seed, time, state)
            .with_context(|| format!("life {} of {}", state.nr_lives, options.command()))?;
    }
    Ok(())
}

fn life(seed: u64, time: Duration, state: &mut State) -> Result<()> {
    state.nr_lives += 1;
    state.process += 1;
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
            if events.may_end_process && state.samples.last().is_some_and(|s| s.process == state.process) {
                state.process += 1;
            }
            let depth = usize::try_from(1 + events.rng.below(32))?;
            let mix =
                Mix { depth, batch: 1 + depth / 2, sectors_max: 1 + events.rng.below(64), ..Mix::default() };
            let until = Instant::now() + leg_time;
            let outcome = leg::run(&mut world, &mut writers, &mut events, &mix, until, end)?;
            state.nr_legs += 1;
            let Tally { answered, sectors_checked, given_up, .. } = outcome.tally;
            state.tally.add(Tally { answered, sectors_checked, given_up, latencies_us: Vec::new() });
            if let Some(survived) = outcome.survived {
                has_cut = true;
                state.nr_cuts += 1;
                state.survived.last += survived.last;
                state.survived.between += survived.between;
                state.survived.durable += survived.durable;
            }
            ensure!(std::fs::read(&stranger)? == foreign, "another file was written to");
            if !events.may_end_process {
                let sample = sample(&mut world, state.process)?;
                state.samples.push(Sample { at_s: begun.elapsed().as_secs_f64(), ..sample });
            }
        }
        Ok(())
    })();
    for (kind, number) in std::mem::take(&mut events.counts) {
        *state.counts.entry(kind).or_default() += number;
    }
    if lived.is_err() {
        state.last = events.history().map(str::to_owned).collect();
        state.log = world.server.stderr();
    }
    lived.with_context(|| format!("{:?}", world.setup))
}

/// A look at the process, with everything well and nothing under way.
fn sample(world: &mut World, process: usize) -> Result<Sample> {
    let q: &mut BlkQueue = world.disk.q();
    let mut us = Vec::with_capacity(NR_TIMED);
    for i in 0..NR_TIMED {
        let done = q.run(&Op::read(i as u64 * 8 % 4096, 8))?;
        ensure!(done.status == 0, "status {} for a read", done.status);
        us.push(u64::try_from(done.latency.as_micros())?);
    }
    us.sort_unstable();
    let stats = world.server.stats();
    let Stats { fds, threads, mappings, rss_kib, .. } = stats;
    let anonymous_kib = anonymous_kib(world.server.pid());
    let [fds, threads, mappings] = [fds, threads, mappings].map(|number| number as u64);
    let (p50_us, p99_us) = (us[NR_TIMED / 2], us[NR_TIMED - NR_TIMED / 100]);
    Ok(Sample { at_s: 0.0, process, rss_kib, anonymous_kib, fds, threads, mappings, p50_us, p99_us })
}

/// Anonymous memory of a process.
fn anonymous_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    field.and_then(|field| field.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}
