//! Latencies, to 3 % of their size.

use std::time::Duration;

/// Each power of two is cut into this many buckets.
const CUT_BITS: u32 = 5;
const NR_BUCKETS: usize = 64 << CUT_BITS;

#[derive(Clone, Debug)]
pub(super) struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; NR_BUCKETS], count: 0, sum_ns: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    pub(super) fn mean_us(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64 / 1000.0
    }

    /// Upper end of the bucket in which this part of the latencies is reached, in us.
    pub(super) fn quantile_us(&self, part: f64) -> f64 {
        let wanted = part * self.count as f64;
        let mut seen = 0;
        for (index, &count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen as f64 >= wanted {
                return upper_end_ns(index) as f64 / 1000.0;
            }
        }
        f64::INFINITY
    }
}

fn bucket(ns: u64) -> usize {
    let bits = (u64::BITS - ns.leading_zeros()).saturating_sub(CUT_BITS + 1);
    ((bits as usize) << CUT_BITS) + usize::try_from(ns >> bits).unwrap_or(0)
}

fn upper_end_ns(index: usize) -> u64 {
    // Values below 2^(CUT_BITS + 1) have a bucket each; above, the index is `bits << CUT_BITS` plus 32 to 63.
    let bits = (index >> CUT_BITS).saturating_sub(1);
    let top = index - (bits << CUT_BITS);
    ((top as u64 + 1) << bits) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_inside_its_bucket_and_near_its_end() {
        for ns in (0..70_000).chain([1 << 20, (1 << 33) + 12345, u64::MAX >> 1]) {
            let end = upper_end_ns(bucket(ns));
            assert!(ns <= end && end - ns <= ns / 32 + 1, "{ns} {end}");
        }
    }

    #[test]
    fn quantiles() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|us| histogram.add(Duration::from_micros(us)));
        assert_eq!((histogram.count, histogram.mean_us()), (100, 50.5));
        assert!((50.0..52.0).contains(&histogram.quantile_us(0.5)));
        assert!((99.0..102.0).contains(&histogram.quantile_us(0.99)));
    }
}
