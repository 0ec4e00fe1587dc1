//! Writes that must be durable when they are answered.

use super::*;

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
