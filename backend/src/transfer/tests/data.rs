//! Reads and writes: whole, short, busy, failing.

use proptest::prelude::*;

use super::*;
use crate::sim::fixture::{cases, with_alignment};

#[test]
fn a_whole_transfer_is_done_at_once() {
    let mut case = Case::new(1);
    case.write(&[4096, 512], false);
    assert!(!case.transfer.is_empty());
    assert_eq!((case.step(), case.transfer.work()), (Step::Write { offset: 0, len: 4608 }, Work::Write));
    assert_eq!(case.transfer.nr_bytes(), 4608);
    assert_eq!(case.transfer.complete(4608), OK);
    assert_eq!(case.end(Status::Ok), (0, Status::Ok));

    case.read(1024, &[512, 1024]);
    assert_eq!((case.step(), case.transfer.work()), (Step::Read { offset: 1024, len: 1536 }, Work::Read));
    assert_eq!(case.transfer.complete(1536), OK);
    assert_eq!(case.end(Status::Ok), (1536, Status::Ok));
}

#[test]
fn no_data_is_nothing_to_do() {
    let mut case = Case::new(1);
    for operation in [Operation::Read { offset: 512 }, Operation::Write { offset: 512 }] {
        case.transfer.buffers.segments.clear();
        case.begin(operation, 0, false);
        assert!(case.transfer.is_empty());
        assert_eq!(case.end(Status::Ok), (0, Status::Ok));
    }
}

#[test]
fn a_failed_read_reports_no_bytes() {
    let mut case = Case::new(1);
    case.read(0, &[512]);
    assert_eq!(case.end(Status::IoErr), (0, Status::IoErr));
}

#[test]
fn f30_a_short_transfer_goes_on_with_exactly_the_rest() {
    for nr_moved in [512, 1024, 4096, 4096 + 512, 3 * 4096] {
        let mut case = Case::new(1);
        case.write(&[4096; 8], false);
        let whole = case.written();
        let len = whole.len() as u64;
        assert_eq!(case.transfer.complete(moved(nr_moved)), Next::Again);
        assert_eq!(case.step(), Step::Write { offset: nr_moved, len: len - nr_moved });
        assert_eq!(case.transfer.nr_bytes(), len - nr_moved);
        assert!(case.written() == whole[usize::try_from(nr_moved).unwrap()..]);
        assert_eq!(case.transfer.complete(moved(len - nr_moved)), OK);
    }
}

#[test]
fn f30_what_is_moved_beyond_a_whole_block_is_moved_again() {
    let mut case = Case::new(1);
    case.write(&[1024, 4096, 512], false);
    let whole = case.written();
    assert_eq!(case.transfer.complete(700), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 512, len: 5120 });
    assert_eq!(case.transfer.complete(512 + 511), Next::Again);
    assert_eq!(case.step(), Step::Write { offset: 1024, len: 4608 });
    assert!(case.written() == whole[1024..]);
    assert_eq!(case.transfer.complete(4608), OK);
}

#[test]
fn f30_the_rest_begins_where_the_storage_accepts_a_buffer() {
    let align = Alignment { mem_bytes: 4096, block_bytes: 512 };
    let (links, table) = table(1, DISK_BYTES);
    let mut case = Case::on(links, with_alignment(&table, align));
    case.write(&[8192, 4096], false);
    let whole = case.written();
    for (nr_moved, begins) in [(4096 + 512, 4096), (4096 + 1024, 8192)] {
        assert_eq!(case.transfer.complete(nr_moved), Next::Again);
        assert_eq!(case.step(), Step::Write { offset: begins, len: 3 * 4096 - begins });
        assert!(case.written() == whole[usize::try_from(begins).unwrap()..]);
    }
    // Less than the next such place is no progress.
    assert_eq!(case.transfer.complete(512), Next::Finished(Status::IoErr));
}

#[test]
fn f30_another_path_gets_the_missing_rest() {
    let mut case = Case::new(4);
    case.write(&[4096; 8], false);
    let whole = case.written();
    assert_eq!(whole[4096], b'B');
    assert_eq!(case.transfer.complete(12288), Next::Again);
    for (path, errno) in [(1, libc::EIO), (2, libc::ENODEV), (3, libc::ETIMEDOUT)] {
        assert_eq!(case.transfer.complete(-errno), Next::Elsewhere(errno));
        case.go_elsewhere(path);
        assert_eq!(case.transfer.tried(), (1 << path) - 1);
        assert_eq!(case.transfer.path_index(), path);
        assert_eq!(case.step(), Step::Write { offset: 12288, len: 20480 });
        assert!(case.written() == whole[12288..]);
    }
    assert_eq!(case.transfer.complete(20480), OK);
}

