//! Which path a request goes down, and what the worker has in flight on each.

use std::rc::Rc;
use std::sync::Arc;

use polypath_paths::failover::Work;
use polypath_paths::{FailOutcome, PATHS_MAX, Path, Table, TableCell, TableReader};
use polypath_selector::{
    Direction, Kind, Load, NewError, Outcome, PathArgs, PathLoad, PathSet, Request, Selector,
};

use crate::transfer::{Snapshot, Transfer};

/// One worker's view of the paths.
#[derive(Debug)]
pub struct Dispatcher {
    reader: TableReader,
    snapshot: Snapshot,
    /// The state of the map that this view was made at.
    epoch: u64,
    groups: Vec<GroupView>,
    current: Option<usize>,
    load: Loads,
    /// Paths of older tables that still have I/O of this worker in flight.
    retired: Vec<(Arc<Path>, PathLoad)>,
    worker: usize,
    /// Whether any selector looks at loads.
    weighs_load: bool,
    /// Whether some path is in several groups.
    has_twins: bool,
}

#[derive(Debug)]
struct GroupView {
    selector: Selector,
    usable: PathSet,
    /// Whether the selector has something to show that nobody else knows.
    learns: bool,
}

/// Loads of all paths of the table, by index in it.
#[derive(Debug, Default)]
struct Loads {
    own: Vec<PathLoad>,
    others: Vec<PathLoad>,
}

/// The part of a group, by index in the group.
struct GroupLoad<'a> {
    own: &'a [PathLoad],
    others: &'a [PathLoad],
}

impl Loads {
    fn of_group(&self, first: usize) -> GroupLoad<'_> {
        GroupLoad {
            own: self.own.get(first..).unwrap_or_default(),
            others: self.others.get(first..).unwrap_or_default(),
        }
    }
}

impl Load for GroupLoad<'_> {
    fn in_flight(&self, path: usize) -> u32 {
        self.own[path].in_flight.saturating_add(self.others[path].in_flight)
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self.own[path].bytes.saturating_add(self.others[path].bytes)
    }
}

/// Whether the selectors of this table can be made: found out before a table is published.
pub fn check_selectors(table: &Table) -> Result<(), NewError> {
    make_groups(table, 0).map(drop)
}

fn make_groups(table: &Table, worker: usize) -> Result<Vec<GroupView>, NewError> {
    let view = |group: &polypath_paths::Group| {
        let args: Vec<PathArgs> = group.paths.iter().map(|(_, args)| args.clone()).collect();
        Ok(GroupView {
            selector: Selector::new(group.selector, &group.args, &args, worker)?,
            usable: PathSet::full(args.len()),
            learns: !matches!(group.selector, Kind::RoundRobin | Kind::QueueLength | Kind::ServiceTime),
        })
    };
    table.groups().iter().map(view).collect()
}

/// Whether some path is in several groups.
fn has_twins(table: &Table) -> bool {
    let paths = table.paths();
    paths.iter().enumerate().any(|(i, path)| paths.iter().skip(i + 1).any(|other| Arc::ptr_eq(path, other)))
}

fn weighs_load(table: &Table) -> bool {
    table.groups().iter().any(|g| !matches!(g.selector, Kind::RoundRobin | Kind::IoAffinity))
}

impl Dispatcher {
    /// For the worker with this index.
    pub fn new(cell: &TableCell, worker: usize) -> Result<Self, NewError> {
        let mut reader = cell.reader();
        let table = Arc::clone(reader.load());
        let none = vec![PathLoad::default(); table.paths().len()];
        Ok(Self {
            reader,
            epoch: 0,
            groups: make_groups(&table, worker)?,
            current: None,
            load: Loads { own: none.clone(), others: none },
            retired: Vec::new(),
            worker,
            weighs_load: weighs_load(&table),
            has_twins: has_twins(&table),
            snapshot: Rc::new(table),
        })
    }

    /// Once per batch: takes a snapshot of the table, and looks what the other workers (the first `nr_workers`) hold.
    pub fn begin_batch(&mut self, nr_workers: usize) {
        // Everything that could be seen to have changed has changed this number.
        if self.snapshot.map().epoch() != self.epoch {
            self.refresh();
        }
        if self.weighs_load && nr_workers > 1 {
            for (others, path) in self.load.others.iter_mut().zip(self.snapshot.paths()) {
                *others = path.gauges().sum_of_others(self.worker, nr_workers);
            }
        }
    }

    /// Looks at the table, the groups and the health of the paths anew.
    fn refresh(&mut self) {
        self.epoch = self.snapshot.map().epoch();
        let table = Arc::clone(self.reader.load());
        if !Arc::ptr_eq(&table, &self.snapshot) {
            self.take_over(table);
        }
        for (index, path) in self.snapshot.paths().iter().enumerate() {
            let group = self.snapshot.group_of(index);
            let local = index - self.snapshot.first_of(group);
            let Some(view) = self.groups.get_mut(group) else { continue };
            match (path.is_active(), view.usable.contains(local)) {
                (false, true) => {
                    view.usable.remove(local);
                    view.selector.fail_path(local);
                }
                (true, false) => {
                    view.usable.insert(local);
                    view.selector.reinstate_path(local);
                }
                _ => {}
            }
        }
        self.current = self.snapshot.current_group();
    }

