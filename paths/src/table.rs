//! The set of paths in priority groups, immutable once published, and the cell it is published through.
//!
//! The rules of groups are dm-multipath's (`drivers/md/dm-mpath.c`, `choose_pgpath()`): a group stays in use until none
//! of its paths is active; then the groups are tried in table order, those that are bypassed last.

use std::sync::Arc;

use arc_swap::ArcSwap;
use polypath_selector::{GroupArgs, Kind, PathArgs};

use crate::identity::Identity;
use crate::limits::Limits;
use crate::map::MapState;
use crate::path::Path;

/// Most paths of one disk: a request remembers those that failed it as bits of one word.
pub const PATHS_MAX: usize = 64;

/// Why paths cannot form one disk.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// There is nothing to serve.
    #[error("no path given")]
    Empty,
    /// There are too many.
    #[error("{0} paths given, at most {PATHS_MAX} are possible")]
    TooMany(usize),
    /// Two paths lead to different LUNs.
    #[error("{name}: not the same disk as {first_name}: {identity} there, {first_identity} here", name = .0.name,
        identity = .0.identity, first_name = .0.first_name, first_identity = .0.first_identity)]
    Identity(Box<Mismatch>),
    /// Two paths show different sizes.
    #[error("{name}: size is {size_bytes} bytes, but {first_size_bytes} by {first_name}")]
    Size {
        /// The path that differs.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// The first path.
        first_name: String,
        /// The first path's size.
        first_size_bytes: u64,
    },
}

/// Two paths and the identities that they proved.
#[derive(Debug)]
pub struct Mismatch {
    name: String,
    identity: Identity,
    first_name: String,
    first_identity: Identity,
}

/// One priority group.
#[derive(Debug, Clone)]
pub struct Group {
    /// Its paths with their arguments for the selector.
    pub paths: Vec<(Arc<Path>, PathArgs)>,
    /// How one of them is chosen.
    pub selector: Kind,
    /// The selector's own arguments.
    pub args: GroupArgs,
    /// Used only if no other group has an active path.
    pub bypassed: bool,
}

/// What [`Table::fail_path`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailOutcome {
    /// Taken out now; so many active ones are left.
    Failed {
        /// Active paths left.
        nr_active: usize,
    },
    /// It was out already.
    Already,
}

/// An immutable set of paths that lead to one LUN.
#[derive(Debug)]
pub struct Table {
    groups: Vec<Group>,
    /// All paths in table order; a group's are neighbours.
    paths: Vec<Arc<Path>>,
    /// Group of each path, and the index of each group's first path.
    group_of: Vec<usize>,
    first_of: Vec<usize>,
    limits: Limits,
    map: Arc<MapState>,
}

impl Table {
    /// Checks that all paths lead to the same LUN and show the same size.
    pub fn new(groups: Vec<Group>, map: Arc<MapState>) -> Result<Self, TableError> {
        Self::with_limits(groups, map, None, false)
    }

    /// As [`Self::new`]; with the limits that the guest was already told, and, if `trusted`, without asking for proof.
    /// What the guest is not told (the alignment of its buffers) follows the paths.
    pub fn with_limits(
        groups: Vec<Group>,
        map: Arc<MapState>,
        limits: Option<Limits>,
        trusted: bool,
    ) -> Result<Self, TableError> {
        let (mut paths, mut group_of, mut first_of) = (Vec::new(), Vec::new(), Vec::new());
        for (index, group) in groups.iter().enumerate() {
            first_of.push(paths.len());
            paths.extend(group.paths.iter().map(|(path, _)| Arc::clone(path)));
            group_of.resize(paths.len(), index);
        }
        let first = paths.first().ok_or(TableError::Empty)?;
        if paths.len() > PATHS_MAX {
            return Err(TableError::TooMany(paths.len()));
        }
        for path in &paths {
            Self::check_identity(first, path, trusted)?;
            // Later, sizes may differ for a while: the guest was told one that all paths have.
            if limits.is_none() {
                Self::check_size(first, path)?;
            }
        }
        let strictest = Limits::strictest(paths.iter().map(|p| p.limits())).ok_or(TableError::Empty)?;
        let limits = match limits {
            Some(told) => Limits {
                mem_align_bytes: told.mem_align_bytes.max(strictest.mem_align_bytes),
                may_block: strictest.may_block,
                in_memory: strictest.in_memory,
                ..told
            },
            None => strictest,
        };
        Ok(Self { groups, paths, group_of, first_of, limits, map })
    }

