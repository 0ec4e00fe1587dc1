//! The disk as the guest sees it: features, config space, limits, serial number.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use polypath_paths::stats::WorkerStats;
use polypath_paths::{MapState, TableCell};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::back_channel::BackChannel;
use crate::cpus::CpuList;
use crate::fence::Gate;
use crate::merge::MergeLimits;
use crate::request::{DiskLimits, RANGES_MAX, SECTOR_BYTES};
use crate::setup;
use crate::stats::QueueStats;

/// Length of the serial number in bytes.
pub const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Bytes of the config space that we know (`struct virtio_blk_config` up to the write-zeroes fields); what lies beyond
/// reads as zero.
const CONFIG_BYTES: usize = 60;

/// Largest config space that a front-end may ask for. Front-ends newer than us ask for more than we know.
const CONFIG_BYTES_MAX: u32 = 256;

/// Where the device's config begins for front-ends that count from the start of the virtio-mmio register page.
const CONFIG_OFFSET_MMIO: u32 = 0x100;

/// Offset of the `writeback` byte.
const WRITEBACK_OFFSET: u32 = 32;

/// Most sectors in one range: 2 GiB for discard. Zeroes may have to be written out, so less: 32 MiB.
const DISCARD_SECTORS_MAX: u32 = 4 << 20;
const WRITE_ZEROES_SECTORS_MAX: u32 = 64 << 10;

/// What the operator chose.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// Virtqueues offered.
    pub nr_queues: u16,
    /// Ring size that the limits are made for.
    pub queue_size: u16,
    /// Serial number, zero-filled; None: made from the identity of the paths.
    pub id: Option<[u8; ID_BYTES]>,
    /// How the workers go about it.
    pub tuning: Tuning,
    /// Where they run; None: anywhere.
    pub cpus: Option<CpuList>,
}

/// What the workers do for speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Most I/Os that one worker has in flight on one path; what can be merged waits beyond that.
    pub path_depth: u32,
    /// How far requests are merged.
    pub merge: MergeLimits,
    /// For how long a worker looks for work before it sleeps, at most, in ns; 0: not at all.
    pub poll_ns: u64,
    /// Whether guest memory is registered with the rings, and so pinned.
    pub register_memory: bool,
    /// After how long without work the kernel's thread of a ring sleeps, in ms; 0: there is none, calls send.
    pub sqpoll_idle_ms: u32,
    /// Whether the guest may be moved to another host while it runs. Not with a page cache: no other host sees that.
    pub migration: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            path_depth: 128,
            merge: MergeLimits::default(),
            poll_ns: 32_000,
            register_memory: false,
            sqpoll_idle_ms: 0,
            migration: true,
        }
    }
}

/// The eventfds of the workers that run. Only the control plane rings them.
#[derive(Debug, Default)]
pub struct Wakers(Mutex<Vec<(usize, OwnedFd)>>);

impl Wakers {
    /// The worker of this queue runs and is woken by `wake`.
    pub fn add(&self, queue: usize, wake: OwnedFd) {
        if let Ok(mut all) = self.0.lock() {
            all.push((queue, wake));
        }
    }

    /// It has ended.
    pub fn remove(&self, queue: usize) {
        if let Ok(mut all) = self.0.lock() {
            all.retain(|(q, _)| *q != queue);
        }
    }

    /// Wakes every worker.
    pub fn wake_all(&self) {
        if let Ok(all) = self.0.lock() {
            for (_, wake) in all.iter() {
                let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
            }
        }
    }
}

/// One virtio-blk disk over the paths of a table.
#[derive(Debug)]
pub struct Disk {
    options: DiskOptions,
    table: TableCell,
    map: Arc<MapState>,
    wakers: Wakers,
    id: [u8; ID_BYTES],
    /// What holds for ever, and the size as it is now.
    limits: DiskLimits,
    size_bytes: AtomicU64,
    /// Where the front-end is told of another size.
    back_channel: BackChannel,
    /// Shut while an earlier process has I/O under way.
    gate: Gate,
    topology: Topology,
    stats: WorkerStats<QueueStats>,
    /// The guest's choice by CONFIG_WCE; true is write-back.
    writeback: AtomicBool,
}

#[derive(Debug)]
struct Topology {
    physical_block_exp: u8,
    io_min_blocks: u16,
    io_opt_blocks: u32,
    discard_alignment_sectors: u32,
}

impl Disk {
    /// The disk that the table's paths lead to.
    pub fn new(table: TableCell, options: DiskOptions) -> Self {
        let paths = table.load();
        let limits = paths.limits();
        let block_bytes = limits.logical_block_bytes;
        let disk_limits = DiskLimits {
            size_bytes: limits.size_bytes,
            block_bytes,
            read_only: limits.read_only,
            discard: limits.discard && !limits.read_only,
            discard_sectors_max: DISCARD_SECTORS_MAX,
            write_zeroes_sectors_max: WRITE_ZEROES_SECTORS_MAX,
        };
        let exp = (limits.physical_block_bytes / block_bytes).trailing_zeros();
        let topology = Topology {
            physical_block_exp: u8::try_from(exp).unwrap_or(0),
            io_min_blocks: u16::try_from(limits.io_min_bytes / block_bytes).unwrap_or(u16::MAX).max(1),
            io_opt_blocks: limits.io_opt_bytes / block_bytes,
            discard_alignment_sectors: u32::try_from(
                u64::from(limits.discard_granularity_bytes) / SECTOR_BYTES,
            )
            .unwrap_or(1)
            .max(1),
        };
        let id = options.id.unwrap_or_else(|| setup::zero_filled(&paths.paths()[0].identity().serial()));
        Self {
            stats: WorkerStats::new(usize::from(options.nr_queues)),
            options,
            id,
            map: Arc::clone(paths.map()),
            table,
            wakers: Wakers::default(),
            size_bytes: AtomicU64::new(disk_limits.size_bytes),
            back_channel: BackChannel::default(),
            gate: Gate::default(),
            limits: disk_limits,
            topology,
            writeback: AtomicBool::new(true),
        }
    }

