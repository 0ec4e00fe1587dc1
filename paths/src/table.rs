//! The set of paths, immutable once published, and the cell it is published through.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arc_swap::ArcSwap;

use crate::identity::Identity;
use crate::limits::Limits;
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

/// What [`Table::fail_path`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailOutcome {
    /// Taken out now; so many active ones are left.
    Failed {
        /// Active paths left.
        nr_active: u32,
    },
    /// It was out already.
    Already,
    /// It stays in: there is no other.
    Last,
}

/// An immutable set of paths that lead to one LUN.
#[derive(Debug)]
pub struct Table {
    paths: Vec<Arc<Path>>,
    limits: Limits,
    /// Shared with the tables that follow, as the health in the paths is.
    nr_active: Arc<AtomicU32>,
}

impl Table {
    /// Checks that all paths lead to the same LUN and show the same size.
    pub fn new(paths: Vec<Arc<Path>>) -> Result<Self, TableError> {
        let first = paths.first().ok_or(TableError::Empty)?;
        if paths.len() > PATHS_MAX {
            return Err(TableError::TooMany(paths.len()));
        }
        for path in &paths {
            if path.identity() != first.identity() {
                return Err(TableError::Identity(Box::new(Mismatch {
                    name: path.name().display().to_string(),
                    identity: path.identity().clone(),
                    first_name: first.name().display().to_string(),
                    first_identity: first.identity().clone(),
                })));
            }
            if path.limits().size_bytes != first.limits().size_bytes {
                return Err(TableError::Size {
                    name: path.name().display().to_string(),
                    size_bytes: path.limits().size_bytes,
                    first_name: first.name().display().to_string(),
                    first_size_bytes: first.limits().size_bytes,
                });
            }
        }
        let limits = Limits::strictest(paths.iter().map(|p| p.limits())).ok_or(TableError::Empty)?;
        let nr_active = u32::try_from(paths.iter().filter(|p| p.is_active()).count()).unwrap_or(u32::MAX);
        Ok(Self { paths, limits, nr_active: Arc::new(AtomicU32::new(nr_active)) })
    }

    /// All paths, in table order.
    pub fn paths(&self) -> &[Arc<Path>] {
        &self.paths
    }

    /// What holds on every path.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How many paths are active.
    pub fn nr_active(&self) -> u32 {
        self.nr_active.load(Ordering::Relaxed)
    }

    /// Takes path `index` out after a path error, unless it is the last one.
    ///
    /// The last path stays: with nothing to bring a path back, taking it out would turn one bad answer into a dead disk.
    pub fn fail_path(&self, index: usize) -> FailOutcome {
        let Some(path) = self.paths.get(index) else { return FailOutcome::Already };
        if !path.is_active() {
            return FailOutcome::Already;
        }
        // Reserves the right to take one path out, so that two workers cannot take out the last two at once.
        let leave_one = |n: u32| (n > 1).then(|| n - 1);
        let Ok(before) = self.nr_active.fetch_update(Ordering::AcqRel, Ordering::Acquire, leave_one) else {
            return FailOutcome::Last;
        };
        if path.set_failed() {
            FailOutcome::Failed { nr_active: before - 1 }
        } else {
            self.nr_active.fetch_add(1, Ordering::AcqRel);
            FailOutcome::Already
        }
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

    /// A reader that revalidates its snapshot with one load.
    pub fn reader(&self) -> TableReader {
        arc_swap::Cache::new(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::OpenOptions;

    const CACHED: OpenOptions = OpenOptions { read_only: false, direct: false };

    fn open(path: &std::path::Path) -> Arc<Path> {
        Arc::new(Path::open(path.to_owned(), CACHED, 1).unwrap())
    }

    fn table_of(nr_paths: usize) -> (tempfile::TempDir, Table) {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("0");
        std::fs::write(&first, [0; 4096]).unwrap();
        let mut paths = vec![open(&first)];
        for i in 1..nr_paths {
            let link = dir.path().join(i.to_string());
            std::fs::hard_link(&first, &link).unwrap();
            paths.push(open(&link));
        }
        (dir, Table::new(paths).unwrap())
    }

    #[test]
    fn f05_different_files_are_not_one_disk() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, [0; 4096]).unwrap();
        std::fs::write(&b, [0; 4096]).unwrap();
        let error = Table::new(vec![open(&a), open(&b)]).unwrap_err().to_string();
        assert!(error.contains("not the same disk") && error.matches("inode").count() == 2, "{error}");
    }

    #[test]
    fn f33_different_sizes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, [0; 4096]).unwrap();
        std::fs::hard_link(&a, &b).unwrap();
        let first = open(&a);
        std::fs::write(&b, [0; 8192]).unwrap();
        let error = Table::new(vec![first, open(&b)]).unwrap_err().to_string();
        assert!(error.contains("8192") && error.contains("4096"), "{error}");
    }

    #[test]
    fn a_failed_path_is_left_out_once_and_the_last_one_never() {
        let (_dir, table) = table_of(3);
        assert_eq!(table.fail_path(1), FailOutcome::Failed { nr_active: 2 });
        assert_eq!(table.fail_path(1), FailOutcome::Already);
        assert_eq!(table.fail_path(0), FailOutcome::Failed { nr_active: 1 });
        assert_eq!(table.fail_path(2), FailOutcome::Last);
        assert!(table.paths()[2].is_active());
        assert_eq!(table.paths()[1].nr_failures(), 1);
    }

    #[test]
    fn two_workers_cannot_take_out_the_last_two_paths() {
        for _ in 0..200 {
            let (_dir, table) = table_of(2);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| table.fail_path(1));
                let one = table.fail_path(0);
                let other = other.join().unwrap();
                let failed = [one, other].iter().filter(|o| matches!(o, FailOutcome::Failed { .. })).count();
                assert_eq!(failed, 1);
            });
            assert_eq!(table.nr_active(), 1);
        }
    }
}