    /// Puts a new table in place: loads go on where the path is the same, learned times where its name is.
    fn take_over(&mut self, table: Arc<Table>) {
        // Such a table is not published (check_selectors).
        let Ok(mut groups) = make_groups(&table, self.worker) else { return };
        let mut own = vec![PathLoad::default(); table.paths().len()];
        for (old_index, path) in self.snapshot.paths().iter().enumerate() {
            let load = self.load.own[old_index];
            match table.paths().iter().position(|p| Arc::ptr_eq(p, path)) {
                Some(_) => {
                    let twins = own.iter_mut().zip(table.paths());
                    twins.filter(|(_, p)| Arc::ptr_eq(p, path)).for_each(|(own, _)| *own = load);
                }
                None if load.in_flight != 0 => self.retired.push((Arc::clone(path), load)),
                None => {}
            }
            let old_group = self.snapshot.group_of(old_index);
            let old_local = old_index - self.snapshot.first_of(old_group);
            let heir = table.paths().iter().position(|p| p.name() == path.name());
            if let (Some(heir), Some(old)) = (heir, self.groups.get(old_group)) {
                let group = table.group_of(heir);
                groups[group].selector.inherit(heir - table.first_of(group), &old.selector, old_local);
            }
        }
        self.load = Loads { others: vec![PathLoad::default(); own.len()], own };
        self.groups = groups;
        self.weighs_load = weighs_load(&table);
        self.has_twins = has_twins(&table);
        self.snapshot = Rc::new(table);
    }

    /// The snapshot of this batch.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Chooses a path for what the transfer has left to do, as an index in the snapshot's table. None if no path is
    /// active, or every active one has refused it.
    pub fn choose(&mut self, transfer: &Transfer, now_ns: u64) -> Option<usize> {
        let request = self.request(transfer, now_ns);
        let tried = transfer.tried();
        if tried == 0 {
            return self.choose_in(self.current?, &request, 0);
        }
        // As when the group in use has no path left: in table order, bypassed ones last.
        let current = self.current;
        let snapshot = Rc::clone(&self.snapshot);
        let others = |bypassed: bool| {
            let groups = snapshot.groups().iter().enumerate();
            groups.filter(move |(g, group)| Some(*g) != current && group.bypassed == bypassed).map(|(g, _)| g)
        };
        let mut groups = current.into_iter().chain(others(false)).chain(others(true));
        groups.find_map(|group| self.choose_in(group, &request, tried))
    }

    fn choose_in(&mut self, group: usize, request: &Request, tried: u64) -> Option<usize> {
        let first = self.snapshot.first_of(group);
        let view = self.groups.get_mut(group)?;
        let load = self.load.of_group(first);
        let has_tried = |usable: &PathSet, l: &usize| tried >> (first + l) & 1 == 1 && usable.contains(*l);
        let local = if tried == 0 {
            view.selector.select(request, &view.usable, &load)
        } else {
            // Those that have refused it are left out for this choice.
            let nr_paths = view.usable.nr_paths();
            let out = (0..nr_paths).filter(|l| has_tried(&view.usable, l)).fold(0_u64, |out, l| out | 1 << l);
            (0..nr_paths).filter(|l| out >> l & 1 == 1).for_each(|l| view.usable.remove(l));
            let local = view.selector.select(request, &view.usable, &load);
            (0..nr_paths).filter(|l| out >> l & 1 == 1).for_each(|l| view.usable.insert(l));
            local
        };
        local.map(|local| first + local)
    }

    fn request(&self, transfer: &Transfer, now_ns: u64) -> Request {
        let direction = match transfer.work() {
            Work::Read => Direction::Read,
            Work::Write => Direction::Write,
            Work::Flush | Work::Discard | Work::WriteZeroes => Direction::Other,
        };
        Request { bytes: transfer.nr_bytes(), direction, queue: self.worker, now_ns }
    }

    /// The transfer's next step goes out on its path.
    pub fn start_io(&mut self, transfer: &mut Transfer, now_ns: u64) {
        let bytes = transfer.nr_bytes();
        let request = self.request(transfer, now_ns);
        transfer.sent_ns = now_ns;
        transfer.sent_bytes = bytes;
        transfer.sent_path = transfer.path_index();
        let Some(index) = self.index_of(transfer) else {
            // A step of a transfer that began under an older table and stays on its path.
            self.retire(transfer, bytes, now_ns);
            return;
        };
        let group = self.snapshot.group_of(index);
        let first = self.snapshot.first_of(group);
        if let Some(view) = self.groups.get_mut(group) {
            transfer.ticket =
                Some(view.selector.start_io(index - first, &request, &self.load.of_group(first)));
        }
        self.change_load(index, |load| {
            load.in_flight += 1;
            load.bytes += bytes;
        });
        let load = &self.load.own[index];
        let path = &self.snapshot.paths()[index];
        if load.in_flight == 1 {
            path.gauges().note_first(self.worker, now_ns);
        }
        path.gauges().show(self.worker, *load);
    }

