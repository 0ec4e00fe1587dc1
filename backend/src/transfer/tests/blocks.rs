//! Blocks that are larger than a sector.

use super::*;
use crate::sim::fixture::with_alignment;

const BLOCK: u64 = 4096;

fn case() -> Case {
    let (links, table) = table(2, DISK_BYTES);
    let table = with_alignment(&table, Alignment { mem_bytes: 512, block_bytes: 4096 });
    Case::on(links, table)
}

/// Bytes of the disk from `offset` on.
fn disk(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|i| (i / 7 % 251).to_le_bytes()[0]).collect()
}

/// Answers the read that is asked for; moves the first `len` bytes of it.
fn answer(case: &mut Case, len: u64) -> Next {
    let Action::Read { iovecs, offset } = case.transfer.action() else { panic!("a read") };
    iovecs::write(iovecs, &disk(offset, len));
    case.transfer.complete(moved(len))
}

#[test]
fn f11_a_read_of_sectors_reads_the_blocks_around_them() {
    for (offset, lens, first, whole) in [
        (512, &[512][..], 0, BLOCK),
        (0, &[512], 0, BLOCK),
        (3584, &[512], 0, BLOCK),
        (3584, &[1024], 0, 2 * BLOCK),
        (4096 + 512, &[100, 412], BLOCK, BLOCK),
        (8192, &[4096, 512], 2 * BLOCK, 2 * BLOCK),
    ] {
        let mut case = case();
        case.read(offset, lens);
        let segments = case.transfer.buffers.segments.clone();
        assert_eq!(case.step(), Step::Read { offset: first, len: whole }, "{lens:?} at {offset}");
        assert_eq!(answer(&mut case, whole), OK);
        let len = lens.iter().sum();
        assert_eq!(case.end(Status::Ok), (len, Status::Ok));
        case.transfer.buffers.segments = segments;
        assert!(case.guest_data() == disk(offset, len), "{lens:?} at {offset}");
    }
}

#[test]
fn f11_whole_blocks_are_moved_in_place() {
    let mut case = case();
    case.read(BLOCK, &[4096, 8192]);
    assert_eq!(case.step(), Step::Read { offset: BLOCK, len: 3 * BLOCK });
    assert_eq!(answer(&mut case, 3 * BLOCK), OK);
    assert!(case.guest_data() == disk(BLOCK, 3 * BLOCK), "there before the end");
    case.end(Status::Ok);

    case.write(&[4096, 4096], false);
    assert_eq!(case.step(), Step::Write { offset: 0, len: 2 * BLOCK });
    assert_eq!(case.transfer.complete(moved(2 * BLOCK)), OK);
}

#[test]
fn f30_short_transfers_go_on_at_whole_blocks() {
    let mut case = case();
    case.read(512, &[3 * 4096]);
    let segments = case.transfer.buffers.segments.clone();
    assert_eq!(case.step(), Step::Read { offset: 0, len: 4 * BLOCK });
    assert_eq!(answer(&mut case, BLOCK + 3584), Next::Again);
    assert_eq!(case.step(), Step::Read { offset: BLOCK, len: 3 * BLOCK });
    assert_eq!(answer(&mut case, 2 * BLOCK), Next::Again);
    assert_eq!(case.step(), Step::Read { offset: 3 * BLOCK, len: BLOCK });
    assert_eq!(answer(&mut case, BLOCK), OK);
    case.end(Status::Ok);
    case.transfer.buffers.segments = segments;
    assert!(case.guest_data() == disk(512, 3 * BLOCK));
}

#[test]
fn f31_less_than_a_block_is_nothing() {
    for len in [0, 512, 4095] {
        let mut case = case();
        case.read(0, &[8192]);
        assert_eq!(answer(&mut case, len), IOERR, "{len}");
    }
}
