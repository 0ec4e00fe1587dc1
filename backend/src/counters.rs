//! What was done so far, by path and by virtqueue, gathered from the workers' counters.

use std::collections::BTreeMap;

use polypath_paths::Table;
use polypath_paths::stats::{IoKind, IoTotals, KindTotals, bucket_end_ns};
use serde_json::{Map, Value, json};

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
        Self { io: stats.io.read(), others }
    }

    fn since(&self, before: &Self) -> Self {
        let then =
            |name: &str| before.others.iter().find(|(other, _)| *other == name).map_or(0, |(_, nr)| *nr);
        let others = self.others.iter().map(|(name, nr)| (*name, nr.wrapping_sub(then(name)))).collect();
        Self { io: self.io.since(&before.io), others }
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
    pub(crate) fn json(&self) -> Value {
        let paths = self.paths.iter().map(|(name, io)| {
            let mut value = kinds(io);
            value["path"] = json!(name);
            value
        });
        let queues = self.queues.iter().map(|(number, totals)| {
            let mut value = kinds(&totals.io);
            value["queue"] = json!(number);
            for (name, nr) in &totals.others {
                value[format!("nr_{name}")] = json!(nr);
            }
            value
        });
        json!({ "paths": paths.collect::<Vec<_>>(), "queues": queues.collect::<Vec<_>>() })
    }
}

fn kinds(io: &IoTotals) -> Value {
    Value::Object(
        IoKind::ALL
            .into_iter()
            .map(|kind| (kind.name().to_owned(), of_kind(io.of(kind))))
            .collect::<Map<_, _>>(),
    )
}

/// `latency_ns` has pairs of an upper bound and the number of I/Os below it and above the bound before; bounds without any
/// are left out.
fn of_kind(totals: &KindTotals) -> Value {
    let classes = totals.latencies.iter().enumerate().filter(|(_, nr)| **nr != 0);
    let latencies: Vec<(u64, u64)> = classes.map(|(class, nr)| (bucket_end_ns(class), *nr)).collect();
    json!({
        "nr_ios": totals.nr,
        "nr_merged": totals.nr_merged,
        "bytes": totals.bytes,
        "total_ns": totals.ns,
        "nr_errors": totals.nr_errors,
        "p50_ns": totals.quantile_ns(0.5),
        "p99_ns": totals.quantile_ns(0.99),
        "latency_ns": latencies,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use polypath_paths::stats::IoStats;

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
        let json = read().since(&before).json();
        let reads = &json["paths"][0]["read"];
        assert_eq!(
            (&reads["nr_ios"], &reads["nr_merged"], &reads["bytes"]),
            (&json!(1), &json!(0), &json!(512))
        );
        assert_eq!(reads["latency_ns"].as_array().unwrap().len(), 1);
        assert_eq!(read().json()["paths"][0]["read"]["nr_merged"], 2);
        // A path that came later has no past.
        assert_eq!(read().since(&Counters::default()).json(), read().json());
    }
}
