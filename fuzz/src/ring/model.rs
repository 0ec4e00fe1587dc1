//! What a chain asks for and what its answer has to be, read from the specification a second time (virtio 1.2, 2.7 and
//! 5.2.6), without a line of the product.

use std::ops::Range;

use polypath::request::DiskLimits;

use crate::guest::{Guest, INDIRECT, Layout3, NEXT, WRITE};

/// Most descriptors of a chain with an indirect table.
const CHAIN_LEN_MAX: u64 = 1026;

const SECTOR_BYTES: u64 = 512;
const ID_BYTES: u64 = 20;

/// A chain as it lay in memory when it was made available.
#[derive(Debug, Default)]
pub struct Chain {
    /// Address and length of what the device may read, then of what it may write.
    pub readable: Vec<(u64, u64)>,
    pub writable: Vec<(u64, u64)>,
    /// Memory that the device reads to know what to do.
    pub control: Vec<Range<u64>>,
    /// What has to come of it.
    pub answer: Answer,
    /// Its places on the disk, and what a write brings there.
    pub disk: Vec<Range<u64>>,
    pub data: Option<Data>,
}

/// Bytes that nobody wants to read in a message.
pub struct Data(pub Vec<u8>);

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// The answer that a chain deserves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Answer {
    /// The head comes back with length 0: there is no place for a status.
    #[default]
    Mute,
    /// This status, nothing else.
    Status(u8),
    /// OK if all goes well, with so many bytes written.
    Read(u64),
    /// As above, for what changes the disk, or makes it durable.
    Changed,
    /// The serial number, cut off at so many bytes.
    Id(u64),
}

const IO_ERROR: Answer = Answer::Status(1);
const UNSUPPORTED: Answer = Answer::Status(2);

impl Chain {
    pub fn writable_bytes(&self) -> u64 {
        self.writable.iter().map(|(_, len)| len).sum()
    }

    /// Where the status goes.
    pub fn status_at(&self) -> Option<u64> {
        let (addr, len) = self.writable.iter().rev().find(|(_, len)| *len != 0)?;
        addr.checked_add(len - 1)
    }

    /// Reads the chain that begins at `head`.
    pub fn read(guest: &Guest, ring: &Layout3, indirect: bool, head: u16, disk: &DiskLimits) -> Self {
        let mut chain = Self::default();
        let in_order = match chain.walk(guest, ring, indirect, head) {
            Some(in_order) => in_order,
            // Nothing is written for a chain that cannot be read.
            None => return Self { control: chain.control, ..Self::default() },
        };
        chain.judge(guest, disk, in_order);
        chain
    }

    /// Whether what is readable comes first; None if the chain cannot be read.
    fn walk(&mut self, guest: &Guest, ring: &Layout3, indirect: bool, head: u16) -> Option<bool> {
        let (mut table, mut len) = (ring.descriptors, u64::from(ring.size));
        let (mut nr, mut most) = (0, u64::from(ring.size));
        let mut index = u64::from(head);
        let mut is_in_table = false;
        let mut in_order = true;
        loop {
            nr += 1;
            if index >= len || nr > most {
                return None;
            }
            let at = table.checked_add(16 * index)?;
            let raw: [u8; 16] = guest.read(at)?;
            self.control.push(at..at.saturating_add(16));
            let addr = u64::from_le_bytes(raw[..8].try_into().ok()?);
            let bytes = u64::from(u32::from_le_bytes(raw[8..12].try_into().ok()?));
            let flags = u16::from_le_bytes([raw[12], raw[13]]);
            if flags & INDIRECT != 0 {
                let is_lawful = indirect && !is_in_table && flags & NEXT == 0;
                if !is_lawful || bytes == 0 || bytes % 16 != 0 || bytes / 16 > CHAIN_LEN_MAX {
                    return None;
                }
                (is_in_table, table, len, index, most) = (true, addr, bytes / 16, 0, CHAIN_LEN_MAX);
                nr -= 1;
                // The descriptor that leads to the table counts as one of the chain.
                most -= 1;
                continue;
            }
            if flags & WRITE != 0 {
                self.writable.push((addr, bytes));
            } else {
                in_order &= self.writable.is_empty();
                self.readable.push((addr, bytes));
            }
            if flags & NEXT == 0 {
                return Some(in_order);
            }
            index = u64::from(u16::from_le_bytes([raw[14], raw[15]]));
        }
    }

