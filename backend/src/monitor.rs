//! Keeps watch over the paths: probes them, takes out those that hang, puts back those that prove well, publishes
//! tables. It runs on the control loop and is the only writer of the table; what can block runs on threads of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as StdPath, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath_paths::text::{TableSpec, TableStatus};
use polypath_paths::{
    Checker, CheckerConfig, CheckerVerdict, Failback, FailbackPolicy, Group, Identity, Limits, OpenOptions,
    Path, Table,
};
use polypath_selector::PathArgs;
use serde_json::Value;

use crate::disk::Disk;
use crate::dispatch;
use crate::events::{Events, What};
use crate::gather;
use crate::probe::{self, Expected, ProbeResult, SizeResult};
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

    /// Takes notice of paths that workers took out.
    fn note_failures(&mut self, table: &Table, now_ns: u64) {
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
                    self.events.note(What::PathQuarantined { path, seconds: hold_s });
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

    fn run_checkers(&mut self, table: &Table, now_ns: u64) -> u64 {
        let mut next_ns = u64::MAX;
        for (index, path) in table.paths().iter().enumerate() {
            let Some(watched) = self.watched.get_mut(path.name()) else { continue };
            if watched.checker.check_overdue(now_ns) == CheckerVerdict::Fail {
                watched.fail(table, index, "its probe gives no answer", now_ns, &mut self.events);
            }
            if watched.checker.is_due(now_ns) {
                watched.checker.begin(now_ns);
                watched.probe_id = self.next_id;
                self.probes_out.insert(self.next_id);
                self.next_id += 1;
                let bell = Arc::clone(&self.bell);
                let reopen = (!path.is_active()).then(|| Expected {
                    identity: (!self.options.trust_paths).then(|| watched.identity.clone()),
                    size_bytes: self.limits.size_bytes,
                    reference: table.paths().iter().find(|p| p.is_active()).map(Arc::downgrade),
                });
                let begun = probe::probe(
                    watched.probe_id,
                    Arc::clone(path),
                    reopen,
                    self.results_in.clone(),
                    move || bell(),
                );
                if let Err(error) = begun {
                    log::error!("cannot start a probe: {error}");
                    self.probes_out.remove(&watched.probe_id);
                    watched.checker.end(now_ns, path.is_active(), false);
                }
            }
            next_ns = next_ns.min(watched.checker.next_ns().unwrap_or(u64::MAX));
        }
        next_ns
    }

    fn probe_ended(&mut self, result: ProbeResult, now_ns: u64) {
        self.probes_out.remove(&result.id);
        let Some(result) = self.replacing_opened(result, now_ns) else { return };
        if self.adding.get(&result.name).is_some_and(|adding| adding.id == result.id)
            && let Some(adding) = self.adding.remove(&result.name)
        {
            return self.finish_adding(result, adding, now_ns);
        }
        let table = self.disk.table().load();
        let Some(index) = table.paths().iter().position(|p| p.name() == result.name) else { return };
        let Some(watched) = self.watched.get_mut(&result.name) else { return };
        if watched.probe_id != result.id {
            return;
        }
        let is_last = table.nr_active() == 0;
        let new = match result.found {
            Ok(new) => new,
            Err(why) => {
                if why.starts_with("refused") && watched.refused.as_ref() != Some(&why) {
                    log::error!("path {why}: path={}", result.name.display());
                    let path = result.name.display().to_string();
                    self.events.note(What::IdentityRefused { path, reason: why.clone() });
                    watched.refused = Some(why.clone());
                }
                if watched.checker.end(now_ns, false, is_last) == CheckerVerdict::Fail {
                    watched.fail(&table, index, &why, now_ns, &mut self.events);
                }
                watched.last_error = Some(why);
                return;
            }
        };
        if result.size_bytes.is_some() {
            watched.size_bytes = result.size_bytes;
        }
        match (watched.checker.end(now_ns, true, is_last), new) {
            (CheckerVerdict::Reinstate, Some(new)) => self.reinstate(&table, new, now_ns),
            // It was active when the probe began, so it was not opened anew.
            (CheckerVerdict::Reinstate, None) => watched.checker.suspected(now_ns),
            _ => {}
        }
        self.grow();
    }

    /// Puts a path that was opened anew in the place of the old one, if it proves to be the same disk.
    fn reinstate(&mut self, table: &Table, new: Arc<Path>, now_ns: u64) {
        if let Err(why) = self.check(&new) {
            return self.refuse(&new, why, now_ns);
        }
        let name = new.name().to_owned();
        if let Some(old) = table.paths().iter().find(|p| p.name() == name) {
            self.closing.push(Closing {
                path: Arc::clone(old),
                probe_id: 0,
                since_ns: now_ns,
                is_removed: false,
                waiting: None,
            });
        }
        let groups = replaced(table.groups(), &name, &new);
        let Some(group) = groups.iter().position(|g| g.paths.iter().any(|(p, _)| Arc::ptr_eq(p, &new)))
        else {
            return;
        };
        let first = groups[group].paths.iter().filter(|(p, _)| p.is_active()).count() == 1;
        if let Err(error) = self.publish(groups) {
            log::error!("cannot put back a path: path={} error={error:#}", name.display());
            return;
        }
        let table = self.disk.table().load();
        let (nr_active, mut failed_ms) = (table.nr_active(), 0);
        if let Some(watched) = self.watched.get_mut(&name) {
            watched.checker.reinstated(now_ns);
            (watched.refused, watched.last_error, watched.reason) = (None, None, None);
            watched.is_noted = false;
            failed_ms = now_ns.saturating_sub(watched.since_ns) / 1_000_000;
            watched.since_ns = now_ns;
        }
        let path = name.display().to_string();
        self.events.note(What::PathReinstated { path, group: group + 1, failed_ms, nr_active });
        log::info!("path reinstated: path={} group={} active={nr_active}", name.display(), group + 1);
        if let Some(best) = table.best_group()
            && self.failback.path_up(now_ns, group, first, best, table.map().current_group())
        {
            self.fail_back(&table);
        }
    }

    fn check(&self, new: &Path) -> Result<(), String> {
        let (limits, known) = (new.limits(), &self.limits);
        // A larger one has been enlarged, and the others not yet; but what is not proved has to fit.
        let fits = match self.options.trust_paths {
            true => limits.size_bytes == known.size_bytes,
            false => limits.size_bytes >= known.size_bytes,
        };
        if !fits {
            return Err(format!("its size is {} bytes, expected {}", limits.size_bytes, known.size_bytes));
        }
        if limits.logical_block_bytes > known.logical_block_bytes {
            return Err(format!(
                "its blocks are {} bytes, the guest was told {}",
                limits.logical_block_bytes, known.logical_block_bytes
            ));
        }
        // The guest is told nothing of this, so tables follow their paths. What is cut at blocks has to stay aligned.
        let align_max_bytes = known.logical_block_bytes.min(gather::MEM_ALIGN_BYTES_MAX);
        if limits.mem_align_bytes > align_max_bytes {
            return Err(format!(
                "it asks for buffers aligned to {} bytes, at most {align_max_bytes} are possible",
                limits.mem_align_bytes
            ));
        }
        Ok(())
    }

    fn refuse(&mut self, new: &Path, why: String, now_ns: u64) {
        let Some(watched) = self.watched.get_mut(new.name()) else { return };
        watched.checker.rejected(now_ns);
        if watched.refused.as_ref() != Some(&why) {
            log::error!("path refused: path={} reason={why}", new.name().display());
            let path = new.name().display().to_string();
            self.events.note(What::IdentityRefused { path, reason: why.clone() });
        }
        watched.last_error = Some(why.clone());
        watched.refused = Some(why);
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

    fn note_group(&mut self, table: &Table, now_ns: u64) {
        let group = table.current_group();
        if group != self.group_seen {
            let number = |g: Option<usize>| g.map_or_else(|| "none".to_owned(), |g| (g + 1).to_string());
            // That none is left, and that a path is back, have lines of their own.
            let is_move = group.is_some() && self.group_seen.is_some();
            let level = if is_move { log::Level::Warn } else { log::Level::Debug };
            log::log!(level, "group switched: from={} to={}", number(self.group_seen), number(group));
            let (from, to) = (self.group_seen.map(|g| g + 1), group.map(|g| g + 1));
            self.events.note(What::GroupSwitched { from, to });
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

    fn fail_back(&mut self, table: &Table) {
        if let Some(best) = table.best_group() {
            table.switch_group(Some(best));
        }
    }
}

/// The groups with another descriptor for the path of this name.
fn replaced(groups: &[Group], name: &StdPath, new: &Arc<Path>) -> Vec<Group> {
    let mut groups = groups.to_vec();
    for (path, _) in groups.iter_mut().flat_map(|group| group.paths.iter_mut()) {
        if path.name() == name {
            *path = Arc::clone(new);
        }
    }
    groups
}

mod change;
mod fenced;
mod hang;
mod note;
mod replace;
mod resize;

use fenced::Fenced;
use resize::Resizing;
