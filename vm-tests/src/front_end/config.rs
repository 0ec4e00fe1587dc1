//! Feature bits and the config space of virtio-blk.

use anyhow::{Context as _, Result};

/// Feature bits.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const SECURE_ERASE: u64 = 1 << 16;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;

    /// All that the driver here can use.
    pub const ALL: u64 = SIZE_MAX
        | SEG_MAX
        | RO
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | CONFIG_WCE
        | MQ
        | DISCARD
        | WRITE_ZEROES
        | INDIRECT_DESC
        | EVENT_IDX
        | VERSION_1;
}

/// Size of the config space up to and with the write-zeroes fields.
pub const CONFIG_BYTES: u32 = 60;
/// Offset of the writeback byte.
pub const WRITEBACK_OFFSET: u32 = 32;

/// The config space, read field by field.
#[allow(missing_docs, reason = "the names are those of the specification")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    pub capacity: u64,
    pub size_max: u32,
    pub seg_max: u32,
    pub blk_size: u32,
    pub physical_block_exp: u8,
    pub alignment_offset: u8,
    pub min_io_size: u16,
    pub opt_io_size: u32,
    pub writeback: u8,
    pub num_queues: u16,
    pub max_discard_sectors: u32,
    pub max_discard_seg: u32,
    pub discard_sector_alignment: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_seg: u32,
    pub write_zeroes_may_unmap: u8,
}

impl Config {
    /// Reads the fields out of at least [`CONFIG_BYTES`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.get(..CONFIG_BYTES as usize).context("short config space")?;
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        Ok(Self {
            capacity: u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")),
            size_max: u32_at(8),
            seg_max: u32_at(12),
            blk_size: u32_at(20),
            physical_block_exp: bytes[24],
            alignment_offset: bytes[25],
            min_io_size: u16_at(26),
            opt_io_size: u32_at(28),
            writeback: bytes[32],
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: bytes[56],
        })
    }
}
