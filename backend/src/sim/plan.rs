//! What a simulated guest asks for, and what must come of it.

use std::ops::Range;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::model::sector_bytes;
use super::rng::Rng;

/// Sectors of the simulated disk: few, so that requests meet.
pub(crate) const NR_SECTORS: u64 = 128;

/// Most sectors of data in one request.
const DATA_SECTORS_MAX: u64 = 16;

pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;

/// The kind of a request that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    Zeroes,
    /// Never gets as far as a path.
    Refused,
}

impl What {
    /// Whether it changes the disk.
    pub(crate) fn is_change(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::Zeroes)
    }
}

/// What the guest may expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// It depends on the paths.
    Served,
    /// This status, whatever the paths do.
    Status(u8),
    /// The head comes back with length 0 and no byte is written.
    Nothing,
}

/// How the chain is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Twist {
    None,
    NoRoom,
    StatusAway,
    DataAway,
    WrongWay,
    BadNext,
    Loop,
    TableEmpty,
    TableNested,
    TableNext,
}

/// One request before it is put into memory.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) what: What,
    /// What it reads or changes.
    pub(crate) sectors: Vec<Range<u64>>,
    /// The bytes for the device, header first.
    pub(crate) out: Vec<u8>,
    /// The bytes that the device may write, the status last.
    pub(crate) room: u32,
    pub(crate) expect: Expect,
    pub(crate) twist: Twist,
}

impl Plan {
    /// The bytes that it is about, if they are in one piece. A discard is about whole blocks only.
    pub(crate) fn only_range(&self, block: u64) -> Option<Range<u64>> {
        let bytes = self.sectors.iter().map(|sectors| sectors.start * 512..sectors.end * 512);
        let whole = bytes.map(|bytes| match self.what {
            What::Discard => bytes.start.next_multiple_of(block)..bytes.end / block * block,
            _ => bytes,
        });
        let mut ranges = whole.filter(|range| !range.is_empty());
        ranges.next().filter(|_| ranges.next().is_none())
    }

