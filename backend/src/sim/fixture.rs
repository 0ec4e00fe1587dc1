//! Paths and tables made of temporary files.

use std::sync::Arc;

use polypath_paths::text::NoPathRetry;
use polypath_paths::{Group, MapState, OpenOptions, Path, Table};
use polypath_selector::{GroupArgs, Kind, PathArgs};
use proptest::test_runner::Config;
use tempfile::TempDir;

use crate::gather::Alignment;

/// How the paths of a test are opened: through the page cache, which asks for no alignment.
pub(crate) const CACHED: OpenOptions = OpenOptions { read_only: false, direct: false };

/// Several names of one file.
#[derive(Debug)]
pub(crate) struct Links {
    dir: TempDir,
}

impl Links {
    /// A file of zeros with `nr` names.
    pub(crate) fn new(nr: usize, size_bytes: u64) -> Self {
        Self::within(&std::env::temp_dir(), nr, size_bytes)
    }

    /// The same, on the file system of that directory.
    pub(crate) fn within(dir: &std::path::Path, nr: usize, size_bytes: u64) -> Self {
        let dir = tempfile::tempdir_in(dir).expect("temporary directory");
        let name = |i: usize| dir.path().join(i.to_string());
        std::fs::File::create(name(0)).and_then(|file| file.set_len(size_bytes)).expect("file");
        (1..nr).for_each(|i| std::fs::hard_link(name(0), name(i)).expect("link"));
        Self { dir }
    }

    /// Name number `i`.
    pub(crate) fn name(&self, i: usize) -> std::path::PathBuf {
        self.dir.path().join(i.to_string())
    }

    /// Opens name number `i`.
    pub(crate) fn path(&self, i: usize, options: OpenOptions, nr_workers: usize) -> Arc<Path> {
        Arc::new(Path::open(self.name(i), options, nr_workers).expect("path"))
    }

    /// The same of a device that has room for so many I/Os.
    pub(crate) fn path_with_room(&self, i: usize, nr_requests: u32, nr_workers: usize) -> Arc<Path> {
        let path = Path::open(self.name(i), CACHED, nr_workers).expect("path");
        let seed = path.seed();
        let mut opened = path.into_opened();
        opened.facts.limits.nr_requests = Some(nr_requests);
        Arc::new(seed.grow(opened))
    }

    /// Opens the first `nr` names as the paths of one disk.
    pub(crate) fn table(&self, nr: usize, options: OpenOptions, nr_workers: usize) -> Table {
        table_of((0..nr).map(|i| self.path(i, options, nr_workers)), nr_workers)
    }
}

/// A table of these paths.
pub(crate) fn table_of(paths: impl Iterator<Item = Arc<Path>>, nr_workers: usize) -> Table {
    let group = Group {
        paths: paths.map(|path| (path, PathArgs::default())).collect(),
        selector: Kind::RoundRobin,
        args: GroupArgs::default(),
        bypassed: false,
    };
    let map = Arc::new(MapState::new(nr_workers, NoPathRetry::Fail, || {}));
    Table::new(vec![group], map).expect("table")
}

/// A table of `nr` paths to a new file, for one worker.
pub(crate) fn table(nr: usize, size_bytes: u64) -> (Links, Table) {
    let links = Links::new(nr, size_bytes);
    let table = links.table(nr, CACHED, 1);
    (links, table)
}

/// The same table for a guest that was told of these blocks, and buffers of that alignment.
pub(crate) fn with_alignment(table: &Table, align: Alignment) -> Table {
    let mut limits = table.limits().clone();
    limits.mem_align_bytes = u32::try_from(align.mem_bytes).expect("small");
    limits.logical_block_bytes = u32::try_from(align.block_bytes).expect("small");
    let (groups, map) = (table.groups().to_vec(), Arc::clone(table.map()));
    Table::with_limits(groups, map, Some(limits), false).expect("table")
}

/// For proptest: so many cases, and no file of its own beside the sources.
pub(crate) fn cases(nr: u32) -> Config {
    Config { failure_persistence: None, ..Config::with_cases(nr) }
}
