//! What is running, in the forms of `dmsetup`.

use polypath_selector::{GroupArgs, Kind, PathArgs, PathInfo};
use serde_json::{Map, Value};

use super::spec::{Features, GroupSpec, NoPathRetry, PathSpec, QueueMode, TableSpec};
use super::words::Line;

/// A running table as the back-end sees it at one moment.
///
/// ```
/// use polypath_paths::text::{TableSpec, TableStatus};
///
/// let spec = TableSpec::parse_dm("0 10 multipath 0 0 1 1 service-time 0 2 2 8:0 128 1 8:16 128 4")?;
/// let mut status = TableStatus::idle(&spec, 10);                   // nothing chosen, nothing in flight, all active
/// assert_eq!(status.info(), "2 0 0 0 1 1 E 0 2 2 8:0 A 0 0 1 8:16 A 0 0 4");
///
/// status.current_group = Some(1);
/// status.groups[0].paths[0].active = false;
/// status.groups[0].paths[0].fail_count = 1;
/// assert_eq!(status.info(), "2 0 0 0 1 1 A 0 2 2 8:0 F 1 0 1 8:16 A 0 0 4");
/// assert_eq!(status.table(), "0 0 1 1 service-time 0 2 2 8:0 1 1 8:16 1 4");
/// assert_eq!(status.json()["groups"][0]["paths"][0]["state"], "failed");
/// # Ok::<(), polypath_paths::text::TextError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TableStatus {
    /// Length of the disk in sectors of 512 bytes.
    pub length_sectors: u64,
    /// Whether I/O is held now if no path is usable: `queue_if_no_path` in the TABLE form.
    ///
    /// Differs from what `no_path_retry` asks for after a message or when its time was up.
    pub queue_if_no_path: bool,
    /// What the table or the program's setting asks for.
    pub no_path_retry: NoPathRetry,
    /// The other features.
    pub features: Features,
    /// As in [`TableSpec::hw_handler`].
    pub hw_handler: Vec<String>,
    /// Group that was asked for and not used yet, from 1.
    pub next_group: Option<usize>,
    /// Group that is in use, from 1.
    pub current_group: Option<usize>,
    /// All groups in table order.
    pub groups: Vec<GroupStatus>,
    /// What waits for a path.
    pub held: Held,
    /// More members for the JSON form. They do not replace those that it has.
    pub extra: Map<String, Value>,
}

/// A running priority group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupStatus {
    /// Chooses among its paths.
    pub selector: Kind,
    /// The selector's arguments.
    pub args: GroupArgs,
    /// Used only if no other group has a path.
    pub bypassed: bool,
    /// All paths in table order.
    pub paths: Vec<PathStatus>,
}

/// A running path.
#[derive(Clone, Debug, PartialEq)]
pub struct PathStatus {
    /// Its name in the table.
    pub device: String,
    /// Its arguments for the selector.
    pub args: PathArgs,
    /// Whether new I/O may go there.
    pub active: bool,
    /// How often it failed since the start; never reset.
    pub fail_count: u32,
    /// What the selector shows of it; of the group's kind.
    pub info: PathInfo,
    /// Requests in flight.
    pub in_flight: u64,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
    /// The last error, such as `EIO`.
    pub last_error: Option<String>,
    /// More members for the JSON form. They do not replace those that it has.
    pub extra: Map<String, Value>,
}

/// Requests that wait for a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Held {
    /// How many.
    pub nr_requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How long the first has waited, in ms; `None` without any.
    pub oldest_age_ms: Option<u64>,
    /// How long until they fail, in ms; `None` if never, or without any.
    pub time_left_ms: Option<u64>,
}

/// State of a priority group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupState {
    /// In use: `A`.
    Active,
    /// May be used: `E`.
    Enabled,
    /// Bypassed, whether in use or not: `D`.
    Disabled,
}

impl GroupState {
    /// Its letter in the INFO form.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Active => 'A',
            Self::Enabled => 'E',
            Self::Disabled => 'D',
        }
    }

    /// Its word in the JSON form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Enabled => "enabled",
            Self::Disabled => "disabled",
        }
    }
}

impl TableStatus {
    /// The status of a table that was just built: all paths active, no group chosen, nothing in flight. To be filled in.
    ///
    /// `paths_sectors` is the length of the paths, for a table that gives none. A table that does not say what to do
    /// without a path gets [`NoPathRetry::Fail`].
    #[must_use]
    pub fn idle(spec: &TableSpec, paths_sectors: u64) -> Self {
        let path = |group: &GroupSpec, path: &PathSpec| PathStatus {
            device: path.device.clone(),
            args: path.args.clone(),
            active: true,
            fail_count: 0,
            info: idle_info(group.selector, &path.args),
            in_flight: 0,
            in_flight_bytes: 0,
            last_error: None,
            extra: Map::new(),
        };
        let group = |group: &GroupSpec| GroupStatus {
            selector: group.selector,
            args: group.args.clone(),
            bypassed: false,
            paths: group.paths.iter().map(|spec| path(group, spec)).collect(),
        };
        let no_path_retry = spec.no_path_retry.unwrap_or(NoPathRetry::Fail);
        Self {
            length_sectors: spec.length_sectors.unwrap_or(paths_sectors),
            queue_if_no_path: no_path_retry != NoPathRetry::Fail,
            no_path_retry,
            features: spec.features.clone(),
            hw_handler: spec.hw_handler.clone(),
            next_group: (spec.initial_group > 0).then_some(spec.initial_group),
            current_group: None,
            groups: spec.groups.iter().map(group).collect(),
            held: Held::default(),
            extra: Map::new(),
        }
    }

