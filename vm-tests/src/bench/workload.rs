//! The loads.

/// Where the next request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Random,
    Sequential,
    /// So many sequential streams, each in a part of the disk of its own, by turns.
    Streams(u64),
}

/// One load: `depth` requests of `bytes` under way all the time.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) write: bool,
    pub(super) order: Order,
    /// Bytes per request.
    pub(super) bytes: usize,
    pub(super) depth: usize,
    /// Part of the quick run.
    pub(super) quick: bool,
}

const fn load(name: &'static str, write: bool, order: Order, bytes: usize, depth: usize) -> Workload {
    Workload { name, write, order, bytes, depth, quick: false }
}

const fn quick(workload: Workload) -> Workload {
    Workload { quick: true, ..workload }
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
        load("read-4k-20x16", false, Order::Streams(20), 4096, 320),
        load("write-4k-20x16", true, Order::Streams(20), 4096, 320),
        load("read-128k-qd8", false, Order::Sequential, 128 << 10, 8),
    ];

    /// The loads with these names, in the order of the table.
    pub(super) fn by_names(names: &[&str]) -> Result<Vec<&'static Self>, String> {
        if let Some(unknown) = names.iter().find(|name| !Self::TABLE.iter().any(|load| load.name == **name)) {
            let all: Vec<_> = Self::TABLE.iter().map(|workload| workload.name).collect();
            return Err(format!("no workload `{unknown}`, there are {}", all.join(", ")));
        }
        Ok(Self::TABLE.iter().filter(|workload| names.contains(&workload.name)).collect())
    }
}

/// Offsets of a load's requests, one after the other.
#[derive(Debug)]
pub(super) struct Offsets {
    order: Order,
    bytes: u64,
    blocks: u64,
    next: u64,
    random: u64,
}

impl Offsets {
    pub(super) fn new(workload: &Workload, disk_bytes: u64) -> Self {
        let bytes = workload.bytes as u64;
        // The same sequence for every program.
        Self {
            order: workload.order,
            bytes,
            blocks: disk_bytes / bytes,
            next: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

impl Iterator for Offsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let block = match self.order {
            Order::Sequential => {
                self.next = if self.next + 1 < self.blocks { self.next + 1 } else { 0 };
                self.next
            }
            Order::Streams(nr) => {
                let part = self.blocks / nr;
                let (stream, step) = (self.next % nr, self.next / nr);
                self.next += 1;
                stream * part + step % part
            }
            Order::Random => {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                self.random % self.blocks
            }
        };
        Some(block * self.bytes)
    }
}