    /// So many bytes of what the device may read, after the first `skip`; their places become part of `control`.
    fn readable_bytes(&mut self, guest: &Guest, mut skip: u64, len: u64) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for &(addr, here) in &self.readable {
            let from = skip.min(here);
            skip -= from;
            for at in from..here {
                if bytes.len() as u64 == len {
                    return Some(bytes);
                }
                let at = addr.checked_add(at)?;
                bytes.extend(guest.read::<1>(at)?);
                match self.control.last_mut() {
                    Some(last) if last.end == at => last.end = at.saturating_add(1),
                    _ => self.control.push(at..at.saturating_add(1)),
                }
            }
        }
        (bytes.len() as u64 == len).then_some(bytes)
    }

    /// The data of a write.
    fn peek(&self, guest: &Guest, len: u64) -> Option<Vec<u8>> {
        if !self.readable.iter().all(|part| lies_in(guest, *part)) {
            return None;
        }
        let mut data = Vec::new();
        for &(addr, len) in &self.readable {
            data.extend(guest.slice(addr, len));
        }
        Some(data.split_off(data.len() - len as usize))
    }

    fn judge(&mut self, guest: &Guest, disk: &DiskLimits, in_order: bool) {
        match self.status_at() {
            Some(at) if guest.has(at) => {}
            _ => return self.answer = Answer::Mute,
        }
        self.answer = IO_ERROR;
        if !in_order {
            return;
        }
        let Some(header) = self.readable_bytes(guest, 0, 16) else { return };
        let kind = u32::from_le_bytes(header[..4].try_into().expect("four"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("eight"));
        let data_out = self.readable.iter().map(|(_, len)| len).sum::<u64>() - 16;
        let data_in = self.writable_bytes() - 1;
        let on_disk = |sector: u64, len: u64| {
            let start = sector.checked_mul(SECTOR_BYTES)?;
            let end = start.checked_add(len)?;
            (len % SECTOR_BYTES == 0 && end <= disk.size_bytes).then_some(start..end)
        };
        let is_whole = |range: &Range<u64>| (range.start | range.end) % u64::from(disk.block_bytes) == 0;
        self.answer = match kind {
            0 => match on_disk(sector, data_in) {
                Some(range) if data_out == 0 => {
                    self.disk.push(range);
                    match self.writable.iter().all(|part| lies_in(guest, *part)) {
                        true => Answer::Read(data_in),
                        false => IO_ERROR,
                    }
                }
                _ => IO_ERROR,
            },
            1 => match on_disk(sector, data_out) {
                Some(range) if !disk.read_only && is_whole(&range) && (data_out != 0 || data_in == 0) => {
                    self.disk.push(range);
                    self.data = self.peek(guest, data_out).map(Data);
                    if self.data.is_some() { Answer::Changed } else { IO_ERROR }
                }
                _ => IO_ERROR,
            },
            4 => Answer::Changed,
            8 => match self.writable.iter().all(|part| lies_in(guest, *part)) {
                true => Answer::Id(data_in.min(ID_BYTES)),
                // As far as it is asked for it may lie in memory.
                false => Answer::Id(u64::MAX),
            },
            11 | 13 => {
                let discard = kind == 11;
                if disk.read_only {
                    IO_ERROR
                } else if discard && !disk.discard {
                    UNSUPPORTED
                } else if data_out == 0 || data_out % 16 != 0 || data_out > 16 * 16 {
                    IO_ERROR
                } else {
                    match self.readable_bytes(guest, 16, data_out) {
                        Some(ranges) => self.judge_ranges(&ranges, discard, disk, on_disk, is_whole),
                        None => IO_ERROR,
                    }
                }
            }
            _ => UNSUPPORTED,
        };
    }

    fn judge_ranges(
        &mut self,
        ranges: &[u8],
        discard: bool,
        disk: &DiskLimits,
        on_disk: impl Fn(u64, u64) -> Option<Range<u64>>,
        is_whole: impl Fn(&Range<u64>) -> bool,
    ) -> Answer {
        let (mut bad, mut unknown) = (false, false);
        let most = if discard { disk.discard_sectors_max } else { disk.write_zeroes_sectors_max };
        for raw in ranges.chunks_exact(16) {
            let sector = u64::from_le_bytes(raw[..8].try_into().expect("eight"));
            let nr_sectors = u32::from_le_bytes(raw[8..12].try_into().expect("four"));
            let flags = u32::from_le_bytes(raw[12..].try_into().expect("four"));
            unknown |= flags & !u32::from(!discard) != 0;
            match on_disk(sector, u64::from(nr_sectors) * SECTOR_BYTES) {
                Some(range) => {
                    bad |= nr_sectors > most || (!discard && !is_whole(&range));
                    self.disk.push(range);
                }
                None => bad = true,
            }
        }
        match (unknown, bad) {
            (true, _) => UNSUPPORTED,
            (_, true) => IO_ERROR,
            _ => Answer::Changed,
        }
    }
}

/// Whether all of a buffer is in guest memory; one without a byte is nowhere.
fn lies_in(guest: &Guest, (addr, len): (u64, u64)) -> bool {
    use vm_memory::{GuestAddress, GuestMemoryBackend as _};
    len == 0 || addr.checked_add(len).is_some() && guest.map().check_range(GuestAddress(addr), len as usize)
}
