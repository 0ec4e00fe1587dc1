//! Reading chains: what is lawful, what is not, and that each ends.

use super::*;
use crate::sim::ring::{DESCRIPTOR_BYTES, INDIRECT, Raw, WRITE};

const SIZE: u16 = 16;
/// Where indirect tables are put.
const TABLE: u64 = 0x4000;

fn ring() -> Both {
    Both::at(SIZE, 0, true)
}

fn read(ring: &Both, head: u16) -> Result<Vec<Descriptor>, ChainError> {
    let mut chain = vec![Descriptor { addr: GuestAddress(1), len: 1, writable: true }];
    ring.device.read_chain(&ring.map, head, &mut chain).map(|()| chain)
}

fn put_table(ring: &Both, raws: &[Raw]) {
    for (i, raw) in (0..).zip(raws) {
        ring.guest.set_descriptor_at(TABLE + DESCRIPTOR_BYTES * i, *raw);
    }
}

/// `nr` descriptors that follow each other, the last one writable.
fn line(nr: u16) -> Vec<Raw> {
    let last = nr - 1;
    (0..nr)
        .map(|i| {
            let flags = if i == last { WRITE } else { NEXT };
            (0x8000 + 16 * u64::from(i), u32::from(i) + 1, flags, i + 1)
        })
        .collect()
}

fn assert_line(chain: &[Descriptor], nr: u16) {
    assert_eq!(chain.len(), usize::from(nr));
    for (i, descriptor) in (0..).zip(chain) {
        let expected = (0x8000 + 16 * u64::from(i), u32::from(i) + 1, i + 1 == nr);
        assert_eq!((descriptor.addr.0, descriptor.len, descriptor.writable), expected);
    }
}

fn table_bytes(nr: u32) -> u32 {
    16 * nr
}

#[test]
fn descriptors_are_followed_in_any_order_of_the_table() {
    let ring = ring();
    ring.guest.set_descriptor(3, (0x10_0000_0000, 16, NEXT, 15));
    ring.guest.set_descriptor(15, (u64::MAX, u32::MAX, NEXT | WRITE, 0));
    ring.guest.set_descriptor(0, (7, 0, WRITE, 9));
    let chain = read(&ring, 3).unwrap();
    let expected = [(0x10_0000_0000, 16, false), (u64::MAX, u32::MAX, true), (7, 0, true)];
    assert_eq!(chain.iter().map(|d| (d.addr.0, d.len, d.writable)).collect::<Vec<_>>(), expected);
}

#[test]
fn f20_a_next_index_outside_the_table_is_an_error() {
    for next in [SIZE, SIZE + 1, 0x8000, 65_535] {
        let ring = ring();
        ring.guest.set_descriptor(0, (0x100, 16, NEXT, next));
        assert_eq!(read(&ring, 0), Err(ChainError::Index), "next {next}");
    }
    assert_eq!(read(&ring(), SIZE), Err(ChainError::Index));
}

#[test]
fn f20_a_loop_ends() {
    let ring = ring();
    ring.guest.set_descriptor(5, (0x100, 16, NEXT, 5));
    assert_eq!(read(&ring, 5), Err(ChainError::Loop));
    ring.guest.set_descriptor(1, (0x100, 16, NEXT, 2));
    ring.guest.set_descriptor(2, (0x100, 16, NEXT, 1));
    assert_eq!(read(&ring, 1), Err(ChainError::Loop));
}

#[test]
fn a_chain_may_use_the_whole_table() {
    let ring = ring();
    for (i, raw) in (0..).zip(line(SIZE)) {
        ring.guest.set_descriptor(i, raw);
    }
    assert_line(&read(&ring, 0).unwrap(), SIZE);
}

#[test]
fn f25_a_chain_in_one_table() {
    for nr in [1, 2, 3, SIZE] {
        let ring = ring();
        put_table(&ring, &line(nr));
        // The write flag of the descriptor that leads to the table says nothing (2.7.5.3.2).
        for flags in [INDIRECT, INDIRECT | WRITE] {
            ring.guest.set_descriptor(9, (TABLE, table_bytes(nr.into()), flags, 3));
            assert_line(&read(&ring, 9).unwrap(), nr);
        }
    }
}

#[test]
fn f25_header_direct_and_the_rest_in_a_table() {
    let ring = ring();
    let all = line(SIZE + 1);
    ring.guest.set_descriptor(4, (all[0].0, all[0].1, NEXT, 7));
    let table: Vec<Raw> = all[1..].iter().map(|raw| (raw.0, raw.1, raw.2, raw.3 - 1)).collect();
    put_table(&ring, &table);
    ring.guest.set_descriptor(7, (TABLE, table_bytes(SIZE.into()), INDIRECT, 0));
    assert_line(&read(&ring, 4).unwrap(), SIZE + 1);
}

