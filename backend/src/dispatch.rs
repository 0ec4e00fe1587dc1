//! Which path a request goes down, and what the worker has in flight on each.

use std::rc::Rc;
use std::sync::Arc;

use polypath_paths::failover::Work;
use polypath_paths::stats::IoKind;
use polypath_paths::{FailOutcome, PATHS_MAX, Table, TableCell, TableReader};
use polypath_selector::{
    Direction, Kind, Load, NewError, Outcome, PathArgs, PathLoad, PathSet, Request, Selector,
};

use crate::lane::{Lane, Snapshot, View};
use crate::transfer::Transfer;

/// One worker's way to the paths.
#[derive(Debug)]
pub struct Dispatcher {
    reader: TableReader,
    snapshot: Snapshot,
    /// The state of the map that the snapshot was looked at in.
    epoch: u64,
    groups: Vec<GroupView>,
    current: Option<usize>,
    /// Loads of all other workers, by index of the path.
    others: Vec<PathLoad>,
    worker: usize,
    /// Most I/Os in flight on one path before merged requests wait, and how many workers share what a device takes.
    depth_max: u32,
    nr_sharers: u32,
    /// Whether any selector looks at loads.
    weighs_load: bool,
    /// Whether some path is in several groups.
    has_twins: bool,
    /// Whether the snapshot was replaced lately.
    is_new_view: bool,
}

/// Where a request can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// This path, as an index in the snapshot's table.
    Path(usize),
    /// Nowhere until something comes back.
    Full,
    /// No path is active, or every active one has refused it.
    Nowhere,
}

#[derive(Debug)]
struct GroupView {
    selector: Selector,
    /// Paths that are active.
    usable: PathSet,
    /// Whether the selector has something to show that nobody else knows.
    learns: bool,
    /// Those of them that take more.
    open: PathSet,
    /// A request belongs to one path: it waits for it, and goes to no other because that one is full.
    is_bound: bool,
}

/// Loads of a group, by index in the group.
struct GroupLoad<'a> {
    own: &'a [Rc<Lane>],
    others: &'a [PathLoad],
}

impl Load for GroupLoad<'_> {
    fn in_flight(&self, path: usize) -> u32 {
        self.own[path].load().in_flight.saturating_add(self.others[path].in_flight)
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self.own[path].load().bytes.saturating_add(self.others[path].bytes)
    }
}