    /// Whether `path` leads to where `first` does.
    fn check_identity(first: &Path, path: &Path, trusted: bool) -> Result<(), TableError> {
        if !trusted && path.identity() != first.identity() {
            return Err(TableError::Identity(Box::new(Mismatch {
                name: path.name().display().to_string(),
                identity: path.identity().clone(),
                first_name: first.name().display().to_string(),
                first_identity: first.identity().clone(),
            })));
        }
        Ok(())
    }

    /// Whether `path` shows the size that `first` does.
    fn check_size(first: &Path, path: &Path) -> Result<(), TableError> {
        if path.limits().size_bytes != first.limits().size_bytes {
            return Err(TableError::Size {
                name: path.name().display().to_string(),
                size_bytes: path.limits().size_bytes,
                first_name: first.name().display().to_string(),
                first_size_bytes: first.limits().size_bytes,
            });
        }
        Ok(())
    }

    /// The groups, in order of priority.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// All paths, in table order.
    pub fn paths(&self) -> &[Arc<Path>] {
        &self.paths
    }

    /// Group of the path with this index.
    pub fn group_of(&self, path: usize) -> usize {
        self.group_of.get(path).copied().unwrap_or(0)
    }

    /// Index of the group's first path; the others follow it.
    pub fn first_of(&self, group: usize) -> usize {
        self.first_of.get(group).copied().unwrap_or(0)
    }

    /// What holds on every path.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The state that outlives the table.
    pub fn map(&self) -> &Arc<MapState> {
        &self.map
    }

    /// How many paths are active.
    pub fn nr_active(&self) -> usize {
        self.paths.iter().filter(|p| p.is_active()).count()
    }

    fn has_active(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|g| g.paths.iter().any(|(p, _)| p.is_active()))
    }

    /// The groups that have an active path, best first.
    fn candidates(&self) -> impl Iterator<Item = usize> + '_ {
        let of = |bypassed: bool| {
            (0..self.groups.len())
                .filter(move |g| self.groups[*g].bypassed == bypassed && self.has_active(*g))
        };
        of(false).chain(of(true))
    }

    /// The group with the highest priority that has an active path.
    pub fn best_group(&self) -> Option<usize> {
        self.candidates().next()
    }

    /// The group in use. If none of its paths is active any more (or it is gone), the best takes its place.
    pub fn current_group(&self) -> Option<usize> {
        let current = self.map.current_group();
        if let Some(group) = current
            && self.has_active(group)
        {
            return current;
        }
        let best = self.best_group();
        if best.is_some() {
            self.map.move_group(current, best);
        }
        best
    }

    /// Puts a group in use, whatever is in use now.
    pub fn switch_group(&self, group: Option<usize>) {
        self.map.move_group(self.map.current_group(), group);
    }

    /// Takes path `index` out.
    pub fn fail_path(&self, index: usize, now_ns: u64) -> FailOutcome {
        self.paths.get(index).map_or(FailOutcome::Already, |path| self.fail(path, now_ns))
    }

    /// Takes a path out: one of this table, or of an older one of the same map.
    pub fn fail(&self, path: &Path, now_ns: u64) -> FailOutcome {
        if !path.set_failed() {
            return FailOutcome::Already;
        }
        let nr_active = self.nr_active();
        if nr_active == 0 {
            self.map.note_no_path(now_ns);
        }
        self.map.changed();
        self.map.ring();
        FailOutcome::Failed { nr_active }
    }

    /// Puts path `index` back, on the descriptor that it has.
    pub fn reinstate_path(&self, index: usize) {
        if let Some(path) = self.paths.get(index) {
            path.set_active();
            self.note_health();
        }
    }

    /// Tells the workers that a path's health may have changed.
    pub fn note_health(&self) {
        if self.nr_active() != 0 {
            self.map.note_path();
        }
        self.map.changed();
    }
}

/// Where the current table is published. Workers take one snapshot per batch, without a lock or a shared write.
#[derive(Debug, Clone)]
pub struct TableCell(Arc<ArcSwap<Table>>);

/// A worker's own view of the cell.
pub type TableReader = arc_swap::Cache<Arc<ArcSwap<Table>>, Arc<Table>>;

impl TableCell {
    /// Publishes the first table.
    pub fn new(table: Table) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(table)))
    }

    /// The table as it is now.
    pub fn load(&self) -> Arc<Table> {
        self.0.load_full()
    }

    /// Puts a new table in place of the old one, which lives until its last user is gone.
    pub fn publish(&self, table: Table) {
        let table = Arc::new(table);
        self.0.store(Arc::clone(&table));
        table.note_health();
    }

    /// A reader that revalidates its snapshot with one load.
    pub fn reader(&self) -> TableReader {
        arc_swap::Cache::new(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests;
