//! Discard and write-zeroes.

use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn a_discard_punches_each_range() {
    let mut case = Case::new(1);
    case.ranges(
        Operation::Discard,
        &[(0, 0, true), (4096, 512, true), (512, 0, true), (MIB, MIB, true)],
        false,
    );
    assert!(!case.transfer.is_empty());
    assert_eq!(case.step(), Step::PunchHole { offset: 4096, len: 512 });
    assert_eq!((case.transfer.work(), case.transfer.nr_bytes()), (Work::Discard, 0));
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.step(), Step::PunchHole { offset: MIB, len: MIB });
    assert_eq!(case.transfer.complete(0), OK);
    assert_eq!(case.end(Status::Ok), (0, Status::Ok));
}

#[test]
fn ranges_without_a_byte_are_nothing_to_do() {
    for operation in [Operation::Discard, Operation::WriteZeroes] {
        let mut case = Case::new(1);
        case.ranges(operation, &[(0, 0, true), (512, 0, false)], false);
        assert!(case.transfer.is_empty());
        case.end(Status::Ok);
    }
}

#[test]
fn f52_a_discard_that_no_path_can_do_is_unsupported() {
    for errno in [libc::EOPNOTSUPP, libc::ENOTTY, libc::ENOSYS] {
        let mut case = Case::new(2);
        case.ranges(Operation::Discard, &[(0, 4096, true)], false);
        // A path that came later may be the only one that cannot: the others are asked, and none is at fault.
        assert_eq!(case.transfer.complete(-errno), Next::AskOthers(Status::Unsupp));
        assert_eq!(case.transfer.tried(), 0, "F01: no path fails for it");
    }
}

#[test]
fn f01_errors_of_discards_and_zeroes() {
    for operation in [Operation::Discard, Operation::WriteZeroes] {
        for errno in TARGET_ERRORS {
            let mut case = Case::new(2);
            case.ranges(operation, &[(0, 4096, true)], false);
            let next = if errno == libc::EPERM { Next::AskOthers(Status::IoErr) } else { IOERR };
            assert_eq!(case.transfer.complete(-errno), next, "errno {errno}");
            assert_eq!(case.transfer.tried(), 0);
        }
        for errno in PATH_ERRORS {
            let mut case = Case::new(2);
            case.ranges(operation, &[(0, 4096, true), (8192, 512, true)], false);
            assert_eq!(case.transfer.complete(0), Next::Again);
            assert_eq!(case.transfer.complete(-errno), Next::Elsewhere(errno));
            case.go_elsewhere(1);
            assert_eq!(case.step(), Step::PunchHole { offset: 8192, len: 512 }, "goes on, not back");
            assert_eq!(case.transfer.complete(0), OK);
        }
        let mut case = Case::new(2);
        case.ranges(operation, &[(0, 4096, true)], false);
        assert_eq!(case.transfer.complete(-libc::EINTR), Next::Again);
        assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(1));
        assert_eq!(case.transfer.complete(0), OK);
    }
}

#[test]
fn zeroes_keep_the_space_unless_the_guest_gives_it_back() {
    let mut case = Case::new(1);
    case.ranges(Operation::WriteZeroes, &[(0, 4096, false), (8192, 512, true), (MIB, 512, false)], false);
    assert_eq!(case.step(), Step::ZeroRange { offset: 0, len: 4096 });
    assert_eq!(case.transfer.work(), Work::WriteZeroes);
    assert_eq!(case.transfer.complete(0), Next::Again);
    let second = case.step();
    assert!(matches!(
        second,
        Step::PunchHole { offset: 8192, len: 512 } | Step::ZeroRange { offset: 8192, len: 512 }
    ));
    assert_eq!(case.transfer.complete(0), Next::Again);
    assert_eq!(case.step(), Step::ZeroRange { offset: MIB, len: 512 }, "no hole where none was allowed");
    assert_eq!(case.transfer.complete(0), OK);
}

#[test]
fn f52_zeroes_are_written_where_the_path_cannot_make_them() {
    let mut case = Case::new(1);
    let len = 3 * MIB + 512;
    case.ranges(Operation::WriteZeroes, &[(4096, len, true), (0, 512, true)], false);
    assert_eq!(case.step(), Step::PunchHole { offset: 4096, len });
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    assert_eq!(case.step(), Step::ZeroRange { offset: 4096, len });
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    for (offset, len) in [(0, MIB), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, 512)] {
        assert_eq!(case.step(), Step::Write { offset: 4096 + offset, len });
        assert_eq!((case.transfer.work(), case.transfer.nr_bytes()), (Work::Write, len));
        assert!(case.written().iter().all(|byte| *byte == 0));
        assert_eq!(case.transfer.complete(moved(len)), Next::Again);
    }
    // What it could not do before it is not asked for again.
    assert_eq!(case.step(), Step::Write { offset: 0, len: 512 });
    assert_eq!(case.transfer.complete(512), OK);
    assert_eq!(case.transfer.tried(), 0);
}

fn writing_zeros(len: u64) -> Case {
    let mut case = Case::new(2);
    case.ranges(Operation::WriteZeroes, &[(0, len, false), (4 * MIB, 512, false)], false);
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    case
}

#[test]
fn f30_written_zeros_may_be_short() {
    let mut case = writing_zeros(MIB + 1024);
    assert_eq!(case.transfer.complete(70_000), Next::Again);
    let done = 70_000 / 512 * 512;
    assert_eq!(case.step(), Step::Write { offset: done, len: MIB - done });
    assert!(case.written().iter().all(|byte| *byte == 0));
    assert_eq!(case.transfer.complete(moved(MIB - done)), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: MIB, len: 1024 });
    assert_eq!(case.transfer.complete(-libc::EIO), Next::Elsewhere(libc::EIO));
    case.go_elsewhere(1);
    assert_eq!(case.step(), Step::Write { offset: MIB, len: 1024 });
    assert_eq!(case.transfer.complete(512), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: MIB + 512, len: 512 });
    assert_eq!(case.transfer.complete(512), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 4 * MIB, len: 512 });
    assert_eq!(case.transfer.complete(512), OK);
}

#[test]
fn f31_zeros_that_cannot_be_written_end() {
    for result in [0, 511, -libc::ENOSPC, -libc::EOPNOTSUPP] {
        let mut case = writing_zeros(4096);
        assert_eq!(case.transfer.complete(result), IOERR, "{result}");
    }
}

#[test]
fn f16_a_discard_or_zeroes_is_to_be_flushed() {
    for operation in [Operation::Discard, Operation::WriteZeroes] {
        let mut case = Case::new(2);
        case.clean();
        case.ranges(operation, &[(0, 4096, true)], false);
        case.transfer.set_path(1);
        assert_eq!(case.transfer.complete(0), OK);
        assert!(case.is_dirty(1) && !case.is_dirty(0));
    }
}
