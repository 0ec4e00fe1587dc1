//! The loads.

use super::disk::DiskKind;

/// Where the next request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Random,
    Sequential,
    /// So many sequential streams, each in a part of the disk of its own and with an equal part of the depth.
    Streams(usize),
}

/// When a load is run without being named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// Always.
    Quick,
    /// Unless the run is a quick one.
    Full,
    /// Never.
    Named,
}

/// One load: `depth` requests of `bytes` under way all the time.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) write: bool,
    pub(super) order: Order,
    /// Bytes per request.
    pub(super) bytes: usize,
    /// Of all queues together.
    pub(super) depth: usize,
    /// Virtqueues that share the depth. A stream stays on one.
    pub(super) nr_queues: usize,
    pub(super) run: Run,
}

const fn load(name: &'static str, write: bool, order: Order, bytes: usize, depth: usize) -> Workload {
    Workload { name, write, order, bytes, depth, nr_queues: 1, run: Run::Full }
}

const fn quick(workload: Workload) -> Workload {
    Workload { run: Run::Quick, ..workload }
}

/// A guest with four processors: as many queues, and more requests than fit in one ring.
const fn four_queues(workload: Workload) -> Workload {
    Workload { nr_queues: 4, ..workload }
}

const fn named(workload: Workload) -> Workload {
    Workload { run: Run::Named, ..workload }
}

impl Workload {
    /// All loads; a new line is a new measurement.
    pub(super) const TABLE: &'static [Self] = &[
        quick(load("randread-4k-qd1", false, Order::Random, 4096, 1)),
        quick(load("randread-4k-qd32", false, Order::Random, 4096, 32)),
        load("randread-4k-qd128", false, Order::Random, 4096, 128),
        load("randwrite-4k-qd1", true, Order::Random, 4096, 1),
        load("randwrite-4k-qd32", true, Order::Random, 4096, 32),
        load("randwrite-4k-qd128", true, Order::Random, 4096, 128),
        quick(load("read-4k-qd64", false, Order::Sequential, 4096, 64)),
        load("write-4k-qd64", true, Order::Sequential, 4096, 64),
        four_queues(load("read-4k-64x16", false, Order::Streams(64), 4096, 64 * 16)),
        four_queues(load("write-4k-64x16", true, Order::Streams(64), 4096, 64 * 16)),
        four_queues(load("randread-4k-12x32", false, Order::Random, 4096, 12 * 32)),
        load("read-128k-qd8", false, Order::Sequential, 128 << 10, 8),
        named(load("read-4k-20x16", false, Order::Streams(20), 4096, 20 * 16)),
        named(load("write-4k-20x16", true, Order::Streams(20), 4096, 20 * 16)),
    ];

    /// The loads with these names, in the order of the table.
    pub(super) fn by_names(names: &[&str]) -> Result<Vec<&'static Self>, String> {
        if let Some(unknown) = names.iter().find(|name| !Self::TABLE.iter().any(|load| load.name == **name)) {
            let all: Vec<_> = Self::TABLE.iter().map(|workload| workload.name).collect();
            return Err(format!("no workload `{unknown}`, there are {}", all.join(", ")));
        }
        Ok(Self::TABLE.iter().filter(|workload| names.contains(&workload.name)).collect())
    }

    /// Whether a full run has it there. Without a device it makes no difference what is read and written, and where.
    pub(super) fn is_usual(&self, disk: DiskKind) -> bool {
        disk.has_device() || (self.order == Order::Random && !self.write)
    }

    /// Whether neighbours on the disk are under way at the same time.
    pub(super) fn can_merge(&self) -> bool {
        self.order != Order::Random && self.depth > 1
    }

    pub(super) fn queue_of(&self, slot: usize) -> usize {
        slot % self.nr_queues
    }
}

/// Offsets of a load's requests, one after the other.
#[derive(Debug)]
pub(super) struct Offsets {
    bytes: u64,
    blocks: u64,
    random: Option<u64>,
    /// Blocks done of each stream.
    streams: Vec<u64>,
}

impl Offsets {
    pub(super) fn new(workload: &Workload, disk_bytes: u64) -> Self {
        let nr_streams = match workload.order {
            Order::Streams(nr) => nr,
            Order::Random | Order::Sequential => 1,
        };
        let bytes = workload.bytes as u64;
        Self {
            bytes,
            blocks: disk_bytes / bytes,
            // The same sequence for every program.
            random: (workload.order == Order::Random).then_some(0x9e37_79b9_7f4a_7c15),
            streams: vec![0; nr_streams],
        }
    }

    /// Where the next request of this slot goes. A slot belongs to one stream, as in a job of fio.
    pub(super) fn next_for(&mut self, slot: usize) -> u64 {
        if let Some(random) = &mut self.random {
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            return *random % self.blocks * self.bytes;
        }
        let stream = slot % self.streams.len();
        let part = self.blocks / self.streams.len() as u64;
        let step = &mut self.streams[stream];
        let block = stream as u64 * part + *step;
        *step = if *step + 1 < part { *step + 1 } else { 0 };
        block * self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stream_is_sequential_in_its_part_and_on_one_queue() {
        let disk_bytes = 64 << 20;
        for workload in Workload::TABLE {
            let mut offsets = Offsets::new(workload, disk_bytes);
            let Order::Streams(nr) = workload.order else { continue };
            assert_eq!(workload.depth % nr, 0, "{}", workload.name);
            let part = disk_bytes / workload.bytes as u64 / nr as u64;
            for step in 0..part + 2 {
                for slot in 0..nr {
                    let block = offsets.next_for(slot) / workload.bytes as u64;
                    assert_eq!(block, slot as u64 * part + step % part, "{} {slot}", workload.name);
                    assert_eq!(workload.queue_of(slot), workload.queue_of(slot + nr), "{}", workload.name);
                }
            }
        }
    }

    #[test]
    fn all_offsets_are_blocks_of_the_disk() {
        for workload in Workload::TABLE {
            let mut offsets = Offsets::new(workload, 8 << 20);
            for i in 0..10_000 {
                let offset = offsets.next_for(i % workload.depth);
                assert_eq!(offset % workload.bytes as u64, 0, "{}", workload.name);
                assert!(offset + workload.bytes as u64 <= 8 << 20, "{}", workload.name);
            }
        }
    }
}
