//! Requests, bytes, errors and latencies, by path and by virtqueue.

use std::fmt;

use polypath_paths::stats::{IoKind, IoTotals, KindTotals, bucket_end_ns};

use super::collect::{Labels, Out};
use crate::counters::Counters;

/// Classes of the counters that make one of a metric's: a power of two.
const CLASSES_PER_BUCKET: usize = 4;

pub(super) fn encode(counters: &Counters, out: &mut Out<'_, '_>) -> fmt::Result {
    let paths: Vec<_> = counters.paths.iter().map(|(name, io)| ("path", name.clone(), io)).collect();
    let queues: Vec<_> =
        counters.queues.iter().map(|(nr, totals)| ("queue", nr.to_string(), &totals.io)).collect();
    of_all("path", "the path", &paths, out)?;
    of_all("queue", "the virtqueue", &queues, out)?;
    let in_flight = counters.queues.iter().map(|(queue, totals)| {
        (vec![("queue", queue.to_string())], i64::try_from(totals.nr_in_flight).unwrap_or(i64::MAX))
    });
    out.gauges("queue_in_flight_requests", "Requests of the virtqueue that are not answered yet", in_flight)?;
    let others = counters.queues.iter().flat_map(|(queue, totals)| {
        let labels = move |what: &str| vec![("queue", queue.to_string()), ("what", what.to_owned())];
        totals.others.iter().map(move |(what, nr)| (labels(what), *nr))
    });
    out.counters("worker", "What the virtqueue's worker did beside requests", others)
}

fn of_all(
    prefix: &str,
    whose: &str,
    all: &[(&str, String, &IoTotals)],
    out: &mut Out<'_, '_>,
) -> fmt::Result {
    let each = |value: fn(&KindTotals) -> u64| {
        all.iter().flat_map(move |(label, name, io)| {
            IoKind::ALL.into_iter().map(move |kind| (labels(label, name, kind), value(io.of(kind))))
        })
    };
    let name = |what: &str| format!("{prefix}_{what}");
    out.counters(&name("ios"), &format!("I/Os of {whose} that ended well"), each(|totals| totals.nr))?;
    let help = format!("Requests of {whose} that went with the I/O of another");
    out.counters(&name("merged_requests"), &help, each(|totals| totals.nr_merged))?;
    out.counters(&name("bytes"), &format!("Data moved by {whose}"), each(|totals| totals.bytes))?;
    out.counters(
        &name("errors"),
        &format!("I/Os of {whose} that ended with an error"),
        each(|totals| totals.nr_errors),
    )?;
    let busy = all.iter().flat_map(|(label, name, io)| {
        let kinds = IoKind::ALL.into_iter().map(move |kind| (kind, io.of(kind)));
        kinds
            .filter(|(_, totals)| totals.nr != 0)
            .map(move |(kind, totals)| histogram(labels(label, name, kind), totals))
    });
    out.histograms(&name("latency_seconds"), &format!("Time that I/Os of {whose} took"), busy)
}

fn labels<'a>(label: &'a str, name: &str, kind: IoKind) -> Labels<'a> {
    vec![(label, name.to_owned()), ("kind", kind.name().to_owned())]
}

#[expect(clippy::cast_precision_loss, reason = "latencies are no more exact")]
fn histogram<'a>(labels: Labels<'a>, totals: &KindTotals) -> (Labels<'a>, f64, Vec<(f64, u64)>) {
    let classes = totals.latencies.chunks(CLASSES_PER_BUCKET).enumerate();
    let mut buckets: Vec<(f64, u64)> = classes
        .map(|(at, nr)| {
            let last = at * CLASSES_PER_BUCKET + nr.len() - 1;
            (bucket_end_ns(last) as f64 / 1e9, nr.iter().sum())
        })
        .collect();
    // What took longer than the last bound is in the last class.
    if let Some(last) = buckets.last_mut() {
        last.0 = f64::MAX;
    }
    (labels, totals.ns as f64 / 1e9, buckets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polypath_paths::stats::IoStats;

    #[test]
    fn buckets_are_powers_of_two_and_end_with_everything() {
        let stats = IoStats::default();
        for ns in [1_500, 3_000, 3_000, u64::MAX / 4] {
            stats.record(IoKind::Read, 1, 0, ns);
        }
        let totals = stats.read();
        let (_, _, buckets) = histogram(vec![], totals.of(IoKind::Read));
        assert_eq!(buckets.iter().map(|(_, nr)| nr).sum::<u64>(), 4);
        assert_eq!((buckets[0], buckets[1]), ((2.048e-6, 1), (4.096e-6, 2)));
        assert_eq!(buckets.last(), Some(&(f64::MAX, 1)));
    }
}
