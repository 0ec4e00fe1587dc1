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
