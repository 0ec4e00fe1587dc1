//! Nothing may be assumed about how the bytes are cut into descriptors (virtio 1.2, 2.7.4.1).

use proptest::prelude::*;

use super::*;
use crate::sim::fixture::cases;

#[test]
fn the_header_in_sixteen_descriptors_of_a_byte() {
    let mut guest = Guest::new();
    let bytes = header(VIRTIO_BLK_T_IN, 0x1_02);
    let mut chain: Vec<_> = bytes.iter().map(|byte| guest.out(&[*byte])).collect();
    chain.extend([guest.room(512), guest.room(1)]);
    let out = guest.parse(&chain, &limits());
    assert_eq!((out.status, out.operation), (None, Operation::Read { offset: 0x102 * 512 }));
}

#[test]
fn header_and_data_in_one_descriptor() {
    let mut guest = Guest::new();
    let both = guest.out(&[header(VIRTIO_BLK_T_OUT, 2), vec![7; 1024]].concat());
    let status = guest.room(1);
    let out = guest.parse(&[both, status], &limits());
    assert_eq!((out.status, out.operation), (None, Operation::Write { offset: 1024 }));
    assert_eq!(out.segments, [Segment { addr: GuestAddress(both.addr.0 + 16), len: 1024 }]);
}

#[test]
fn header_and_first_data_share_a_descriptor() {
    let mut guest = Guest::new();
    let bytes = [header(VIRTIO_BLK_T_OUT, 2), vec![7; 512]].concat();
    let (a, b, c) = (guest.out(&bytes[..9]), guest.out(&bytes[9..100]), guest.out(&bytes[100..]));
    let status = guest.room(1);
    let out = guest.parse(&[a, b, c, status], &limits());
    assert_eq!((out.status, out.data_len), (None, 512));
    let first = Segment { addr: GuestAddress(b.addr.0 + 7), len: 84 };
    assert_eq!(out.segments, [first, Segment { addr: c.addr, len: 428 }]);
}

#[test]
fn neighbours_in_memory_are_one_segment() {
    let mut guest = Guest::new();
    let header = guest.out(&header(VIRTIO_BLK_T_IN, 0));
    let room = guest.room(2049);
    let piece = |from: u64, len| Descriptor { addr: GuestAddress(room.addr.0 + from), len, writable: true };
    let chain = [header, piece(0, 512), piece(512, 100), piece(612, 924), piece(1537, 512), piece(2049, 1)];
    let out = guest.parse(&chain, &limits());
    assert_eq!(out.status_addr, Some(room.addr.0 + 2049));
    let expected = [(0, 1536), (1537, 512)].map(|(from, len)| Segment { addr: piece(from, 0).addr, len });
    assert_eq!(out.segments, expected);
    // The status touches the data and is not part of it.
    let chain = [header, piece(0, 512), piece(512, 1)];
    assert_eq!(guest.parse(&chain, &limits()).segments, [Segment { addr: room.addr, len: 512 }]);
}

#[test]
fn f53_the_place_for_the_serial_number() {
    let mut guest = Guest::new();
    for pieces in [vec![19], vec![20], vec![21], vec![512], vec![10, 10], vec![0, 20], vec![1; 20], vec![]] {
        let mut chain = vec![guest.out(&header(VIRTIO_BLK_T_GET_ID, 0))];
        chain.extend(pieces.iter().map(|len| guest.room(*len)));
        chain.push(guest.room(1));
        let out = guest.parse(&chain, &limits());
        let len = pieces.iter().map(|len| u64::from(*len)).sum();
        assert_eq!((out.status, out.operation, out.data_len), (None, Operation::GetId, len));
        assert_eq!(out.segments.iter().map(|s| s.len).sum::<u64>(), len);
    }
}

#[test]
fn empty_descriptors_are_nothing_wherever_they_point() {
    let mut guest = Guest::new();
    let header = header(VIRTIO_BLK_T_OUT, 2);
    let nothing = |addr, writable| Descriptor { addr: GuestAddress(addr), len: 0, writable };
    let (a, b, c) = (guest.out(&header[..3]), guest.out(&header[3..]), guest.out(&[1; 512]));
    let status = guest.room(1);
    for addr in [0, a.addr.0, MEMORY_BYTES, u64::MAX] {
        let (out, room) = (nothing(addr, false), nothing(addr, true));
        let parsed = guest.parse(&[out, a, out, out, b, out, c, out, room, status, room], &limits());
        assert_eq!((parsed.status, parsed.data_len), (None, 512), "{addr:#x}");
        assert_eq!(parsed.segments, [Segment { addr: c.addr, len: 512 }]);
        assert_eq!(parsed.status_addr, Some(status.addr.0));
    }
}

