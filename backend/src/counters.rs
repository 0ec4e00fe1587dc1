//! What was done so far, by path and by virtqueue, gathered from the workers' counters.

use std::collections::BTreeMap;

use polypath_paths::Table;
use polypath_paths::stats::{IoKind, IoTotals, KindTotals, bucket_end_ns};
use serde::{Serialize, Serializer};

use crate::disk::Disk;
use crate::stats::QueueStats;

/// The counters of now, or what came since they were reset.
#[derive(Debug, Default, Clone)]
pub(crate) struct Counters {
    /// By name of the path.
    pub paths: BTreeMap<String, IoTotals>,
    /// By number of the queue, from 0.
    pub queues: BTreeMap<usize, QueueTotals>,
}

/// Counters of one virtqueue.
#[derive(Debug, Default, Clone)]
pub(crate) struct QueueTotals {
    pub io: IoTotals,
    /// Requests that are not answered yet, now.
    pub nr_in_flight: u64,
    /// Beside the requests, by name.
    pub others: Vec<(&'static str, u64)>,
}

impl QueueTotals {
    fn of(stats: &QueueStats) -> Self {
        let others = vec![
            ("turns", stats.nr_turns.get()),
            ("sleeps", stats.nr_sleeps.get()),
            ("polls_found", stats.nr_polls_found.get()),
            ("polls_missed", stats.nr_polls_missed.get()),
            ("calls", stats.nr_calls.get()),
            ("retries", stats.nr_retries.get()),
        ];
        Self { io: stats.io.read(), nr_in_flight: stats.nr_in_flight.get(), others }
    }

    fn since(&self, before: &Self) -> Self {
        let then =
            |name: &str| before.others.iter().find(|(other, _)| *other == name).map_or(0, |(_, nr)| *nr);
        let others = self.others.iter().map(|(name, nr)| (*name, nr.wrapping_sub(then(name)))).collect();
        Self { io: self.io.since(&before.io), nr_in_flight: self.nr_in_flight, others }
    }
}

impl Counters {
    /// Those of now.
    pub(crate) fn read(disk: &Disk, table: &Table) -> Self {
        let mut counters = Self::default();
        for path in table.paths() {
            let mut sum = IoTotals::default();
            path.stats().all().for_each(|(_, stats)| sum += &stats.read());
            counters.paths.insert(path.name().display().to_string(), sum);
        }
        counters.queues = disk.stats().all().map(|(queue, stats)| (queue, QueueTotals::of(stats))).collect();
        counters
    }

    /// What came since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let path = |(name, now): (&String, &IoTotals)| {
            (name.clone(), before.paths.get(name).map_or_else(|| now.clone(), |then| now.since(then)))
        };
        let queue = |(number, now): (&usize, &QueueTotals)| {
            (*number, before.queues.get(number).map_or_else(|| now.clone(), |then| now.since(then)))
        };
        Self { paths: self.paths.iter().map(path).collect(), queues: self.queues.iter().map(queue).collect() }
    }

    /// The JSON form.
    pub(crate) fn view(&self, since_ms: u64) -> CountersView<'_> {
        let paths = self.paths.iter().map(|(path, io)| PathView { path, kinds: KindViews::of(io) });
        let queues = self.queues.iter().map(|(queue, totals)| QueueView {
            queue: *queue,
            in_flight: totals.nr_in_flight,
            kinds: KindViews::of(&totals.io),
            others: &totals.others,
        });
        CountersView { since_ms, paths: paths.collect(), queues: queues.collect() }
    }
}

/// The counters in their JSON form. They are asked for often: no tree of values is made of them.
#[derive(Debug, Serialize)]
pub(crate) struct CountersView<'a> {
    since_ms: u64,
    paths: Vec<PathView<'a>>,
    queues: Vec<QueueView<'a>>,
}

#[derive(Debug, Serialize)]
struct PathView<'a> {
    path: &'a str,
    #[serde(flatten)]
    kinds: KindViews,
}

#[derive(Debug, Serialize)]
struct QueueView<'a> {
    queue: usize,
    in_flight: u64,
    #[serde(flatten)]
    kinds: KindViews,
    #[serde(flatten, serialize_with = "with_names")]
    others: &'a [(&'static str, u64)],
}

/// Members `nr_NAME`.
fn with_names<S: Serializer>(others: &&[(&'static str, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(others.iter().map(|(name, nr)| (format!("nr_{name}"), nr)))
}

#[derive(Debug, Serialize)]
struct KindViews {
    read: KindView,
    write: KindView,
    flush: KindView,
    discard: KindView,
}

impl KindViews {
    fn of(io: &IoTotals) -> Self {
        let [read, write, flush, discard] = IoKind::ALL.map(|kind| KindView::of(io.of(kind)));
        Self { read, write, flush, discard }
    }
}

/// `latency_ns` has pairs of an upper bound and the number of I/Os below it and above the bound before; bounds without any
/// are left out.
#[derive(Debug, Serialize)]
struct KindView {
    nr_ios: u64,
    nr_merged: u64,
    bytes: u64,
    total_ns: u64,
    nr_errors: u64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    latency_ns: Vec<(u64, u64)>,
}

impl KindView {
    fn of(totals: &KindTotals) -> Self {
        let classes = totals.latencies.iter().enumerate().filter(|(_, nr)| **nr != 0);
        Self {
            nr_ios: totals.nr,
            nr_merged: totals.nr_merged,
            bytes: totals.bytes,
            total_ns: totals.ns,
            nr_errors: totals.nr_errors,
            p50_ns: totals.quantile_ns(0.5),
            p99_ns: totals.quantile_ns(0.99),
            latency_ns: classes.map(|(class, nr)| (bucket_end_ns(class), *nr)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polypath_paths::stats::IoStats;
    use serde_json::json;

    #[test]
    fn a_reset_hides_what_was_before() {
        let stats = IoStats::default();
        let read = || {
            let mut counters = Counters::default();
            counters.paths.insert("a".into(), stats.read());
            counters
        };
        stats.record(IoKind::Read, 3, 4096, 5_000);
        let before = read();
        stats.record(IoKind::Read, 1, 512, 9_000);
        let json = |counters: Counters| serde_json::to_value(counters.view(7)).unwrap();
        let now = json(read().since(&before));
        let reads = &now["paths"][0]["read"];
        assert_eq!(
            (&reads["nr_ios"], &reads["nr_merged"], &reads["bytes"]),
            (&json!(1), &json!(0), &json!(512))
        );
        assert_eq!(reads["latency_ns"].as_array().unwrap().len(), 1);
        assert_eq!(json(read())["paths"][0]["read"]["nr_merged"], 2);
        // A path that came later has no past.
        assert_eq!(json(read().since(&Counters::default())), json(read()));
    }
}
