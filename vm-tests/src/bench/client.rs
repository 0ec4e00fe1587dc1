//! The closed loop that every program is measured with.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::histogram::Histogram;
use super::workload::{Offsets, Workload};

/// An answer takes at most this long, or the run is given up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A way to the disk. `slot` is below the depth it was made for; each has a buffer of its own.
pub(super) trait Client {
    /// Queues a request.
    fn queue(&mut self, slot: usize, offset: u64, bytes: usize, write: bool) -> Result<()>;
    /// Makes what is queued known to the other side.
    fn submit(&mut self) -> Result<()>;
    /// Adds the slots of finished requests to `done`; may find none.
    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()>;
}

/// What one run gave.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
    pub(super) latency: Histogram,
}

impl Sample {
    pub(super) fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
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
    let mut begun = vec![Instant::now(); workload.depth];
    let mut done = Vec::with_capacity(workload.depth);
    let mut latency = Histogram::default();
    let start = Instant::now();
    let end = start + time;
    let mut under_way = 0;
    let mut queue = |client: &mut dyn Client, slot: usize, now: Instant, begun: &mut [Instant]| {
        begun[slot] = now;
        client.queue(slot, offsets.next().unwrap_or(0), workload.bytes, workload.write)
    };
    for slot in 0..workload.depth {
        queue(client, slot, start, &mut begun)?;
        under_way += 1;
    }
    client.submit()?;
    let mut last = start;
    while under_way > 0 {
        done.clear();
        client.reap(&mut done)?;
        let now = Instant::now();
        if done.is_empty() {
            if now - last > ANSWER_TIMEOUT {
                bail!("{under_way} requests without an answer for {ANSWER_TIMEOUT:?}");
            }
            std::hint::spin_loop();
            continue;
        }
        last = now;
        under_way -= done.len();
        for &slot in &done {
            latency.add(now - begun[slot]);
        }
        if now < end {
            for &slot in &done {
                queue(client, slot, now, &mut begun)?;
            }
            under_way += done.len();
            client.submit()?;
        }
    }
    Ok(Sample { requests: latency.count(), elapsed: start.elapsed(), latency })
}
