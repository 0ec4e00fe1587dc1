//! A worker's own view of the paths: one [`Lane`] per path, one [`View`] per table.
//!
//! Both are held through `Rc`, so that a request holds its path without a write that another worker sees. A request in
//! flight holds its lane and not its table: a path that was removed is closed when its own requests are done, whatever
//! happens on the others.

use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use polypath_paths::stats::IoStats;
use polypath_paths::{Path, Table};
use polypath_selector::PathLoad;

/// One path as one worker sees it.
#[derive(Debug)]
pub struct Lane {
    path: Arc<Path>,
    worker: usize,
    load: Cell<PathLoad>,
    /// Most I/Os of this worker that are in flight there before what can merge waits.
    depth: Cell<u32>,
    /// Place of its file among those that the worker's ring knows.
    file_place: Cell<Option<u32>>,
    /// Whether the worker's view has it no more.
    has_left: Cell<bool>,
}

impl Lane {
    fn new(path: Arc<Path>, worker: usize) -> Self {
        Self {
            path,
            worker,
            load: Cell::new(PathLoad::default()),
            depth: Cell::new(u32::MAX),
            file_place: Cell::new(None),
            has_left: Cell::new(false),
        }
    }

    /// Where the worker's ring has its file registered.
    pub fn file_place(&self) -> Option<u32> {
        self.file_place.get()
    }

    /// Its file is registered there, for as long as the lane lives.
    pub fn set_file_place(&self, place: u32) {
        self.file_place.set(Some(place));
    }

    /// Whether it is no more in the view of its worker: no new request will use it.
    pub fn has_left(&self) -> bool {
        self.has_left.get()
    }

    /// What this worker has done there.
    pub fn stats(&self) -> &IoStats {
        self.path.stats().of(self.worker)
    }

    /// The path.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// What this worker has in flight there.
    pub fn load(&self) -> PathLoad {
        self.load.get()
    }

    /// Most I/Os of this worker that may be in flight there before what can merge waits.
    pub fn depth(&self) -> u32 {
        self.depth.get()
    }

    /// It is so many from now on.
    pub fn set_depth(&self, depth: u32) {
        self.depth.set(depth);
    }

    /// One more I/O of so many bytes is in flight.
    pub fn add(&self, bytes: u64) -> PathLoad {
        let load = self.load.get();
        self.set(PathLoad { in_flight: load.in_flight + 1, bytes: load.bytes + bytes })
    }

    /// It has come back.
    pub fn subtract(&self, bytes: u64) -> PathLoad {
        let load = self.load.get();
        self.set(PathLoad {
            in_flight: load.in_flight.saturating_sub(1),
            bytes: load.bytes.saturating_sub(bytes),
        })
    }

    fn set(&self, load: PathLoad) -> PathLoad {
        self.load.set(load);
        load
    }
}

/// A worker's hold on a view.
pub type Snapshot = Rc<View>;

/// One table with this worker's lanes, by the table's index of the path. A path that is in several groups has one lane.
#[derive(Debug)]
pub struct View {
    table: Arc<Table>,
    lanes: Box<[Rc<Lane>]>,
}

impl View {
    /// A worker's view of a table; lanes of paths that `before` has as well go on.
    pub fn new(table: Arc<Table>, before: Option<&View>, worker: usize) -> Self {
        let mut lanes: Vec<Rc<Lane>> = Vec::with_capacity(table.paths().len());
        for path in table.paths() {
            let old = before.map(|view| &view.lanes[..]).unwrap_or_default();
            let known = lanes.iter().chain(old).find(|lane| Arc::ptr_eq(&lane.path, path));
            let lane = known.map_or_else(|| Rc::new(Lane::new(Arc::clone(path), worker)), Rc::clone);
            lanes.push(lane);
        }
        for old in before.into_iter().flat_map(View::lanes) {
            old.has_left.set(!lanes.iter().any(|lane| Rc::ptr_eq(lane, old)));
        }
        Self { table, lanes: lanes.into() }
    }

    /// The table as it was published.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The lane of the path with this index.
    pub fn lane(&self, index: usize) -> Option<&Rc<Lane>> {
        self.lanes.get(index)
    }

    /// All lanes, by index of the path.
    pub fn lanes(&self) -> &[Rc<Lane>] {
        &self.lanes
    }

    /// Index of a lane, if its path is in this table.
    pub fn index_of(&self, lane: &Rc<Lane>) -> Option<usize> {
        self.lanes.iter().position(|own| Rc::ptr_eq(own, lane))
    }
}

impl Deref for View {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}
