//! What is running, as JSON.

use polypath_selector::PathInfo;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::spec::{NoPathRetry, QueueMode, path_words};
use super::status::{GroupStatus, PathStatus, TableStatus};

/// A group in its JSON form.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // TableStatus::json says it
pub struct GroupView<'a, P = PathView<'a>> {
    pub group: usize,
    pub state: &'static str,
    pub selector: &'a str,
    pub selector_args: Vec<String>,
    pub nr_active: usize,
    pub paths: Vec<P>,
}

/// A path in its JSON form.
#[derive(Debug, Serialize)]
#[allow(missing_docs)] // TableStatus::json says it
pub struct PathView<'a> {
    // First, so that what follows wins where a map is made of it.
    #[serde(flatten)]
    pub extra: &'a Map<String, Value>,
    pub device: &'a str,
    pub state: &'static str,
    pub fail_count: u32,
    pub args: Vec<String>,
    pub in_flight: u64,
    pub in_flight_bytes: u64,
    pub last_error: Option<&'a str>,
    pub selector_info: SelectorInfo,
}

/// What a selector shows of a path.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)] // each selector's own words
pub enum SelectorInfo {
    RoundRobin {},
    QueueLength { in_flight: u32 },
    ServiceTime { in_flight_bytes: u64, relative_throughput: u8 },
    HistoricalServiceTime { average_ns: u64, in_flight: u32, stale_after_ns: u64 },
    IoAffinity { misses: u64 },
    LearnedServiceTime { in_flight: u32, read_ns: u64, write_ns: u64, penalty: u32 },
}

impl Serialize for NoPathRetry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Seconds(seconds) => seconds.serialize(serializer),
            Self::Fail | Self::Queue => serializer.collect_str(self),
        }
    }
}

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
        let value = json!({
            "length_sectors": self.length_sectors,
            "queue_if_no_path": self.queue_if_no_path,
            "no_path_retry": self.no_path_retry,
            "retain_attached_hw_handler": self.features.retain_attached_hw_handler,
            "pg_init_retries": self.features.pg_init_retries,
            "pg_init_delay_msecs": self.features.pg_init_delay_msecs,
            "queue_mode": QueueMode::name(self.features.queue_mode),
            "hw_handler": self.hw_handler,
            "current_group": self.current_group,
            "next_group": self.next_group,
            "held": self.held,
            "groups": self.group_views().collect::<Vec<_>>(),
        });
        with_extra(&self.extra, value)
    }

    /// The groups in their JSON form, for who writes a larger one.
    pub fn group_views(&self) -> impl Iterator<Item = GroupView<'_>> {
        self.group_views_of(path)
    }

    /// The same with another form of their paths.
    pub fn group_views_of<'a, P>(
        &'a self,
        view: impl Fn(&'a GroupStatus, &'a PathStatus) -> P,
    ) -> impl Iterator<Item = GroupView<'a, P>> {
        (1..).zip(&self.groups).map(move |(number, group)| GroupView {
            group: number,
            state: self.group_state(number).name(),
            selector: group.selector.name(),
            selector_args: group.args.table(group.selector).split(' ').skip(1).map(str::to_owned).collect(),
            nr_active: group.paths.iter().filter(|path| path.active).count(),
            paths: group.paths.iter().map(|path| view(group, path)).collect(),
        })
    }
}

impl PathStatus {
    /// The JSON form of a path of this group.
    #[must_use]
    pub fn view(&self, group: &GroupStatus) -> PathView<'_> {
        PathView {
            device: &self.device,
            state: if self.active { "active" } else { "failed" },
            fail_count: self.fail_count,
            args: path_words(group.selector, &self.args),
            in_flight: self.in_flight,
            in_flight_bytes: self.in_flight_bytes,
            last_error: self.last_error.as_deref(),
            selector_info: selector_info(&self.info),
            extra: &self.extra,
        }
    }
}

fn path<'a>(group: &'a GroupStatus, path: &'a PathStatus) -> PathView<'a> {
    path.view(group)
}

fn selector_info(info: &PathInfo) -> SelectorInfo {
    match *info {
        PathInfo::RoundRobin => SelectorInfo::RoundRobin {},
        PathInfo::QueueLength { in_flight } => SelectorInfo::QueueLength { in_flight },
        PathInfo::ServiceTime { in_flight_bytes, relative_throughput } => {
            SelectorInfo::ServiceTime { in_flight_bytes, relative_throughput }
        }
        PathInfo::HistoricalServiceTime { average, in_flight, stale_after_ns } => {
            SelectorInfo::HistoricalServiceTime { average_ns: average / 1024, in_flight, stale_after_ns }
        }
        PathInfo::IoAffinity { misses } => SelectorInfo::IoAffinity { misses },
        PathInfo::LearnedServiceTime { in_flight, read_ns, write_ns, penalty } => {
            SelectorInfo::LearnedServiceTime { in_flight, read_ns, write_ns, penalty }
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
