//! Tables are swapped as fast as it goes while readers take snapshots: each is whole, its descriptors are open and lead
//! where they should, and old tables and descriptors are gone when their last user is.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use polypath_paths::text::NoPathRetry;
use polypath_paths::{Group, MapState, OpenOptions, Path, Table, TableCell};
use polypath_selector::{GroupArgs, Kind, PathArgs};

const NR_FILES: usize = 8;
const NR_READERS: usize = 4;
const NR_SWAPS: usize = 20_000;
const SIZE_BYTES: usize = 4096;

/// Table number `n`: as many paths as the number says, in two groups, each with arguments that say it again. Every path
/// is opened anew, so that descriptor numbers are used again and again, for other files.
fn table(n: usize, names: &[std::path::PathBuf], map: &Arc<MapState>) -> Table {
    let nr_paths = 2 + n % (NR_FILES - 1);
    let mark = u8::try_from(n % 101).unwrap();
    let open = |i: usize| {
        let options = OpenOptions { read_only: true, direct: false };
        let path = Path::open(names[(n + i) % NR_FILES].clone(), options, 1).unwrap();
        let args = PathArgs { relative_throughput: mark, ..PathArgs::default() };
        (Arc::new(path), args)
    };
    let group = |range: std::ops::Range<usize>| Group {
        paths: range.map(open).collect(),
        selector: Kind::ServiceTime,
        args: GroupArgs::default(),
        bypassed: n.is_multiple_of(2),
    };
    // (These files are not one disk, so that a descriptor that leads elsewhere is noticed.)
    Table::with_limits(vec![group(0..1), group(1..nr_paths)], Arc::clone(map), None, true).unwrap()
}

/// Whether all of a snapshot is of one table, and its descriptors are what they were opened as.
fn check(table: &Table) {
    let groups = table.groups();
    assert_eq!(groups.len(), 2);
    let of_groups: Vec<_> = groups.iter().flat_map(|g| &g.paths).collect();
    assert_eq!(of_groups.len(), table.paths().len());
    let mark = of_groups[0].1.relative_throughput;
    assert!(of_groups.iter().all(|(_, args)| args.relative_throughput == mark), "two tables in one");
    assert_eq!(groups[0].bypassed, groups[1].bypassed);
    for (index, path) in table.paths().iter().enumerate() {
        assert!(Arc::ptr_eq(path, &of_groups[index].0));
        assert_eq!(table.group_of(index), usize::from(index > 0));
        let mut block = [0; SIZE_BYTES];
        path.file().read_exact_at(&mut block, 0).unwrap();
        let number = path.name().file_name().unwrap().to_str().unwrap();
        assert!(block.iter().all(|byte| *byte == number.as_bytes()[0]), "the descriptor leads elsewhere");
        assert_eq!(path.file().metadata().unwrap().ino(), fs::metadata(path.name()).unwrap().ino());
    }
}

#[test]
fn f38_every_snapshot_is_whole_while_tables_are_swapped_thousands_of_times_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..NR_FILES).map(|i| dir.path().join(i.to_string())).collect();
    for name in &names {
        let digit = name.file_name().unwrap().to_str().unwrap().as_bytes()[0];
        fs::write(name, [digit; SIZE_BYTES]).unwrap();
    }
    let nr_open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let nr_open_before = nr_open();
    let map = Arc::new(MapState::new(1, NoPathRetry::Queue, || {}));
    let cell = TableCell::new(table(0, &names, &map));
    let (stop, nr_snapshots, nr_changes) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut old: Vec<Weak<Table>> = Vec::new();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for reader in 0..NR_READERS {
            let (stop, nr_snapshots, nr_changes) = (&stop, &nr_snapshots, &nr_changes);
            let mut snapshots = cell.reader();
            scope.spawn(move || {
                let mut kept: Option<Arc<Table>> = None;
                while !stop.load(Ordering::Relaxed) {
                    let now = Arc::clone(snapshots.load());
                    check(&now);
                    if kept.as_ref().is_some_and(|kept| !Arc::ptr_eq(kept, &now)) {
                        nr_changes.fetch_add(1, Ordering::Relaxed);
                    }
                    // Some hold on to an old table for longer than it is published, as requests in flight do.
                    if reader % 2 == 0 || kept.is_none() {
                        kept = Some(now);
                    } else if nr_snapshots.load(Ordering::Relaxed) % 64 == 0 {
                        check(kept.as_ref().unwrap());
                        kept = Some(now);
                    }
                    nr_snapshots.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for n in 1..=NR_SWAPS {
            old.push(Arc::downgrade(&cell.load()));
            cell.publish(table(n, &names, &map));
        }
        // On a machine with few processors the readers may have been waiting all the time.
        let deadline = begun + std::time::Duration::from_secs(30);
        let mut n = NR_SWAPS;
        while nr_changes.load(Ordering::Relaxed) < 100 && Instant::now() < deadline {
            n += 1;
            old.push(Arc::downgrade(&cell.load()));
            cell.publish(table(n, &names, &map));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let took = begun.elapsed();
    println!(
        "{} tables in {took:?}, {:.0} a second; {} snapshots, of which {} were of another table than the one before",
        old.len(),
        old.len() as f64 / took.as_secs_f64(),
        nr_snapshots.load(Ordering::Relaxed),
        nr_changes.load(Ordering::Relaxed)
    );
    assert!(nr_changes.load(Ordering::Relaxed) >= 100, "hardly anything was swapped under the readers");
    assert!(old.iter().all(|table| table.upgrade().is_none()), "an old table is still there");
    assert_eq!(cell.load().paths().len(), 2 + old.len() % (NR_FILES - 1));
    drop(cell);
    assert_eq!(nr_open(), nr_open_before, "descriptors are left open");
}
