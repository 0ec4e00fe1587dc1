//! Which path a request goes down, and what the worker has in flight on each.

use std::rc::Rc;
use std::sync::Arc;

use polypath_paths::failover::Work;
use polypath_paths::{FailOutcome, Table, TableCell, TableReader};
use polypath_selector::{
    Direction, GroupArgs, Kind, Load, NewError, Outcome, PathArgs, PathLoad, PathSet, Request, Selector,
    Ticket,
};

use crate::transfer::{Snapshot, Transfer};

/// One worker's view of the paths.
#[derive(Debug)]
pub struct Dispatcher {
    reader: TableReader,
    snapshot: Snapshot,
    selector: Selector,
    usable: PathSet,
    load: Loads,
    worker: usize,
    /// Whether the selector looks at loads at all.
    weighs_load: bool,
}

#[derive(Debug)]
struct Loads {
    own: Vec<PathLoad>,
    others: Vec<PathLoad>,
}

impl Load for Loads {
    fn in_flight(&self, path: usize) -> u32 {
        self.own[path].in_flight.saturating_add(self.others[path].in_flight)
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self.own[path].bytes.saturating_add(self.others[path].bytes)
    }
}

impl Dispatcher {
    /// For the worker with this index.
    pub fn new(cell: &TableCell, kind: Kind, worker: usize) -> Result<Self, NewError> {
        let mut reader = cell.reader();
        let table = Arc::clone(reader.load());
        let nr_paths = table.paths().len();
        let args: Vec<_> = (0..nr_paths).map(|path| PathArgs::for_path(kind, path, nr_paths)).collect();
        let none = vec![PathLoad::default(); nr_paths];
        Ok(Self {
            reader,
            selector: Selector::new(kind, &GroupArgs::default(), &args, worker)?,
            usable: PathSet::full(nr_paths),
            load: Loads { own: none.clone(), others: none },
            snapshot: Rc::new(table),
            worker,
            weighs_load: !matches!(kind, Kind::RoundRobin | Kind::IoAffinity),
        })
    }

    /// Once per batch: takes a snapshot of the table, and looks what the other workers (the first `nr_workers`) hold.
    pub fn begin_batch(&mut self, nr_workers: usize) {
        let current = self.reader.load();
        if !Arc::ptr_eq(current, &self.snapshot) {
            self.snapshot = Rc::new(Arc::clone(current));
        }
        for (index, path) in self.snapshot.paths().iter().enumerate() {
            // Another worker may have taken a path out.
            match (path.is_active(), self.usable.contains(index)) {
                (false, true) => {
                    self.usable.remove(index);
                    self.selector.fail_path(index);
                }
                (true, false) => {
                    self.usable.insert(index);
                    self.selector.reinstate_path(index);
                }
                _ => {}
            }
            if self.weighs_load && nr_workers > 1 {
                self.load.others[index] = path.gauges().sum_of_others(self.worker, nr_workers);
            }
        }
    }

    /// The snapshot of this batch.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Chooses a path for what the transfer has left to do. None if every usable path has failed it.
    pub fn choose(&mut self, transfer: &Transfer, now_ns: u64) -> Option<usize> {
        let request = self.request(transfer, now_ns);
        let tried = transfer.tried();
        if tried == 0 {
            return self.selector.select(&request, &self.usable, &self.load);
        }
        let mut usable = self.usable.clone();
        (0..64).filter(|path| tried & 1 << path != 0).for_each(|path| usable.remove(path));
        self.selector.select(&request, &usable, &self.load)
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
        let (path, bytes) = (transfer.path_index(), transfer.nr_bytes());
        let request = self.request(transfer, now_ns);
        let ticket = self.selector.start_io(path, &request, &self.load);
        let load = &mut self.load.own[path];
        load.in_flight += 1;
        load.bytes += bytes;
        self.show(path);
        transfer.ticket = Some((ticket, bytes));
    }

    /// It has come back.
    pub fn end_io(&mut self, transfer: &mut Transfer) -> Option<Ticket> {
        let (ticket, bytes) = transfer.ticket.take()?;
        let path = transfer.path_index();
        let load = &mut self.load.own[path];
        load.in_flight = load.in_flight.saturating_sub(1);
        load.bytes = load.bytes.saturating_sub(bytes);
        self.show(path);
        Some(ticket)
    }

    /// What the selector is to learn from it.
    pub fn learn(&mut self, ticket: Ticket, now_ns: u64, outcome: Outcome) {
        self.selector.end_io(ticket, now_ns, outcome);
    }

    fn show(&self, path: usize) {
        if self.weighs_load
            && let Some(shared) = self.snapshot.paths().get(path)
        {
            shared.gauges().show(self.worker, self.load.own[path]);
        }
    }

    /// Takes a path out after a path error, and says so once.
    pub fn fail_path(&mut self, table: &Table, index: usize, errno: i32) {
        let Some(path) = table.paths().get(index) else { return };
        let name = path.name().display();
        let errno = nix::errno::Errno::from_raw(errno);
        match table.fail_path(index) {
            FailOutcome::Failed { nr_active } => {
                log::warn!("path failed: path={name} errno={errno:?} active={nr_active}");
            }
            FailOutcome::Last if path.note_error() => {
                log::warn!("path error: path={name} errno={errno:?} active=1, the last path stays in use");
            }
            FailOutcome::Last | FailOutcome::Already => {}
        }
        if !path.is_active() && self.usable.contains(index) {
            self.usable.remove(index);
            self.selector.fail_path(index);
        }
    }
}
