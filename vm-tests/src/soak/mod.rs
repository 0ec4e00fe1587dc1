//! Load and faults for as long as wanted, from a seed: everything that is read is checked, and what the process uses is
//! watched for drift.
//!
//! The time is cut into lives. A life begins with storage and a back-end made from the seed. For most of it the process
//! stays the same, while legs of load meet faults of paths and commands; at the end of each leg everything is mended and
//! compared, and a sample is taken. Then come legs in which the process itself is killed and restarted. There are two forms:
//! [`vmless`] with a front-end of our own, and [`guest`] with a real guest under QEMU.

pub mod drift;
mod ends;
pub mod events;
pub mod guest;
pub mod leg;
pub mod options;
pub mod piece;
pub mod report;
pub mod storage;
pub mod vmless;
pub mod world;

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::front_end::verify::Rng;
pub use options::{HELP, Options};
pub use report::Record;
use report::Report;

/// Part of a life, in percent, after which the process does not stay the same.
const CALM_PERCENT: u32 = 70;

/// Runs it and writes the results; whether nothing was found.
pub fn main(options: &Options) -> Result<bool> {
    println!("{}", options.command());
    let begun = Instant::now();
    let mut record = Record::default();
    let run = if options.guest { guest::run } else { vmless::run };
    let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(options, begun, &mut record)));
    let ran = ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!("panic: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a word")))
    });
    let report = Report::new(options, begun.elapsed(), record, ran.err());
    report.write(&options.out)?;
    print!("{}", report.text());
    Ok(report.is_good())
}

/// Cuts the time into lives of at least `shortest` each: `life` gets its seed, its time and its number, from 0.
fn lives(
    options: &Options,
    begun: Instant,
    shortest: Duration,
    mut life: impl FnMut(u64, Duration, u64) -> Result<()>,
) -> Result<()> {
    let end = begun + options.time;
    let life_time = shortest.max(options.time / 8).min(options.time);
    let mut rng = Rng::new(options.seed);
    for number in 0_u64.. {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let seed = rng.next_u64();
        // What would be too short for a life belongs to this one.
        let time = if left < life_time + life_time / 2 { left } else { life_time };
        life(seed, time, number).with_context(|| format!("life {} of {}", number + 1, options.command()))?;
    }
    Ok(())
}