/// A request as its two streams: the bytes to the device, and how many come back (the status among them).
#[derive(Debug, Clone)]
struct Streams {
    out: Vec<u8>,
    room: u32,
}

fn any_request() -> impl Strategy<Value = Streams> {
    let sector = prop_oneof![4 => 0..SECTORS, 1 => SECTORS - 2..SECTORS + 2, 1 => any::<u64>()];
    let ranges = prop::collection::vec((0..SECTORS + 2, 0_u32..300, 0_u32..3), 0..5)
        .prop_map(|all| all.into_iter().flat_map(|(s, n, f)| range(s, n, f)).collect::<Vec<_>>());
    let kind = prop_oneof![
        Just(VIRTIO_BLK_T_IN),
        Just(VIRTIO_BLK_T_OUT),
        Just(VIRTIO_BLK_T_FLUSH),
        Just(VIRTIO_BLK_T_GET_ID),
        Just(VIRTIO_BLK_T_DISCARD),
        Just(VIRTIO_BLK_T_WRITE_ZEROES),
        Just(UNKNOWN),
    ];
    (kind, sector, 0_u32..5, prop_oneof![3 => Just(0_u32), 1 => 1..512_u32], ranges).prop_map(
        |(kind, sector, nr_sectors, odd, ranges)| {
            let len = 512 * nr_sectors + odd;
            let (data, room) = match kind {
                VIRTIO_BLK_T_IN => (vec![], len),
                VIRTIO_BLK_T_OUT => ((0..len).map(|i| (i % 251).to_le_bytes()[0]).collect(), 0),
                VIRTIO_BLK_T_GET_ID => (vec![], len % 40),
                VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => (ranges, 0),
                _ => (vec![], 0),
            };
            Streams { out: [header(kind, sector), data].concat(), room: room + 1 }
        },
    )
}

/// Cuts `len` bytes at the given places; places that repeat make empty pieces.
fn cut(len: usize, places: &[prop::sample::Index]) -> Vec<usize> {
    let mut at: Vec<_> = places.iter().map(|place| place.index(len + 1)).collect();
    at.extend([0, len]);
    at.sort_unstable();
    at.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// The address of each byte of the segments.
fn addresses(segments: &[Segment]) -> Vec<u64> {
    segments.iter().flat_map(|s| s.addr.0..s.addr.0 + s.len).collect()
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn any_framing_of_the_same_bytes_is_the_same_request(
        streams in any_request(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        room_cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        is_backwards: bool,
        joined: u16,
    ) {
        let mut guest = Guest::new();
        let plain = [guest.out(&streams.out), guest.room(streams.room)];
        let expected = guest.parse(&plain, &limits());

        // Pieces in memory: in order or from behind, some of them touching the one before.
        let mut pieces: Vec<Descriptor> = Vec::new();
        let mut bytes = &streams.out[..];
        for len in cut(streams.out.len(), &cuts) {
            let (here, rest) = bytes.split_at(len);
            pieces.push(guest.out(here));
            bytes = rest;
        }
        let room = cut(streams.room as usize, &room_cuts);
        let mut lens: Vec<_> = room.iter().map(|len| u32::try_from(*len).unwrap()).collect();
        if is_backwards {
            lens.reverse();
        }
        let mut writable = Vec::new();
        for (i, len) in lens.iter().enumerate() {
            if joined & 1 << (i % 16) != 0 {
                guest.next -= 32;
            }
            writable.push(guest.room(*len));
        }
        if is_backwards {
            writable.reverse();
        }
        pieces.extend(writable.iter().copied());
        let out = guest.parse(&pieces, &limits());

        prop_assert_eq!(out.status, expected.status);
        prop_assert_eq!(out.operation, expected.operation);
        prop_assert_eq!(out.data_len, expected.data_len);
        prop_assert_eq!(&out.ranges, &expected.ranges);
        let byte_of = |all: &[Descriptor]| -> Vec<u64> {
            all.iter().flat_map(|d| d.addr.0..d.addr.0 + u64::from(d.len)).collect()
        };
        let room = byte_of(&writable);
        prop_assert_eq!(out.status_addr, room.last().copied());
        if out.status.is_none() {
            let data = match out.operation {
                Operation::Read { .. } | Operation::GetId => room[..room.len() - 1].to_vec(),
                Operation::Flush => vec![],
                _ => byte_of(&pieces[..pieces.len() - writable.len()])[16..].to_vec(),
            };
            prop_assert_eq!(addresses(&out.segments), data);
        }
    }
}
