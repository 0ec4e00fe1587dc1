use polypath_paths::OpenOptions;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BARRIER, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_SCSI, VIRTIO_BLK_F_SIZE_MAX, virtio_blk_config,
};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;

use super::*;
use crate::sim::fixture::{CACHED, Links};

const SIZE_BYTES: u64 = 64 << 10;
const READ_ONLY: OpenOptions = OpenOptions { read_only: true, direct: false };

/// A disk whose file is gone already: nothing here does I/O.
fn disk_of(size_bytes: u64, queue_size: u16, options: OpenOptions) -> Disk {
    let table = Links::new(2, size_bytes).table(2, options, 4);
    let mut id = [0; ID_BYTES];
    id[..3].copy_from_slice(b"abc");
    Disk::new(
        TableCell::new(table),
        DiskOptions { nr_queues: 4, queue_size, id: Some(id), tuning: Tuning::default(), cpus: None },
    )
}

fn disk() -> Disk {
    disk_of(SIZE_BYTES, 128, CACHED)
}

fn has(disk: &Disk, bit: u32) -> bool {
    disk.features() & 1 << bit != 0
}

/// A little-endian field of the config space.
fn field(disk: &Disk, offset: u32, len: u32) -> u64 {
    let bytes = disk.read_config(offset, len).unwrap();
    assert_eq!(bytes.len(), len as usize);
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

const WCE: u64 = 1 << VIRTIO_BLK_F_CONFIG_WCE;
const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;

#[test]
fn the_config_space_byte_by_byte() {
    let disk = disk();
    assert_eq!(field(&disk, 0, 8), SIZE_BYTES / 512, "capacity");
    assert_eq!(field(&disk, 8, 4), 0, "size_max is not offered");
    assert_eq!(field(&disk, 12, 4), 126, "seg_max");
    assert_eq!(field(&disk, 16, 4), 0, "geometry is not offered");
    assert_eq!(field(&disk, 20, 4), 512, "blk_size");
    let physical = 512 << field(&disk, 24, 1);
    assert!((512..=4096).contains(&physical), "physical block: {physical}");
    assert_eq!(field(&disk, 25, 1), 0, "alignment_offset");
    assert!(field(&disk, 26, 2) >= 1, "min_io_size");
    assert_eq!(field(&disk, 28, 4), 0, "opt_io_size: a file names none");
    assert_eq!(field(&disk, 32, 1), 1, "writeback");
    assert_eq!(field(&disk, 33, 1), 0);
    assert_eq!(field(&disk, 34, 2), 4, "num_queues");
    assert_eq!(field(&disk, 56, 1), 1, "write_zeroes_may_unmap");
    assert_eq!(field(&disk, 57, 3), 0);
}

#[test]
fn the_fields_lie_where_the_header_has_them() {
    use std::mem::offset_of;

    assert_eq!(offset_of!(virtio_blk_config, seg_max), 12);
    assert_eq!(offset_of!(virtio_blk_config, blk_size), 20);
    assert_eq!(offset_of!(virtio_blk_config, physical_block_exp), 24);
    assert_eq!(offset_of!(virtio_blk_config, min_io_size), 26);
    assert_eq!(offset_of!(virtio_blk_config, opt_io_size), 28);
    assert_eq!(offset_of!(virtio_blk_config, wce), WRITEBACK_OFFSET as usize);
    assert_eq!(offset_of!(virtio_blk_config, num_queues), 34);
    assert_eq!(offset_of!(virtio_blk_config, max_discard_sectors), 36);
    assert_eq!(offset_of!(virtio_blk_config, max_discard_seg), 40);
    assert_eq!(offset_of!(virtio_blk_config, discard_sector_alignment), 44);
    assert_eq!(offset_of!(virtio_blk_config, max_write_zeroes_sectors), 48);
    assert_eq!(offset_of!(virtio_blk_config, max_write_zeroes_seg), 52);
    assert_eq!(offset_of!(virtio_blk_config, write_zeroes_may_unmap), 56);
}

#[test]
fn features_are_what_is_kept() {
    let disk = disk();
    for bit in [
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_WRITE_ZEROES,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_F_VERSION_1,
    ] {
        assert!(has(&disk, bit), "bit {bit}");
    }
    for bit in [
        VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_BARRIER,
        VIRTIO_BLK_F_SCSI,
        VIRTIO_F_RING_PACKED,
    ] {
        assert!(!has(&disk, bit), "bit {bit}");
    }
}

#[test]
fn f54_a_read_only_disk_offers_no_way_to_change_it() {
    let disk = disk_of(SIZE_BYTES, 128, READ_ONLY);
    assert!(has(&disk, VIRTIO_BLK_F_RO) && disk.limits().read_only);
    assert!(!has(&disk, VIRTIO_BLK_F_DISCARD) && !has(&disk, VIRTIO_BLK_F_WRITE_ZEROES));
    assert!(has(&disk, VIRTIO_BLK_F_FLUSH), "firmware expects that a flush works");
    for offset in [36, 40, 44, 48, 52, 56] {
        assert_eq!(field(&disk, offset, 4), 0, "offset {offset}");
    }
}

#[test]
fn f51_a_feature_is_offered_with_sensible_limits_or_not_at_all() {
    for options in [CACHED, READ_ONLY] {
        let disk = disk_of(SIZE_BYTES, 128, options);
        for (bit, offsets) in
            [(VIRTIO_BLK_F_DISCARD, [36, 40, 44]), (VIRTIO_BLK_F_WRITE_ZEROES, [48, 52, 52])]
        {
            for offset in offsets {
                assert_eq!(field(&disk, offset, 4) != 0, has(&disk, bit), "bit {bit} offset {offset}");
            }
        }
        assert_eq!(has(&disk, VIRTIO_BLK_F_DISCARD), disk.limits().discard);
        // What is shown is what requests are checked against.
        if has(&disk, VIRTIO_BLK_F_WRITE_ZEROES) {
            assert_eq!(field(&disk, 48, 4), u64::from(disk.limits().write_zeroes_sectors_max));
            assert_eq!(field(&disk, 52, 4), u64::from(RANGES_MAX));
        }
        if has(&disk, VIRTIO_BLK_F_DISCARD) {
            assert_eq!(field(&disk, 36, 4), u64::from(disk.limits().discard_sectors_max));
            assert_eq!(field(&disk, 40, 4), u64::from(RANGES_MAX));
            let granularity = disk.table().load().limits().discard_granularity_bytes;
            assert_eq!(field(&disk, 44, 4) * 512, u64::from(granularity));
        }
    }
}

#[test]
fn f60_seg_max_leaves_room_for_header_and_status() {
    for queue_size in [4, 16, 128, 256, 1024] {
        let seg_max = field(&disk_of(SIZE_BYTES, queue_size, CACHED), 12, 4);
        assert_eq!(seg_max, u64::from(queue_size) - 2);
        assert!(seg_max >= 1);
        // The chain reader must not be stricter.
        assert!(seg_max + 2 <= u64::from(crate::vring::CHAIN_LEN_MAX));
    }
}

#[test]
fn f32_a_capacity_is_whole_blocks() {
    for (size_bytes, sectors) in [(512, 1), (513, 1), (1_234_567, 2411)] {
        let disk = disk_of(size_bytes, 128, CACHED);
        assert_eq!(field(&disk, 0, 8), sectors);
        assert_eq!(disk.limits().size_bytes, sectors * 512);
    }
}

#[test]
fn f41_any_part_can_be_read() {
    let disk = disk();
    let whole = disk.read_config(0, 60).unwrap();
    for (offset, size) in [(0, 8), (20, 4), (0, 60), (0, 57), (0, 48), (0, 36), (3, 1), (59, 1), (7, 30)] {
        let part = disk.read_config(offset, size).unwrap();
        let from = offset as usize;
        assert_eq!(part, whole[from..from + size as usize], "{size} at {offset}");
    }
    // What front-ends newer than us know reads as zero.
    for (offset, size) in [(0, 96), (0, 256), (60, 36), (255, 1), (58, 100)] {
        let part = disk.read_config(offset, size).unwrap();
        assert_eq!(part.len(), size as usize);
        for (at, byte) in (offset as usize..).zip(part) {
            assert_eq!(byte, whole.get(at).copied().unwrap_or(0), "byte {at}");
        }
    }
}

#[test]
fn f41_front_ends_that_count_from_0x100() {
    let disk = disk();
    assert_eq!(disk.read_config(0x100, 60), disk.read_config(0, 60));
    assert_eq!(disk.read_config(0x114, 4), disk.read_config(20, 4));
}

#[test]
fn f41_nonsense_is_refused() {
    let disk = disk();
    for (offset, size) in [
        (0, 0),
        (256, 0),
        (0, 257),
        (1, 256),
        (255, 2),
        (0x100, 257),
        (0x200, 1),
        (4096, 4),
        (0, u32::MAX),
        (u32::MAX, 1),
        (u32::MAX, u32::MAX),
        (0x100, u32::MAX),
    ] {
        assert_eq!(disk.read_config(offset, size), None, "{size} at {offset}");
    }
}

#[test]
fn f42_only_the_writeback_byte_can_be_written() {
    let disk = disk();
    let before = disk.read_config(0, 60);
    assert!(!disk.write_config(WRITEBACK_OFFSET, &[0], 0), "CONFIG_WCE was not agreed");
    for (offset, bytes) in [
        (0, &[0xff][..]),
        (0, &[0; 60]),
        (WRITEBACK_OFFSET, &[]),
        (0, &[]),
        (WRITEBACK_OFFSET, &[2]),
        (WRITEBACK_OFFSET, &[255]),
        (31, &[0]),
        (33, &[0]),
        (1000, &[0]),
        (u32::MAX, &[0]),
    ] {
        assert!(!disk.write_config(offset, bytes, WCE), "{bytes:?} at {offset}");
    }
    assert_eq!(disk.read_config(0, 60), before);
    for value in [0, 1, 0] {
        assert!(disk.write_config(WRITEBACK_OFFSET, &[value], WCE));
        assert_eq!(field(&disk, 32, 1), u64::from(value));
        assert_eq!(disk.is_write_through(WCE | FLUSH), value == 0);
    }
    let mut after = disk.read_config(0, 60).unwrap();
    after[32] = 1;
    assert_eq!(Some(after), before, "nothing else has changed");
}

#[test]
fn f16_who_knows_no_flush_gets_no_volatile_cache() {
    let disk = disk();
    assert!(disk.is_write_through(0));
    assert!(!disk.is_write_through(FLUSH));
    assert!(!disk.is_write_through(FLUSH | WCE));
}

#[test]
fn f53_the_serial_number_is_filled_with_zeros() {
    let mut expected = [0; ID_BYTES];
    expected[..3].copy_from_slice(b"abc");
    assert_eq!((disk().id(), ID_BYTES), (&expected, 20));
}