    /// What it does with its range, and whether the space may go.
    pub(crate) fn range_kind(&self) -> (What, bool) {
        // The flags of the first range that has sectors: the last word of its 16 bytes.
        let first = self.sectors.iter().position(|sectors| !sectors.is_empty()).unwrap_or(0);
        let flags = self.out.get(16 + first * 16 + 12).is_some_and(|flags| flags & 1 == 1);
        (self.what, flags || self.what == What::Discard)
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = vec![0xa5; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// A place on the disk, in whole units of so many sectors.
fn any_place(rng: &mut Rng, len_max: u64, unit: u64) -> Range<u64> {
    let len = match rng.weighted(&[30, 40, 28, 2]) {
        0 => 1,
        1 => 1 + rng.below(4.min(len_max / unit)),
        2 => 1 + rng.below(len_max / unit),
        _ => 0,
    };
    let start = rng.below(NR_SECTORS / unit + 1 - len);
    start * unit..(start + len) * unit
}

fn plain(what: What, kind: u32, sector: u64) -> Plan {
    Plan {
        what,
        sectors: Vec::new(),
        out: header(kind, sector),
        room: 1,
        expect: Expect::Served,
        twist: Twist::None,
    }
}

fn refused(plan: Plan, status: u8) -> Plan {
    Plan { what: What::Refused, sectors: Vec::new(), expect: Expect::Status(status), ..plan }
}

fn read(rng: &mut Rng) -> Plan {
    let sectors = any_place(rng, DATA_SECTORS_MAX, 1);
    let room = u32::try_from((sectors.end - sectors.start) * 512 + 1).expect("small");
    Plan { sectors: vec![sectors.clone()], room, ..plain(What::Read, VIRTIO_BLK_T_IN, sectors.start) }
}

fn write(rng: &mut Rng, content: u64, block: u64) -> Plan {
    let sectors = any_place(rng, DATA_SECTORS_MAX, block);
    let mut plan = plain(What::Write, VIRTIO_BLK_T_OUT, sectors.start);
    for sector in sectors.clone() {
        plan.out.extend(sector_bytes(content, sector));
    }
    plan.sectors.push(sectors);
    plan
}

fn ranges(rng: &mut Rng, what: What, block: u64) -> Plan {
    // A discard is a hint, so that it need not be of whole blocks.
    let unit = if what == What::Discard { 1 } else { block };
    let kind = if what == What::Discard { VIRTIO_BLK_T_DISCARD } else { VIRTIO_BLK_T_WRITE_ZEROES };
    let mut plan = plain(what, kind, 0);
    for _ in 0..=rng.below(3) {
        let sectors = any_place(rng, 40, unit);
        let flags = if what == What::Zeroes { rng.below_u32(2) } else { 0 };
        plan.out.extend(range(sectors.start, sectors.end - sectors.start, flags));
        plan.sectors.push(sectors);
    }
    plan
}

fn range(sector: u64, len: u64, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(u32::try_from(len).expect("small").to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// Requests that a correct guest does not send.
fn nonsense(rng: &mut Rng, content: u64, block: u64) -> Plan {
    match rng.below(9) {
        0 => refused(plain(What::Refused, rng.pick(&[2, 5, 99, u32::MAX]), 0), UNSUPP),
        1 => {
            let sector = rng.pick(&[NR_SECTORS, NR_SECTORS + 1, 1 << 55, (1 << 55) - 1, u64::MAX]);
            let room = 513;
            refused(Plan { room, ..plain(What::Refused, VIRTIO_BLK_T_IN, sector) }, IOERR)
        }
        2 => {
            let sector = rng.pick(&[NR_SECTORS - 1, NR_SECTORS, u64::MAX, u64::MAX - 1]);
            let mut plan = plain(What::Refused, VIRTIO_BLK_T_OUT, sector);
            plan.out.extend([0xee; 1024]);
            refused(plan, IOERR)
        }
        3 => {
            let plan = read(rng);
            let room = plan.room + 1 + rng.below_u32(510);
            refused(Plan { room, ..plan }, IOERR)
        }
        4 => {
            let mut plan = write(rng, content, block);
            plan.out.push(0);
            refused(plan, IOERR)
        }
        5 => {
            let (kind, flags) = rng.pick(&[
                (VIRTIO_BLK_T_DISCARD, 1),
                (VIRTIO_BLK_T_DISCARD, 2),
                (VIRTIO_BLK_T_WRITE_ZEROES, 2),
                (VIRTIO_BLK_T_WRITE_ZEROES, 0x8000_0001),
            ]);
            let mut plan = plain(What::Refused, kind, 0);
            plan.out.extend(range(rng.below(NR_SECTORS), 1, flags));
            refused(plan, UNSUPP)
        }
        6 => {
            let mut plan = plain(What::Refused, VIRTIO_BLK_T_WRITE_ZEROES, 0);
            plan.out.extend(range(0, 8, 0));
            plan.out.extend(range(NR_SECTORS - 1, 2, 1));
            refused(plan, IOERR)
        }
        7 if block != 1 => {
            let mut plan = plain(What::Refused, VIRTIO_BLK_T_OUT, rng.below(8));
            plan.out.extend([0xee; 512]);
            refused(plan, IOERR)
        }
        _ => {
            let mut plan = read(rng);
            plan.out.truncate(15);
            refused(plan, IOERR)
        }
    }
}

/// A good request in a broken chain.
fn twisted(rng: &mut Rng, content: u64, block: u64, indirect: bool) -> Plan {
    let mut plan = if rng.chance(50) { read(rng) } else { write(rng, content, block) };
    let any =
        [Twist::NoRoom, Twist::StatusAway, Twist::DataAway, Twist::WrongWay, Twist::BadNext, Twist::Loop];
    let tables = [Twist::TableEmpty, Twist::TableNested, Twist::TableNext];
    plan.twist = if indirect && rng.chance(40) { rng.pick(&tables) } else { rng.pick(&any) };
    let status = match plan.twist {
        Twist::DataAway | Twist::WrongWay => Expect::Status(IOERR),
        _ => Expect::Nothing,
    };
    Plan { what: What::Refused, sectors: Vec::new(), expect: status, ..plan }
}

/// What the guest was told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told {
    pub(crate) discard: bool,
    pub(crate) indirect: bool,
    /// Sectors of a block.
    pub(crate) block: u64,
    /// Whether nothing may be read from the middle of a block.
    pub(crate) nothing: bool,
}

/// Any request. What it writes has this content.
pub(crate) fn any(rng: &mut Rng, content: u64, told: Told) -> Plan {
    let block = told.block;
    match rng.weighted(&[32, 34, 9, 4, 5, 8, 4, 4]) {
        0 => {
            let plan = read(rng);
            let is_odd = plan.room == 1 && !plan.sectors[0].start.is_multiple_of(block);
            if is_odd && !told.nothing { plain(What::Flush, VIRTIO_BLK_T_FLUSH, 0) } else { plan }
        }
        1 => write(rng, content, block),
        2 => plain(What::Flush, VIRTIO_BLK_T_FLUSH, rng.below(2)),
        3 => {
            let room = 1 + rng.pick(&[0, 1, 19, 20, 21, 64]);
            Plan { room, ..plain(What::GetId, VIRTIO_BLK_T_GET_ID, 0) }
        }
        4 if told.discard => ranges(rng, What::Discard, block),
        4 => refused(ranges(rng, What::Discard, block), UNSUPP),
        5 => ranges(rng, What::Zeroes, block),
        6 => nonsense(rng, content, block),
        _ => twisted(rng, content, block, told.indirect),
    }
}
