//! What was done, counted: as in Linux' `/sys/block/*/stat`, with a histogram of latencies.
//!
//! Each set of counters has one writer, a worker, so counting is plain loads and stores of its own lines; anybody reads.
//! Numbers that are read while they change may be a request apart from each other.

use std::ops::AddAssign;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// What kind of work is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards and write-zeroes.
    Discard,
}

impl IoKind {
    /// All kinds, in the order of the counters.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Discard];

    /// The kind in a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
        }
    }
}

/// Latency classes: four per power of two from 2^10 ns (1 us) to 2^36 ns (69 s); the first and the last take the rest.
pub const NR_BUCKETS: usize = 26 * 4;

/// Class of a latency.
fn bucket(ns: u64) -> usize {
    let ns = ns.clamp(1 << 10, (1 << 36) - 1);
    let exp = 63 - ns.leading_zeros();
    let quarter = ns >> (exp - 2) & 3;
    (exp as usize - 10) * 4 + usize::try_from(quarter).unwrap_or(0)
}

/// Upper bound of a class in ns; what is equal to it is in the next one.
pub fn bucket_end_ns(bucket: usize) -> u64 {
    let bucket = bucket.min(NR_BUCKETS - 1) as u64 + 1;
    (4 + bucket % 4) << (bucket / 4 + 8)
}

#[derive(Debug)]
struct Counters {
    nr: AtomicU64,
    nr_merged: AtomicU64,
    bytes: AtomicU64,
    ns: AtomicU64,
    nr_errors: AtomicU64,
    latencies: [AtomicU64; NR_BUCKETS],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            nr: AtomicU64::new(0),
            nr_merged: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            ns: AtomicU64::new(0),
            nr_errors: AtomicU64::new(0),
            latencies: [const { AtomicU64::new(0) }; NR_BUCKETS],
        }
    }
}

/// Only the one writer calls this, so nothing is lost between load and store.
#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// Counters with one writer.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoStats {
    kinds: [Counters; 4],
}

impl IoStats {
    /// One I/O has ended well: it stood for `nr_requests`, moved so many bytes and took so long.
    #[inline]
    pub fn record(&self, kind: IoKind, nr_requests: u32, bytes: u64, ns: u64) {
        let counters = &self.kinds[kind as usize];
        add(&counters.nr, 1);
        if nr_requests > 1 {
            add(&counters.nr_merged, u64::from(nr_requests) - 1);
        }
        add(&counters.bytes, bytes);
        add(&counters.ns, ns);
        add(&counters.latencies[bucket(ns)], 1);
    }

    /// A request has ended well that had no I/O of its own: it went with that of another.
    #[inline]
    pub fn record_merged(&self, kind: IoKind, bytes: u64, ns: u64) {
        let counters = &self.kinds[kind as usize];
        add(&counters.nr_merged, 1);
        add(&counters.bytes, bytes);
        add(&counters.ns, ns);
        add(&counters.latencies[bucket(ns)], 1);
    }

    /// One has ended with an error.
    pub fn record_error(&self, kind: IoKind) {
        add(&self.kinds[kind as usize].nr_errors, 1);
    }

    /// The numbers of now.
    pub fn read(&self) -> IoTotals {
        IoTotals { kinds: self.kinds.each_ref().map(Counters::read) }
    }
}

impl Counters {
    fn read(&self) -> KindTotals {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        KindTotals {
            nr: load(&self.nr),
            nr_merged: load(&self.nr_merged),
            bytes: load(&self.bytes),
            ns: load(&self.ns),
            nr_errors: load(&self.nr_errors),
            latencies: self.latencies.each_ref().map(load),
        }
    }
}

/// Counters of one kind, as plain numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindTotals {
    /// I/Os that ended well.
    pub nr: u64,
    /// Requests that had no I/O of their own because they were merged into another.
    pub nr_merged: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Sum of the latencies, in ns.
    pub ns: u64,
    /// I/Os that ended with an error.
    pub nr_errors: u64,
    /// I/Os by latency: see [`bucket_end_ns`].
    pub latencies: [u64; NR_BUCKETS],
}

impl Default for KindTotals {
    fn default() -> Self {
        Self { nr: 0, nr_merged: 0, bytes: 0, ns: 0, nr_errors: 0, latencies: [0; NR_BUCKETS] }
    }
}

impl KindTotals {
    /// The latency in ns that this share (0 to 1) of the I/Os did not pass; None without I/O.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let nr: u64 = self.latencies.iter().sum();
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let wanted = ((nr as f64 * share).ceil() as u64).clamp(1, nr.max(1));
        let mut seen = 0;
        let bucket = self.latencies.iter().position(|nr| {
            seen += nr;
            seen >= wanted
        })?;
        Some(bucket_end_ns(bucket))
    }

    /// What came since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut latencies = self.latencies;
        latencies.iter_mut().zip(before.latencies).for_each(|(now, then)| *now = now.wrapping_sub(then));
        Self {
            nr: self.nr.wrapping_sub(before.nr),
            nr_merged: self.nr_merged.wrapping_sub(before.nr_merged),
            bytes: self.bytes.wrapping_sub(before.bytes),
            ns: self.ns.wrapping_sub(before.ns),
            nr_errors: self.nr_errors.wrapping_sub(before.nr_errors),
            latencies,
        }
    }
}

