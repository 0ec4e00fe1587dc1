//! The closed loop that every program is measured with.
//!
//! It is kept lean, because on paths without a device its own core is what limits the rate: the clock is read only where
//! a timed request ends or begins, or now and then, and one request in [`TIMED_EVERY`] is timed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::histogram::Histogram;
use super::host;
use super::workload::{Offsets, Workload};

/// An answer takes at most this long, or the run is given up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Loads that are deeper than this have only a part of their requests timed.
const ALL_TIMED_DEPTH: usize = 8;
/// One slot in so many is timed in deep loads.
const TIMED_EVERY: usize = 8;

/// The clock is read at least once in so many polls.
const POLLS_PER_CLOCK: u64 = 256;

/// Polls of an idle queue from which the cost of one is taken.
const NR_CALIBRATION: u32 = 20_000;

/// A way to the disk.
pub(super) trait Client {
    /// Queues a request of this load.
    fn queue(&mut self, workload: &Workload, slot: usize, offset: u64) -> Result<()>;
    /// Makes what is queued known to the other side.
    fn submit(&mut self) -> Result<()>;
    /// Adds the slots of finished requests to `done`; may find none.
    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()>;
    /// Whether `reap` returns at once when there is nothing.
    fn is_polling(&self) -> bool;
}

/// What one run gave.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
    /// Of the timed requests.
    pub(super) latency: Histogram,
    pub(super) polls: u64,
    /// Polls that found nothing.
    pub(super) empty_polls: u64,
    /// What such a poll costs; None of a client that waits in place of polling.
    pub(super) empty_poll_ns: Option<f64>,
}

impl Sample {
    pub(super) fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }

    /// Part of the time that the client spent in polls that found nothing, in per cent: near 0 means that the client's
    /// core is the limit. Not a number where it does not poll.
    pub(super) fn idle_percent(&self) -> f64 {
        let idle = |ns: f64| (self.empty_polls as f64 * ns / self.elapsed.as_nanos() as f64).min(1.0) * 100.0;
        self.empty_poll_ns.map_or(f64::NAN, idle)
    }
}

/// Keeps the load's depth under way for `time`, then lets it run dry.
pub(super) fn run(
    client: &mut dyn Client,
    workload: &Workload,
    disk_bytes: u64,
    time: Duration,
) -> Result<Sample> {
    let mut offsets = Offsets::new(workload, disk_bytes);
    let mut done = Vec::with_capacity(workload.depth);
    let empty_poll_ns = calibrate(client, &mut done)?;
    let timed_every = if workload.depth > ALL_TIMED_DEPTH { TIMED_EVERY } else { 1 };
    let mut latency = Histogram::default();
    let start = Instant::now();
    let end = start + time;
    let mut begun = vec![start; workload.depth];
    for slot in 0..workload.depth {
        client.queue(workload, slot, offsets.next_for(slot))?;
    }
    client.submit()?;
    let (mut under_way, mut requests, mut polls, mut empty_polls) = (workload.depth, 0, 0_u64, 0_u64);
    let (mut now, mut last_requests, mut last_progress) = (start, 0, start);
    while under_way > 0 {
        done.clear();
        client.reap(&mut done)?;
        polls += 1;
        if polls.is_multiple_of(POLLS_PER_CLOCK) {
            host::check_stopped()?;
            now = Instant::now();
            if requests > last_requests {
                (last_requests, last_progress) = (requests, now);
            } else if now - last_progress > ANSWER_TIMEOUT {
                bail!("{under_way} requests without an answer for {ANSWER_TIMEOUT:?}");
            }
        }
        if done.is_empty() {
            empty_polls += 1;
            std::hint::spin_loop();
            continue;
        }
        requests += done.len() as u64;
        if done.iter().any(|slot| slot.is_multiple_of(timed_every)) {
            now = Instant::now();
            for slot in done.iter().filter(|slot| slot.is_multiple_of(timed_every)) {
                latency.add(now - begun[*slot]);
                begun[*slot] = now;
            }
        }
        if now >= end {
            under_way -= done.len();
            continue;
        }
        for &slot in &done {
            client.queue(workload, slot, offsets.next_for(slot))?;
        }
        client.submit()?;
    }
    Ok(Sample { requests, elapsed: start.elapsed(), latency, polls, empty_polls, empty_poll_ns })
}

/// The cost of a poll that finds nothing, with nothing under way.
fn calibrate(client: &mut dyn Client, done: &mut Vec<usize>) -> Result<Option<f64>> {
    if !client.is_polling() {
        return Ok(None);
    }
    let start = Instant::now();
    for _ in 0..NR_CALIBRATION {
        client.reap(done)?;
        std::hint::spin_loop();
    }
    Ok(Some(start.elapsed().as_nanos() as f64 / f64::from(NR_CALIBRATION)))
}
