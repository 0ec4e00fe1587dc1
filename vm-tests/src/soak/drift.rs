//! Whether what a process uses goes up and up.
//!
//! Samples are taken while everything is at rest, once per leg, of the same process; a new process begins a new series. The
//! first third of a series is left out: caches fill and threads are made for the first time. The rest is split into thirds;
//! what has grown by more than an allowance from the best of the first to the *best* (lowest) of the last counts as drift. A
//! busy machine makes single samples worse and hardly ever a whole third of them, while a leak leaves no low one behind.

use serde::Serialize;

use crate::server::{Process, Stats};

/// Fewest samples of a series that can be judged.
pub const NR_JUDGED_MIN: usize = 12;

/// A look at the process between two legs.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sample {
    /// Time since the start, in s.
    pub at_s: f64,
    /// Number of the process, of those that served one after the other.
    pub process: usize,
    /// Resident memory, without what is shared: that is the guest's.
    pub rss_kib: u64,
    /// Anonymous memory of it.
    pub anonymous_kib: u64,
    /// Open descriptors.
    pub fds: u64,
    /// Threads.
    pub threads: u64,
    /// Lines of the memory map.
    pub mappings: u64,
    /// Times to answers of a short load without faults, in us; 0 where none was run.
    pub p50_us: u64,
    /// Likewise.
    pub p99_us: u64,
}

impl Sample {
    /// A look at a process, without a time and without latencies.
    pub fn of(process: &Process, number: usize) -> Self {
        let Stats { fds, threads, mappings, rss_kib, anonymous_kib, shared_kib, .. } = process.stats();
        let [fds, threads, mappings] = [fds, threads, mappings].map(|number| number as u64);
        let rss_kib = rss_kib.saturating_sub(shared_kib);
        Self { process: number, rss_kib, anonymous_kib, fds, threads, mappings, ..Self::default() }
    }
}

/// One measure of the samples: name, allowance in its unit, allowance in percent of the first value.
struct Measure {
    name: &'static str,
    of: fn(&Sample) -> u64,
    allowance: u64,
    percent: u64,
}

/// What is judged. Latencies are only shown to be judged by the median of a fault-free load, which a busy machine doubles
/// without meaning it.
const MEASURES: [Measure; 7] = [
    Measure { name: "resident memory, KiB", of: |s| s.rss_kib, allowance: 6 << 10, percent: 25 },
    Measure { name: "anonymous memory, KiB", of: |s| s.anonymous_kib, allowance: 4 << 10, percent: 25 },
    Measure { name: "descriptors", of: |s| s.fds, allowance: 2, percent: 0 },
    Measure { name: "threads", of: |s| s.threads, allowance: 2, percent: 0 },
    Measure { name: "mappings", of: |s| s.mappings, allowance: 16, percent: 10 },
    Measure { name: "latency p50, us", of: |s| s.p50_us, allowance: 1000, percent: 200 },
    Measure { name: "latency p99, us", of: |s| s.p99_us, allowance: 20_000, percent: 400 },
];

/// What became of one measure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Drift {
    /// What was measured.
    pub name: &'static str,
    /// Number of the process.
    pub process: usize,
    /// Lowest value of the first judged third.
    pub first: u64,
    /// Lowest value of the last third.
    pub last: u64,
    /// What would have been allowed.
    pub most: u64,
    /// By how much it grows per hour, by a line through all judged samples.
    pub per_hour: f64,
}

impl Drift {
    /// Whether it is one.
    pub fn is_found(&self) -> bool {
        self.last > self.most
    }
}

/// Judges every process that has served for long enough.
pub fn judge(samples: &[Sample]) -> Vec<Drift> {
    let mut found = Vec::new();
    let last = samples.iter().map(|sample| sample.process).max().unwrap_or(0);
    for process in 0..=last {
        let series: Vec<_> = samples.iter().filter(|sample| sample.process == process).collect();
        if series.len() < NR_JUDGED_MIN {
            continue;
        }
        let judged = &series[series.len() / 3..];
        let third = judged.len() / 3;
        for measure in &MEASURES {
            let lowest = |part: &[&Sample]| part.iter().map(|sample| (measure.of)(sample)).min().unwrap_or(0);
            if judged.iter().all(|sample| (measure.of)(sample) == 0) {
                continue; // not taken
            }
            let (first, last) = (lowest(&judged[..third]), lowest(&judged[judged.len() - third..]));
            let most = first + measure.allowance.max(first * measure.percent / 100);
            let per_hour = slope_per_s(judged, measure.of) * 3600.0;
            found.push(Drift { name: measure.name, process, first, last, most, per_hour });
        }
    }
    found
}

/// Slope of the line with the least squares.
#[expect(clippy::cast_precision_loss, reason = "small numbers, for people")]
fn slope_per_s(samples: &[&Sample], of: fn(&Sample) -> u64) -> f64 {
    let nr = samples.len() as f64;
    let mean = |values: &dyn Fn(&Sample) -> f64| samples.iter().map(|s| values(s)).sum::<f64>() / nr;
    let (x, y) = (mean(&|s| s.at_s), mean(&|s| of(s) as f64));
    let products = samples.iter().map(|s| (s.at_s - x) * (of(s) as f64 - y)).sum::<f64>();
    let squares = samples.iter().map(|s| (s.at_s - x).powi(2)).sum::<f64>();
    if squares == 0.0 { 0.0 } else { products / squares }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front_end::verify::Rng;

    fn series(rss: impl Fn(u64) -> u64, fds: impl Fn(u64) -> u64) -> Vec<Sample> {
        let of = |i: u64| Sample { at_s: i as f64 * 4.0, rss_kib: rss(i), fds: fds(i), ..Sample::default() };
        (0..60).map(of).collect()
    }

    fn found(samples: &[Sample]) -> Vec<&'static str> {
        judge(samples).into_iter().filter(Drift::is_found).map(|drift| drift.name).collect()
    }

    #[test]
    fn a_leak_is_found() {
        assert_eq!(found(&series(|i| 20_000 + i * 300, |_| 20)), ["resident memory, KiB"]);
        assert_eq!(found(&series(|_| 20_000, |i| 20 + i / 5)), ["descriptors"]);
    }

    #[test]
    fn noise_and_a_rise_at_the_start_are_none() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let noise: Vec<_> = (0..60).map(|_| [rng.below(9_000), rng.below(5)]).collect();
            let at = |i: u64| usize::try_from(i).unwrap();
            let rss = |i: u64| 10_000 + 20_000 * i.min(15) / 15 + noise[at(i)][0];
            assert_eq!(found(&series(rss, |i| 20 + noise[at(i)][1])), [""; 0], "seed {seed}");
        }
    }

    #[test]
    fn each_process_is_judged_by_itself_and_a_short_life_not_at_all() {
        let mut samples = series(|i| 20_000 + i * 400, |_| 20);
        samples.iter_mut().enumerate().for_each(|(i, sample)| sample.process = i / 10);
        assert_eq!(judge(&samples), []);
        samples.iter_mut().enumerate().for_each(|(i, sample)| sample.process = i / 30);
        let all = judge(&samples);
        assert_eq!(all.iter().filter(|drift| drift.name == "descriptors").count(), 2);
        assert!((all[0].per_hour - 360_000.0).abs() < 1.0, "{all:?}");
    }
}
