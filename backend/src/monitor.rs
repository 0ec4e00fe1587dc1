//! Keeps watch over the paths: probes them, takes out those that hang, puts back those that prove well, publishes
//! tables. It runs on the control loop and is the only writer of the table; what can block runs on threads of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as StdPath, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath_paths::text::{TableSpec, TableStatus};
use polypath_paths::{
    Checker, CheckerConfig, Failback, FailbackPolicy, Group, Identity, Limits, OpenOptions, Path, Table,
};
use polypath_selector::PathArgs;
use serde_json::Value;

use crate::disk::Disk;
use crate::dispatch;
use crate::events::{Events, What};
use crate::probe::{ProbeResult, SizeResult};
use crate::status::{self, PathDetails};

/// How the monitor is to work.
#[derive(Debug, Clone)]
pub struct MonitorOptions {
    /// A path that gives no answer for so long is taken out.
    pub path_timeout: Duration,
    /// When to go back to a better group.
    pub failback: FailbackPolicy,
    /// Times of the checkers.
    pub checker: CheckerConfig,
    /// How paths are opened.
    pub open: OpenOptions,
    /// Use paths that do not prove to be the same disk.
    pub trust_paths: bool,
    /// Most workers that will ever use a path.
    pub nr_workers: usize,
}

#[derive(Debug)]
struct Watched {
    checker: Checker,
    /// What the path was when it was first proved.
    identity: Identity,
    /// Why the path was last refused, so that it is said once.
    refused: Option<String>,
    /// What the last probe met.
    last_error: Option<String>,
    /// Why it was taken out.
    reason: Option<String>,
    /// Since when it is active, or failed, in ns.
    since_ns: u64,
    /// Its failure has been noted already, by whoever found it.
    is_noted: bool,
    /// The size that it showed last.
    size_bytes: Option<u64>,
    /// The probe that is under way: the answer of another one (to an earlier path of the name) is not its.
    probe_id: u64,
}

/// What became of a command that took time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is done; what there is to say of it.
    Done(Value),
    /// It is not done, and why.
    Refused(String),
    /// Its time is over, and what that means.
    TimedOut(String),
}

/// A path on its way in, and who asked for it.
#[derive(Debug)]
struct Adding {
    id: u64,
    since_ns: u64,
    until_ns: u64,
    group: usize,
    args: PathArgs,
    token: u64,
}

/// A path on its way out: closed when nothing uses it any more, on a thread of its own, since closing may hang too.
#[derive(Debug)]
struct Closing {
    path: Arc<Path>,
    /// A probe that was under way: it may have opened the path anew.
    probe_id: u64,
    since_ns: u64,
    /// Whether the path left the table; else the same one was opened anew.
    is_removed: bool,
    /// Who waits for it, and until when at the latest.
    waiting: Option<(u64, u64)>,
}

/// A path that was closed: since when it was on its way out, and who waits for it.
#[derive(Debug)]
struct Closed {
    name: String,
    since_ns: u64,
    token: Option<u64>,
}

