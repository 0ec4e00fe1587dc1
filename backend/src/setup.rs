//! From the command line to a disk: opens the paths, proves them, makes the table.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::path::{Path as StdPath, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use polypath_paths::text::{NoPathRetry, TableSpec};
use polypath_paths::{FileKind, Group, MapState, OpenOptions, Path, Table, TableCell, prove};

use crate::cli::{Options, Switch};
use crate::disk::{Disk, DiskOptions, ID_BYTES, Tuning};
use crate::dispatch;
use crate::merge::MergeLimits;

/// How the paths are opened.
pub fn open_options(options: &Options) -> OpenOptions {
    OpenOptions { read_only: options.read_only, direct: options.direct == Switch::On }
}

/// How long requests wait for a path if nothing else is said, in seconds.
const NO_PATH_RETRY_DEFAULT: u32 = 60;

/// The table that the options describe.
pub fn table_spec(options: &Options) -> anyhow::Result<TableSpec> {
    let mut spec = if let Some(line) = &options.table {
        TableSpec::parse_dm(line).context("--table")?
    } else if let Some(file) = &options.table_file {
        let option = || format!("--table-file {}", file.display());
        let text = std::fs::read_to_string(file).with_context(option)?;
        // A dm line begins with the start sector, a TOML file never does.
        if text.trim_start().starts_with(|c: char| c.is_ascii_digit()) {
            TableSpec::parse_dm(text.trim()).with_context(option)?
        } else {
            TableSpec::parse_toml(&text).with_context(option)?
        }
    } else if let (Some(section), []) = (&options.table_section, options.all_paths().as_slice()) {
        section.clone()
    } else {
        let names = options.all_paths();
        if names.is_empty() {
            bail!("--path PATH (or --table, --table-file, --config) is needed");
        }
        let mut seen = HashSet::new();
        if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
            bail!("--path {}: given twice", twice.display());
        }
        let names: Option<Vec<&str>> = names.iter().map(|name| name.to_str()).collect();
        TableSpec::one_group(options.selector, names.context("--path: not UTF-8")?)
    };
    let wait = NonZeroU32::new(NO_PATH_RETRY_DEFAULT).map(NoPathRetry::Seconds);
    spec.no_path_retry = spec.no_path_retry.or(options.no_path_retry).or(wait);
    Ok(spec)
}

/// Makes the disk. `bell` is rung when a path fails.
pub fn make_disk(
    options: &Options,
    spec: &TableSpec,
    bell: impl Fn() + Send + Sync + 'static,
) -> anyhow::Result<Disk> {
    let open = open_options(options);
    if !open.direct && spec.paths().count() > 1 {
        bail!(
            "--direct off: two page caches over one disk cannot be kept the same, so it is for a single path"
        );
    }
    // A device that is in several groups is one path.
    let mut opened: HashMap<&str, Arc<Path>> = HashMap::new();
    let mut groups = Vec::new();
    for group in &spec.groups {
        let mut paths = Vec::new();
        for path in &group.paths {
            let known = match opened.get(path.device.as_str()) {
                Some(known) => Arc::clone(known),
                None => open_path(StdPath::new(&path.device), open, options.num_queues)?,
            };
            opened.insert(&path.device, Arc::clone(&known));
            paths.push((known, path.args.clone()));
        }
        let (selector, args) = (group.selector, group.args.clone());
        groups.push(Group { paths, selector, args, bypassed: false });
    }
    if !options.trust_paths {
        let first = groups.first().and_then(|g: &Group| g.paths.first()).map(|(path, _)| Arc::clone(path));
        for (path, _) in groups.iter().flat_map(|group| &group.paths) {
            let Some(first) = &first else { break };
            prove(path, first.identity(), first.limits().size_bytes, Some(first)).with_context(|| {
                format!("--path {}: against {}", path.name().display(), first.name().display())
            })?;
        }
    }
    let retry = spec.no_path_retry.unwrap_or(NoPathRetry::Fail);
    let map = Arc::new(MapState::new(usize::from(options.num_queues), retry, bell));
    let table = Table::with_limits(groups, map, None, true).context("--path")?;
    dispatch::check_selectors(&table).context("--selector")?;
    if let Some(sectors) = spec.length_sectors
        && sectors != table.limits().size_bytes / 512
    {
        let found = table.limits().size_bytes / 512;
        bail!("table: the length is {sectors} sectors, but the paths have {found}");
    }
    if !open.direct && table.limits().kind != FileKind::Regular {
        bail!("--direct off: only a regular file is served through the page cache");
    }
    if let Some(initial) = spec.initial_group.checked_sub(1) {
        table.switch_group(Some(initial));
    }
    warn_of_same_names(spec.paths().map(|path| StdPath::new(&path.device)));
    Ok(Disk::new(TableCell::new(table), disk_options(options)?))
}

fn disk_options(options: &Options) -> anyhow::Result<DiskOptions> {
    if let Some(cpus) = &options.cpus
        && let Some(cpu) = cpus.first_forbidden().context("--cpus")?
    {
        bail!("--cpus {cpus}: processor {cpu} is not one that this process may run on");
    }
    Ok(DiskOptions {
        nr_queues: options.num_queues,
        queue_size: options.queue_size,
        id: options.serial.as_deref().map(zero_filled),
        tuning: Tuning {
            path_depth: options.path_depth,
            merge: MergeLimits { bytes_max: u64::from(options.merge_max) << 10, ..MergeLimits::default() },
            poll_ns: options.poll_us * 1000,
            register_memory: options.register_memory,
            sqpoll_idle_ms: options.sqpoll_idle_ms,
            migration: options.direct == Switch::On,
        },
        cpus: options.cpus.clone(),
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
fn warn_of_same_names<'a>(names: impl Iterator<Item = &'a StdPath>) {
    let mut seen: Vec<(PathBuf, &StdPath)> = Vec::new();
    for name in names {
        let Ok(real) = name.canonicalize() else { continue };
        match seen.iter().find(|(other, _)| *other == real) {
            Some((_, first)) if *first != name => {
                log::warn!(
                    "no redundancy: {} and {} are the same file name",
                    first.display(),
                    name.display()
                );
            }
            Some(_) => {}
            None => seen.push((real, name)),
        }
    }
}