    /// State of a group; `number` is from 1.
    #[must_use]
    pub fn group_state(&self, number: usize) -> GroupState {
        let bypassed =
            number.checked_sub(1).and_then(|index| self.groups.get(index)).is_some_and(|g| g.bypassed);
        match self.current_group {
            _ if bypassed => GroupState::Disabled,
            Some(current) if current == number => GroupState::Active,
            _ => GroupState::Enabled,
        }
    }

    /// The group that the next request is expected to use, from 1: asked for, else in use, else the first; 0 without
    /// groups.
    #[must_use]
    pub fn expected_group(&self) -> usize {
        self.next_group.or(self.current_group).unwrap_or(self.groups.len().min(1))
    }

    /// The INFO form: what `dmsetup status` shows behind `multipath`, as `multipath_status()` in Linux'
    /// `drivers/md/dm-mpath.c` prints it, without the space at the end.
    ///
    /// Its first three words say that no group is being initialised: only device handlers need that.
    #[must_use]
    pub fn info(&self) -> String {
        let mut line = Line::default();
        line.words("2 0 0").words(0).words(self.groups.len()).words(self.expected_group());
        for (number, group) in (1..).zip(&self.groups) {
            line.words(self.group_state(number).letter()).words(group.args.table(group.selector));
            line.words(group.paths.len()).words(group.selector.nr_info_words());
            for path in &group.paths {
                line.quoted(&path.device).words(if path.active { 'A' } else { 'F' });
                line.words(path.fail_count).words(path.info);
            }
        }
        line.finish()
    }

    /// The TABLE form: what `dmsetup table` shows behind `multipath`, printed as the kernel does. Only the name of a
    /// hardware handler is shown (none in bio mode) and repeat counts are those in effect.
    #[must_use]
    pub fn table(&self) -> String {
        let mut line = Line::default();
        let nr_handler_words = if self.features.queue_mode == QueueMode::Bio { 0 } else { 1 };
        let handler = &self.hw_handler[..self.hw_handler.len().min(nr_handler_words)];
        line.counted(&self.features.words(self.queue_if_no_path)).counted(handler);
        line.words(self.groups.len()).words(self.expected_group());
        for group in &self.groups {
            line.words(group.selector).words(group.args.table(group.selector));
            line.words(group.paths.len()).words(group.selector.nr_table_words());
            for path in &group.paths {
                line.quoted(&path.device).words(path.args.table(group.selector));
            }
        }
        line.finish()
    }

    /// The whole line of `dmsetup status`.
    #[must_use]
    pub fn dmsetup_status(&self) -> String {
        format!("0 {} multipath {}", self.length_sectors, self.info())
    }

    /// The whole line of `dmsetup table`, which [`TableSpec::parse_dm`] accepts.
    #[must_use]
    pub fn dmsetup_table(&self) -> String {
        format!("0 {} multipath {}", self.length_sectors, self.table())
    }

    /// A table that would build what is running, for the TOML form. States of paths and groups are not part of it.
    #[must_use]
    pub fn spec(&self) -> TableSpec {
        let path = |path: &PathStatus| PathSpec { device: path.device.clone(), args: path.args.clone() };
        let group = |group: &GroupStatus| GroupSpec {
            selector: group.selector,
            args: group.args.clone(),
            paths: group.paths.iter().map(path).collect(),
        };
        TableSpec {
            length_sectors: Some(self.length_sectors),
            no_path_retry: Some(self.no_path_retry),
            features: self.features.clone(),
            hw_handler: self.hw_handler.clone(),
            groups: self.groups.iter().map(group).collect(),
            initial_group: self.expected_group(),
        }
    }
}

/// What a selector shows of a path before its first request.
fn idle_info(selector: Kind, args: &PathArgs) -> PathInfo {
    match selector {
        Kind::RoundRobin => PathInfo::RoundRobin,
        Kind::QueueLength => PathInfo::QueueLength { in_flight: 0 },
        Kind::ServiceTime => {
            PathInfo::ServiceTime { in_flight_bytes: 0, relative_throughput: args.relative_throughput }
        }
        Kind::HistoricalServiceTime => {
            PathInfo::HistoricalServiceTime { average: 1024, in_flight: 0, stale_after_ns: 0 }
        }
        Kind::IoAffinity => PathInfo::IoAffinity { misses: 0 },
        Kind::LearnedServiceTime => {
            PathInfo::LearnedServiceTime { in_flight: 0, read_ns: 0, write_ns: 0, penalty: 0 }
        }
    }
}

#[cfg(test)]
mod tests;
