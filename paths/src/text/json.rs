//! What is running, as JSON.

use polypath_selector::PathInfo;
use serde_json::{Map, Value, json};

use super::spec::{NoPathRetry, QueueMode, path_words};
use super::status::{GroupStatus, Held, PathStatus, TableStatus};

impl TableStatus {
    /// The JSON form, for programs. Names with units; numbers of groups from 1; what does not apply is null.
    ///
    /// ```json
    /// {
    ///   "length_sectors": 1563037696, "queue_if_no_path": true, "no_path_retry": 30,
    ///   "retain_attached_hw_handler": false, "pg_init_retries": null, "pg_init_delay_msecs": null,
    ///   "queue_mode": "mq", "hw_handler": [],
    ///   "current_group": 1, "next_group": null,
    ///   "held": { "nr_requests": 0, "bytes": 0, "oldest_age_ms": null, "time_left_ms": null },
    ///   "groups": [{
    ///     "group": 1, "state": "active", "selector": "service-time", "selector_args": [],
    ///     "nr_active": 1,
    ///     "paths": [{
    ///       "device": "/dev/skd0", "state": "active", "fail_count": 0, "args": ["1", "4"],
    ///       "in_flight": 2, "in_flight_bytes": 8192, "last_error": null,
    ///       "selector_info": { "in_flight_bytes": 8192, "relative_throughput": 4 }
    ///     }]
    ///   }]
    /// }
    /// ```
    ///
    /// `state` of a group is `active`, `enabled` or `disabled`, that of a path `active` or `failed`; `no_path_retry` is
    /// `"fail"`, `"queue"` or seconds.
    #[must_use]
    pub fn json(&self) -> Value {
        let groups: Vec<_> =
            (1..).zip(&self.groups).map(|(number, group)| self.group(number, group)).collect();
        let value = json!({
            "length_sectors": self.length_sectors,
            "queue_if_no_path": self.queue_if_no_path,
            "no_path_retry": match self.no_path_retry {
                NoPathRetry::Seconds(seconds) => json!(seconds),
                word @ (NoPathRetry::Fail | NoPathRetry::Queue) => json!(word.to_string()),
            },
            "retain_attached_hw_handler": self.features.retain_attached_hw_handler,
            "pg_init_retries": self.features.pg_init_retries,
            "pg_init_delay_msecs": self.features.pg_init_delay_msecs,
            "queue_mode": QueueMode::name(self.features.queue_mode),
            "hw_handler": self.hw_handler,
            "current_group": self.current_group,
            "next_group": self.next_group,
            "held": held(&self.held),
            "groups": groups,
        });
        with_extra(&self.extra, value)
    }

    fn group(&self, number: usize, group: &GroupStatus) -> Value {
        let args = group.args.table(group.selector);
        let paths: Vec<_> = group.paths.iter().map(|path| self::path(group, path)).collect();
        json!({
            "group": number,
            "state": self.group_state(number).name(),
            "selector": group.selector.name(),
            "selector_args": args.split(' ').skip(1).collect::<Vec<_>>(),
            "nr_active": group.paths.iter().filter(|path| path.active).count(),
            "paths": paths,
        })
    }
}

fn path(group: &GroupStatus, path: &PathStatus) -> Value {
    let value = json!({
        "device": path.device,
        "state": if path.active { "active" } else { "failed" },
        "fail_count": path.fail_count,
        "args": path_words(group.selector, &path.args),
        "in_flight": path.in_flight,
        "in_flight_bytes": path.in_flight_bytes,
        "last_error": path.last_error,
        "selector_info": selector_info(&path.info),
    });
    with_extra(&path.extra, value)
}

fn held(held: &Held) -> Value {
    json!({
        "nr_requests": held.nr_requests,
        "bytes": held.bytes,
        "oldest_age_ms": held.oldest_age_ms,
        "time_left_ms": held.time_left_ms,
    })
}

fn selector_info(info: &PathInfo) -> Value {
    match info {
        PathInfo::RoundRobin => json!({}),
        PathInfo::QueueLength { in_flight } => json!({ "in_flight": in_flight }),
        PathInfo::ServiceTime { in_flight_bytes, relative_throughput } => {
            json!({ "in_flight_bytes": in_flight_bytes, "relative_throughput": relative_throughput })
        }
        PathInfo::HistoricalServiceTime { average, in_flight, stale_after_ns } => {
            json!({ "average_ns": average / 1024, "in_flight": in_flight, "stale_after_ns": stale_after_ns })
        }
        PathInfo::IoAffinity { misses } => json!({ "misses": misses }),
        PathInfo::LearnedServiceTime { in_flight, read_ns, write_ns, penalty } => {
            json!({ "in_flight": in_flight, "read_ns": read_ns, "write_ns": write_ns, "penalty": penalty })
        }
    }
}

/// The members of both; those of `value` win.
fn with_extra(extra: &Map<String, Value>, value: Value) -> Value {
    let Value::Object(own) = value else { return value };
    let mut members = extra.clone();
    members.extend(own);
    Value::Object(members)
}
