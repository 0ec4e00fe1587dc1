//! Discard and write-zeroes.

use super::*;

const BOTH: [u32; 2] = [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES];

fn of(kind: u32, ranges: &[Vec<u8>], disk: &DiskLimits) -> Out {
    let mut guest = Guest::new();
    let chain = [guest.out(&header(kind, 0)), guest.out(&ranges.concat()), guest.room(1)];
    guest.parse(&chain, disk)
}

fn status(kind: u32, ranges: &[Vec<u8>]) -> Option<Status> {
    of(kind, ranges, &limits()).status
}

#[test]
fn f50_flags() {
    for (kind, flags, expected) in [
        (VIRTIO_BLK_T_DISCARD, 0, None),
        (VIRTIO_BLK_T_DISCARD, 1, Some(Status::Unsupp)),
        (VIRTIO_BLK_T_DISCARD, 2, Some(Status::Unsupp)),
        (VIRTIO_BLK_T_DISCARD, 0x8000_0000, Some(Status::Unsupp)),
        (VIRTIO_BLK_T_WRITE_ZEROES, 0, None),
        (VIRTIO_BLK_T_WRITE_ZEROES, 1, None),
        (VIRTIO_BLK_T_WRITE_ZEROES, 2, Some(Status::Unsupp)),
        (VIRTIO_BLK_T_WRITE_ZEROES, 3, Some(Status::Unsupp)),
        (VIRTIO_BLK_T_WRITE_ZEROES, 0x8000_0000, Some(Status::Unsupp)),
    ] {
        assert_eq!(status(kind, &[range(8, 8, flags)]), expected, "type {kind} flags {flags:#x}");
        // One bad range among good ones spoils the request, wherever it stands.
        let good = range(0, 1, 0);
        assert_eq!(status(kind, &[good.clone(), range(8, 8, flags), good]), expected);
    }
    for (flags, unmap) in [(0, false), (1, true)] {
        let out = of(VIRTIO_BLK_T_WRITE_ZEROES, &[range(8, 8, flags)], &limits());
        assert_eq!(out.ranges, [Range { offset: 4096, len: 4096, unmap }]);
    }
}

#[test]
fn f50_an_unknown_flag_is_unsupported_whatever_else_is_wrong() {
    for kind in BOTH {
        assert_eq!(status(kind, &[range(u64::MAX, 1, 2)]), Some(Status::Unsupp));
        assert_eq!(status(kind, &[range(0, u32::MAX, 2), range(0, 1, 0)]), Some(Status::Unsupp));
    }
}

#[test]
fn f23_ranges_do_not_wrap_around() {
    for kind in BOTH {
        for sector in [u64::MAX, 1 << 63, 1 << 55, (1 << 55) - 1, 1 << 54, SECTORS] {
            for nr_sectors in [1, 8, u32::MAX] {
                assert_eq!(status(kind, &[range(sector, nr_sectors, 0)]), Some(Status::IoErr));
            }
        }
        assert_eq!(status(kind, &[range(SECTORS - 1, 2, 0)]), Some(Status::IoErr));
        assert_eq!(status(kind, &[range(0, u32::MAX, 0)]), Some(Status::IoErr));
        assert_eq!(status(kind, &[range(SECTORS - 1, 1, 0)]), None);
    }
}

#[test]
fn f51_the_limits_that_are_offered_are_kept() {
    for (kind, sectors_max) in [(VIRTIO_BLK_T_DISCARD, 400), (VIRTIO_BLK_T_WRITE_ZEROES, 200)] {
        assert_eq!(status(kind, &[range(0, sectors_max, 0)]), None);
        assert_eq!(status(kind, &[range(0, sectors_max + 1, 0)]), Some(Status::IoErr));
        let many = |nr: u32| (0..nr).map(|i| range(u64::from(i) * 2, 1, 0)).collect::<Vec<_>>();
        let out = of(kind, &many(RANGES_MAX), &limits());
        assert_eq!((out.status, out.ranges.len()), (None, RANGES_MAX as usize));
        assert_eq!(status(kind, &many(RANGES_MAX + 1)), Some(Status::IoErr));
    }
}

