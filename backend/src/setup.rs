//! From the command line to a disk: opens the paths, proves them, makes the table.

use std::collections::HashSet;
use std::path::{Path as StdPath, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use polypath_paths::{FileKind, Group, MapState, OpenOptions, Path, Table, TableCell};
use polypath_selector::{GroupArgs, PathArgs};

use crate::cli::{Options, Switch};
use crate::disk::{Disk, DiskOptions, ID_BYTES};
use crate::dispatch;

/// How the paths are opened.
pub fn open_options(options: &Options) -> OpenOptions {
    OpenOptions { read_only: options.read_only, direct: options.direct == Switch::On }
}

/// Makes the disk. `bell` is rung when a path fails.
pub fn make_disk(options: &Options, bell: impl Fn() + Send + Sync + 'static) -> anyhow::Result<Disk> {
    let names = options.all_paths();
    if names.is_empty() {
        bail!("--path PATH is needed at least once");
    }
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
        bail!("--path {}: given twice", twice.display());
    }
    let open = open_options(options);
    if !open.direct && names.len() > 1 {
        bail!("--direct off: two page caches over one disk cannot be kept the same, so it is for a single path");
    }
    let kind = options.selector;
    let paths = names.iter().enumerate().map(|(index, name)| {
        let path = open_path(name, open, options.num_queues)?;
        Ok((path, PathArgs::for_path(kind, index, names.len())))
    });
    let group = Group {
        paths: paths.collect::<anyhow::Result<_>>()?,
        selector: kind,
        args: GroupArgs::default(),
        bypassed: false,
    };
    let map = MapState::new(usize::from(options.num_queues), options.no_path_retry, bell);
    let table =
        Table::with_limits(vec![group], Arc::new(map), None, options.trust_paths).context("--path")?;
    dispatch::check_selectors(&table).with_context(|| format!("--selector {kind}"))?;
    if !open.direct && table.limits().kind != FileKind::Regular {
        bail!("--direct off: only a regular file is served through the page cache");
    }
    warn_of_same_names(&names);
    Ok(Disk::new(TableCell::new(table), disk_options(options)?))
}

fn disk_options(options: &Options) -> anyhow::Result<DiskOptions> {
    Ok(DiskOptions {
        nr_queues: options.num_queues,
        queue_size: options.queue_size,
        id: options.serial.as_deref().map(zero_filled),
    })
}

/// A serial number in the width that the guest reads.
pub fn zero_filled(serial: &str) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    id
}

fn open_path(name: &StdPath, open: OpenOptions, nr_queues: u16) -> anyhow::Result<Arc<Path>> {
    let path = Path::open(name.to_owned(), open, usize::from(nr_queues));
    path.map(Arc::new).with_context(|| format!("--path {}", name.display()))
}

/// Two names of one directory entry are two ways to the same way.
fn warn_of_same_names(names: &[PathBuf]) {
    let mut seen: Vec<(PathBuf, &PathBuf)> = Vec::new();
    for name in names {
        let Ok(real) = name.canonicalize() else { continue };
        match seen.iter().find(|(other, _)| *other == real) {
            Some((_, first)) => {
                log::warn!("no redundancy: {} and {} are the same file name", first.display(), name.display());
            }
            None => seen.push((real, name)),
        }
    }
}