/// Counters of all kinds, as plain numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IoTotals {
    kinds: [KindTotals; 4],
}

impl IoTotals {
    /// Those of one kind.
    pub fn of(&self, kind: IoKind) -> &KindTotals {
        &self.kinds[kind as usize]
    }

    /// What came since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut kinds = self.kinds.clone();
        kinds.iter_mut().zip(&before.kinds).for_each(|(now, then)| *now = now.since(then));
        Self { kinds }
    }
}

impl AddAssign<&IoTotals> for IoTotals {
    fn add_assign(&mut self, other: &Self) {
        for (sum, more) in self.kinds.iter_mut().zip(&other.kinds) {
            sum.nr += more.nr;
            sum.nr_merged += more.nr_merged;
            sum.bytes += more.bytes;
            sum.ns += more.ns;
            sum.nr_errors += more.nr_errors;
            sum.latencies.iter_mut().zip(more.latencies).for_each(|(sum, more)| *sum += more);
        }
    }
}

/// One set of counters per worker, made when the worker first asks for it.
#[derive(Debug)]
pub struct WorkerStats<T>(Box<[OnceLock<Box<T>>]>);

impl<T: Default> WorkerStats<T> {
    /// For so many workers.
    pub fn new(nr_workers: usize) -> Self {
        Self((0..nr_workers.max(1)).map(|_| OnceLock::new()).collect())
    }

    /// Those of a worker. Numbers beyond the last share its counters.
    pub fn of(&self, worker: usize) -> &T {
        self.0[worker.min(self.0.len() - 1)].get_or_init(Box::default)
    }

    /// Those of all workers that have any, with their numbers.
    pub fn all(&self) -> impl Iterator<Item = (usize, &T)> {
        self.0.iter().enumerate().filter_map(|(worker, stats)| Some((worker, &**stats.get()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_fall_into_their_classes() {
        for (ns, end_ns) in [
            (0, 1280),
            (1023, 1280),
            (1024, 1280),
            (1279, 1280),
            (1280, 1536),
            (1536, 1792),
            (1792, 2048),
            (2047, 2048),
            (2048, 2560),
            (100_000, 114_688),
            (u64::MAX, 1 << 36),
        ] {
            assert_eq!(bucket_end_ns(bucket(ns)), end_ns, "{ns} ns");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, NR_BUCKETS - 1));
        assert!((1..NR_BUCKETS).all(|i| bucket(bucket_end_ns(i - 1)) == i));
    }

    #[test]
    fn merges_bytes_and_quantiles() {
        let stats = IoStats::default();
        for i in 0..100 {
            stats.record(IoKind::Write, 4, 16_384, 2_000 + i);
        }
        stats.record(IoKind::Write, 1, 4_096, 1_000_000);
        stats.record_error(IoKind::Read);
        let totals = stats.read();
        let writes = totals.of(IoKind::Write);
        assert_eq!((writes.nr, writes.nr_merged, writes.bytes), (101, 300, 1_642_496));
        assert_eq!((writes.quantile_ns(0.5), writes.quantile_ns(0.99)), (Some(2_560), Some(2_560)));
        assert_eq!(writes.quantile_ns(1.0), Some(1 << 20));
        // Of a queue, each request has a latency of its own.
        let queue = IoStats::default();
        queue.record(IoKind::Read, 1, 4_096, 2_000);
        queue.record_merged(IoKind::Read, 512, 3_000);
        let reads = queue.read().of(IoKind::Read).clone();
        assert_eq!((reads.nr, reads.nr_merged, reads.bytes, reads.ns), (1, 1, 4_608, 5_000));
        assert_eq!(reads.latencies.iter().sum::<u64>(), 2);
        assert_eq!((totals.of(IoKind::Read).nr_errors, totals.of(IoKind::Read).quantile_ns(0.5)), (1, None));
        let mut sum = IoTotals::default();
        sum += &totals;
        sum += &totals;
        assert_eq!(sum.of(IoKind::Write).nr, 202);
        assert_eq!(sum.since(&totals), totals);
    }

    #[test]
    fn each_worker_has_its_own() {
        let stats: WorkerStats<IoStats> = WorkerStats::new(3);
        stats.of(2).record(IoKind::Flush, 1, 0, 5);
        assert_eq!(stats.all().map(|(worker, _)| worker).collect::<Vec<_>>(), [2]);
        stats.of(9).record(IoKind::Flush, 1, 0, 5);
        assert_eq!(stats.all().map(|(_, s)| s.read().of(IoKind::Flush).nr).collect::<Vec<_>>(), [2]);
    }
}
