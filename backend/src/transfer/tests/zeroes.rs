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

/// A request of one range, begun and not sent.
fn one_range(case: &Case, operation: Operation, offset: u64, unmap: bool) -> Box<Transfer> {
    let mut transfer = Box::<Transfer>::default();
    transfer.buffers.ranges.push(Range { offset, len: 4096, unmap });
    let mut request = unreadable(5);
    request.operation = operation;
    transfer.begin(request, &case.lease, &case.table, false, 0).unwrap();
    transfer
}

#[test]
fn a_range_of_ranges_is_one_and_falls_apart_into_its_members() {
    for operation in [Operation::Discard, Operation::WriteZeroes] {
        let mut case = Case::new(2);
        case.ranges(operation, &[(0, 0, true), (8192, 4096, true)], false);
        let own = case.transfer.span().unwrap();
        assert_eq!((own.start, own.end, own.nr_iovecs), (8192, 12288, 0));
        let others = [12288, 16384].map(|offset| one_range(&case, operation, offset, true));
        assert!(others.iter().all(|other| other.span().is_some_and(|span| span.kind == own.kind)));
        case.transfer.lead(others.into_iter(), Vec::new());
        assert_eq!(case.transfer.flight_span().map(|span| (span.start, span.end)), Some((8192, 20480)));
        assert_eq!(case.transfer.changes(), Some((0, 20480)));
        assert_eq!(case.step(), Step::PunchHole { offset: 8192, len: 12288 });
        // Memory that changes under way is none of its concern.
        let lease = Rc::clone(&case.lease);
        assert_eq!(case.transfer.remap(&lease), Ok(()));
        assert_eq!(case.step(), Step::PunchHole { offset: 8192, len: 12288 });
        assert_eq!(case.transfer.complete(-libc::ENOSPC), IOERR);
        let members: Vec<_> = std::iter::from_fn(|| case.transfer.take_member()).collect();
        assert!(!case.transfer.has_moved_own() && !members.iter().any(|m| case.transfer.has_moved(m)));
        case.transfer.begin_alone();
        assert_eq!(case.transfer.span(), None, "not merged again");
        assert_eq!(case.step(), Step::PunchHole { offset: 8192, len: 4096 });
        assert_eq!(case.transfer.complete(0), OK);
        case.end(Status::Ok);
        for (mut member, offset) in members.into_iter().zip([12288, 16384]) {
            member.begin_alone();
            assert_eq!(member.changes(), Some((offset, offset + 4096)));
            let (request, ..) = member.end(Status::Ok).unwrap();
            let _ = request.into_head();
        }
    }
}

#[test]
fn ranges_that_are_written_by_hand_are_written_whole() {
    let mut case = Case::new(1);
    case.ranges(Operation::WriteZeroes, &[(0, 4096, false)], false);
    let other = one_range(&case, Operation::WriteZeroes, 4096, false);
    case.transfer.lead([other].into_iter(), Vec::new());
    assert_eq!(case.step(), Step::ZeroRange { offset: 0, len: 8192 });
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 0, len: 8192 });
    assert_eq!(case.transfer.complete(4096), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 4096, len: 4096 });
    assert_eq!(case.transfer.complete(4096), OK);
    let (request, ..) = case.transfer.take_member().unwrap().end(Status::Ok).unwrap();
    let _ = request.into_head();
    case.end(Status::Ok);
}

#[test]
fn what_has_two_ranges_or_has_begun_is_not_merged() {
    let mut case = Case::new(1);
    case.ranges(Operation::Discard, &[(0, 4096, true), (8192, 4096, true)], false);
    assert_eq!(case.transfer.span(), None);
    case.end(Status::Ok);
    case.ranges(Operation::WriteZeroes, &[(0, 4096, false)], false);
    assert!(case.transfer.span().is_some());
    assert_eq!(case.transfer.complete(-libc::EOPNOTSUPP), Next::Again);
    assert_eq!(case.transfer.span(), None);
    case.end(Status::Ok);
}
