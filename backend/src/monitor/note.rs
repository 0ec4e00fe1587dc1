//! What the monitor takes notice of, once, for whoever wants to know; and settings that change while it runs.

use std::time::Duration;

use polypath_paths::{Checker, CheckerConfig, FailOutcome, Failback, FailbackPolicy, Identity, Path, Table};

use super::{Monitor, Watched};
use crate::events::{Events, What};

/// How often what is held is looked at while there is no path.
const HELD_LOOK_NS: u64 = 100_000_000;

/// How long requests must have been held for their release to be worth a line at the usual level.
const HELD_SAID_MS: u64 = 1000;

impl Watched {
    /// For a path that is active at `now_ns`.
    pub(super) fn new(config: CheckerConfig, identity: Identity, now_ns: u64) -> Self {
        let checker = Checker::new(config, now_ns);
        Self {
            checker,
            identity,
            refused: None,
            last_error: None,
            reason: None,
            since_ns: now_ns,
            is_noted: false,
            size_bytes: None,
            probe_id: 0,
        }
    }

    /// The path is out since now; said once.
    pub(super) fn note_failed(
        &mut self,
        path: &Path,
        group: usize,
        reason: &str,
        nr_active: usize,
        now_ns: u64,
        events: &mut Events,
    ) {
        if !std::mem::replace(&mut self.is_noted, true) {
            (self.since_ns, self.reason) = (now_ns, Some(reason.to_owned()));
            let path = path.name().display().to_string();
            events.note(What::PathFailed { path, group: group + 1, reason: reason.to_owned(), nr_active });
        }
    }

    /// Takes a path out for a reason that no request met.
    pub(super) fn fail(&mut self, table: &Table, index: usize, why: &str, now_ns: u64, events: &mut Events) {
        if let FailOutcome::Failed { nr_active } = table.fail_path(index, now_ns) {
            let path = &table.paths()[index];
            let (name, group) = (path.name().display(), table.group_of(index));
            log::warn!("path failed: path={name} group={} reason={why} active={nr_active}", group + 1);
            self.note_failed(path, group, why, nr_active, now_ns, events);
        }
        self.checker.failed(now_ns);
    }
}

impl Monitor {
    /// Changes how long a silent path is waited for.
    pub fn set_path_timeout(&mut self, timeout: Duration) {
        self.options.path_timeout = timeout;
        self.options.checker.probe_timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        for watched in self.watched.values_mut() {
            watched.checker.set_config(self.options.checker);
        }
        self.setting_changed("path_timeout", timeout.as_millis());
    }

    /// Changes when a better group is gone back to.
    pub fn set_failback(&mut self, policy: FailbackPolicy) {
        self.options.failback = policy;
        self.failback = Failback::new(policy);
        self.setting_changed("failback", policy);
    }

    /// Takes notice of paths that workers took out.
    pub(super) fn note_failures(&mut self, table: &Table, now_ns: u64) {
        for (index, path) in table.paths().iter().enumerate() {
            let Some(watched) = self.watched.get_mut(path.name()) else { continue };
            if !path.is_active() && watched.checker.is_active() {
                let why = match path.last_errno() {
                    Some(errno) => format!("{:?}", nix::errno::Errno::from_raw(errno)),
                    None => "an I/O error".to_owned(),
                };
                let group = table.group_of(index);
                watched.note_failed(path, group, &why, table.nr_active(), now_ns, &mut self.events);
                watched.checker.failed(now_ns);
                if let Some(until_ns) = watched.checker.quarantined_until_ns(now_ns) {
                    let hold_s = (until_ns - now_ns) / 1_000_000_000;
                    log::warn!("path quarantined: path={} seconds={hold_s}", path.name().display());
                    let path = path.name().display().to_string();
                    let nr_active = table.nr_active();
                    self.events.note(What::PathQuarantined { path, seconds: hold_s, nr_active });
                }
                self.failback.path_failed();
            }
            if path.take_suspicion() {
                watched.checker.suspected(now_ns);
            }
        }
        if table.nr_active() != 0 {
            table.map().note_path_exists();
        }
    }

    /// Takes notice of another group in use, and of none.
    pub(super) fn note_group(&mut self, table: &Table, now_ns: u64) {
        let group = table.current_group();
        if group != self.group_seen {
            let number = |g: Option<usize>| g.map_or_else(|| "none".to_owned(), |g| (g + 1).to_string());
            // That none is left, and that a path is back, have lines of their own.
            let is_move = group.is_some() && self.group_seen.is_some();
            let level = if is_move { log::Level::Warn } else { log::Level::Debug };
            log::log!(level, "group switched: from={} to={}", number(self.group_seen), number(group));
            let (from, to) = (self.group_seen.map(|g| g + 1), group.map(|g| g + 1));
            let (reason, nr_active) = (why_switched(table, self.group_seen, group), table.nr_active());
            self.events.note(What::GroupSwitched { from, to, reason, nr_active });
            if group.is_none() {
                // Whatever was held back is needed now.
                self.watched.values_mut().for_each(|watched| watched.checker.suspected(now_ns));
                log::error!("no path: requests are held, no_path_retry={}", self.disk.map().no_path_retry());
                let no_path_retry = self.disk.map().no_path_retry().to_string();
                self.events.note(What::NoPath { no_path_retry });
            }
            self.group_seen = group;
        }
    }

    /// Takes notice of requests that are held, and of the end of that. Gives the time of the next look: workers do not
    /// ring for it.
    pub(super) fn note_held(&mut self, now_ns: u64) -> u64 {
        let nr_requests = u64::from(self.disk.map().held().nr_requests);
        match self.held_since_ns {
            None if nr_requests != 0 => {
                // The line that says that there is no path says this as well.
                log::debug!("requests held: nr={nr_requests}");
                self.held_since_ns = Some(now_ns);
                self.events.note(What::RequestsHeld { nr_requests });
            }
            Some(since_ns) if nr_requests == 0 => {
                let held_ms = now_ns.saturating_sub(since_ns) / 1_000_000;
                let level = if held_ms >= HELD_SAID_MS { log::Level::Info } else { log::Level::Debug };
                log::log!(level, "no requests held: after_ms={held_ms}");
                self.held_since_ns = None;
                self.events.note(What::HeldReleased { held_ms });
            }
            _ => {}
        }
        if self.group_seen.is_none() || self.held_since_ns.is_some() {
            now_ns + HELD_LOOK_NS
        } else {
            u64::MAX
        }
    }
}

/// Why another group is in use, or none.
fn why_switched(table: &Table, from: Option<usize>, to: Option<usize>) -> String {
    let Some(from) = from else { return "a path is active again".to_owned() };
    let number = from + 1;
    match table.groups().get(from) {
        _ if to.is_none() => "no path is active".to_owned(),
        None => format!("the table has no group {number} any more"),
        Some(group) if !group.paths.iter().any(|(path, _)| path.is_active()) => {
            format!("group {number} has no active path")
        }
        Some(group) if group.bypassed => format!("group {number} is disabled"),
        Some(_) => "by the failback policy, or by a command".to_owned(),
    }
}