#[test]
fn f31_a_transfer_that_does_not_move_ends() {
    for (first, second) in [(0, None), (511, None), (512, Some(0)), (512, Some(511))] {
        let mut case = Case::new(2);
        case.read(0, &[4096]);
        let mut next = case.transfer.complete(first);
        if let Some(second) = second {
            assert_eq!(next, Next::Again);
            next = case.transfer.complete(second);
        }
        assert_eq!(next, IOERR, "{first} then {second:?}");
        assert_eq!(case.transfer.tried(), 0, "the path is not at fault");
    }
    let mut case = Case::new(1);
    case.write(&[4096], false);
    assert_eq!(case.transfer.complete(0), IOERR);
}

#[test]
fn f12_busy_waits_longer_and_longer_and_not_for_ever() {
    for errno in [libc::EAGAIN, libc::ENOMEM, libc::EBUSY] {
        let mut case = Case::new(2);
        case.read(0, &[4096]);
        let (mut sum_ms, mut last_ms) = (0, 0);
        let end = loop {
            match case.transfer.complete(-errno) {
                Next::Later(wait_ms) => {
                    assert!(wait_ms >= 1 && wait_ms >= last_ms && wait_ms <= 256, "{wait_ms}");
                    (sum_ms, last_ms) = (sum_ms + wait_ms, wait_ms);
                    assert_eq!(case.step(), Step::Read { offset: 0, len: 4096 }, "the same again");
                }
                end => break end,
            }
        };
        assert_eq!(end, Next::Elsewhere(errno));
        assert!((1000..3000).contains(&sum_ms), "{sum_ms} ms in all");
    }
}

#[test]
fn f12_three_times_busy_is_no_error() {
    let mut case = Case::new(1);
    case.read(0, &[4096]);
    let mut next = Next::Again;
    while next == Next::Again {
        for wait_ms in [1, 2, 4] {
            assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(wait_ms));
        }
        // Each progress gives it all its tries back.
        next = case.transfer.complete(512);
    }
    assert_eq!(next, OK);
    assert_eq!(case.transfer.tried(), 0);
}

#[test]
fn f12_interrupted_is_tried_again_at_once_and_not_for_ever() {
    let mut case = Case::new(2);
    case.write(&[4096], false);
    let mut nr = 0;
    let end = loop {
        match case.transfer.complete(-libc::EINTR) {
            Next::Again => nr += 1,
            end => break end,
        }
    };
    assert_eq!(end, Next::Elsewhere(libc::EINTR));
    assert!((10..100_000).contains(&nr), "{nr}");
    // Elsewhere it has all its tries again.
    case.go_elsewhere(1);
    assert_eq!(case.transfer.complete(-libc::EINTR), Next::Again);
    assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(1));
    assert_eq!(case.transfer.complete(4096), OK);
}

#[test]
fn f01_errors_of_the_path_go_elsewhere_and_errors_of_the_target_do_not() {
    for is_read in [true, false] {
        let begin = |case: &mut Case| {
            if is_read { case.read(0, &[512]) } else { case.write(&[512], false) }
        };
        for errno in PATH_ERRORS {
            let mut case = Case::new(2);
            begin(&mut case);
            assert_eq!(case.transfer.complete(-errno), Next::Elsewhere(errno));
            case.transfer.note_refusal(1);
            assert_eq!(case.transfer.tried(), 1);
        }
        for errno in TARGET_ERRORS.into_iter().chain([libc::EOPNOTSUPP, libc::ENOSYS]) {
            let mut case = Case::new(2);
            begin(&mut case);
            // One path alone may have become read-only: the others are asked, and none is at fault.
            let next = if !is_read && errno == libc::EPERM { Next::AskOthers(Status::IoErr) } else { IOERR };
            assert_eq!(case.transfer.complete(-errno), next, "errno {errno}");
            assert_eq!(case.transfer.tried(), 0);
        }
    }
}

#[test]
fn f20_data_outside_memory_leaves_a_request_that_can_be_ended() {
    let mut case = Case::new(1);
    for operation in [Operation::Read { offset: 0 }, Operation::Write { offset: 0 }] {
        for (addr, len) in
            [(MEMORY_BYTES as u64, 512), (MEMORY_BYTES as u64 - 256, 512), (u64::MAX - 511, 512)]
        {
            case.transfer.buffers.segments = vec![Segment { addr: GuestAddress(addr), len }];
            assert_eq!(case.try_begin(operation, len, false), Err(OutsideMemory));
            assert_eq!(case.end(Status::IoErr), (0, Status::IoErr));
        }
    }
    case.read(0, &[512]);
    assert_eq!(case.transfer.complete(512), OK);
}

