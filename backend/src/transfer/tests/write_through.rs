//! Writes that must be durable when they are answered.

use super::*;

#[test]
fn f16_a_write_is_followed_by_a_sync_of_its_path() {
    let mut case = Case::new(2);
    case.clean();
    case.write(&[4096], true);
    case.transfer.set_path(1);
    assert_eq!(case.transfer.complete(512), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 512, len: 3584 });
    assert_eq!(case.transfer.complete(3584), Next::Again);
    assert_eq!((case.step(), case.transfer.path_index()), (Step::Sync, 1));
    assert_eq!(case.transfer.work(), Work::Flush, "its errors are judged as those of a flush");
    assert_eq!(case.transfer.nr_bytes(), 0);
    assert_eq!(case.transfer.complete(0), OK);
    assert!(!case.is_dirty(1), "nothing is left for a flush");
    assert_eq!(case.end(Status::Ok), (0, Status::Ok));
}

#[test]
fn f16_discards_and_zeroes_are_synced_once_at_their_end() {
    for operation in [Operation::Discard, Operation::WriteZeroes] {
        let mut case = Case::new(1);
        case.clean();
        case.ranges(operation, &[(0, 512, true), (4096, 512, true), (8192, 0, true)], true);
        assert_eq!(case.transfer.complete(0), Next::Again);
        assert_eq!(case.step(), Step::PunchHole { offset: 4096, len: 512 });
        assert_eq!(case.transfer.complete(0), Next::Again);
        assert_eq!((case.step(), case.transfer.work()), (Step::Sync, Work::Flush));
        assert_eq!(case.transfer.complete(0), OK);
        assert!(!case.is_dirty(0));
    }
}

#[test]
fn f16_written_zeros_are_synced_as_well() {
    let mut case = Case::new(1);
    case.ranges(Operation::WriteZeroes, &[(0, 4096, false)], true);
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    assert_eq!(case.transfer.complete(4096), Next::Again);
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
}

#[test]
fn f16_a_sync_that_fails_is_the_guests() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EREMOTEIO] {
        let mut case = Case::new(2);
        case.write(&[4096], true);
        assert_eq!(case.transfer.complete(4096), Next::Again);
        assert_eq!(case.transfer.complete(-errno), IOERR, "errno {errno}");
        assert_eq!(case.end(Status::IoErr), (0, Status::IoErr));
        assert!(case.is_dirty(0));
    }
}

#[test]
fn f16_a_sync_may_be_busy_or_interrupted() {
    let mut case = Case::new(2);
    case.write(&[4096], true);
    assert_eq!(case.transfer.complete(4096), Next::Again);
    assert_eq!(case.transfer.complete(-libc::EINTR), Next::Again);
    assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(1));
    assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
}

#[test]
fn f03_a_sync_whose_path_fails_is_done_by_another() {
    let mut case = Case::new(2);
    case.clean();
    case.write(&[4096], true);
    assert_eq!(case.transfer.complete(4096), Next::Again);
    assert_eq!(case.transfer.complete(-libc::ENODEV), Next::Elsewhere(libc::ENODEV));
    case.go_elsewhere(1);
    assert_eq!((case.step(), case.transfer.path_index()), (Step::Sync, 1), "the data is not sent again");
    assert_eq!(case.transfer.complete(0), OK);
}

#[test]
fn reads_and_empty_writes_owe_nothing() {
    let mut case = Case::new(1);
    case.data(&[512]);
    case.begin(Operation::Read { offset: 0 }, 512, true);
    case.transfer.set_path(0);
    assert_eq!(case.transfer.complete(512), OK);
    case.end(Status::Ok);
    case.transfer.buffers.segments.clear();
    case.begin(Operation::Write { offset: 0 }, 0, true);
    assert!(case.transfer.is_empty());
}

#[test]
fn f16_a_member_of_a_run_is_synced_though_the_leader_need_not_be() {
    for (leaders, members) in [(false, true), (true, false), (false, false)] {
        let mut case = Case::new(1);
        case.data(&[4096]);
        case.begin(Operation::Write { offset: 4096 }, 4096, members);
        let member = Box::new(std::mem::take(&mut case.transfer));
        case.write(&[4096], leaders);
        case.transfer.lead(std::iter::once(member), Vec::new());
        match case.transfer.complete(8192) {
            Next::Again => {
                assert!(leaders || members);
                assert_eq!((case.step(), case.transfer.complete(0)), (Step::Sync, OK));
            }
            next => assert!(!leaders && !members && next == OK, "{next:?}"),
        }
        let mut member = case.transfer.take_member().unwrap();
        let _ = member.end(Status::Ok).unwrap().0.into_head();
        case.end(Status::Ok);
    }
}