fn group_load<'a>(snapshot: &'a Snapshot, others: &'a [PathLoad], first: usize) -> GroupLoad<'a> {
    GroupLoad {
        own: snapshot.lanes().get(first..).unwrap_or_default(),
        others: others.get(first..).unwrap_or_default(),
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
            open: PathSet::full(args.len()),
            is_bound: group.selector == Kind::IoAffinity,
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

/// I/Os that a path has always room for, however many workers share it.
const SHARE_MIN: u32 = 4;

/// Most I/Os that one of `nr_sharers` workers has in flight on a path that takes `nr_requests`, and never more than
/// `depth_max`.
fn depth_of(nr_requests: Option<u32>, depth_max: u32, nr_sharers: u32) -> u32 {
    let share = nr_requests.map(|nr| (nr / nr_sharers).max(SHARE_MIN));
    share.map_or(depth_max, |share| share.min(depth_max))
}

impl Dispatcher {
    /// For the worker with this index. `depth_max` is the most I/Os that it has in flight on one path; what can be merged
    /// waits beyond that.
    pub fn new(cell: &TableCell, worker: usize, depth_max: u32) -> Result<Self, NewError> {
        let mut reader = cell.reader();
        let table = Arc::clone(reader.load());
        Ok(Self {
            reader,
            epoch: 0,
            groups: make_groups(&table, worker)?,
            current: None,
            others: vec![PathLoad::default(); table.paths().len()],
            worker,
            depth_max,
            nr_sharers: 1,
            weighs_load: weighs_load(&table),
            has_twins: has_twins(&table),
            snapshot: Rc::new(View::new(table, None, worker)),
            is_new_view: false,
        })
    }

    /// So many workers, this one among them, have something to do: each takes its share of what a device has room for.
    pub fn share_with(&mut self, nr_sharers: u32) {
        let nr_sharers = nr_sharers.max(1);
        if std::mem::replace(&mut self.nr_sharers, nr_sharers) != nr_sharers {
            self.refresh();
        }
    }

    /// Once per batch: takes a snapshot of the table, and looks what the other workers (the first `nr_workers`) hold.
    pub fn begin_batch(&mut self, nr_workers: usize) {
        self.catch_up();
        if self.weighs_load && nr_workers > 1 {
            for (others, path) in self.others.iter_mut().zip(self.snapshot.paths()) {
                *others = path.gauges().sum_of_others(self.worker, nr_workers);
            }
        }
    }

    /// Takes notice of what has changed. Called after requests were taken and before they are sent, so that what the guest
    /// asked for after a path was taken out does not go there.
    pub fn catch_up(&mut self) {
        // Everything that could be seen to have changed has changed this number.
        if self.snapshot.map().epoch() != self.epoch {
            self.refresh();
        }
    }

    /// Whether nothing has changed since then.
    pub fn is_up_to_date(&self) -> bool {
        self.snapshot.map().epoch() == self.epoch
    }

    /// Looks at the table, the groups and the health of the paths anew.
    fn refresh(&mut self) {
        self.epoch = self.snapshot.map().epoch();
        let table = Arc::clone(self.reader.load());
        if !Arc::ptr_eq(&table, self.snapshot.table()) {
            self.take_over(table);
        }
        for (index, lane) in self.snapshot.lanes().iter().enumerate() {
            let group = self.snapshot.group_of(index);
            let local = index - self.snapshot.first_of(group);
            let Some(view) = self.groups.get_mut(group) else { continue };
            match (lane.path().is_active(), view.usable.contains(local)) {
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
            lane.set_depth(depth_of(lane.path().limits().nr_requests, self.depth_max, self.nr_sharers));
            view.set_open(local, lane.load().in_flight < lane.depth());
        }
        self.current = self.snapshot.current_group();
    }

    /// Puts a new table in place: loads go on where the path is the same, learned times where its name is.
    fn take_over(&mut self, table: Arc<Table>) {
        // Such a table is not published (check_selectors).
        let Ok(mut groups) = make_groups(&table, self.worker) else { return };
        for (old_index, path) in self.snapshot.paths().iter().enumerate() {
            let old_group = self.snapshot.group_of(old_index);
            let old_local = old_index - self.snapshot.first_of(old_group);
            let heir = table.paths().iter().position(|p| p.name() == path.name());
            if let (Some(heir), Some(old)) = (heir, self.groups.get(old_group)) {
                let group = table.group_of(heir);
                groups[group].selector.inherit(heir - table.first_of(group), &old.selector, old_local);
            }
        }
        self.others = vec![PathLoad::default(); table.paths().len()];
        self.groups = groups;
        self.weighs_load = weighs_load(&table);
        self.has_twins = has_twins(&table);
        self.snapshot = Rc::new(View::new(table, Some(&self.snapshot), self.worker));
        self.is_new_view = true;
    }

    /// Whether there is another snapshot than at the last call.
    pub fn take_new_view(&mut self) -> bool {
        std::mem::take(&mut self.is_new_view)
    }

    /// The snapshot of this batch.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Chooses a path for a request of so many bytes that can wait: a path that is full is none.
    pub fn choose_open(&mut self, bytes: u64, direction: Direction, now_ns: u64) -> Choice {
        let request = Request { bytes, direction, queue: self.worker, now_ns };
        let Some(group) = self.current else { return Choice::Nowhere };
        let first = self.snapshot.first_of(group);
        let Some(view) = self.groups.get_mut(group) else { return Choice::Nowhere };
        let load = group_load(&self.snapshot, &self.others, first);
        let candidates = if view.is_bound { &view.usable } else { &view.open };
        match view.selector.select(&request, candidates, &load) {
            Some(local) if view.open.contains(local) => Choice::Path(first + local),
            Some(_) => Choice::Full,
            None if view.usable.is_empty() => Choice::Nowhere,
            None => Choice::Full,
        }
    }

    /// Chooses a path for what the transfer has left to do, however full it is.
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
        let load = group_load(&self.snapshot, &self.others, first);
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
        let Some(lane) = transfer.lane().map(Rc::clone) else { return };
        transfer.sent_work = transfer.work();
        transfer.sent_ns = now_ns;
        transfer.sent_bytes = bytes;
        transfer.sent_range_bytes = transfer.step_range_bytes();
        transfer.sent_path = transfer.path_index();
        if transfer.is_of(&self.snapshot) {
            let index = transfer.sent_path;
            let group = self.snapshot.group_of(index);
            let first = self.snapshot.first_of(group);
            let request = self.request(transfer, now_ns);
            if let Some(view) = self.groups.get_mut(group) {
                let load = group_load(&self.snapshot, &self.others, first);
                transfer.ticket = Some(view.selector.start_io(index - first, &request, &load));
            }
        }
        let load = lane.add(bytes);
        if load.in_flight == 1 {
            lane.path().gauges().note_first(self.worker, now_ns);
        }
        if load.in_flight == lane.depth() {
            self.set_open(&lane, false);
        }
        lane.path().gauges().show(self.worker, load);
        transfer.sent_lane = Some(lane);
    }

    /// A path has become full, or takes more again.
    fn set_open(&mut self, lane: &Rc<Lane>, is_open: bool) {
        for (index, own) in self.snapshot.lanes().iter().enumerate() {
            if !Rc::ptr_eq(own, lane) {
                continue;
            }
            let group = self.snapshot.group_of(index);
            let local = index - self.snapshot.first_of(group);
            if let Some(view) = self.groups.get_mut(group) {
                view.set_open(local, is_open);
            }
            if !self.has_twins {
                return;
            }
        }
    }

    /// It has come back. `outcome` is what the selector learns from it.
    pub fn end_io(&mut self, transfer: &mut Transfer, now_ns: u64, outcome: Outcome) {
        let Some(lane) = transfer.sent_lane.take() else { return };
        let load = lane.subtract(transfer.sent_bytes);
        let kind = kind_of(transfer.sent_work);
        match outcome {
            Outcome::Success => {
                let ns = now_ns.saturating_sub(transfer.sent_ns);
                let bytes = transfer.sent_bytes + transfer.sent_range_bytes;
                lane.stats().record(kind, 1 + transfer.nr_members(), bytes, ns);
            }
            _ => lane.stats().record_error(kind),
        }
        lane.path().gauges().note_progress(self.worker, now_ns);
        lane.path().gauges().show(self.worker, load);
        if load.in_flight + 1 == lane.depth() {
            self.set_open(&lane, true);
        }
        // A ticket names its path by the index that it had; only the view that gave it knows it.
        if let Some(ticket) = transfer.ticket.take()
            && transfer.is_of(&self.snapshot)
            && let group = self.snapshot.group_of(transfer.sent_path)
            && let Some(view) = self.groups.get_mut(group)
        {
            view.selector.end_io(ticket, now_ns, outcome);
            if view.learns {
                let first = self.snapshot.first_of(group);
                let load = group_load(&self.snapshot, &self.others, first);
                let info = view.selector.info(transfer.sent_path - first, &load);
                lane.path().gauges().show_learned(self.worker, info.learned());
            }
        }
    }

    /// Takes the path that a transfer was on out after a path error, and says so once.
    pub fn fail_path(&mut self, transfer: &Transfer, errno: i32, now_ns: u64) {
        let Some(lane) = transfer.lane() else { return };
        lane.path().note_errno(errno);
        if let FailOutcome::Failed { nr_active } = self.snapshot.fail(lane.path(), now_ns)
            && let Some(index) = self.snapshot.index_of(lane)
        {
            log::warn!(
                "path failed: path={} group={} errno={:?} active={nr_active}",
                lane.path().name().display(),
                self.snapshot.group_of(index) + 1,
                nix::errno::Errno::from_raw(errno),
            );
        }
        self.refresh();
    }

    /// Shows since when the oldest request on each path is out, of those that `visit` shows.
    pub fn show_oldest(&self, now_ns: u64, visit: impl Fn(&mut dyn FnMut(&Transfer))) {
        let mut oldest_ns = [now_ns; PATHS_MAX];
        visit(&mut |transfer| {
            let index = transfer.lane().and_then(|lane| self.snapshot.index_of(lane));
            if let Some(oldest_ns) = index.and_then(|index| oldest_ns.get_mut(index)) {
                *oldest_ns = transfer.sent_ns.min(*oldest_ns);
            }
        });
        for (path, oldest_ns) in self.snapshot.paths().iter().zip(oldest_ns) {
            path.gauges().note_oldest(self.worker, oldest_ns, now_ns);
        }
    }

    /// A write was completed on a path that is not in the table, or not any more: all paths of it have to be flushed. One
    /// would do for the LUN; but it may lead where the path of before did, under the same name.
    pub fn note_foreign_write(&self) {
        self.snapshot.paths().iter().for_each(|path| path.ledger().note_write(self.worker));
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

fn kind_of(work: Work) -> IoKind {
    match work {
        Work::Read => IoKind::Read,
        Work::Write => IoKind::Write,
        Work::Flush => IoKind::Flush,
        Work::Discard | Work::WriteZeroes => IoKind::Discard,
    }
}

impl GroupView {
    /// Whether a path takes more; one that is not active does not.
    fn set_open(&mut self, local: usize, is_open: bool) {
        if is_open && self.usable.contains(local) {
            self.open.insert(local);
        } else {
            self.open.remove(local);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::fixture::{Links, table_of};

    #[test]
    fn a_devices_room_is_shared_by_the_workers_that_are_busy() {
        let of = |nr_sharers| depth_of(Some(128), 128, nr_sharers);
        assert_eq!([1, 2, 3, 4, 32, 64].map(of), [128, 64, 42, 32, 4, 4]);
        assert_eq!(depth_of(Some(1023), 128, 4), 128, "no more than was asked for");
        assert_eq!(depth_of(Some(128), 3, 64), 3);
        assert_eq!(depth_of(None, 128, 64), 128, "what has no such queue has no such bound");
    }

    #[test]
    fn a_share_that_changes_counts_at_once() {
        let links = Links::new(2, 1 << 20);
        let paths = [links.path_with_room(0, 32, 4), links.path_with_room(1, 64, 4)];
        let cell = TableCell::new(table_of(paths.into_iter(), 4));
        let mut dispatcher = Dispatcher::new(&cell, 0, 24).unwrap();
        dispatcher.begin_batch(1);
        let lanes: Vec<_> = dispatcher.snapshot().lanes().to_vec();
        let depths = || [lanes[0].depth(), lanes[1].depth()];
        assert_eq!(depths(), [24, 24]);
        lanes.iter().for_each(|lane| (0..12).for_each(|_| _ = lane.add(4096)));
        let chosen = |dispatcher: &mut Dispatcher| {
            let mut all = [0, 1].map(|_| dispatcher.choose_open(4096, Direction::Read, 0));
            all.sort_by_key(|choice| format!("{choice:?}"));
            all
        };
        assert_eq!(chosen(&mut dispatcher), [Choice::Path(0), Choice::Path(1)]);
        // 16 of 32 and 24 of 64; 10 and 21; 8 and 16.
        for (nr_sharers, all) in [
            (2, [Choice::Path(0), Choice::Path(1)]),
            (3, [Choice::Path(1); 2]),
            (4, [Choice::Path(1); 2]),
            (16, [Choice::Full; 2]),
            (0, [Choice::Path(0), Choice::Path(1)]),
        ] {
            dispatcher.share_with(nr_sharers);
            assert_eq!(chosen(&mut dispatcher), all, "{nr_sharers}");
        }
    }
}
