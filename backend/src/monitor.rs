//! Keeps watch over the paths: probes them, takes out those that hang, puts back those that prove well, publishes
//! tables. It runs on the control loop and is the only writer of the table; what can block runs on threads of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as StdPath, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath_paths::text::{TableSpec, TableStatus};
use polypath_paths::{
    Checker, CheckerConfig, CheckerVerdict, FailOutcome, Failback, FailbackPolicy, Group, Identity, Limits,
    OpenOptions, Path, Table,
};
use polypath_selector::PathArgs;

use crate::disk::Disk;
use crate::dispatch;
use crate::gather;
use crate::probe::{self, Expected, ProbeResult};
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
    last_error: Option<String>,
    /// The probe that is under way: the answer of another one (to an earlier path of the name) is not its.
    probe_id: u64,
}

/// A path on its way in, and who asked for it.
#[derive(Debug)]
struct Adding {
    id: u64,
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
    /// Who waits for it, and until when at the latest.
    waiting: Option<(u64, u64)>,
}

/// The watch over one disk's paths.
pub struct Monitor {
    disk: Arc<Disk>,
    /// The table as it was asked for.
    spec: TableSpec,
    options: MonitorOptions,
    watched: BTreeMap<PathBuf, Watched>,
    adding: BTreeMap<PathBuf, Adding>,
    closing: Vec<Closing>,
    next_id: u64,
    /// Probes that have not answered.
    probes_out: BTreeSet<u64>,
    /// Answers to commands that took time: token, text.
    answers: Vec<(u64, String)>,
    failback: Failback,
    results: mpsc::Receiver<ProbeResult>,
    results_in: mpsc::Sender<ProbeResult>,
    /// Paths that were closed: who waits for it.
    closed: mpsc::Receiver<Option<u64>>,
    closed_in: mpsc::Sender<Option<u64>>,
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
        let watched = |path: &Arc<Path>| {
            let checker = Checker::new(options.checker, now_ns);
            let identity = path.identity().clone();
            (
                path.name().to_owned(),
                Watched { checker, identity, refused: None, last_error: None, probe_id: 0 },
            )
        };
        Self {
            watched: table.paths().iter().map(watched).collect(),
            adding: BTreeMap::new(),
            closing: Vec::new(),
            next_id: 1,
            probes_out: BTreeSet::new(),
            answers: Vec::new(),
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
        let details = |name: &StdPath| {
            let watched = self.watched.get(name)?;
            Some(PathDetails {
                last_error: watched.last_error.clone(),
                failed_by_operator: watched.checker.is_failed_by_operator(),
                quarantined_until_ns: watched.checker.quarantined_until_ns(now_ns),
            })
        };
        status::of(&self.spec, &table, details, now_ns)
    }

    /// Answers that have become ready: the token of the command, and the text.
    pub fn take_answers(&mut self) -> Vec<(u64, String)> {
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
        if self.failback.is_due(now_ns) {
            self.fail_back(&table);
        }
        let next_ns = next_ns.min(self.failback.next_ns().unwrap_or(u64::MAX));
        let next_ns = next_ns.min(self.close_unused(now_ns)).min(self.give_up_adding(now_ns));
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
        for path in table.paths() {
            let Some(watched) = self.watched.get_mut(path.name()) else { continue };
            if !path.is_active() && watched.checker.is_active() {
                watched.checker.failed(now_ns);
                if let Some(until_ns) = watched.checker.quarantined_until_ns(now_ns) {
                    let hold_s = (until_ns - now_ns) / 1_000_000_000;
                    log::warn!("path quarantined: path={} seconds={hold_s}", path.name().display());
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
                fail(table, index, watched, "its probe gives no answer", now_ns);
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
                    watched.refused = Some(why.clone());
                }
                if watched.checker.end(now_ns, false, is_last) == CheckerVerdict::Fail {
                    fail(&table, index, watched, &why, now_ns);
                }
                watched.last_error = Some(why);
                return;
            }
        };
        match (watched.checker.end(now_ns, true, is_last), new) {
            (CheckerVerdict::Reinstate, Some(new)) => self.reinstate(&table, new, now_ns),
            // It was active when the probe began, so it was not opened anew.
            (CheckerVerdict::Reinstate, None) => watched.checker.suspected(now_ns),
            _ => {}
        }
    }

    /// Puts a path that was opened anew in the place of the old one, if it proves to be the same disk.
    fn reinstate(&mut self, table: &Table, new: Arc<Path>, now_ns: u64) {
        if let Err(why) = self.check(&new) {
            return self.refuse(&new, why, now_ns);
        }
        let name = new.name().to_owned();
        if let Some(old) = table.paths().iter().find(|p| p.name() == name) {
            self.closing.push(Closing { path: Arc::clone(old), probe_id: 0, waiting: None });
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
        if let Some(watched) = self.watched.get_mut(&name) {
            watched.checker.reinstated(now_ns);
            (watched.refused, watched.last_error) = (None, None);
        }
        let nr_active = table.nr_active();
        log::info!("path reinstated: path={} group={} active={nr_active}", name.display(), group + 1);
        if let Some(best) = table.best_group()
            && self.failback.path_up(now_ns, group, first, best, table.map().current_group())
        {
            self.fail_back(&table);
        }
    }

    fn check(&self, new: &Path) -> Result<(), String> {
        let (limits, known) = (new.limits(), &self.limits);
        if limits.size_bytes != known.size_bytes {
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
        self.disk.table().publish(table);
        Ok(())
    }

    fn note_group(&mut self, table: &Table, now_ns: u64) {
        let group = table.current_group();
        if group != self.group_seen {
            let number = |g: Option<usize>| g.map_or_else(|| "none".to_owned(), |g| (g + 1).to_string());
            log::warn!("group switched: from={} to={}", number(self.group_seen), number(group));
            if group.is_none() {
                // Whatever was held back is needed now.
                self.watched.values_mut().for_each(|watched| watched.checker.suspected(now_ns));
                log::error!("no path: requests are held, no_path_retry={}", self.disk.map().no_path_retry());
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

/// Takes a path out for a reason that no request met.
fn fail(table: &Table, index: usize, watched: &mut Watched, why: &str, now_ns: u64) {
    if let FailOutcome::Failed { nr_active } = table.fail_path(index, now_ns) {
        let name = table.paths()[index].name().display();
        let group = table.group_of(index) + 1;
        log::warn!("path failed: path={name} group={group} reason={why} active={nr_active}");
    }
    watched.checker.failed(now_ns);
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
mod hang;
