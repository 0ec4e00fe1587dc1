//! The guest's driver: lays requests out in memory, lawful ones for the most part.

use polypath::memory::GuestMap;

use crate::guest::{Guest, INDIRECT, Layout3, NEXT, Raw, WRITE, descriptor};
use crate::input::Input;

/// Regions: one for the rings, one that follows it without a gap, one that ends in the middle of everything, and one near
/// the end of all addresses.
pub const REGIONS: [(u64, usize); 4] =
    [(0x1_0000, 0x8000), (0x1_8000, 0x8000), (0x4_0000, 0x2f01), (0xffff_ffff_ffff_e000, 0x1000)];

/// Where nothing is.
const NOWHERE: [u64; 4] = [0, 0x3_0000, 0xffff_ffff_ffff_f000, 0xffff_ffff_ffff_fff8];

/// Kinds of requests, the frequent ones more than once.
const KINDS: [u32; 12] = [0, 0, 0, 1, 1, 1, 4, 8, 11, 13, 13, 6];

fn ends(region: usize) -> u64 {
    REGIONS[region].0 + REGIONS[region].1 as u64
}

/// Where free memory is, and which descriptors.
pub struct Driver {
    pub ring: Layout3,
    pub indirect: bool,
    /// Memory is given out a second time.
    pub is_reused: bool,
    cursor: u64,
    next_descriptor: u16,
    disk_bytes: u64,
}

impl Driver {
    pub fn new(ring: Layout3, indirect: bool, disk_bytes: u64) -> Self {
        Self { ring, indirect, is_reused: false, cursor: ring.end(), next_descriptor: 0, disk_bytes }
    }

    /// Everything of before has come back: memory and descriptors are free.
    pub fn start_over(&mut self) {
        self.cursor = self.ring.end();
        self.next_descriptor = 0;
    }

    /// Descriptors that are not in use.
    pub fn nr_free(&self) -> u16 {
        self.ring.size - self.next_descriptor.min(self.ring.size)
    }

    /// So many bytes of free memory; when there is none left, of memory that is in use.
    fn allocate(&mut self, input: &mut Input<'_>, len: u64) -> u64 {
        if input.rarely(64) {
            return input.pick(&NOWHERE);
        }
        match input.below(8) {
            0..=4 => self.cursor = self.cursor.next_multiple_of(512),
            5 => self.cursor += u64::from(input.u8()),
            _ => {}
        }
        // The first two regions are one stretch of memory.
        for (start, end) in [(0, ends(1)), (REGIONS[2].0, ends(2)), (REGIONS[3].0, ends(3))] {
            let at = self.cursor.max(start);
            if let Some(behind) = at.checked_add(len).filter(|behind| *behind <= end) {
                self.cursor = behind;
                return at;
            }
        }
        self.is_reused = true;
        self.cursor = self.ring.end();
        self.cursor
    }

    /// Lays one request out; gives its head.
    pub fn lay(&mut self, input: &mut Input<'_>, guest: &Guest) -> u16 {
        let kind = input.pick(&KINDS);
        let sectors = self.disk_bytes / 512;
        let sector = match input.below(12) {
            0 => sectors - u64::from(input.below(4)),
            1 => input.u64(),
            _ => u64::from(input.below(u32::try_from(sectors).expect("small"))) & !7,
        };
        let mut readable = Vec::new();
        let mut writable = Vec::new();
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(input, guest, &header, &mut readable);
        match kind {
            0 => self.reserve(input, &mut writable),
            1 => self.reserve(input, &mut readable),
            8 => writable.push((self.allocate(input, 20), input.pick(&[20, 20, 7, 64, 1]))),
            11 | 13 => {
                let mut ranges = Vec::new();
                for _ in 0..1 + input.below(3) {
                    let sector = u64::from(input.below(u32::try_from(sectors).expect("small"))) & !7;
                    let nr = if input.rarely(8) { input.u32() } else { 8 * input.below(5) };
                    let flags = if input.rarely(6) { input.u32() } else { u32::from(kind == 13) };
                    ranges.extend_from_slice(&sector.to_le_bytes());
                    ranges.extend_from_slice(&nr.to_le_bytes());
                    ranges.extend_from_slice(&flags.to_le_bytes());
                }
                self.put(input, guest, &ranges, &mut readable);
            }
            _ => {}
        }
        match input.below(12) {
            // It lies where the data ends, in the same descriptor.
            0 if !writable.is_empty() => {
                if let Some((_, len)) = writable.last_mut() {
                    *len = len.saturating_add(1);
                }
            }
            1 => {}
            _ => writable.push((self.allocate(input, 1), 1)),
        }
        self.chain(input, guest, &readable, &writable)
    }

