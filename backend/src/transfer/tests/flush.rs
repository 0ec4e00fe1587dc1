//! Which paths a flush visits.

use super::*;

/// Visits paths until the flush ends; gives them in order. Each sync succeeds.
fn visited(case: &mut Case) -> Vec<usize> {
    let mut paths = Vec::new();
    case.flush();
    while !case.transfer.is_empty() {
        assert_eq!((case.step(), case.transfer.work()), (Step::Sync, Work::Flush));
        paths.push(case.transfer.path_index());
        match case.transfer.complete(0) {
            Next::Again => {}
            OK => break,
            next => panic!("{next:?}"),
        }
    }
    assert_eq!(case.end(Status::Ok), (0, Status::Ok));
    paths
}

fn wrote(case: &Case, path: usize) {
    case.table.paths()[path].ledger().note_write(0);
}

#[test]
fn f16_the_first_flush_covers_what_an_earlier_process_wrote() {
    let mut case = Case::new(3);
    assert_eq!(visited(&mut case), [0, 1, 2]);
    assert_eq!(visited(&mut case), [0; 0], "nothing was written since");
}

#[test]
fn f03_a_flush_visits_every_path_that_carried_a_write() {
    for written in 0..16_usize {
        let mut case = Case::new(4);
        case.clean();
        let expected: Vec<_> = (0..4).filter(|path| written & 1 << path != 0).collect();
        expected.iter().for_each(|path| wrote(&case, *path));
        assert_eq!(visited(&mut case), expected);
        assert!((0..4).all(|path| !case.is_dirty(path)));
    }
}

#[test]
fn f16_a_write_that_is_answered_while_a_flush_is_under_way_is_the_next_ones() {
    let mut case = Case::new(2);
    case.clean();
    wrote(&case, 0);
    case.flush();
    wrote(&case, 0);
    wrote(&case, 1);
    assert_eq!(case.transfer.complete(0), OK);
    case.end(Status::Ok);
    assert_eq!(visited(&mut case), [0, 1]);
}

#[test]
fn f16_each_path_is_covered_from_when_its_own_sync_began() {
    let mut case = Case::new(2);
    case.flush();
    wrote(&case, 1);
    assert_eq!(case.transfer.complete(0), Next::Again);
    // The sync of path 1 is sent after that write.
    assert_eq!(case.transfer.path_index(), 1);
    wrote(&case, 1);
    assert_eq!(case.transfer.complete(0), OK);
    case.end(Status::Ok);
    assert!(case.is_dirty(1), "one came after it was sent");
    assert_eq!(visited(&mut case), [1]);
}

#[test]
fn f16_busy_and_interrupted_are_tried_again_and_uncover_nothing() {
    let mut case = Case::new(1);
    case.flush();
    assert_eq!(case.transfer.complete(-libc::EINTR), Next::Again);
    assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(1));
    assert!(case.is_dirty(0));
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
    assert!(!case.is_dirty(0));
}

#[test]
fn f16_an_error_of_the_target_is_the_guests_and_leaves_the_writes_to_be_flushed() {
    // On a regular file even EIO is one: the data is lost already, and another sync would say that all is well.
    for errno in TARGET_ERRORS.into_iter().chain([libc::EIO]) {
        let mut case = Case::new(2);
        case.flush();
        assert_eq!(case.transfer.complete(-errno), IOERR, "errno {errno}");
        assert_eq!(case.end(Status::IoErr), (0, Status::IoErr));
        assert!(case.is_dirty(0));
    }
    // The second path's error counts as well.
    let mut case = Case::new(2);
    case.flush();
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.transfer.complete(-libc::EIO), IOERR);
}

/// What the worker does when the path of a flush has failed.
fn reroute(case: &mut Case, replacement: usize) -> usize {
    let _ = case.table.fail_path(case.transfer.path_index(), 1);
    case.transfer.note_refusal(1);
    case.transfer.flush_target_failed();
    assert!(!case.transfer.is_empty());
    let path = case.transfer.required_path().unwrap_or(replacement);
    case.transfer.set_path(path);
    path
}

#[test]
fn f03_what_a_failed_path_carried_is_flushed_by_another() {
    let mut case = Case::new(3);
    case.clean();
    wrote(&case, 1);
    case.flush();
    assert_eq!(case.transfer.complete(-libc::ENODEV), Next::Elsewhere(libc::ENODEV));
    assert_eq!(reroute(&mut case, 2), 2);
    assert_eq!(case.transfer.tried(), 1 << 1);
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
}

#[test]
fn f03_a_flush_whose_path_fails_goes_on_with_the_others() {
    let mut case = Case::new(3);
    case.flush();
    assert_eq!(case.transfer.complete(-libc::ENODEV), Next::Elsewhere(libc::ENODEV));
    assert_eq!(reroute(&mut case, 2), 1, "path 1 has its own to flush, wherever the selector points");
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.transfer.path_index(), 2);
    assert_eq!(case.transfer.complete(0), OK);
}

#[test]
fn f03_a_failure_after_another_path_was_flushed() {
    let mut case = Case::new(2);
    case.flush();
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.transfer.complete(-libc::ENODEV), Next::Elsewhere(libc::ENODEV));
    assert_eq!(reroute(&mut case, 0), 0, "path 0 was flushed before what path 1 had became anybody's");
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
}

/// The same when others take it out.
#[test]
fn f03_the_last_path_is_taken_out_by_others_after_another_was_flushed() {
    let mut case = Case::new(3);
    case.flush();
    let _ = case.table.fail_path(1, 1);
    let _ = case.table.fail_path(2, 1);
    assert_eq!(case.transfer.complete(0), Next::Again, "path 0 was flushed before they failed, as it may be");
    assert_eq!(case.transfer.required_path(), None, "any path does");
    case.transfer.set_path(0);
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
}

#[test]
fn f03_a_path_that_others_take_out_meanwhile_is_passed_over() {
    let mut case = Case::new(4);
    case.flush();
    let _ = case.table.fail_path(1, 1);
    let _ = case.table.fail_path(2, 1);
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.transfer.path_index(), 3);
    let _ = case.table.fail_path(3, 1);
    assert_eq!(case.transfer.complete(0), OK);
}

#[test]
fn f03_writes_of_paths_that_are_out_are_flushed_by_one_that_is_not() {
    let mut case = Case::new(3);
    case.clean();
    wrote(&case, 0);
    wrote(&case, 2);
    let _ = case.table.fail_path(0, 1);
    assert_eq!(visited(&mut case), [2], "its own, and through it the disk's");
    let _ = case.table.fail_path(2, 1);
    wrote(&case, 2);
    assert_eq!(visited(&mut case), [1]);
}

#[test]
fn a_flush_is_not_sent_through_a_selector() {
    let mut case = Case::new(2);
    case.flush();
    assert_eq!(case.transfer.required_path(), Some(0));
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.transfer.required_path(), Some(1));
    assert_eq!(case.transfer.complete(0), OK);
    assert_eq!(case.transfer.required_path(), None);
    case.end(Status::Ok);
    case.read(0, &[512]);
    assert_eq!(case.transfer.required_path(), None);
}