#[test]
fn payloads_that_are_no_list_of_ranges() {
    for kind in BOTH {
        assert_eq!(status(kind, &[]), Some(Status::IoErr), "none");
        let whole = range(0, 1, 0);
        for len in [1, 8, 15] {
            assert_eq!(status(kind, &[whole[..len].to_vec()]), Some(Status::IoErr), "{len} bytes");
            assert_eq!(status(kind, &[whole.clone(), whole[..len].to_vec()]), Some(Status::IoErr));
        }
        // Far more than anyone means: neither read nor kept.
        let mut guest = Guest::new();
        let chain = [
            guest.out(&header(kind, 0)),
            Descriptor { addr: GuestAddress(0), len: u32::MAX, writable: false },
            guest.room(1),
        ];
        assert_eq!(guest.parse(&chain, &limits()).status, Some(Status::IoErr));
    }
}

#[test]
fn f20_payload_outside_memory() {
    for kind in BOTH {
        let mut guest = Guest::new();
        let (header, status) = (guest.out(&header(kind, 0)), guest.room(1));
        for addr in [MEMORY_BYTES, MEMORY_BYTES - 8, u64::MAX - 7, u64::MAX] {
            let payload = Descriptor { addr: GuestAddress(addr), len: 16, writable: false };
            let out = guest.parse(&[header, payload, status], &limits());
            assert_eq!(out.status, Some(Status::IoErr), "{addr:#x}");
        }
    }
}

#[test]
fn f24_a_payload_that_the_device_may_not_read() {
    for kind in BOTH {
        let mut guest = Guest::new();
        let payload = Descriptor { writable: true, ..guest.out(&range(0, 1, 0)) };
        let chain = [guest.out(&header(kind, 0)), payload, guest.room(1)];
        assert_eq!(guest.parse(&chain, &limits()).status, Some(Status::IoErr));
    }
}

#[test]
fn empty_ranges_are_lawful() {
    for kind in BOTH {
        let out = of(kind, &[range(3, 0, 0), range(SECTORS, 0, 0)], &limits());
        assert_eq!(out.status, None);
        assert!(out.ranges.iter().all(|r| r.len == 0));
        assert_eq!(status(kind, &[range(SECTORS + 1, 0, 0)]), Some(Status::IoErr));
    }
}

#[test]
fn f51_discard_that_was_not_offered_is_unsupported() {
    let disk = DiskLimits { discard: false, ..limits() };
    assert_eq!(of(VIRTIO_BLK_T_DISCARD, &[range(0, 1, 0)], &disk).status, Some(Status::Unsupp));
    assert_eq!(of(VIRTIO_BLK_T_WRITE_ZEROES, &[range(0, 1, 0)], &disk).status, None);
}

#[test]
fn f11_a_discard_leaves_parts_of_blocks_alone_and_a_write_zeroes_with_them_is_refused() {
    let disk = DiskLimits { block_bytes: 4096, ..limits() };
    for (sector, nr_sectors, offset, len) in [
        (8, 8, 4096, 4096),
        (8, 16, 4096, 8192),
        (7, 10, 4096, 4096),
        (9, 15, 8192, 4096),
        (9, 7, 8192, 0),
        (9, 6, 8192, 0),
        (1, 1, 4096, 0),
    ] {
        let out = of(VIRTIO_BLK_T_DISCARD, &[range(sector, nr_sectors, 0)], &disk);
        assert_eq!(out.status, None);
        assert_eq!((out.ranges[0].len, out.ranges[0].unmap), (len, true), "{nr_sectors} at {sector}");
        assert!(len == 0 || out.ranges[0].offset == offset, "{nr_sectors} at {sector}");
        let is_whole = sector % 8 == 0 && nr_sectors % 8 == 0;
        let zeroes = of(VIRTIO_BLK_T_WRITE_ZEROES, &[range(sector, nr_sectors, 0)], &disk).status;
        assert_eq!(zeroes, if is_whole { None } else { Some(Status::IoErr) });
    }
}
