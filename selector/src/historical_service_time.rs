//! historical-service-time: measured service times, one average per path (Linux:
//! `drivers/md/dm-ps-historical-service-time.c`, whose fixed-point arithmetic is kept to the bit).
//!
//! Overlapping I/Os are charged as if the path served them one after the other. An average whose path has finished
//! nothing for (paths x average) is stale: an idle stale path gets one request to find out, a busy one no more than
//! its equal share. Unlike [`learned-service-time`](crate::Kind::LearnedServiceTime) it mixes reads and writes of all
//! sizes in one average, and a failed I/O counts as a fast one.

use crate::PathSet;
use crate::rotation::Rotation;
use std::cmp::Ordering;

const FIXED_BITS: u32 = 10;
const FIXED_1: u64 = 1 << FIXED_BITS;
const FIXED_MAX: u64 = u64::MAX >> FIXED_BITS;
/// From this many requests in flight on, a product with the largest average could overflow.
const IN_FLIGHT_EXACT_MAX: u64 = FIXED_1;
/// A sample is weighted by its own length in buckets of 16.8 ms.
const BUCKET_BITS: u32 = 24;
const NR_WEIGHTS: usize = 64;

#[derive(Clone, Debug)]
pub(crate) struct HistoricalServiceTime {
    rotation: Rotation,
    /// Weight of the history against a sample, by the sample's bucket; `[i]` is base^(i+1), the last is 0.
    weights: [u64; NR_WEIGHTS],
    threshold: u64,
    paths: Box<[History]>,
    /// Paths that are not failed.
    valid: PathSet,
    nr_valid: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct History {
    /// Average service time in ns, with [`FIXED_BITS`] binary places.
    pub(crate) average: u64,
    pub(crate) stale_after_ns: u64,
    last_finish_ns: u64,
    /// In flight of this instance: what the average was learned from, and what it is multiplied by.
    in_flight: u32,
}

impl HistoricalServiceTime {
    pub(crate) fn new(base_weight: u16, threshold: u32, nr_paths: u16, first: usize) -> Self {
        let fresh = History { average: FIXED_1, stale_after_ns: 0, last_finish_ns: 0, in_flight: 0 };
        Self {
            rotation: Rotation::new(nr_paths, first),
            weights: weights(u64::from(base_weight)),
            threshold: u64::from(threshold),
            paths: vec![fresh; usize::from(nr_paths)].into(),
            valid: PathSet::full(usize::from(nr_paths)),
            nr_valid: u64::from(nr_paths),
        }
    }

    #[inline]
    pub(crate) fn select(&mut self, now_ns: u64, usable: &PathSet) -> Option<usize> {
        let mut best: Option<(usize, Candidate)> = None;
        for path in self.rotation.iter().filter(|&path| usable.contains(path)) {
            let History { average, stale_after_ns, in_flight, .. } = self.paths[path];
            let candidate = Candidate { average, stale_after_ns, in_flight: u64::from(in_flight) };
            if best.is_none_or(|(_, least)| candidate.compare(least, now_ns, self.threshold).is_lt()) {
                best = Some((path, candidate));
            }
        }
        let (path, _) = best?;
        self.rotation.move_to_tail(path);
        Some(path)
    }

    pub(crate) fn start_io(&mut self, path: usize) {
        self.paths[path].in_flight += 1;
    }

    pub(crate) fn end_io(&mut self, path: usize, start_ns: u64, now_ns: u64) {
        let history = &mut self.paths[path];
        history.in_flight = history.in_flight.saturating_sub(1);
        let sample_ns = now_ns.saturating_sub(start_ns.max(history.last_finish_ns));
        history.last_finish_ns = now_ns;
        let bucket =
            usize::try_from(sample_ns >> BUCKET_BITS).map_or(NR_WEIGHTS - 1, |b| b.min(NR_WEIGHTS - 1));
        let weight = self.weights[bucket];
        let sample = sample_ns.saturating_mul(FIXED_1).min(FIXED_MAX);
        history.average =
            (history.average * weight + sample * (FIXED_1 - weight) + FIXED_1 / 2) >> FIXED_BITS;
        history.stale_after_ns =
            now_ns.saturating_add(self.nr_valid.saturating_mul(history.average >> FIXED_BITS));
    }

