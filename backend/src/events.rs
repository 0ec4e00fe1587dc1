//! What happened to the disk, for people and programs that want to know: the last ones are kept, and whoever follows is
//! told of each. Noted by the control loop only, never on the I/O path.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};

use serde::Serialize;
use serde_json::{Value, json};

/// How many are kept to be asked for later.
const HISTORY_MAX: usize = 256;

/// What happened. Numbers of groups are from 1; `nr_active` is the number of active paths that are left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs)] // the sentences below say it
pub enum What {
    PathFailed { path: String, group: usize, reason: String, nr_active: usize },
    PathReinstated { path: String, group: usize, failed_ms: u64, nr_active: usize },
    PathQuarantined { path: String, seconds: u64, nr_active: usize },
    PathAdded { path: String, group: usize, nr_active: usize },
    PathRemoved { path: String, nr_active: usize },
    PathClosed { path: String },
    IdentityRefused { path: String, reason: String },
    GroupSwitched { from: Option<usize>, to: Option<usize>, reason: String, nr_active: usize },
    NoPath { no_path_retry: String },
    RequestsHeld { nr_requests: u64 },
    HeldReleased { held_ms: u64 },
    EarlierIoAwaited { waited_ms: u64 },
    EarlierIoEnded { waited_ms: u64 },
    TablePublished { nr_groups: usize, nr_paths: usize, nr_active: usize },
    SettingChanged { setting: String, value: String },
    Reloaded { changes: Vec<String> },
    FrontEndConnected,
    FrontEndDisconnected,
    Stopping { reason: String },
}

/// Names of all events.
const NAMES: [&str; 19] = [
    "path_failed",
    "path_reinstated",
    "path_quarantined",
    "path_added",
    "path_removed",
    "path_closed",
    "identity_refused",
    "group_switched",
    "no_path",
    "requests_held",
    "held_released",
    "earlier_io_awaited",
    "earlier_io_ended",
    "table_published",
    "setting_changed",
    "reloaded",
    "front_end_connected",
    "front_end_disconnected",
    "stopping",
];

/// Whether there are events of this name.
pub(crate) fn is_name(name: &str) -> bool {
    NAMES.contains(&name)
}

impl fmt::Display for What {
    /// One sentence for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = |group: &Option<usize>| group.map_or_else(|| "none".to_owned(), |g| g.to_string());
        match self {
            Self::PathFailed { path, group, reason, nr_active } => {
                write!(f, "path {path} of group {group} failed: {reason}; active paths left: {nr_active}")
            }
            Self::PathReinstated { path, group, failed_ms, nr_active } => write!(
                f,
                "path {path} of group {group} is back after {:.1} s; active paths: {nr_active}",
                *failed_ms as f64 / 1e3
            ),
            Self::PathQuarantined { path, seconds, nr_active } => write!(
                f,
                "path {path} fails too often and is held back for {seconds} s; active paths left: {nr_active}"
            ),
            Self::PathAdded { path, group, nr_active } => {
                write!(f, "path {path} was added to group {group}; active paths: {nr_active}")
            }
            Self::PathRemoved { path, nr_active } => {
                write!(f, "path {path} was taken out of the table; active paths: {nr_active}")
            }
            Self::PathClosed { path } => write!(f, "path {path} has no requests left and is closed"),
            Self::IdentityRefused { path, reason } => write!(f, "path {path} is not used: {reason}"),
            Self::GroupSwitched { from, to, reason, nr_active } => write!(
                f,
                "the group in use was {} and is {}: {reason}; active paths: {nr_active}",
                group(from),
                group(to)
            ),
            Self::NoPath { no_path_retry } => {
                write!(f, "no path is usable; requests wait by no_path_retry={no_path_retry}")
            }
            Self::RequestsHeld { nr_requests } => write!(f, "{nr_requests} requests wait for a path"),
            Self::HeldReleased { held_ms } => {
                write!(f, "no request waits for a path any more, after {:.1} s", *held_ms as f64 / 1e3)
            }
            Self::EarlierIoAwaited { waited_ms } => write!(
                f,
                "requests have waited for {:.1} s, since an earlier process still has I/O with a path",
                *waited_ms as f64 / 1e3
            ),
            Self::EarlierIoEnded { waited_ms } => {
                write!(f, "the I/O of the earlier process has ended, after {:.1} s", *waited_ms as f64 / 1e3)
            }
            Self::TablePublished { nr_groups, nr_paths, nr_active } => {
                write!(f, "a table of {nr_groups} groups and {nr_paths} paths ({nr_active} active) is in use")
            }
            Self::SettingChanged { setting, value } => write!(f, "{setting} is now {value}"),
            Self::Reloaded { changes } if changes.is_empty() => {
                f.write_str("the configuration was read again: no change")
            }
            Self::Reloaded { changes } => {
                write!(f, "the configuration was read again; changed: {}", changes.join(", "))
            }
            Self::FrontEndConnected => f.write_str("a front-end connected"),
            Self::FrontEndDisconnected => f.write_str("the front-end has gone"),
            Self::Stopping { reason } => write!(f, "polypath stops: {reason}"),
        }
    }
}

