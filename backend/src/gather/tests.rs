use std::sync::{Arc, LazyLock};

use proptest::prelude::*;

use super::*;
use crate::sim::fixture::cases;
use crate::sim::iovecs;

/// Two regions that follow each other for the guest and lie apart in the host.
const REGION_BYTES: usize = 64 << 10;
const MEMORY_BYTES: u64 = 2 * REGION_BYTES as u64;

const PAGE: Alignment = Alignment { mem_bytes: 4096, block_bytes: 512 };
const ANY: Alignment = Alignment { mem_bytes: 1, block_bytes: 512 };

fn memory() -> Arc<GuestMap> {
    let end = GuestAddress(REGION_BYTES as u64);
    Arc::new(GuestMap::from_ranges(&[(GuestAddress(0), REGION_BYTES), (end, REGION_BYTES)]).unwrap())
}

fn segment(addr: u64, len: u64) -> Segment {
    Segment { addr: GuestAddress(addr), len }
}

fn host(map: &GuestMap, addr: u64) -> usize {
    map.get_host_address(GuestAddress(addr)).unwrap().addr()
}

/// Address and length of each iovec.
fn shape(gather: &Gather) -> Vec<(usize, usize)> {
    gather.iovecs().iter().map(|v| (v.iov_base.addr(), v.iov_len)).collect()
}

/// Bytes that differ from place to place; made once, since that is what takes the time.
static PATTERN: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..=MEMORY_BYTES).map(|i| (i * 7 + i / 251).to_le_bytes()[0]).collect());

/// Fills memory with the pattern.
fn fill(map: &GuestMap) -> Vec<u8> {
    let bytes = PATTERN[1..].to_vec();
    map.write_slice(&bytes, GuestAddress(0)).unwrap();
    bytes
}

/// Other bytes than those that [`fill`] puts anywhere.
fn data(len: usize) -> Vec<u8> {
    PATTERN[..len].to_vec()
}

fn contents(map: &GuestMap) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(MEMORY_BYTES).unwrap()];
    map.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

fn gathered(map: &GuestMap, segments: &[Segment], align: Alignment) -> Gather {
    let mut gather = Gather::default();
    gather.map(map, segments, align).unwrap();
    gather
}

#[test]
fn aligned_pieces_are_used_in_place() {
    let map = memory();
    let segments = [segment(0x2000, 4096), segment(0x5000, 512), segment(0, 8192)];
    let gather = gathered(&map, &segments, PAGE);
    let expected = [(0x2000, 4096), (0x5000, 512), (0, 8192)];
    assert_eq!(shape(&gather), expected.map(|(addr, len)| (host(&map, addr), len)));
    assert!(!gather.is_bounced());
}

#[test]
fn no_alignment_asked_for_is_none_missed() {
    let map = memory();
    let gather = gathered(&map, &[segment(0x2001, 1536), segment(0x5003, 512)], ANY);
    assert_eq!(shape(&gather), [(host(&map, 0x2001), 1536), (host(&map, 0x5003), 512)]);
    assert!(!gather.is_bounced());
}

#[test]
fn neighbours_are_one_iovec_and_may_be_aligned_where_their_parts_are_not() {
    let map = memory();
    let gather = gathered(&map, &[segment(0x3000, 100), segment(0x3064, 412), segment(0x3200, 512)], PAGE);
    assert_eq!(shape(&gather), [(host(&map, 0x3000), 1024)]);
    assert!(!gather.is_bounced());
}

#[test]
fn only_the_odd_pieces_are_bounced() {
    let map = memory();
    let bytes = fill(&map);
    let segments = [segment(0x1000, 4096), segment(0x4008, 512), segment(0x6000, 4096)];
    let mut gather = gathered(&map, &segments, PAGE);
    assert!(gather.is_bounced());
    let shape = shape(&gather);
    assert_eq!((shape[0], shape[2]), ((host(&map, 0x1000), 4096), (host(&map, 0x6000), 4096)));
    assert_eq!((shape.len(), shape[1].1, shape[1].0 % 4096), (3, 512, 0));
    assert_ne!(shape[1].0, host(&map, 0x4008));
    gather.copy_in(&map).unwrap();
    assert_eq!(iovecs::read(&gather.iovecs()[1..2], 512), bytes[0x4008..0x4208]);
}