#[test]
fn f25_tables_longer_than_the_ring_as_linux_makes_them() {
    for nr in [SIZE + 1, 128, 1024] {
        let ring = ring();
        put_table(&ring, &line(nr));
        ring.guest.set_descriptor(0, (TABLE, table_bytes(nr.into()), INDIRECT, 0));
        assert_line(&read(&ring, 0).unwrap(), nr);
    }
}

#[test]
fn f25_entries_of_a_table_that_no_chain_leads_to_do_not_matter() {
    let ring = ring();
    put_table(
        &ring,
        &[(0x8000, 1, NEXT, 3), (0, 0, INDIRECT, 0), (0, 0, INDIRECT, 0), (0x8010, 2, WRITE, 9)],
    );
    ring.guest.set_descriptor(0, (TABLE, table_bytes(4), INDIRECT, 0));
    assert_eq!(read(&ring, 0).unwrap().len(), 2);
}

#[test]
fn f25_broken_tables() {
    let end = MEMORY_BYTES as u64;
    let last = (0x8000, 1, WRITE, 0);
    let cases: &[(&str, Raw, &[Raw], ChainError)] = &[
        ("length 0", (TABLE, 0, INDIRECT, 0), &[last], ChainError::Indirect),
        ("one byte", (TABLE, 1, INDIRECT, 0), &[last], ChainError::Indirect),
        ("not a multiple of 16", (TABLE, 17, INDIRECT, 0), &[last], ChainError::Indirect),
        ("absurdly long", (TABLE, u32::MAX - 15, INDIRECT, 0), &[last], ChainError::Indirect),
        ("INDIRECT and NEXT", (TABLE, 16, INDIRECT | NEXT, 1), &[last], ChainError::Indirect),
        ("nested", (TABLE, 16, INDIRECT, 0), &[(TABLE, 16, INDIRECT, 0)], ChainError::Indirect),
        (
            "nested, second entry",
            (TABLE, 32, INDIRECT, 0),
            &[(0x8000, 1, NEXT, 1), (TABLE, 32, INDIRECT, 0)],
            ChainError::Indirect,
        ),
        ("loop to itself", (TABLE, 16, INDIRECT, 0), &[(0x8000, 1, NEXT, 0)], ChainError::Loop),
        (
            "loop of two",
            (TABLE, 32, INDIRECT, 0),
            &[(0x8000, 1, NEXT, 1), (0x8000, 1, NEXT, 0)],
            ChainError::Loop,
        ),
        ("next past the table", (TABLE, 16, INDIRECT, 0), &[(0x8000, 1, NEXT, 1)], ChainError::Index),
        ("next far past", (TABLE, 16, INDIRECT, 0), &[(0x8000, 1, NEXT, 65_535)], ChainError::Index),
        ("outside memory", (end, 16, INDIRECT, 0), &[], ChainError::Memory),
        ("half outside memory", (end - 8, 16, INDIRECT, 0), &[], ChainError::Memory),
        ("at the top of the address space", (u64::MAX - 15, 16, INDIRECT, 0), &[], ChainError::Memory),
        ("past the top", (u64::MAX, 16, INDIRECT, 0), &[], ChainError::Memory),
    ];
    for (what, head, table, error) in cases {
        let ring = ring();
        put_table(&ring, table);
        ring.guest.set_descriptor(0, *head);
        assert_eq!(read(&ring, 0), Err(*error), "{what}");
        // The same behind a good header.
        ring.guest.set_descriptor(1, (0x100, 16, NEXT, 0));
        assert_eq!(read(&ring, 1), Err(*error), "{what}, behind a header");
    }
}

#[test]
fn f25_a_table_over_the_end_of_memory() {
    let ring = ring();
    let at = MEMORY_BYTES as u64 - 32;
    ring.guest.set_descriptor_at(at, (0x8000, 1, NEXT, 1));
    ring.guest.set_descriptor_at(at + 16, (0x8010, 2, NEXT, 2));
    ring.guest.set_descriptor(0, (at, table_bytes(3), INDIRECT, 0));
    assert_eq!(read(&ring, 0), Err(ChainError::Memory));
}

#[test]
fn f25_tables_need_the_feature() {
    let ring = ring();
    put_table(&ring, &line(2));
    ring.guest.set_descriptor(0, (TABLE, 32, INDIRECT, 0));
    let device = Vring::new(&ring.map, SIZE, ring.guest.at(), 0, true, false).unwrap();
    let mut chain = Vec::new();
    assert_eq!(device.read_chain(&ring.map, 0, &mut chain), Err(ChainError::Indirect));
}