/// What happened, and when.
#[derive(Clone, Debug)]
pub struct Event {
    /// Counts from 1; a gap means that some were lost on the way.
    pub number: u64,
    /// When, by the system's clock.
    pub time: jiff::Timestamp,
    /// What.
    pub what: What,
}

impl Event {
    /// The form on the control socket and for the event command.
    pub fn json(&self) -> Value {
        let mut value = serde_json::to_value(&self.what).unwrap_or_else(|_| json!({}));
        if let Value::Object(members) = &mut value {
            members.insert("number".into(), json!(self.number));
            members.insert("time".into(), json!(time_text(self.time)));
            members.insert("text".into(), json!(self.what.to_string()));
        }
        value
    }
}

/// A time as programs like it: RFC 3339, UTC, to the millisecond.
pub fn time_text(time: jiff::Timestamp) -> String {
    format!("{time:.3}")
}

/// How often what has happened, for other threads.
#[derive(Clone, Debug)]
pub struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

impl Default for Counts {
    /// Nothing has happened yet: 0 for each, since what grows from nothing cannot be seen to grow.
    fn default() -> Self {
        Self(Arc::new(Mutex::new(NAMES.iter().map(|name| ((*name).to_owned(), 0)).collect())))
    }
}

impl Counts {
    fn count(&self, name: &str) {
        if let Ok(mut counts) = self.0.lock() {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }

    /// Names of events with their numbers.
    pub fn all(&self) -> Vec<(String, u64)> {
        self.0.lock().map(|counts| counts.clone().into_iter().collect()).unwrap_or_default()
    }
}

/// What has happened lately.
#[derive(Debug, Default)]
pub struct Events {
    counts: Counts,
    nr_events: u64,
    history: VecDeque<Arc<Event>>,
    /// Not yet passed on.
    fresh: Vec<Arc<Event>>,
}

impl Events {
    /// It happened now.
    pub fn note(&mut self, what: What) {
        self.nr_events += 1;
        let event = Event { number: self.nr_events, time: jiff::Timestamp::now(), what };
        self.counts.count(event.json()["event"].as_str().unwrap_or_default());
        let event = Arc::new(event);
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(Arc::clone(&event));
        self.fresh.push(event);
    }

    /// The counts, to be read by others at any time.
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }

    /// The last `nr_events`, oldest first.
    pub fn last(&self, nr_events: usize) -> impl Iterator<Item = &Arc<Event>> {
        self.history.iter().skip(self.history.len().saturating_sub(nr_events))
    }

    /// Those that were noted since the last time this was asked.
    pub fn take_fresh(&mut self) -> Vec<Arc<Event>> {
        std::mem::take(&mut self.fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(nr_active: usize) -> What {
        What::PathFailed { path: "/dev/sda".into(), group: 1, reason: "EIO".into(), nr_active }
    }

    #[test]
    fn an_event_says_what_when_and_what_is_left() {
        let mut events = Events::default();
        events.note(failed(1));
        let json = events.last(9).next().unwrap().json();
        assert_eq!(
            (&json["event"], &json["path"], &json["nr_active"]),
            (&json!("path_failed"), &json!("/dev/sda"), &json!(1))
        );
        assert_eq!((&json["number"], &json["group"], &json["reason"]), (&json!(1), &json!(1), &json!("EIO")));
        assert_eq!(json["text"], "path /dev/sda of group 1 failed: EIO; active paths left: 1");
        let time = json["time"].as_str().unwrap();
        assert!(time.len() == "2026-01-01T00:00:00.000Z".len() && time.ends_with('Z'), "{time}");
    }

    #[test]
    fn the_last_ones_are_kept_and_each_is_passed_on_once() {
        let mut events = Events::default();
        (0..HISTORY_MAX + 5).for_each(|n| events.note(failed(n)));
        assert_eq!(events.take_fresh().len(), HISTORY_MAX + 5);
        assert!(events.take_fresh().is_empty());
        let numbers: Vec<u64> = events.last(2).map(|event| event.number).collect();
        assert_eq!(numbers, [HISTORY_MAX as u64 + 4, HISTORY_MAX as u64 + 5]);
        assert_eq!(events.last(usize::MAX).count(), HISTORY_MAX);
    }
}