#[test]
fn a_bounced_run_lasts_until_whole_blocks_are_together() {
    let map = memory();
    let segments = [segment(0x1000, 300), segment(0x2000, 512), segment(0x3000, 212), segment(0x4000, 512)];
    let gather = gathered(&map, &segments, PAGE);
    let shape = shape(&gather);
    assert_eq!((shape.len(), shape[0].1), (2, 1024));
    assert_eq!(shape[1], (host(&map, 0x4000), 512));
}

#[test]
fn runs_that_do_not_end_on_the_alignment_start_anew_on_it() {
    let map = memory();
    let segments = [segment(0x1008, 512), segment(0x2008, 512)];
    let gather = gathered(&map, &segments, PAGE);
    let shape = shape(&gather);
    assert_eq!(shape.iter().map(|(addr, len)| (addr % 4096, *len)).collect::<Vec<_>>(), [(0, 512), (0, 512)]);
    // With nothing to align, both are one.
    let coarse = Alignment { mem_bytes: 512, block_bytes: 512 };
    assert_eq!(gathered(&map, &segments, coarse).iovecs().len(), 1);
}

#[test]
fn a_segment_may_cross_from_one_region_into_the_next() {
    let map = memory();
    let bytes = fill(&map);
    let end = REGION_BYTES as u64;
    let gather = gathered(&map, &[segment(end - 1024, 2048)], PAGE);
    assert_eq!(shape(&gather)[1], (host(&map, end), 1024));
    let gather = gathered(&map, &[segment(end - 100, 512)], ANY);
    // 100 bytes and 412 are no blocks each, so direct I/O gets them in one piece.
    assert!(gather.is_bounced() && gather.iovecs().len() == 1);
    let mut gather = gather;
    gather.copy_in(&map).unwrap();
    assert_eq!(iovecs::read(gather.iovecs(), 512), bytes[REGION_BYTES - 100..REGION_BYTES + 412]);
}

#[test]
fn f20_what_is_outside_memory_is_refused() {
    let map = memory();
    let mut gather = Gather::default();
    for (addr, len) in [
        (MEMORY_BYTES, 512),
        (MEMORY_BYTES - 256, 512),
        (u64::MAX - 511, 512),
        (u64::MAX - 255, 512),
        (0, MEMORY_BYTES + 512),
        (0, u64::MAX - 511),
        (512, u64::MAX - 511),
    ] {
        for good in [&[][..], &[segment(0x1000, 512)], &[segment(0x1008, 512)]] {
            let segments = [good, &[segment(addr, len)]].concat();
            assert_eq!(gather.map(&map, &segments, PAGE), Err(OutsideMemory), "{len} at {addr:#x}");
        }
        assert_eq!(gather.surround(&map, &[segment(addr, len)], 0, 4096, PAGE), Err(OutsideMemory));
    }
    // And it can be used again.
    gather.map(&map, &[segment(0x1000, 512)], PAGE).unwrap();
    assert_eq!(shape(&gather), [(host(&map, 0x1000), 512)]);
}

#[test]
fn nothing_is_left_of_the_request_before() {
    let map = memory();
    let mut gather = gathered(&map, &[segment(0x1008, 512)], PAGE);
    gather.map(&map, &[segment(0x2000, 512)], PAGE).unwrap();
    assert_eq!(shape(&gather), [(host(&map, 0x2000), 512)]);
    assert!(!gather.is_bounced());
    gather.clear();
    assert!(gather.iovecs().is_empty());
}