/// The watch over one disk's paths.
pub struct Monitor {
    disk: Arc<Disk>,
    /// The table as it was asked for.
    spec: TableSpec,
    options: MonitorOptions,
    watched: BTreeMap<PathBuf, Watched>,
    adding: BTreeMap<PathBuf, Adding>,
    replacing: Option<replace::Replacing>,
    closing: Vec<Closing>,
    next_id: u64,
    /// Probes that have not answered.
    probes_out: BTreeSet<u64>,
    /// A question for the size that is under way, the paths that have not answered one, and the answers.
    resizing: Option<Resizing>,
    sizes_out: BTreeSet<PathBuf>,
    sizes: mpsc::Receiver<SizeResult>,
    sizes_in: mpsc::Sender<SizeResult>,
    /// Answers to commands that took time, by their tokens.
    answers: Vec<(u64, Outcome)>,
    events: Events,
    /// Since when requests are held, in ns.
    held_since_ns: Option<u64>,
    /// The rings wait for the I/O of an earlier process.
    fenced: Option<Fenced>,
    failback: Failback,
    results: mpsc::Receiver<ProbeResult>,
    results_in: mpsc::Sender<ProbeResult>,
    /// Paths that were closed.
    closed: mpsc::Receiver<Closed>,
    closed_in: mpsc::Sender<Closed>,
    /// Rings the control loop.
    bell: Arc<dyn Fn() + Send + Sync>,
    /// What every path has to be.
    identity: Identity,
    limits: Limits,
    /// When the workers were last asked how long they have waited.
    look_asked_ns: u64,
    seen_epoch: u64,
    group_seen: Option<usize>,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").field("watched", &self.watched).finish_non_exhaustive()
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Monitor {
    /// Watches the paths of the disk's table. `bell` makes the control loop call [`Self::tick`].
    pub fn new(
        disk: Arc<Disk>,
        spec: TableSpec,
        options: MonitorOptions,
        bell: Arc<dyn Fn() + Send + Sync>,
        now_ns: u64,
    ) -> Self {
        let table = disk.table().load();
        let (results_in, results) = mpsc::channel();
        let (closed_in, closed) = mpsc::channel();
        let (sizes_in, sizes) = mpsc::channel();
        let watched = |path: &Arc<Path>| {
            let mut watched = Watched::new(options.checker, path.identity().clone(), now_ns);
            watched.size_bytes = Some(path.limits().size_bytes);
            (path.name().to_owned(), watched)
        };
        Self {
            watched: table.paths().iter().map(watched).collect(),
            adding: BTreeMap::new(),
            replacing: None,
            closing: Vec::new(),
            next_id: 1,
            probes_out: BTreeSet::new(),
            resizing: None,
            sizes_out: BTreeSet::new(),
            sizes,
            sizes_in,
            answers: Vec::new(),
            events: Events::default(),
            held_since_ns: None,
            fenced: None,
            failback: Failback::new(options.failback),
            results,
            results_in,
            closed,
            closed_in,
            bell,
            // The paths were compared when the table was made.
            identity: table.paths()[0].identity().clone(),
            limits: table.limits().clone(),
            look_asked_ns: 0,
            seen_epoch: 0,
            group_seen: table.current_group(),
            options,
            spec,
            disk,
        }
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// What is running.
    pub fn status(&self, now_ns: u64) -> TableStatus {
        let table = self.disk.table().load();
        let details = |name: &StdPath| self.details(name, now_ns);
        status::of(&self.spec, &table, details, now_ns)
    }

    /// What only the monitor knows of a path.
    pub(crate) fn details(&self, name: &StdPath, now_ns: u64) -> Option<PathDetails> {
        let watched = self.watched.get(name)?;
        Some(PathDetails {
            last_error: watched.last_error.clone(),
            reason: watched.reason.clone(),
            failed_by_operator: watched.checker.is_failed_by_operator(),
            quarantined_until_ns: watched.checker.quarantined_until_ns(now_ns),
            since_ns: watched.since_ns,
            refused: watched.refused.clone(),
            next_probe_ns: watched.checker.next_ns(),
        })
    }

    /// The table as it was asked for.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// How it works now.
    pub fn options(&self) -> &MonitorOptions {
        &self.options
    }

    /// What happened.
    pub fn events(&mut self) -> &mut Events {
        &mut self.events
    }

    /// Answers that have become ready: the token of the command, and what became of it.
    pub fn take_answers(&mut self) -> Vec<(u64, Outcome)> {
        std::mem::take(&mut self.answers)
    }

    /// Does everything that is due at `now_ns`. Gives the time at which to come back at the latest.
    pub fn tick(&mut self, now_ns: u64) -> u64 {
        while let Ok(result) = self.results.try_recv() {
            self.probe_ended(result, now_ns);
        }
        let table = self.disk.table().load();
        self.note_failures(&table, now_ns);
        let next_ns = self.find_hung(&table, now_ns);
        let next_ns = next_ns.min(self.run_checkers(&table, now_ns));
        self.note_group(&table, now_ns);
        let next_ns = next_ns.min(self.note_held(now_ns));
        if self.failback.is_due(now_ns) {
            self.fail_back(&table);
        }
        let next_ns = next_ns.min(self.failback.next_ns().unwrap_or(u64::MAX));
        let next_ns = next_ns
            .min(self.close_unused(now_ns))
            .min(self.give_up_adding(now_ns))
            .min(self.give_up_replacing(now_ns))
            .min(self.go_on_resizing(now_ns))
            .min(self.look_at_fence(now_ns));
        let epoch = self.disk.map().epoch();
        if epoch != self.seen_epoch {
            self.seen_epoch = epoch;
            // Idle workers see what has changed, let go of old tables, and send what they hold.
            self.disk.wakers().wake_all();
        }
        next_ns
    }

    /// Publishes a table of these groups.
    fn publish(&mut self, groups: Vec<Group>) -> anyhow::Result<()> {
        let map = Arc::clone(self.disk.map());
        let limits = Some(self.limits.clone());
        // Each path was proved when it was opened.
        let table = Table::with_limits(groups, map, limits, true)?;
        dispatch::check_selectors(&table)?;
        let (nr_groups, nr_paths, nr_active) = (table.groups().len(), table.paths().len(), table.nr_active());
        self.disk.table().publish(table);
        // Whatever made it necessary has a line of its own.
        log::debug!("table published: groups={nr_groups} paths={nr_paths} active={nr_active}");
        self.events.note(What::TablePublished { nr_groups, nr_paths, nr_active });
        Ok(())
    }

    /// The same where paths leave the table: what they carried is flushed by `heir` from now on. It is told before, for flushes
    /// by the new table, and after, since a flush by the old one may have covered that meanwhile and not what was written
    /// behind it. What is answered later still is noted by the workers.
    fn publish_to(&mut self, groups: Vec<Group>, heir: Option<Arc<Path>>) -> anyhow::Result<()> {
        let tell = || heir.iter().for_each(|path| path.ledger().note_foreign_write());
        tell();
        self.publish(groups)?;
        tell();
        Ok(())
    }

    fn fail_back(&mut self, table: &Table) {
        if let Some(best) = table.best_group() {
            table.switch_group(Some(best));
        }
    }
}

mod change;
mod fenced;
mod hang;
mod note;
mod probing;
mod replace;
mod resize;

use fenced::Fenced;
use resize::Resizing;