    pub(crate) fn fail_path(&mut self, path: usize) {
        self.valid.remove(path);
        self.nr_valid = self.valid.len() as u64;
    }

    pub(crate) fn reinstate_path(&mut self, path: usize) {
        self.valid.insert(path);
        self.nr_valid = self.valid.len() as u64;
        self.rotation.move_to_tail(path);
    }

    pub(crate) fn history(&self, path: usize) -> History {
        self.paths[path]
    }

    /// Takes over what another instance has learned about a path.
    pub(crate) fn inherit(&mut self, path: usize, history: History) {
        self.paths[path] = History { in_flight: self.paths[path].in_flight, ..history };
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    average: u64,
    in_flight: u64,
    stale_after_ns: u64,
}

impl Candidate {
    /// `Less` if this path is the better one.
    #[inline]
    fn compare(self, other: Self, now_ns: u64, threshold: u64) -> Ordering {
        let by_load = self.in_flight.cmp(&other.in_flight);
        let (low, high) = (self.average.min(other.average), self.average.max(other.average));
        if high <= threshold.saturating_mul(low) {
            return by_load;
        }
        // The idle one; of two idle ones the one that was neglected longer.
        if self.is_due(now_ns) || other.is_due(now_ns) || self.in_flight + other.in_flight == 0 {
            let own = if other.in_flight == 0 { self.stale_after_ns } else { 0 };
            let others = if self.in_flight == 0 { other.stale_after_ns } else { 0 };
            return own.cmp(&others);
        }
        let other_is_better = if self.in_flight == other.in_flight {
            self.average > other.average
        } else {
            let shift =
                if self.in_flight.max(other.in_flight) >= IN_FLIGHT_EXACT_MAX { FIXED_BITS } else { 0 };
            self.expected(shift) > other.expected(shift)
        };
        let (winner, verdict) =
            if other_is_better { (other, Ordering::Greater) } else { (self, Ordering::Less) };
        // A winner that is silent for so long may have become slow: equal use only.
        if winner.stale_after_ns < now_ns { by_load } else { verdict }
    }

    fn is_due(self, now_ns: u64) -> bool {
        self.in_flight == 0 && self.stale_after_ns < now_ns
    }