#[test]
fn bounced_data_reaches_the_guest_at_the_end_and_only_if_all_is_well() {
    for status in [Status::Ok, Status::IoErr] {
        let mut case = Case::new(1);
        // No part is a block, so all of it is bounced.
        case.read(0, &[300, 212]);
        let before = case.guest_data();
        let Action::Read { iovecs, .. } = case.transfer.action() else { panic!("a read") };
        iovecs::write(iovecs, &[b'x'; 512]);
        assert_eq!(case.transfer.complete(512), OK);
        assert!(case.guest_data() == before, "not before the end");
        let expected = if status == Status::Ok { vec![b'x'; 512] } else { before };
        assert_eq!(case.end(status), (if status == Status::Ok { 512 } else { 0 }, status));
        assert!(case.guest_data() == expected);
    }
}

#[test]
fn f19_memory_and_path_are_held_until_the_end_and_no_longer() {
    let mut case = Case::new(1);
    let held = |case: &Case| (Rc::strong_count(&case.lease), Rc::strong_count(case.table.lane(0).unwrap()));
    case.read(0, &[512]);
    assert_eq!(held(&case), (2, 2));
    assert_eq!(case.transfer.complete(512), OK);
    assert_eq!(held(&case), (2, 2));
    assert_eq!(Rc::strong_count(&case.table), 1, "the other paths of its table are not");
    case.end(Status::Ok);
    assert_eq!(held(&case), (1, 1));
}

#[test]
fn f16_a_write_that_moved_makes_its_path_dirty() {
    let mut case = Case::new(3);
    case.clean();
    case.write(&[4096], false);
    assert!(!case.is_dirty(0), "not before it is done");
    assert_eq!(case.transfer.complete(512), Next::Again);
    assert!(case.is_dirty(0), "a part counts");
    assert_eq!(case.transfer.complete(-libc::EIO), Next::Elsewhere(libc::EIO));
    case.go_elsewhere(2);
    assert_eq!(case.transfer.complete(3584), OK);
    assert!(case.is_dirty(2) && !case.is_dirty(1));
    case.end(Status::Ok);

    case.clean();
    case.read(0, &[4096]);
    assert_eq!(case.transfer.complete(4096), OK);
    assert!((0..3).all(|path| !case.is_dirty(path)), "reading leaves nothing to flush");
}

#[test]
fn a_used_transfer_remembers_nothing() {
    let mut case = Case::new(2);
    case.write(&[4096, 4096], true);
    assert_eq!(case.transfer.complete(512), Next::Again);
    assert!(matches!(case.transfer.complete(-libc::EAGAIN), Next::Later(_)));
    assert_eq!(case.transfer.complete(-libc::EIO), Next::Elsewhere(libc::EIO));
    case.end(Status::IoErr);
    case.read(8192, &[512]);
    assert_eq!((case.step(), case.transfer.tried()), (Step::Read { offset: 8192, len: 512 }, 0));
    assert_eq!(case.transfer.complete(-libc::EAGAIN), Next::Later(1));
    assert_eq!(case.transfer.complete(512), OK);
}

/// An answer of a path.
#[derive(Debug, Clone)]
enum Answer {
    /// So many 1/256 of what was asked for.
    Part(u8),
    Error(i32),
}

