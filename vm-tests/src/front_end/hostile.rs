//! A driver that keeps no rules, at full speed: each kind of nonsense as a whole ring of it, again and again.
//!
//! Nothing of it may harm the disk: what can be read as a request is a read.

use std::sync::Arc;

use super::chain::{Desc, link};
use super::memory::{Buf, Memory};
use super::queue::{INDIRECT, NEXT, Queue, WRITE, signal};
use super::request::{header, kind};
use super::verify::Rng;

/// Entries of the longest table that is lawful on the largest ring.
const TABLE_ENTRIES: usize = 1026;

/// What the driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nonsense {
    /// Chains that come back to their beginning.
    Loops,
    /// The same inside an indirect table of the greatest length.
    LoopsInTables,
    /// Heads and next indices outside of the table.
    Indices,
    /// The same head in every entry.
    SameHead,
    /// Indirect tables that are too long, or no whole entries, or empty.
    TableLengths,
    /// Tables in tables.
    NestedTables,
    /// Buffers for the wrong direction, in the wrong order.
    Directions,
    /// Addresses where no memory is.
    Addresses,
    /// Lengths of 4 GiB, and address sums that wrap around.
    Lengths,
    /// Descriptors of no length.
    Empty,
    /// Requests that do not exist, or are beyond the end of the disk.
    Requests,
    /// Bytes by chance.
    Noise,
    /// An available index further on than the ring is long.
    Index,
    /// Kicks with nothing there.
    Kicks,
}

impl Nonsense {
    /// All of it.
    pub const ALL: [Self; 14] = [
        Self::Loops,
        Self::LoopsInTables,
        Self::Indices,
        Self::SameHead,
        Self::TableLengths,
        Self::NestedTables,
        Self::Directions,
        Self::Addresses,
        Self::Lengths,
        Self::Empty,
        Self::Requests,
        Self::Noise,
        Self::Index,
        Self::Kicks,
    ];

    /// For reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loops => "loops",
            Self::LoopsInTables => "loops-in-tables",
            Self::Indices => "indices",
            Self::SameHead => "same-head",
            Self::TableLengths => "table-lengths",
            Self::NestedTables => "nested-tables",
            Self::Directions => "directions",
            Self::Addresses => "addresses",
            Self::Lengths => "lengths",
            Self::Empty => "empty",
            Self::Requests => "requests",
            Self::Noise => "noise",
            Self::Index => "index",
            Self::Kicks => "kicks",
        }
    }

    /// Whether the device may leave the queue alone from then on.
    pub fn breaks_the_ring(self) -> bool {
        self == Self::Index
    }
}

/// A driver of one ring.
#[derive(Debug)]
pub struct Hostile {
    what: Nonsense,
    rng: Rng,
    next: u16,
    heads: Vec<u16>,
    /// Buffers, which the descriptors point to.
    head: Buf,
    data: Buf,
    table: Buf,
    outside: u64,
    /// Rings full of nonsense that were offered.
    pub nr_rings: u64,
    /// Kicks sent.
    pub nr_kicks: u64,
}

impl Hostile {
    /// Fills the table of `queue` with nonsense of this kind. The queue has been reset and nothing is on it.
    pub fn new(queue: &mut Queue, what: Nonsense, seed: u64) -> Self {
        let mem = Arc::clone(queue.memory());
        let rng = Rng::new(seed);
        let mut hostile = Self {
            what,
            next: mem.load_u16(queue.ring_addresses()[0] + 2),
            heads: (0..queue.size()).collect(),
            head: mem.alloc(16 << 10),
            data: mem.alloc(16 << 10),
            table: mem.alloc(TABLE_ENTRIES * 16),
            // Beyond memory that is plugged in later as well.
            outside: mem.end().max(1 << 45),
            rng,
            nr_rings: 0,
            nr_kicks: 0,
        };
        let sector = hostile.rng.below(64);
        hostile.head.put(&header(kind::IN, sector));
        hostile.fill(queue);
        hostile
    }

    fn good(&self) -> [Desc; 3] {
        let [head, data, status] = [self.head.addr, self.data.addr, self.data.addr + 8192];
        [
            Desc { addr: head, len: 16, flags: 0, next: 0 },
            Desc { addr: data, len: 4096, flags: WRITE, next: 0 },
            Desc { addr: status, len: 1, flags: WRITE, next: 0 },
        ]
    }

    fn table_of(&self, entries: &[Desc]) -> Desc {
        let bytes: Vec<u8> = entries.iter().flat_map(Desc::bytes).collect();
        self.table.put(&bytes);
        let len = u32::try_from(bytes.len()).expect("a table of sane size");
        Desc { addr: self.table.addr, len, flags: INDIRECT, next: 0 }
    }