    /// Bytes for the device to read, in one buffer or in pieces.
    fn put(&mut self, input: &mut Input<'_>, guest: &Guest, bytes: &[u8], parts: &mut Vec<(u64, u32)>) {
        let mut left = bytes;
        while !left.is_empty() {
            let here = if input.rarely(8) { 1 + input.index(left.len()) } else { left.len() };
            let (part, rest) = left.split_at(here);
            let at = self.allocate(input, part.len() as u64);
            guest.write(part, at);
            parts.push((at, u32::try_from(part.len()).expect("short")));
            left = rest;
        }
    }

    /// Buffers for data: whole sectors in all, cut in places of any kind.
    fn reserve(&mut self, input: &mut Input<'_>, parts: &mut Vec<(u64, u32)>) {
        let mut left = match input.below(16) {
            0 => input.below(3000),
            1 => input.u32(),
            _ => 512 * (1 + input.below(16)),
        };
        for _ in 0..6 {
            let here = match input.below(6) {
                0 => left.min(input.below(1500)),
                1 => left.min(512),
                _ => left,
            };
            parts.push((self.allocate(input, here.into()), here));
            left -= here;
            if left == 0 {
                return;
            }
        }
        parts.push((self.allocate(input, left.into()), left));
    }

    /// Descriptors for these buffers, in the ring's table or in one of their own.
    fn chain(
        &mut self,
        input: &mut Input<'_>,
        guest: &Guest,
        out: &[(u64, u32)],
        into: &[(u64, u32)],
    ) -> u16 {
        let mut all: Vec<(u64, u32, u16)> = out.iter().map(|(addr, len)| (*addr, *len, 0)).collect();
        all.extend(into.iter().map(|(addr, len)| (*addr, *len, WRITE)));
        if input.rarely(32) && all.len() > 1 {
            let (a, b) = (input.index(all.len()), input.index(all.len()));
            all.swap(a, b);
        }
        let len = u16::try_from(all.len()).expect("few");
        let direct = if self.nr_free() >= len && input.below(3) != 0 { len } else { 0 };
        let raws = |first: u16, table: &[(u64, u32, u16)]| -> Vec<Raw> {
            let last = table.len() - 1;
            let number = |i: usize| first.wrapping_add(u16::try_from(i).expect("few"));
            let raw = |(i, (addr, len, flags)): (usize, &(u64, u32, u16))| match i == last {
                true => (*addr, *len, *flags, 0),
                false => (*addr, *len, flags | NEXT, number(i + 1)),
            };
            table.iter().enumerate().map(raw).collect()
        };
        let head = self.next_descriptor % self.ring.size;
        if direct != 0 {
            for (at, raw) in (self.next_descriptor..).zip(raws(self.next_descriptor, &all)) {
                self.describe(guest, at, raw);
            }
            self.next_descriptor += direct;
        } else {
            let table: Vec<u8> = raws(0, &all).into_iter().flat_map(descriptor).collect();
            self.cursor = self.cursor.next_multiple_of(16);
            let at = self.allocate(input, table.len() as u64);
            guest.write(&table, at);
            self.describe(guest, head, (at, u32::try_from(table.len()).expect("short"), INDIRECT, 0));
            self.next_descriptor = self.next_descriptor.saturating_add(1);
        }
        head
    }

    fn describe(&self, guest: &Guest, index: u16, raw: Raw) {
        guest.write(&descriptor(raw), self.ring.descriptors + 16 * u64::from(index));
    }

    /// Breaks something: a word of the ring, of a table, or anywhere.
    pub fn damage(&self, input: &mut Input<'_>, guest: &Guest) {
        let descriptor = self.ring.descriptors + 16 * u64::from(input.below(self.ring.size.into()));
        match input.below(8) {
            0 => guest.write(&input.u64().to_le_bytes(), descriptor),
            1 => guest.write(&input.u32().to_le_bytes(), descriptor + 8),
            2 => guest.write(&input.below(8).to_le_bytes()[..2], descriptor + 12),
            3 => guest.write(&input.u16().to_le_bytes(), descriptor + 14),
            4 => guest.write(&input.u16().to_le_bytes(), self.ring.available + 2),
            5 => {
                let slot = input.below(self.ring.size.into());
                guest.write(&input.u16().to_le_bytes(), self.ring.available + 4 + 2 * u64::from(slot));
            }
            6 => guest.write(&[input.u8()], self.ring.descriptors + u64::from(input.u16() & 0x7fff)),
            _ => guest.write(&input.u16().to_le_bytes(), self.ring.used + 2 * u64::from(input.below(8))),
        }
    }

    /// The guest's map.
    pub fn offer(&self, map: &GuestMap, index: u16, head: u16) {
        self.ring.set_available(map, index, head);
    }
}