proptest! {
    #![proptest_config(cases(300))]

    /// However a write or read is cut up, put off and moved to other paths: the bytes end where they belong.
    #[test]
    fn f30_any_sequence_of_answers_moves_every_byte_to_its_place(
        lens in prop::collection::vec(1_u64..3000, 1..6),
        is_read: bool,
        answers in prop::collection::vec(
            prop_oneof![
                6 => any::<u8>().prop_map(Answer::Part),
                1 => Just(Answer::Error(libc::EAGAIN)),
                1 => Just(Answer::Error(libc::EINTR)),
                1 => Just(Answer::Error(libc::EIO)),
            ],
            0..12,
        ),
    ) {
        let mut case = Case::new(4);
        let mut lens = lens;
        let total: u64 = lens.iter().sum();
        lens.push(total.next_multiple_of(512) - total + 512);
        let total = usize::try_from(lens.iter().sum::<u64>()).unwrap();
        let mut disk: Vec<u8> = (0..total).map(|i| (i / 3 % 249).to_le_bytes()[0]).collect();
        if is_read { case.read(0, &lens) } else { case.write(&lens, false) }
        let expected = if is_read { disk.clone() } else { case.guest_data() };
        let mut answers = answers.into_iter();
        let mut path = 0;
        let status = loop {
            let answer = answers.next().unwrap_or(Answer::Part(255));
            let result = match (case.transfer.action(), answer) {
                (_, Answer::Error(errno)) => -errno,
                (Action::Read { iovecs, offset }, Answer::Part(part)) => {
                    let n = (iovecs::len(iovecs) * (usize::from(part) + 1)) >> 8;
                    let at = usize::try_from(offset).unwrap();
                    iovecs::write(iovecs, &disk[at..at + n]);
                    i32::try_from(n).unwrap()
                }
                (Action::Write { iovecs, offset }, Answer::Part(part)) => {
                    let n = (iovecs::len(iovecs) * (usize::from(part) + 1)) >> 8;
                    let at = usize::try_from(offset).unwrap();
                    disk[at..at + n].copy_from_slice(&iovecs::read(iovecs, n));
                    i32::try_from(n).unwrap()
                }
                (action, _) => panic!("{action:?}"),
            };
            match case.transfer.complete(result) {
                Next::Finished(status) => break status,
                Next::Again | Next::Later(_) => {}
                Next::Elsewhere(_) | Next::AskOthers(_) if path == 3 => break Status::IoErr,
                Next::Elsewhere(_) | Next::AskOthers(_) => {
                    path += 1;
                    case.go_elsewhere(path);
                }
            }
        };
        let segments = case.transfer.buffers.segments.clone();
        let (_, status) = case.end(status);
        if status == Status::Ok {
            case.transfer.buffers.segments = segments;
            prop_assert!(case.guest_data() == expected);
            prop_assert!(disk == expected);
        }
    }
}

/// A path with a stricter alignment comes while a request waits: its buffers are bounced from then on, and what was
/// moved already is not lost.
#[test]
fn f11_a_table_that_asks_for_more_alignment_than_the_one_before() {
    let strict = Alignment { mem_bytes: 512, block_bytes: 512 };
    for nr_moved in [0, 512, 4096, 4096 + 512] {
        let mut case = Case::new(2);
        case.write(&[100, 4096, 924], false);
        let whole = case.written();
        if nr_moved != 0 {
            assert_eq!(case.transfer.complete(moved(nr_moved)), Next::Again);
        }
        let table = Rc::new(View::new(Arc::new(with_alignment(&case.table, strict)), None, 0));
        case.transfer.rebase(&table);
        case.transfer.set_path(1);
        let Action::Write { iovecs, offset } = case.transfer.action() else { panic!("a write") };
        assert_eq!(offset, nr_moved);
        assert!(
            iovecs.iter().all(|v| v.iov_base.addr().is_multiple_of(512) && v.iov_len.is_multiple_of(512))
        );
        assert!(case.written() == whole[usize::try_from(nr_moved).unwrap()..], "after {nr_moved}");
    }
    let mut case = Case::new(2);
    case.read(0, &[100, 4096, 924]);
    assert_eq!(case.transfer.complete(512), Next::Again);
    let table = Rc::new(View::new(Arc::new(with_alignment(&case.table, strict)), None, 0));
    case.transfer.rebase(&table);
    case.transfer.set_path(1);
    let Action::Read { iovecs, offset } = case.transfer.action() else { panic!("a read") };
    assert!(iovecs.iter().all(|v| v.iov_base.addr().is_multiple_of(512)));
    assert_eq!((offset, iovecs::len(iovecs)), (0, 5120), "what lies in the guest is read again");
    iovecs::write(iovecs, &vec![7; 5120]);
    assert_eq!(case.transfer.complete(5120), OK);
    let segments = case.transfer.buffers.segments.clone();
    assert_eq!(case.end(Status::Ok), (5120, Status::Ok));
    case.transfer.buffers.segments = segments;
    assert!(case.guest_data() == vec![7; 5120]);
}

#[test]
fn a_run_under_way_is_known_by_all_of_it() {
    let mut case = Case::new(1);
    case.write(&[4096], false);
    let mut other = Box::<Transfer>::default();
    other.buffers.segments.push(Segment { addr: GuestAddress(0x8000), len: 8192 });
    let mut request = unreadable(4);
    (request.operation, request.data_len) = (Operation::Write { offset: 4096 }, 8192);
    other.begin(request, &case.lease, &case.table, false, 0).unwrap();
    case.transfer.lead([other].into_iter(), Vec::new());
    assert_eq!(case.transfer.flight_span().map(|span| (span.start, span.end)), Some((0, 12288)));
    assert_eq!(case.transfer.complete(4096), Next::Again);
    assert_eq!(case.transfer.flight_span(), None, "not new any more");
    let (request, ..) = case.transfer.take_member().unwrap().end(Status::Ok).unwrap();
    let _ = request.into_head();
    case.end(Status::Ok);
}
