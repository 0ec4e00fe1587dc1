//! The whole picture of a disk, for `show`.

use std::path::Path;

use polypath_paths::stats::{IoKind, IoTotals};
use serde_json::{Map, Value, json};

use super::Context;
use crate::disk::Disk;
use crate::events::time_text;
use crate::stats::QueueStats;

/// Everything that is known, with what an operator has to know first at the top.
pub(super) fn show(context: &mut Context<'_>) -> Value {
    let (monitor, running, now_ns) = (&*context.monitor, &*context.running, context.now_ns);
    let status = monitor.status(now_ns);
    let table = monitor.disk().table().load();
    let limits = table.limits();
    let (nr_paths, nr_active) = (table.paths().len(), table.nr_active());
    let state = match nr_active {
        0 => "no_path",
        n if n < nr_paths => "degraded",
        _ => "ok",
    };
    let mut json = status.json();
    let mut take = |name: &str| json.get_mut(name).map(Value::take).unwrap_or_default();
    let (groups, held, no_path_retry) = (take("groups"), take("held"), take("no_path_retry"));
    let disk = monitor.disk();
    json!({
        "state": state,
        "nr_paths": nr_paths,
        "nr_active": nr_active,
        "program": {
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "started": time_text(running.started),
            "uptime_ms": now_ns.saturating_sub(running.started_ns) / 1_000_000,
        },
        "disk": {
            "size_bytes": disk.limits().size_bytes,
            "block_bytes": disk.limits().block_bytes,
            "physical_block_bytes": limits.physical_block_bytes,
            "io_min_bytes": limits.io_min_bytes,
            "io_opt_bytes": limits.io_opt_bytes,
            "mem_align_bytes": limits.mem_align_bytes,
            "read_only": disk.limits().read_only,
            "discard": disk.limits().discard,
            "discard_granularity_bytes": limits.discard_granularity_bytes,
            "serial": String::from_utf8_lossy(disk.id()).trim_end_matches('\0'),
            "identity": table.paths().first().map(|path| path.identity().to_string()),
            "nr_queues": disk.nr_queues(),
        },
        "front_end": {
            "socket": running.socket,
            "connected": running.front_end_since.is_some(),
            "since": running.front_end_since.map(|(_, time)| time_text(time)),
            "connected_ms": running.front_end_since.map(|(since_ns, _)| now_ns.saturating_sub(since_ns) / 1_000_000),
            "nr_connects": running.nr_front_ends,
        },
        "queues": queues(disk),
        "no_path_retry": no_path_retry,
        "current_group": status.current_group,
        "held": held,
        "earlier_io_ms": monitor.fenced_ns(now_ns).map(|ns| ns / 1_000_000),
        "no_path_ms": table.map().no_path_since_ns().map(|since_ns| now_ns.saturating_sub(since_ns) / 1_000_000),
        "nr_troubled_writes": table.map().nr_troubled(),
        "groups": with_details(groups, context),
        "settings": running.settings(monitor),
        "differs_from_configuration": running.differences(monitor, &status),
    })
}

/// The virtqueues that have been used, with the requests that they have done.
fn queues(disk: &Disk) -> Vec<Value> {
    let nr_requests = |io: &IoTotals| -> u64 {
        IoKind::ALL.into_iter().map(|kind| io.of(kind)).map(|totals| totals.nr + totals.nr_errors).sum()
    };
    let queue = |(queue, stats): (usize, &QueueStats)| json!({ "queue": queue, "nr_requests": nr_requests(&stats.io.read()) });
    disk.stats().all().map(queue).collect()
}

/// The groups with what only the monitor knows of their paths.
fn with_details(mut groups: Value, context: &Context<'_>) -> Value {
    for group in groups.as_array_mut().into_iter().flatten() {
        for path in group.get_mut("paths").and_then(Value::as_array_mut).into_iter().flatten() {
            let device = path.get("device").and_then(Value::as_str).unwrap_or_default().to_owned();
            if let (Some(members), Some(more)) = (path.as_object_mut(), details(&device, context)) {
                members.extend(more);
            }
        }
    }
    groups
}

fn details(device: &str, context: &Context<'_>) -> Option<Map<String, Value>> {
    let now_ns = context.now_ns;
    let details = context.monitor.details(Path::new(device), now_ns)?;
    let age_ns = now_ns.saturating_sub(details.since_ns);
    let since = jiff::Timestamp::now() - std::time::Duration::from_nanos(age_ns);
    let next_probe_ms = details.next_probe_ns.map(|at_ns| at_ns.saturating_sub(now_ns) / 1_000_000);
    Some(Map::from_iter([
        ("since".to_owned(), json!(time_text(since))),
        ("state_age_ms".to_owned(), json!(age_ns / 1_000_000)),
        ("reason".to_owned(), json!(details.reason)),
        ("refused".to_owned(), json!(details.refused)),
        ("next_probe_ms".to_owned(), json!(next_probe_ms)),
    ]))
}