#[test]
fn f11_a_read_that_is_no_whole_block_surrounds_itself() {
    let map = memory();
    fill(&map);
    let align = Alignment { mem_bytes: 512, block_bytes: 4096 };
    let segments = [segment(0x3001, 700), segment(0x8000, 324)];
    let mut gather = Gather::default();
    gather.surround(&map, &segments, 1536, 4096, align).unwrap();
    assert!(gather.is_bounced());
    assert_eq!((gather.iovecs().len(), iovecs::len(gather.iovecs())), (1, 4096));
    assert_eq!(shape(&gather)[0].0 % 512, 0);

    let block: Vec<u8> = (0..4096_u32).map(|i| (i % 253).to_le_bytes()[0]).collect();
    iovecs::write(gather.iovecs(), &block);
    let mut expected = contents(&map);
    expected[0x3001..0x3001 + 700].copy_from_slice(&block[1536..1536 + 700]);
    expected[0x8000..0x8000 + 324].copy_from_slice(&block[1536 + 700..1536 + 1024]);
    gather.copy_out(&map).unwrap();
    assert!(contents(&map) == expected, "exactly the asked-for bytes change");
}

#[test]
fn zeros_of_any_length() {
    let mut gather = Gather::default();
    for len in [512, 65_536, 65_536 + 512, 1 << 20] {
        gather.zeros(len);
        assert_eq!(iovecs::len(gather.iovecs()), len);
        assert!(iovecs::read(gather.iovecs(), len).iter().all(|byte| *byte == 0));
        assert!(gather.iovecs().iter().all(|v| v.iov_base.addr() % 4096 == 0 && v.iov_len % 512 == 0));
        assert!(!gather.is_bounced());
    }
}

#[test]
fn large_bounce_buffers_are_given_back() {
    let map = memory();
    let mut gather = gathered(&map, &[segment(8, 100 << 10)], PAGE);
    assert!(gather.buffer.capacity() >= 100 << 10);
    gather.clear();
    assert_eq!(gather.buffer.capacity(), 0);
    gather.map(&map, &[segment(8, 8 << 10)], PAGE).unwrap();
    let kept = gather.buffer.capacity();
    gather.clear();
    assert_eq!(gather.buffer.capacity(), kept, "small ones are kept");
}

/// Segments that fill whole blocks, aligned or not, with overlaps left to chance only where `apart` is false.
fn any_segments(block: u64) -> impl Strategy<Value = Vec<Segment>> {
    let len = prop_oneof![2 => Just(0_u64), 2 => 1_u64..64, 1 => 1_u64..3000];
    prop::collection::vec((len, 0_u64..4, prop_oneof![Just(0_u64), Just(4), 1_u64..4096]), 1..9).prop_map(
        move |parts| {
            let mut at = 0x100;
            let mut sum = 0;
            let mut segments = Vec::new();
            let nr = parts.len();
            for (i, (odd, blocks, gap)) in parts.into_iter().enumerate() {
                // A gap of 0 makes neighbours; 4 keeps small alignments; page starts now and then.
                at += gap;
                if gap % 3 == 1 {
                    at = u64::next_multiple_of(at, 4096);
                }
                let mut len = blocks * block + odd;
                if i + 1 == nr {
                    len += (sum + len).next_multiple_of(block) - (sum + len);
                }
                sum += len;
                if len != 0 {
                    segments.push(segment(at, len));
                }
                at += len;
            }
            segments
        },
    )
}