    fn fill(&mut self, queue: &mut Queue) {
        let size = queue.size();
        let good = link(&self.good());
        let far = self.outside;
        let circle = |entries: u16| -> Vec<Desc> {
            let entry = |i: u16| Desc { flags: NEXT, next: (i + 1) % entries, ..good[0] };
            (0..entries).map(entry).collect()
        };
        let one = |desc: Desc| -> Vec<Desc> { vec![desc; size.into()] };
        let table: Vec<Desc> = match self.what {
            Nonsense::Loops => circle(size),
            Nonsense::LoopsInTables => {
                one(self.table_of(&circle(u16::try_from(TABLE_ENTRIES).expect("small"))))
            }
            Nonsense::Indices => {
                self.heads = (0..size).map(|i| if i % 2 == 0 { size + i } else { i }).collect();
                one(Desc { flags: NEXT, next: size, ..good[0] })
            }
            Nonsense::SameHead => {
                self.heads = vec![0; size.into()];
                let mut table = one(good[0]);
                table[..3].copy_from_slice(&good);
                table
            }
            Nonsense::TableLengths => {
                let table = self.table_of(&good);
                let lens = [0, 8, 17, u32::MAX, u32::MAX - 15, 16 * 2000, 16 * 65536];
                (0..usize::from(size)).map(|i| Desc { len: lens[i % lens.len()], ..table }).collect()
            }
            Nonsense::NestedTables => {
                let inner = self.table_of(&good);
                one(self.table_of(&[Desc { flags: INDIRECT | NEXT, next: 1, ..inner }, inner]))
            }
            Nonsense::Directions => {
                let flags = [WRITE, 0, 0, WRITE, 0, WRITE, WRITE, 0];
                let entry = |i: u16| {
                    let next = if i % 8 == 7 { 0 } else { NEXT };
                    Desc {
                        flags: flags[usize::from(i % 8)] | next,
                        next: (i + 1) % size,
                        ..good[usize::from(i % 3)]
                    }
                };
                (0..size).map(entry).collect()
            }
            Nonsense::Addresses => {
                // Not what others on this front-end may have for a buffer: a status byte there is what was asked for.
                let addrs = [far, far - 8, u64::MAX, u64::MAX - 15, 1 << 62, 1 << 63];
                let entry = |i: u16| {
                    let addr = addrs[usize::from(i) % addrs.len()];
                    let next = if i % 4 == 3 { 0 } else { NEXT };
                    Desc {
                        addr,
                        len: 512,
                        flags: next | if i.is_multiple_of(4) { 0 } else { WRITE },
                        next: (i + 1) % size,
                    }
                };
                (0..size).map(entry).collect()
            }
            Nonsense::Lengths => {
                let mut table = one(good[0]);
                for (i, desc) in (0..size).zip(&mut table) {
                    *desc = match i % 3 {
                        0 => Desc { next: (i + 1) % size, ..good[0] },
                        1 => Desc { len: u32::MAX, next: (i + 1) % size, ..good[1] },
                        _ => Desc { addr: u64::MAX - 100, len: u32::MAX, ..good[2] },
                    };
                }
                table
            }
            Nonsense::Empty => {
                let entry = |i: u16| {
                    let next = if i % 5 == 4 { 0 } else { NEXT };
                    Desc {
                        len: 0,
                        flags: next | if i % 5 < 2 { 0 } else { WRITE },
                        next: (i + 1) % size,
                        ..good[0]
                    }
                };
                (0..size).map(entry).collect()
            }
            Nonsense::Requests => {
                let [a, b] = [header(77, 0), header(kind::IN, u64::MAX >> 9)];
                self.head.put(if self.rng.percent(50) { &a } else { &b });
                let table = one(self.table_of(&good));
                self.heads = (0..size).collect();
                table
            }
            Nonsense::Noise | Nonsense::Index | Nonsense::Kicks => {
                // What the device may write is no header and no table: nothing can come to be a write by chance.
                let into = [self.data.addr, far - 8, far];
                let from = [self.head.addr, self.table.addr, self.head.addr, far - 8];
                let (rng, mut table) = (&mut self.rng, one(good[0]));
                for desc in &mut table {
                    let flags = u16::try_from(rng.below(8)).expect("3 bits");
                    let pick = usize::try_from(rng.below(12)).expect("small");
                    *desc = Desc {
                        addr: if flags & WRITE == 0 {
                            from[pick % from.len()]
                        } else {
                            into[pick % into.len()]
                        },
                        len: [0, 1, 8, 16, 512, 513, 4096, 8192][pick % 8],
                        flags,
                        next: u16::try_from(rng.below(u64::from(size) + 2)).expect("small"),
                    };
                }
                table
            }
        };
        for (at, desc) in (0..size).zip(table) {
            queue.put_desc(at, desc);
        }
    }

    /// Goes on as fast as the device takes it: a whole ring if the last one was taken, and a kick in any case. To be called
    /// again and again; costs a few stores and a system call.
    pub fn poke(&mut self, queue: &Queue) {
        let mem: &Memory = queue.memory();
        let [avail, used] = queue.ring_addresses();
        let size = queue.size();
        match self.what {
            Nonsense::Kicks => {}
            Nonsense::Index => {
                self.next = self.next.wrapping_add(size + 1);
                mem.store_u16(avail + 2, self.next);
            }
            _ => {
                // The device asks for a kick at what it would take next: it has taken everything before that.
                let taken = mem.load_u16(used + 4 + 8 * u64::from(size));
                if self.nr_rings == 0 || taken == self.next {
                    for (i, head) in (0..).zip(&self.heads) {
                        let slot = u64::from(self.next.wrapping_add(i) % size);
                        mem.store_u16(avail + 4 + 2 * slot, *head);
                    }
                    self.next = self.next.wrapping_add(size);
                    mem.store_u16(avail + 2, self.next);
                    self.nr_rings += 1;
                }
            }
        }
        signal(queue.kick_fd());
        self.nr_kicks += 1;
    }
}
