//! The whole picture of a disk, for `show`.
//!
//! Written straight into text: it is asked for often, and a tree of values in between would cost more than all the rest.

use std::path::Path as StdPath;

use polypath_paths::stats::{IoKind, IoTotals};
use polypath_paths::text::{GroupView, Held, NoPathRetry, PathView};
use serde::Serialize;

use super::Context;
use crate::disk::Disk;
use crate::events::time_text;
use crate::monitor::Monitor;
use crate::running::{Running, Settings};
use crate::stats::QueueStats;

/// Everything that is known, with what an operator has to know first at the top. `docs/control.md` says what it means.
#[derive(Serialize)]
struct Shown<'a> {
    state: &'static str,
    nr_paths: usize,
    nr_active: usize,
    program: Program,
    disk: DiskShown<'a>,
    front_end: FrontEnd<'a>,
    queues: Vec<Queue>,
    no_path_retry: NoPathRetry,
    current_group: Option<usize>,
    held: Held,
    earlier_io_ms: Option<u64>,
    no_path_ms: Option<u64>,
    nr_troubled_writes: usize,
    groups: Vec<GroupView<'a, PathShown<'a>>>,
    settings: Settings<'a>,
    differs_from_configuration: Vec<String>,
}

#[derive(Serialize)]
struct Program {
    version: &'static str,
    pid: u32,
    started: String,
    uptime_ms: u64,
}

#[derive(Serialize)]
struct DiskShown<'a> {
    size_bytes: u64,
    block_bytes: u32,
    physical_block_bytes: u32,
    io_min_bytes: u32,
    io_opt_bytes: u32,
    mem_align_bytes: u32,
    read_only: bool,
    discard: bool,
    discard_granularity_bytes: u32,
    serial: &'a str,
    identity: Option<String>,
    nr_queues: u16,
}

#[derive(Serialize)]
struct FrontEnd<'a> {
    socket: &'a str,
    connected: bool,
    since: Option<String>,
    connected_ms: Option<u64>,
    nr_connects: u64,
}

#[derive(Serialize)]
struct Queue {
    queue: usize,
    nr_requests: u64,
}

/// A path with what only the monitor knows of it.
#[derive(Serialize)]
struct PathShown<'a> {
    #[serde(flatten)]
    view: PathView<'a>,
    since: String,
    state_age_ms: u64,
    reason: Option<String>,
    refused: Option<String>,
    next_probe_ms: Option<u64>,
}

/// As JSON text.
pub(super) fn show(context: &mut Context<'_>) -> serde_json::Result<String> {
    let (monitor, running, now_ns) = (&*context.monitor, &*context.running, context.now_ns);
    let (status, now) = (monitor.status(now_ns), jiff::Timestamp::now());
    let table = monitor.disk().table().load();
    let (limits, disk) = (table.limits(), monitor.disk());
    let disk_limits = disk.limits();
    let (nr_paths, nr_active) = (table.paths().len(), table.nr_active());
    let serial = String::from_utf8_lossy(disk.id());
    let since_ms = |since_ns: u64| now_ns.saturating_sub(since_ns) / 1_000_000;
    serde_json::to_string(&Shown {
        state: match nr_active {
            0 => "no_path",
            n if n < nr_paths => "degraded",
            _ => "ok",
        },
        nr_paths,
        nr_active,
        program: Program {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            started: time_text(running.started),
            uptime_ms: since_ms(running.started_ns),
        },
        disk: DiskShown {
            size_bytes: disk_limits.size_bytes,
            block_bytes: disk_limits.block_bytes,
            physical_block_bytes: limits.physical_block_bytes,
            io_min_bytes: limits.io_min_bytes,
            io_opt_bytes: limits.io_opt_bytes,
            mem_align_bytes: limits.mem_align_bytes,
            read_only: disk_limits.read_only,
            discard: disk_limits.discard,
            discard_granularity_bytes: limits.discard_granularity_bytes,
            serial: serial.trim_end_matches('\0'),
            identity: table.paths().first().map(|path| path.identity().to_string()),
            nr_queues: disk.nr_queues(),
        },
        front_end: front_end(running, since_ms),
        queues: queues(disk),
        no_path_retry: status.no_path_retry,
        current_group: status.current_group,
        held: status.held,
        earlier_io_ms: monitor.fenced_ns(now_ns).map(|ns| ns / 1_000_000),
        no_path_ms: table.map().no_path_since_ns().map(since_ms),
        nr_troubled_writes: table.map().nr_troubled(),
        groups: status
            .group_views_of(|group, path| path_shown(path.view(group), monitor, now, now_ns))
            .collect(),
        settings: running.settings(monitor),
        differs_from_configuration: running.differences(monitor, &status),
    })
}

fn front_end(running: &Running, since_ms: impl Fn(u64) -> u64) -> FrontEnd<'_> {
    FrontEnd {
        socket: &running.socket,
        connected: running.front_end_since.is_some(),
        since: running.front_end_since.map(|(_, time)| time_text(time)),
        connected_ms: running.front_end_since.map(|(since_ns, _)| since_ms(since_ns)),
        nr_connects: running.nr_front_ends,
    }
}

/// The virtqueues that have been used, with the requests that they have done.
fn queues(disk: &Disk) -> Vec<Queue> {
    let nr_requests = |io: &IoTotals| -> u64 {
        IoKind::ALL
            .into_iter()
            .map(|kind| io.of(kind))
            .map(|totals| totals.nr + totals.nr_merged + totals.nr_errors)
            .sum()
    };
    let queue =
        |(queue, stats): (usize, &QueueStats)| Queue { queue, nr_requests: nr_requests(&stats.io.read()) };
    disk.stats().all().map(queue).collect()
}

fn path_shown<'a>(view: PathView<'a>, monitor: &Monitor, now: jiff::Timestamp, now_ns: u64) -> PathShown<'a> {
    let details = monitor.details(StdPath::new(view.device), now_ns).unwrap_or_default();
    let age_ns = now_ns.saturating_sub(details.since_ns);
    PathShown {
        view,
        since: time_text(now - std::time::Duration::from_nanos(age_ns)),
        state_age_ms: age_ns / 1_000_000,
        reason: details.reason,
        refused: details.refused,
        next_probe_ms: details.next_probe_ns.map(|at_ns| at_ns.saturating_sub(now_ns) / 1_000_000),
    }
}