#[test]
fn f25_a_loop_in_the_longest_table_ends_soon() {
    let ring = ring();
    let mut all = line(1024);
    all[1023] = (0x8000, 1, NEXT, 0);
    put_table(&ring, &all);
    ring.guest.set_descriptor(0, (TABLE, table_bytes(1024), INDIRECT, 0));
    let mut chain = Vec::new();
    assert_eq!(ring.device.read_chain(&ring.map, 0, &mut chain), Err(ChainError::Loop));
    assert!(chain.len() <= CHAIN_LEN_MAX as usize);
}

proptest! {
    #![proptest_config(cases(512))]

    /// Whatever lies in the table and in memory: an end without a panic, and never more than a chain can hold.
    #[test]
    fn f25_f26_any_bytes_end(raws in prop::collection::vec((any::<u16>(), 0_u32..96, 0_u16..8, 0_u16..20), 32), head in 0_u16..20) {
        let ring = ring();
        let near = |(addr, len, flags, next): (u16, u32, u16, u16)| (u64::from(addr), len, flags, next);
        for (i, raw) in (0..SIZE).zip(&raws) {
            ring.guest.set_descriptor(i, near(*raw));
        }
        put_table(&ring, &raws.iter().map(|raw| near(*raw)).collect::<Vec<_>>());
        let mut chain = Vec::new();
        let _ = ring.device.read_chain(&ring.map, head, &mut chain);
        prop_assert!(chain.len() <= CHAIN_LEN_MAX as usize);
    }
}

/// Rings and indirect tables may lie across regions, or not in memory as a whole.
#[test]
fn f45_tables_across_regions_are_read_as_others_are() {
    let half = MEMORY_BYTES / 2;
    let regions = [(GuestAddress(0), half), (GuestAddress(half as u64), half)];
    let map = Arc::new(GuestMap::from_ranges(&regions).unwrap());
    let base = half as u64 - 16 * 2;
    let guest = RawRing::new(&map, SIZE, base);
    let device = Vring::new(&map, SIZE, guest.at(), 0, true, true).unwrap();
    let mut ring = Both { map, guest, device };
    line(4).into_iter().zip(0..).for_each(|(raw, i)| ring.guest.set_descriptor(i, raw));
    assert_line(&read(&ring, 0).unwrap(), 4);
    ring.offer(0, &[0, 1, 2, 3]);
    assert_eq!(ring.pop_all(), [0, 1, 2, 3]);

    let end = MEMORY_BYTES as u64;
    for at in [half as u64 - 16, half as u64 - 8, end - 16 * 3] {
        for (i, raw) in (0..).zip(line(3)) {
            ring.guest.set_descriptor_at(at + DESCRIPTOR_BYTES * i, raw);
        }
        // The whole table is there, or as much of it as the chain needs.
        for nr in [3, 1000] {
            ring.guest.set_descriptor(5, (at, table_bytes(nr), INDIRECT, 0));
            assert_line(&read(&ring, 5).unwrap(), 3);
        }
    }
    ring.guest.set_descriptor(5, (end - 16 * 2, table_bytes(3), INDIRECT, 0));
    ring.guest.set_descriptor_at(end - 16, (0x8000, 1, NEXT, 2));
    ring.guest.set_descriptor_at(end - 16 * 2, (0x8000, 1, NEXT, 1));
    assert_eq!(read(&ring, 5), Err(ChainError::Memory));
}

proptest! {
    #![proptest_config(cases(256))]

    /// Whatever stands in the table, heads come as they were made available.
    #[test]
    fn f20_what_is_looked_at_ahead_decides_nothing(
        raws in prop::collection::vec(
            (prop_oneof![any::<u64>(), 0..MEMORY_BYTES as u64], any::<u32>(), 0..8_u16, any::<u16>()),
            usize::from(SIZE),
        ),
        heads in prop::collection::vec(0..SIZE + 4, 1..usize::from(SIZE)),
    ) {
        let mut ring = ring();
        (0..).zip(&raws).for_each(|(i, raw)| ring.guest.set_descriptor(i, *raw));
        ring.offer(0, &heads);
        let mut seen = Vec::new();
        for head in heads {
            let expected = if head < SIZE && !seen.contains(&head) { Pop::Head(head) } else { Pop::BadHead(head) };
            seen.push(head);
            prop_assert_eq!(ring.pop(), expected);
        }
        prop_assert_eq!(ring.pop(), Pop::Empty);
    }
}