    /// How the workers go about it.
    pub fn tuning(&self) -> &Tuning {
        &self.options.tuning
    }

    /// Where the workers run; None: anywhere.
    pub fn cpus(&self) -> Option<&CpuList> {
        self.options.cpus.as_ref()
    }

    /// What the workers have done, by virtqueue.
    pub fn stats(&self) -> &WorkerStats<QueueStats> {
        &self.stats
    }

    /// Where the paths are published.
    pub fn table(&self) -> &TableCell {
        &self.table
    }

    /// What requests are checked against.
    pub fn limits(&self) -> DiskLimits {
        // A word of its own: a request is checked against the size of before or that of after.
        DiskLimits { size_bytes: self.size_bytes.load(Ordering::Relaxed), ..self.limits }
    }

    /// The disk has another size from now on. Whole blocks, never 0.
    pub fn set_size(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
    }

    /// The way to tell the front-end of it.
    pub fn back_channel(&self) -> &BackChannel {
        &self.back_channel
    }

    /// Whether rings may be served.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The state of the paths that outlives their tables.
    pub fn map(&self) -> &Arc<MapState> {
        &self.map
    }

    /// The workers that run, to be woken.
    pub fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// The serial number.
    pub fn id(&self) -> &[u8; ID_BYTES] {
        &self.id
    }

    /// Virtqueues offered.
    pub fn nr_queues(&self) -> u16 {
        self.options.nr_queues
    }

    /// Feature bits of the device and of the ring, as offered.
    pub fn features(&self) -> u64 {
        let always = [
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_CONFIG_WCE,
            VIRTIO_BLK_F_MQ,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_F_VERSION_1,
        ];
        let mut features = always.iter().fold(0, |bits, bit| bits | 1 << bit);
        if self.limits.read_only {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << VIRTIO_BLK_F_WRITE_ZEROES;
        }
        if self.limits.discard {
            features |= 1 << VIRTIO_BLK_F_DISCARD;
        }
        features
    }

    /// Whether a write must be durable when it is answered (virtio 1.2, 5.2.6.2): the guest's choice where it can
    /// choose; otherwise only a guest that knows flush may be given a volatile cache.
    pub fn is_write_through(&self, features: u64) -> bool {
        if features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 {
            self.is_cache_off()
        } else {
            features & 1 << VIRTIO_BLK_F_FLUSH == 0
        }
    }

    /// Whether the guest's choice, this or an earlier process's, is that a write must be durable when it is answered.
    pub fn is_cache_off(&self) -> bool {
        !self.writeback.load(Ordering::Relaxed)
    }

    /// The guest has chosen, as an earlier process heard, that a write must be durable when it is answered.
    pub fn choose_write_through(&self) {
        self.writeback.store(false, Ordering::Relaxed);
    }

    /// Whether the guest could choose, and chose that a write must be durable when it is answered.
    pub fn has_chosen_write_through(&self, features: u64) -> bool {
        features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 && self.is_write_through(features)
    }

    /// The config space as it is now.
    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        let mut put = |offset: usize, value: &[u8]| {
            if let Some(field) = config.get_mut(offset..offset + value.len()) {
                field.copy_from_slice(value);
            }
        };
        put(0, &(self.limits().size_bytes / SECTOR_BYTES).to_le_bytes());
        // Header and status take two descriptors of the ring.
        put(12, &u32::from(self.options.queue_size - 2).to_le_bytes());
        put(20, &self.limits.block_bytes.to_le_bytes());
        put(24, &[self.topology.physical_block_exp, 0]);
        put(26, &self.topology.io_min_blocks.to_le_bytes());
        put(28, &self.topology.io_opt_blocks.to_le_bytes());
        put(32, &[u8::from(self.writeback.load(Ordering::Relaxed))]);
        put(34, &self.options.nr_queues.to_le_bytes());
        let nr_ranges = RANGES_MAX.to_le_bytes();
        if self.limits.discard {
            put(36, &self.limits.discard_sectors_max.to_le_bytes());
            put(40, &nr_ranges);
            put(44, &self.topology.discard_alignment_sectors.to_le_bytes());
        }
        if !self.limits.read_only {
            put(48, &self.limits.write_zeroes_sectors_max.to_le_bytes());
            put(52, &nr_ranges);
            // Where a hole cannot be made, zeros are written; either is lawful.
            put(56, &[1]);
        }
        config
    }

    /// `size` bytes of the config space from `offset` on. None if that is nonsense.
    pub fn read_config(&self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let offset = match offset.checked_sub(CONFIG_OFFSET_MMIO) {
            Some(from_mmio) => from_mmio,
            None => offset,
        };
        if size == 0 || offset.checked_add(size)? > CONFIG_BYTES_MAX {
            return None;
        }
        let known = self.config();
        let range = offset as usize..offset as usize + size as usize;
        Some(range.map(|at| known.get(at).copied().unwrap_or(0)).collect())
    }

    /// Takes a write to the config space: the `writeback` byte can change if CONFIG_WCE was agreed, nothing else can.
    /// False if nothing was changed.
    pub fn write_config(&self, offset: u32, bytes: &[u8], features: u64) -> bool {
        match bytes {
            [value @ (0 | 1)]
                if offset == WRITEBACK_OFFSET && features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 =>
            {
                self.writeback.store(*value == 1, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