fn any_alignment() -> impl Strategy<Value = Alignment> {
    let block = prop_oneof![3 => Just(512_usize), 1 => Just(4096_usize)];
    let mem = prop_oneof![Just(1_usize), Just(4), Just(512), Just(4096)];
    (mem, block).prop_map(|(mem_bytes, block_bytes)| Alignment { mem_bytes, block_bytes })
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn data_goes_where_it_belongs_whatever_the_segments(
        (align, segments) in any_alignment().prop_flat_map(|a| (Just(a), any_segments(a.block_bytes as u64))),
    ) {
        let total: usize = segments.iter().map(|s| usize::try_from(s.len).unwrap()).sum();
        prop_assume!(segments.iter().all(|s| s.addr.0 + s.len <= MEMORY_BYTES));
        let map = memory();
        let before = fill(&map);
        let span = |s: &Segment| usize::try_from(s.addr.0).unwrap()..usize::try_from(s.addr.0 + s.len).unwrap();
        let mut gather = gathered(&map, &segments, align);

        // What direct I/O asks for.
        prop_assert_eq!(iovecs::len(gather.iovecs()), total);
        for v in gather.iovecs() {
            prop_assert_eq!(v.iov_base.addr() % align.mem_bytes, 0);
            prop_assert_eq!(v.iov_len % align.block_bytes, 0);
            prop_assert_ne!(v.iov_len, 0);
        }

        // A piece that is good as it is stays where it is.
        let mut at = 0;
        for s in &segments {
            let crosses = s.addr.0 < REGION_BYTES as u64 && s.addr.0 + s.len > REGION_BYTES as u64;
            let len = usize::try_from(s.len).unwrap();
            let place = host(&map, s.addr.0);
            if !crosses && (at | len).is_multiple_of(align.block_bytes) && place.is_multiple_of(align.mem_bytes) {
                let is_inside = |v: &IoVec| v.iov_base.addr() <= place && place + len <= v.iov_base.addr() + v.iov_len;
                prop_assert!(gather.iovecs().iter().any(is_inside), "moved without need");
            }
            at += len;
        }

        // A write takes the data in its order and changes nothing.
        gather.copy_in(&map).unwrap();
        let expected = segments.iter().map(|s| &before[span(s)]).collect::<Vec<_>>().concat();
        prop_assert!(iovecs::read(gather.iovecs(), total) == expected);
        prop_assert!(contents(&map) == before);

        // A read puts it there and nowhere else.
        let data = data(total);
        iovecs::write(gather.iovecs(), &data);
        gather.copy_out(&map).unwrap();
        let mut after = before;
        let mut rest = &data[..];
        for s in &segments {
            let (part, left) = rest.split_at(usize::try_from(s.len).unwrap());
            after[span(s)].copy_from_slice(part);
            rest = left;
        }
        prop_assert!(contents(&map) == after);
    }

    #[test]
    fn f11_surrounding_gives_exactly_the_part(
        len in 1_usize..6000, skip in 0_usize..4096, addr in 0x100_u64..0x8000, cut in any::<prop::sample::Index>(),
    ) {
        let map = memory();
        let mut expected = fill(&map);
        let whole = (skip + len).next_multiple_of(4096);
        let cut = cut.index(len + 1);
        let apart = 0x9000_u64;
        let segments: Vec<_> = [segment(addr, cut as u64), segment(addr + apart, (len - cut) as u64)]
            .into_iter().filter(|s| s.len != 0).collect();
        let mut gather = Gather::default();
        let align = Alignment { mem_bytes: 4096, block_bytes: 4096 };
        gather.surround(&map, &segments, skip, whole, align).unwrap();
        prop_assert_eq!(shape(&gather).iter().map(|(a, l)| (a % 4096, *l)).collect::<Vec<_>>(), [(0, whole)]);
        let data = data(whole);
        iovecs::write(gather.iovecs(), &data);
        gather.copy_out(&map).unwrap();
        let at = usize::try_from(addr).unwrap();
        expected[at..at + cut].copy_from_slice(&data[skip..skip + cut]);
        let at = usize::try_from(addr + apart).unwrap();
        expected[at..at + len - cut].copy_from_slice(&data[skip + cut..skip + len]);
        prop_assert!(contents(&map) == expected);
    }
}

/// A guest names the same memory as often as it likes; what that takes of the host's is bounded.
#[test]
fn f62_no_more_is_bounced_than_is_allowed_and_pieces_are_counted() {
    let map = memory();
    let mut gather = Gather::default();
    let odd = [segment(1, MEMORY_BYTES / 2); 8];
    let bytes = odd.len() * REGION_BYTES;
    assert_eq!(gather.map_within(&map, &odd, PAGE, bytes - 1), Err(OutsideMemory));
    assert_eq!(gather.large_bytes, 0);
    gather.map_within(&map, &odd, PAGE, bytes).unwrap();
    assert!(gather.large_bytes >= bytes && room() <= LARGE_BYTES_MAX - bytes);
    // What is in place is not counted.
    gather.map_within(&map, &[segment(4096, 8192)], PAGE, 0).unwrap();
    assert_eq!(gather.large_bytes, 0);
    let many = |nr| vec![segment(4096, 512); nr];
    assert_eq!(gather.map(&map, &many(PIECES_MAX), PAGE), Ok(()));
    assert_eq!(gather.map(&map, &many(PIECES_MAX + 1), PAGE), Err(OutsideMemory));
}
