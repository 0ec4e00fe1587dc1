use super::*;
use crate::open::OpenOptions;
use crate::text::NoPathRetry;

const CACHED: OpenOptions = OpenOptions { read_only: false, direct: false };

fn open(path: &std::path::Path) -> Arc<Path> {
    Arc::new(Path::open(path.to_owned(), CACHED, 1).unwrap())
}

fn group(paths: Vec<Arc<Path>>) -> Group {
    Group {
        paths: paths.into_iter().map(|p| (p, PathArgs::default())).collect(),
        selector: Kind::RoundRobin,
        args: GroupArgs::default(),
        bypassed: false,
    }
}

fn map() -> Arc<MapState> {
    Arc::new(MapState::new(1, NoPathRetry::Fail, || {}))
}

/// Groups with so many paths each, all to one file.
fn table_of(sizes: &[usize], bypassed: &[bool]) -> (tempfile::TempDir, Table) {
    let dir = tempfile::tempdir().unwrap();
    let first = dir.path().join("file");
    std::fs::write(&first, [0; 4096]).unwrap();
    let groups = sizes.iter().enumerate().map(|(g, size)| {
        let paths = (0..*size).map(|i| {
            let link = dir.path().join(format!("{g}.{i}"));
            std::fs::hard_link(&first, &link).unwrap();
            open(&link)
        });
        Group { bypassed: bypassed.get(g).copied().unwrap_or(false), ..group(paths.collect()) }
    });
    let table = Table::new(groups.collect(), map()).unwrap();
    (dir, table)
}

#[test]
fn f05_different_files_are_not_one_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    std::fs::write(&a, [0; 4096]).unwrap();
    std::fs::write(&b, [0; 4096]).unwrap();
    let groups = || vec![group(vec![open(&a), open(&b)])];
    let error = Table::new(groups(), map()).unwrap_err().to_string();
    assert!(error.contains("not the same disk") && error.matches("inode").count() == 2, "{error}");
    assert!(Table::with_limits(groups(), map(), None, true).is_ok(), "the operator takes the blame");
}

#[test]
fn f33_different_sizes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    std::fs::write(&a, [0; 4096]).unwrap();
    std::fs::hard_link(&a, &b).unwrap();
    let first = open(&a);
    std::fs::write(&b, [0; 8192]).unwrap();
    let error = Table::new(vec![group(vec![first, open(&b)])], map()).unwrap_err().to_string();
    assert!(error.contains("8192") && error.contains("4096"), "{error}");
}

#[test]
fn a_failed_path_is_left_out_once() {
    let (_dir, table) = table_of(&[2], &[]);
    let before = table.map().epoch();
    assert_eq!(table.fail_path(1, 7), FailOutcome::Failed { nr_active: 1 });
    assert_eq!(table.fail_path(1, 8), FailOutcome::Already);
    assert_eq!(table.map().no_path_since_ns(), None);
    assert_eq!(table.fail_path(0, 9), FailOutcome::Failed { nr_active: 0 });
    assert_eq!(table.map().no_path_since_ns(), Some(9));
    assert!(table.map().epoch() > before);
    table.reinstate_path(1);
    assert_eq!((table.nr_active(), table.map().no_path_since_ns()), (1, None));
    assert_eq!(table.paths()[1].nr_failures(), 1, "the count is never reset");
}

#[test]
fn groups_are_used_in_order_and_stay_in_use() {
    let (_dir, table) = table_of(&[2, 1, 1], &[]);
    assert_eq!(table.current_group(), Some(0));
    table.fail_path(0, 1);
    assert_eq!(table.current_group(), Some(0), "one path of the group is left");
    table.fail_path(1, 1);
    assert_eq!(table.current_group(), Some(1));
    table.reinstate_path(0);
    assert_eq!(table.current_group(), Some(1), "no hop back by itself");
    assert_eq!(table.best_group(), Some(0));
    table.fail_path(2, 1);
    assert_eq!(table.current_group(), Some(0));
    table.fail_path(0, 1);
    assert_eq!(table.current_group(), Some(2));
    table.fail_path(3, 1);
    assert_eq!(table.current_group(), None);
}

#[test]
fn bypassed_groups_are_the_last_resort() {
    let (_dir, table) = table_of(&[1, 1, 1], &[true, false, true]);
    assert_eq!(table.current_group(), Some(1));
    table.fail_path(1, 1);
    assert_eq!(table.current_group(), Some(0), "bypassed ones in their order");
    table.switch_group(Some(2));
    assert_eq!(table.current_group(), Some(2));
}

#[test]
fn indices_lead_from_paths_to_groups_and_back() {
    let (_dir, table) = table_of(&[2, 3], &[]);
    assert_eq!((0..5).map(|p| table.group_of(p)).collect::<Vec<_>>(), [0, 0, 1, 1, 1]);
    assert_eq!((table.first_of(0), table.first_of(1)), (0, 2));
}

#[test]
fn a_path_that_is_opened_anew_is_not_touched_by_errors_of_the_old_one() {
    let (_dir, table) = table_of(&[1], &[]);
    let old = Arc::clone(&table.paths()[0]);
    table.fail_path(0, 1);
    let new = Arc::new(old.seed().open().unwrap());
    let next = Table::new(vec![group(vec![Arc::clone(&new)])], Arc::clone(table.map())).unwrap();
    let cell = TableCell::new(table);
    let mut reader = cell.reader();
    let before = Arc::clone(reader.load());
    cell.publish(next);
    assert_eq!(before.fail_path(0, 2), FailOutcome::Already);
    assert!(new.is_active() && !old.is_active());
    assert_eq!(new.nr_failures(), 1, "the history stays");
    assert!(!Arc::ptr_eq(&before, reader.load()));
    assert_eq!(before.map().no_path_since_ns(), None);
}