    /// Changes the load of a path, wherever it stands in the table.
    fn change_load(&mut self, index: usize, change: impl Fn(&mut PathLoad)) {
        if !self.has_twins {
            return change(&mut self.load.own[index]);
        }
        let paths = self.snapshot.paths();
        for (load, path) in self.load.own.iter_mut().zip(paths) {
            if Arc::ptr_eq(path, &paths[index]) {
                change(load);
            }
        }
    }

    fn retire(&mut self, transfer: &Transfer, bytes: u64, now_ns: u64) {
        let Some(path) = transfer.sent_path_arc() else { return };
        let known = self.retired.iter().position(|(p, _)| Arc::ptr_eq(p, path));
        let index = known.unwrap_or_else(|| {
            self.retired.push((Arc::clone(path), PathLoad::default()));
            self.retired.len() - 1
        });
        let (path, load) = &mut self.retired[index];
        load.in_flight += 1;
        load.bytes += bytes;
        path.gauges().note_progress(self.worker, now_ns);
        path.gauges().show(self.worker, *load);
    }

    /// It has come back. `outcome` is what the selector learns from it.
    pub fn end_io(&mut self, transfer: &mut Transfer, now_ns: u64, outcome: Outcome) {
        let bytes = transfer.sent_bytes;
        let less = |load: &mut PathLoad| {
            load.in_flight = load.in_flight.saturating_sub(1);
            load.bytes = load.bytes.saturating_sub(bytes);
        };
        let ticket = transfer.ticket.take();
        if let Some(index) = self.index_of(transfer) {
            self.change_load(index, less);
            let load = &self.load.own[index];
            let path = &self.snapshot.paths()[index];
            path.gauges().note_progress(self.worker, now_ns);
            path.gauges().show(self.worker, *load);
            let group = self.snapshot.group_of(index);
            // A ticket names its path by the index that it had; only the table that gave it knows it.
            let same_table = transfer.is_of(&self.snapshot);
            if let (Some(ticket), true, Some(view)) = (ticket, same_table, self.groups.get_mut(group)) {
                view.selector.end_io(ticket, now_ns, outcome);
                if view.learns {
                    let first = self.snapshot.first_of(group);
                    let info = view.selector.info(index - first, &self.load.of_group(first));
                    path.gauges().show_learned(self.worker, info.learned());
                }
            }
        } else if let Some(path) = transfer.sent_path_arc()
            && let Some(at) = self.retired.iter().position(|(p, _)| Arc::ptr_eq(p, path))
        {
            let (path, load) = &mut self.retired[at];
            less(load);
            path.gauges().note_progress(self.worker, now_ns);
            path.gauges().show(self.worker, *load);
            if load.in_flight == 0 {
                self.retired.swap_remove(at);
            }
        }
    }

    /// Index in the current table of the path that a transfer was sent by.
    fn index_of(&self, transfer: &Transfer) -> Option<usize> {
        if transfer.is_of(&self.snapshot) {
            return Some(transfer.sent_path);
        }
        let path = transfer.sent_path_arc()?;
        self.snapshot.paths().iter().position(|p| Arc::ptr_eq(p, path))
    }

    /// Takes the path that a transfer was on out after a path error, and says so once.
    pub fn fail_path(&mut self, transfer: &Transfer, errno: i32, now_ns: u64) {
        let Some(table) = transfer.table() else { return };
        let index = transfer.path_index();
        if let FailOutcome::Failed { nr_active } = table.fail_path(index, now_ns)
            && let Some(path) = table.paths().get(index)
        {
            log::warn!(
                "path failed: path={} group={} errno={:?} active={nr_active}",
                path.name().display(),
                table.group_of(index) + 1,
                nix::errno::Errno::from_raw(errno),
            );
        }
        self.refresh();
    }

    /// Shows since when the oldest request on each path is out, of those that `visit` shows.
    pub fn show_oldest(&self, now_ns: u64, visit: impl Fn(&mut dyn FnMut(&Transfer))) {
        let mut oldest_ns = [now_ns; PATHS_MAX];
        visit(&mut |transfer| {
            if let Some(oldest_ns) = self.index_of(transfer).and_then(|index| oldest_ns.get_mut(index)) {
                *oldest_ns = transfer.sent_ns.min(*oldest_ns);
            }
        });
        for (path, oldest_ns) in self.snapshot.paths().iter().zip(oldest_ns) {
            path.gauges().note_oldest(self.worker, oldest_ns, now_ns);
        }
    }

    /// A write was completed on a path that may not be in the table any more: some path of it has to be flushed.
    pub fn note_foreign_write(&self) {
        if let Some(path) = self.snapshot.paths().first() {
            path.ledger().note_write(self.worker);
        }
    }

    /// Whether some path of the current table is active.
    pub fn has_active_path(&self) -> bool {
        self.current.is_some()
    }

    /// Whether some path of the current table is not active.
    pub fn has_failed_path(&self) -> bool {
        self.snapshot.paths().iter().any(|p| !p.is_active())
    }
}
