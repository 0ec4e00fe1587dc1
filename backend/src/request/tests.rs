use std::sync::Arc;

use super::*;
use crate::memory::anonymous;

mod framing;
mod ranges;

const MEMORY_BYTES: u64 = 256 << 10;

/// Sectors of the disk.
const SECTORS: u64 = 1000;

/// What a type field says.
const UNKNOWN: u32 = 5;

fn limits() -> DiskLimits {
    DiskLimits {
        size_bytes: SECTORS * SECTOR_BYTES,
        block_bytes: 512,
        read_only: false,
        discard: true,
        discard_sectors_max: 400,
        write_zeroes_sectors_max: 200,
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0xa5; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn range(sector: u64, nr_sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(nr_sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// Guest memory, given out from the start, with a gap after each buffer.
struct Guest {
    map: Arc<GuestMap>,
    next: u64,
}

/// What came out of a chain.
#[derive(Debug, PartialEq, Eq)]
struct Out {
    status: Option<Status>,
    status_addr: Option<u64>,
    operation: Operation,
    data_len: u64,
    segments: Vec<Segment>,
    ranges: Vec<Range>,
}

impl Guest {
    fn new() -> Self {
        Self { map: anonymous(usize::try_from(MEMORY_BYTES).unwrap()), next: 0x1000 }
    }

    fn place(&mut self, len: u32) -> u64 {
        let addr = self.next;
        self.next += u64::from(len) + 32;
        assert!(self.next <= MEMORY_BYTES, "test memory is full");
        addr
    }

    /// A buffer that the device may read.
    fn out(&mut self, bytes: &[u8]) -> Descriptor {
        let len = u32::try_from(bytes.len()).unwrap();
        let addr = GuestAddress(self.place(len));
        self.map.write_slice(bytes, addr).unwrap();
        Descriptor { addr, len, writable: false }
    }

    /// A buffer that the device may write.
    fn room(&mut self, len: u32) -> Descriptor {
        Descriptor { addr: GuestAddress(self.place(len)), len, writable: true }
    }

    fn parse(&self, chain: &[Descriptor], disk: &DiskLimits) -> Out {
        // What an earlier request left there must not matter.
        let junk = Segment { addr: GuestAddress(1), len: 1 };
        let mut buffers =
            Buffers { segments: vec![junk; 3], ranges: vec![Range { offset: 1, len: 1, unmap: true }] };
        let (request, status) = parse(&self.map, 7, chain, disk, &mut buffers);
        let (operation, data_len) = (request.operation, request.data_len);
        let (head, status_addr) = request.into_head();
        assert_eq!(head, 7);
        Out {
            status,
            status_addr: status_addr.map(|addr| addr.0),
            operation,
            data_len,
            segments: buffers.segments,
            ranges: buffers.ranges,
        }
    }

    /// The plain framing: header, data, status.
    fn plain(&mut self, kind: u32, sector: u64, out: &[u8], room: u32) -> Out {
        let mut chain = vec![self.out(&header(kind, sector))];
        if !out.is_empty() {
            chain.push(self.out(out));
        }
        if room != 0 {
            chain.push(self.room(room));
        }
        chain.push(self.room(1));
        self.parse(&chain, &limits())
    }
}

/// The status of a request in the plain framing.
fn status_of(kind: u32, sector: u64, out_len: usize, room: u32) -> Option<Status> {
    Guest::new().plain(kind, sector, &vec![1; out_len], room).status
}

#[test]
fn the_plain_framing_of_every_kind() {
    let mut guest = Guest::new();
    let read = guest.plain(VIRTIO_BLK_T_IN, 3, &[], 1024);
    assert_eq!((read.status, read.operation, read.data_len), (None, Operation::Read { offset: 1536 }, 1024));
    assert_eq!(read.segments.iter().map(|s| s.len).sum::<u64>(), 1024);

    let write = guest.plain(VIRTIO_BLK_T_OUT, 999, &[1; 512], 0);
    assert_eq!((write.status, write.operation), (None, Operation::Write { offset: 999 * 512 }));
    assert_eq!((write.data_len, write.segments.len()), (512, 1));

    let flush = guest.plain(VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    assert_eq!((flush.status, flush.operation, flush.data_len), (None, Operation::Flush, 0));

    let id = guest.plain(VIRTIO_BLK_T_GET_ID, 0, &[], 20);
    assert_eq!((id.status, id.operation, id.data_len), (None, Operation::GetId, 20));

    let discard = guest.plain(VIRTIO_BLK_T_DISCARD, 0, &range(8, 4, 0), 0);
    assert_eq!((discard.status, discard.operation), (None, Operation::Discard));
    assert_eq!(discard.ranges, [Range { offset: 4096, len: 2048, unmap: true }]);

    let zeroes = guest.plain(VIRTIO_BLK_T_WRITE_ZEROES, 0, &range(8, 4, 1), 0);
    assert_eq!((zeroes.status, zeroes.operation), (None, Operation::WriteZeroes));
    assert_eq!(zeroes.ranges, [Range { offset: 4096, len: 2048, unmap: true }]);

    for kind in [UNKNOWN, 2, 3, 6, 7, 9, 10, 12, 14, 15, 0x8000_0000, u32::MAX] {
        let unknown = guest.plain(kind, 0, &[], 0);
        assert_eq!(unknown.status, Some(Status::Unsupp), "type {kind}");
        assert!(unknown.status_addr.is_some());
    }
}

#[test]
fn the_status_bytes() {
    assert_eq!([Status::Ok, Status::IoErr, Status::Unsupp].map(Status::byte), [0, 1, 2]);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "head 9 was dropped")]
fn a_request_that_is_lost_is_caught() {
    drop(unreadable(9));
}

#[test]
fn f06_the_sum_of_the_pieces_must_end_inside_the_disk() {
    for (sector, nr_pieces, good) in [
        (SECTORS - 1, 1, true),
        (SECTORS - 1, 2, false),
        (SECTORS - 1, 8, false),
        (SECTORS - 8, 8, true),
        (SECTORS - 8, 9, false),
        (SECTORS, 1, false),
        (SECTORS, 0, true),
        (SECTORS + 1, 0, false),
    ] {
        let mut guest = Guest::new();
        let mut read = vec![guest.out(&header(VIRTIO_BLK_T_IN, sector))];
        read.extend((0..nr_pieces).map(|_| guest.room(512)));
        read.push(guest.room(1));
        let mut write = vec![guest.out(&header(VIRTIO_BLK_T_OUT, sector))];
        write.extend((0..nr_pieces).map(|_| guest.out(&[1; 512])));
        write.push(guest.room(1));
        let expected = if good { None } else { Some(Status::IoErr) };
        for chain in [read, write] {
            assert_eq!(guest.parse(&chain, &limits()).status, expected, "{nr_pieces} at {sector}");
        }
    }
}

#[test]
fn f20_broken_chains_have_a_status_where_there_is_a_place_for_it() {
    let mut guest = Guest::new();
    let outside = GuestAddress(MEMORY_BYTES);
    let good = guest.out(&header(VIRTIO_BLK_T_IN, 0));
    let short = guest.out(&header(VIRTIO_BLK_T_IN, 0)[..15]);
    let (data, status) = (guest.room(512), guest.room(1));
    let away = |d: Descriptor| Descriptor { addr: outside, ..d };
    let none = Descriptor { len: 0, ..status };
    let cases: &[(&str, &[Descriptor], bool)] = &[
        ("nothing", &[], false),
        ("only a header", &[good], false),
        ("only a status", &[status], true),
        ("header of 15 bytes", &[short, status], true),
        (
            "header and data without status",
            &[guest.out(&header(VIRTIO_BLK_T_OUT, 0)), guest.out(&[0; 512])],
            false,
        ),
        ("status of length 0", &[good, none], false),
        ("header outside memory", &[away(good), data, status], true),
        ("status outside memory", &[good, data, away(status)], false),
        (
            "status at the end of the address space",
            &[good, data, Descriptor { addr: GuestAddress(u64::MAX), len: 2, ..status }],
            false,
        ),
    ];
    for (what, chain, has_place) in cases {
        let out = guest.parse(chain, &limits());
        assert_eq!(out.status, Some(Status::IoErr), "{what}");
        assert_eq!(out.status_addr.is_some(), *has_place, "{what}");
    }
    // A header across the end of memory.
    let header = Descriptor { addr: GuestAddress(MEMORY_BYTES - 15), len: 16, writable: false };
    assert_eq!(guest.parse(&[header, data, status], &limits()).status, Some(Status::IoErr));
}

#[test]
fn f20_data_outside_memory_is_left_to_whoever_maps_it() {
    // The segments are given as they are: mapping them is what finds out, and it must find the whole length.
    let mut guest = Guest::new();
    let header = guest.out(&header(VIRTIO_BLK_T_IN, 0));
    let data = Descriptor { addr: GuestAddress(MEMORY_BYTES - 256), len: 512, writable: true };
    let status = guest.room(1);
    let out = guest.parse(&[header, data, status], &limits());
    assert_eq!((out.status, out.segments), (None, vec![Segment { addr: data.addr, len: 512 }]));
}

#[test]
fn f21_the_status_is_the_last_writable_byte() {
    let mut guest = Guest::new();
    let header = guest.out(&header(VIRTIO_BLK_T_IN, 0));
    let data = guest.room(512);
    for len in [1, 2, 4, 100] {
        let status = guest.room(len);
        let out = guest.parse(&[header, data, status], &limits());
        assert_eq!(out.status_addr, Some(status.addr.0 + u64::from(len) - 1));
        // All bytes before the last are data, so only a status of one byte makes whole sectors.
        assert_eq!(out.status.is_none(), len == 1);
    }
    // Shared with the data.
    let shared = guest.room(513);
    let out = guest.parse(&[header, shared], &limits());
    assert_eq!((out.status, out.data_len, out.status_addr), (None, 512, Some(shared.addr.0 + 512)));
    assert_eq!(out.segments, [Segment { addr: shared.addr, len: 512 }]);
    // The last byte of a memory region.
    let last = Descriptor { addr: GuestAddress(MEMORY_BYTES - 1), len: 1, writable: true };
    assert_eq!(guest.parse(&[header, data, last], &limits()).status_addr, Some(MEMORY_BYTES - 1));
    // Empty descriptors behind it change nothing.
    let empty = Descriptor { addr: GuestAddress(u64::MAX), len: 0, writable: true };
    let out = guest.parse(&[header, shared, empty, empty], &limits());
    assert_eq!((out.status, out.status_addr), (None, Some(shared.addr.0 + 512)));
}

#[test]
fn f23_no_sector_number_wraps_around() {
    for kind in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT] {
        for sector in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 56, 1 << 55, (1 << 55) - 1, 1 << 54, SECTORS] {
            for nr_sectors in [1_u32, 8] {
                let (out_len, room) = if kind == VIRTIO_BLK_T_OUT {
                    (512 * nr_sectors as usize, 0)
                } else {
                    (0, 512 * nr_sectors)
                };
                assert_eq!(status_of(kind, sector, out_len, room), Some(Status::IoErr), "{kind} {sector}");
            }
        }
        assert_eq!(status_of(kind, u64::MAX, 0, 0), Some(Status::IoErr));
    }
    // What is not a place on the disk is not looked at.
    assert_eq!(status_of(VIRTIO_BLK_T_FLUSH, u64::MAX, 0, 0), None);
    assert_eq!(status_of(VIRTIO_BLK_T_GET_ID, u64::MAX, 0, 20), None);
}

#[test]
fn data_comes_in_whole_sectors() {
    for len in [1, 511, 513, 1023] {
        assert_eq!(status_of(VIRTIO_BLK_T_IN, 0, 0, len), Some(Status::IoErr), "{len}");
        assert_eq!(status_of(VIRTIO_BLK_T_OUT, 0, len as usize, 0), Some(Status::IoErr), "{len}");
    }
    for kind in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT] {
        assert_eq!(status_of(kind, 5, 0, 0), None, "no data is no fault");
    }
}

#[test]
fn f24_buffers_of_the_wrong_direction() {
    let mut guest = Guest::new();
    let (read, write) = (guest.out(&header(VIRTIO_BLK_T_IN, 0)), guest.out(&header(VIRTIO_BLK_T_OUT, 0)));
    let (source, target, status) = (guest.out(&[1; 512]), guest.room(512), guest.room(1));
    let read_only = |d: Descriptor| Descriptor { writable: false, ..d };
    let writable = |d: Descriptor| Descriptor { writable: true, ..d };
    let cases: &[(&str, &[Descriptor], Option<Descriptor>)] = &[
        ("read-only status", &[read, target, read_only(status)], Some(target)),
        ("read into read-only data", &[read, read_only(target), status], Some(status)),
        (
            "read into partly read-only data",
            &[read, read_only(target), guest.room(512), status],
            Some(status),
        ),
        ("write from write-only data", &[write, writable(source), status], Some(status)),
        ("read-only after writable", &[write, status, source], Some(status)),
        ("read-only between writable", &[read, target, source, status], Some(status)),
        ("header marked writable", &[writable(read), target, status], Some(status)),
        ("all read-only", &[read, read_only(target), read_only(status)], None),
    ];
    for (what, chain, place) in cases {
        let out = guest.parse(chain, &limits());
        assert_eq!(out.status, Some(Status::IoErr), "{what}");
        let expected = place.map(|d| d.addr.0 + u64::from(d.len) - 1);
        assert_eq!(out.status_addr, expected, "{what}");
    }
}

#[test]
fn f54_a_read_only_disk_takes_no_change() {
    let disk = DiskLimits { read_only: true, discard: false, ..limits() };
    let mut guest = Guest::new();
    for (kind, out, room, expected) in [
        (VIRTIO_BLK_T_OUT, vec![1; 512], 0, Some(Status::IoErr)),
        (VIRTIO_BLK_T_OUT, vec![], 0, Some(Status::IoErr)),
        (VIRTIO_BLK_T_DISCARD, range(0, 1, 0), 0, Some(Status::IoErr)),
        (VIRTIO_BLK_T_WRITE_ZEROES, range(0, 1, 0), 0, Some(Status::IoErr)),
        (VIRTIO_BLK_T_IN, vec![], 512, None),
        (VIRTIO_BLK_T_FLUSH, vec![], 0, None),
        (VIRTIO_BLK_T_GET_ID, vec![], 20, None),
    ] {
        let chain = [guest.out(&header(kind, 0)), guest.out(&out), guest.room(room), guest.room(1)];
        assert_eq!(guest.parse(&chain, &disk).status, expected, "type {kind}");
    }
}

#[test]
fn f11_blocks_larger_than_a_sector() {
    let disk = DiskLimits { block_bytes: 4096, ..limits() };
    let mut guest = Guest::new();
    let mut status = |kind, sector, out_len: usize, room| {
        let chain =
            [guest.out(&header(kind, sector)), guest.out(&vec![1; out_len]), guest.room(room), guest.room(1)];
        guest.parse(&chain, &disk).status
    };
    // Firmware reads single sectors; a part of a block cannot be written.
    assert_eq!(status(VIRTIO_BLK_T_IN, 1, 0, 512), None);
    assert_eq!(status(VIRTIO_BLK_T_OUT, 8, 4096, 0), None);
    assert_eq!(status(VIRTIO_BLK_T_OUT, 8, 512, 0), Some(Status::IoErr));
    assert_eq!(status(VIRTIO_BLK_T_OUT, 1, 4096, 0), Some(Status::IoErr));
    assert_eq!(status(VIRTIO_BLK_T_OUT, 1, 0, 0), Some(Status::IoErr));
}

#[test]
fn f26_a_header_that_changes_meanwhile_is_one_of_both() {
    use std::sync::atomic::{AtomicBool, Ordering};

    let mut guest = Guest::new();
    let good = header(VIRTIO_BLK_T_IN, 0);
    let (head, data, status) = (guest.out(&good), guest.room(512), guest.room(1));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sector = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                sector = if sector == 0 { u64::MAX } else { 0 };
                guest.map.store(sector.to_le(), GuestAddress(head.addr.0 + 8), Ordering::Relaxed).unwrap();
            }
        });
        for _ in 0..20_000 {
            let out = guest.parse(&[head, data, status], &limits());
            match out.status {
                None => assert_eq!(out.operation, Operation::Read { offset: 0 }),
                Some(status) => assert_eq!(status, Status::IoErr),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