    fn expected(self, shift: u32) -> u64 {
        (1 + self.in_flight).saturating_mul(self.average >> shift)
    }
}

fn weights(base: u64) -> [u64; NR_WEIGHTS] {
    let mut weights = [0; NR_WEIGHTS];
    for (exponent, weight) in (1..).zip(&mut weights[..NR_WEIGHTS - 1]) {
        *weight = power(base, exponent);
    }
    weights
}

/// base^exponent by squaring, each product rounded to [`FIXED_BITS`] places: the order of the products decides the
/// last bit.
fn power(mut base: u64, mut exponent: u32) -> u64 {
    let product = |a: u64, b: u64| (a * b + FIXED_1 / 2) >> FIXED_BITS;
    let mut result = FIXED_1;
    while exponent > 0 {
        if exponent % 2 == 1 {
            result = product(result, base);
        }
        base = product(base, base);
        exponent /= 2;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use Ordering::{Equal, Greater, Less};

    const MS: u64 = 1_000_000;

    fn fresh(nr_paths: u16) -> HistoricalServiceTime {
        HistoricalServiceTime::new(972, 0, nr_paths, 0)
    }

    #[test]
    fn weights_of_the_default_base() {
        let weights = weights(972);
        assert_eq!(weights[..8], [972, 923, 876, 832, 790, 750, 712, 676]);
        assert_eq!((weights[15], weights[31], weights[62], weights[63]), (446, 194, 39, 0));
        assert_eq!(super::weights(0), [0; NR_WEIGHTS]);
    }

    #[test]
    fn the_average_after_samples_of_1_ms() {
        let mut selector = fresh(1);
        for (index, expected_ns) in (0..).zip([50_782, 98_984, 144_739, 188_170, 229_396]) {
            selector.end_io(0, 10 * index * MS, 10 * index * MS + MS);
            assert_eq!(selector.history(0).average >> FIXED_BITS, expected_ns, "after sample {index}");
        }
    }

    #[test]
    fn the_longer_a_sample_the_more_it_counts() {
        // (length in ns, average of a fresh path after it)
        for (sample_ns, expected_ns) in [
            (100 * MS, 26_757_813),              // bucket 5
            (63 << 24, 63 << 24),                // the last bucket replaces the history
            (u64::MAX, FIXED_MAX >> FIXED_BITS), // capped
        ] {
            let mut selector = fresh(1);
            selector.end_io(0, 0, sample_ns);
            assert_eq!(selector.history(0).average >> FIXED_BITS, expected_ns, "{sample_ns}");
        }
    }

    #[test]
    fn overlapping_requests_are_charged_one_after_the_other() {
        let (mut overlapping, mut serial) = (fresh(1), fresh(1));
        overlapping.end_io(0, 0, MS);
        overlapping.end_io(0, 0, 2 * MS);
        serial.end_io(0, 0, MS);
        serial.end_io(0, MS, 2 * MS);
        assert_eq!(overlapping.history(0).average, serial.history(0).average);
        // A clock that stepped back: a sample of 0, no panic.
        overlapping.end_io(0, 5 * MS, MS);
    }

    #[test]
    fn an_average_lasts_for_its_length_times_the_valid_paths() {
        let mut selector = fresh(4);
        selector.fail_path(3);
        selector.end_io(0, 0, MS);
        assert_eq!(selector.history(0).stale_after_ns, MS + 3 * 50_782);
        selector.fail_path(3);
        selector.reinstate_path(3);
        selector.end_io(1, 0, MS);
        assert_eq!(selector.history(1).stale_after_ns, MS + 4 * 50_782);
    }

    #[test]
    fn comparison_rules() {
        let max = FIXED_MAX;
        // ((average, in flight, stale after) of both, now, threshold, result)
        let table = [
            // a: within the threshold only the load counts
            ((3000, 2, 0), (1024, 3, 0), 5, 3, Less),
            ((1024, 3, 0), (3000, 2, 0), 5, 3, Greater),
            ((1024, 2, 9), (1024, 2, 0), 5, 1, Equal),
            // b: idle and stale, or both idle
            ((9000, 0, 4), (1024, 1, 9), 5, 0, Less),
            ((9000, 1, 9), (1024, 0, 4), 5, 0, Greater),
            ((9000, 0, 7), (1024, 0, 8), 5, 0, Less),
            ((9000, 0, 8), (1024, 0, 7), 5, 0, Greater),
            ((9000, 0, 0), (1024, 0, 0), 5, 0, Equal),
            // c: expected time, with what is in flight
            ((1024, 2, 9), (2048, 2, 9), 5, 0, Less),
            ((2048, 2, 9), (1024, 2, 9), 5, 0, Greater),
            ((1024, 2, 9), (4096, 1, 9), 5, 0, Less), // 3 x 1 < 2 x 4
            ((1024, 8, 9), (4096, 1, 9), 5, 0, Greater), // 9 x 1 > 2 x 4
            ((1024, 7, 9), (4096, 1, 9), 5, 0, Less), // equal: the candidate
            ((max, 1023, 9), (max - 1, 1022, 9), 5, 0, Greater), // fits exactly
            ((max, 1024, 9), (max, 1 << 30, 9), 5, 0, Less), // shifted
            // d: a stale winner gets equal use
            ((1024, 2, 4), (4096, 1, 9), 5, 0, Greater),
            ((4096, 1, 9), (1024, 2, 4), 5, 0, Less),
            ((1024, 1, 4), (4096, 1, 9), 5, 0, Equal),
            ((1024, 2, 5), (4096, 1, 9), 5, 0, Less), // at the very time it is not stale yet
        ];
        for (own, other, now_ns, threshold, expected) in table {
            let candidate =
                |(average, in_flight, stale_after_ns)| Candidate { average, in_flight, stale_after_ns };
            let result = candidate(own).compare(candidate(other), now_ns, threshold);
            assert_eq!(result, expected, "{own:?} against {other:?} at {now_ns}");
        }
    }

    #[test]
    fn f40_fresh_paths_take_turns() {
        let mut selector = fresh(3);
        let picks: Vec<_> = (0..6).filter_map(|now| selector.select(now, &PathSet::full(3))).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }
}
