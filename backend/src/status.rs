//! What is running, gathered for the text forms of `polypath_paths::text`.

use std::path::Path as StdPath;

use polypath_paths::text::{GroupStatus, Held, NoPathRetry, PathStatus, TableSpec, TableStatus};
use polypath_paths::{Path, Table};
use polypath_selector::{Kind, PathArgs, PathInfo, PathLoad};
use serde_json::{Map, Value, json};

/// What only the monitor knows of a path.
#[derive(Debug, Default)]
pub(crate) struct PathDetails {
    pub last_error: Option<String>,
    /// Why it was taken out.
    pub reason: Option<String>,
    pub failed_by_operator: bool,
    pub quarantined_until_ns: Option<u64>,
    /// Since when it is active, or failed.
    pub since_ns: u64,
    /// Why it is not used although it answers.
    pub refused: Option<String>,
    pub next_probe_ns: Option<u64>,
}

/// The status of `table`, which was asked for as `spec`.
pub(crate) fn of(
    spec: &TableSpec,
    table: &Table,
    details: impl Fn(&StdPath) -> Option<PathDetails>,
    now_ns: u64,
) -> TableStatus {
    let path = |kind: Kind, (path, args): &(std::sync::Arc<Path>, PathArgs)| {
        let load = path.gauges().sum();
        let details = details(path.name()).unwrap_or_default();
        PathStatus {
            device: path.name().display().to_string(),
            args: args.clone(),
            active: path.is_active(),
            fail_count: path.nr_failures(),
            info: info(kind, args, load, path.gauges().learned()),
            in_flight: u64::from(load.in_flight),
            in_flight_bytes: load.bytes,
            last_error: details.last_error.clone(),
            extra: extra(path, &details, now_ns),
        }
    };
    let groups = table.groups().iter().map(|group| GroupStatus {
        selector: group.selector,
        args: group.args.clone(),
        bypassed: group.bypassed,
        paths: group.paths.iter().map(|p| path(group.selector, p)).collect(),
    });
    let policy = table.map().no_path_retry();
    TableStatus {
        length_sectors: table.limits().size_bytes / 512,
        queue_if_no_path: policy != NoPathRetry::Fail,
        no_path_retry: policy,
        features: spec.features.clone(),
        hw_handler: spec.hw_handler.clone(),
        next_group: None,
        current_group: table.map().current_group().map(|group| group + 1),
        groups: groups.collect(),
        held: held(table, policy, now_ns),
        extra: Map::from_iter([("nr_troubled_writes".to_owned(), json!(table.map().nr_troubled()))]),
    }
}

fn held(table: &Table, policy: NoPathRetry, now_ns: u64) -> Held {
    let held = table.map().held();
    let any = held.nr_requests != 0;
    let left_ms = match policy {
        NoPathRetry::Seconds(seconds) => table.map().no_path_since_ns().map(|since_ns| {
            let until_ns = since_ns + u64::from(seconds.get()) * 1_000_000_000;
            until_ns.saturating_sub(now_ns) / 1_000_000
        }),
        NoPathRetry::Fail | NoPathRetry::Queue => None,
    };
    Held {
        nr_requests: u64::from(held.nr_requests),
        bytes: held.bytes,
        oldest_age_ms: any.then(|| now_ns.saturating_sub(held.oldest_ns) / 1_000_000),
        time_left_ms: left_ms.filter(|_| any),
    }
}

/// One view of what all workers know of a path; `learned` is what each has learned.
fn info(kind: Kind, args: &PathArgs, load: PathLoad, learned: impl Iterator<Item = [u64; 3]>) -> PathInfo {
    let PathLoad { in_flight, bytes: in_flight_bytes } = load;
    let empty = match kind {
        Kind::RoundRobin => PathInfo::RoundRobin,
        Kind::QueueLength => PathInfo::QueueLength { in_flight },
        Kind::ServiceTime => {
            PathInfo::ServiceTime { in_flight_bytes, relative_throughput: args.relative_throughput }
        }
        Kind::HistoricalServiceTime => {
            PathInfo::HistoricalServiceTime { average: 0, in_flight, stale_after_ns: 0 }
        }
        Kind::IoAffinity => PathInfo::IoAffinity { misses: 0 },
        Kind::LearnedServiceTime => {
            PathInfo::LearnedServiceTime { in_flight, read_ns: 0, write_ns: 0, penalty: 0 }
        }
    };
    let views: Vec<_> = learned.map(|words| empty.with_learned(words)).collect();
    PathInfo::combine(&views).unwrap_or(empty)
}

fn extra(path: &Path, details: &PathDetails, now_ns: u64) -> Map<String, Value> {
    let left_ms = details.quarantined_until_ns.map(|until_ns| until_ns.saturating_sub(now_ns) / 1_000_000);
    let members = [
        ("identity", json!(path.identity().to_string())),
        ("size_bytes", json!(path.limits().size_bytes)),
        ("failed_by_operator", json!(details.failed_by_operator)),
        ("quarantine_left_ms", json!(left_ms)),
        ("is_dirty", json!(path.ledger().is_dirty())),
    ];
    members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
