//! A request in guest memory: how its bytes are cut and placed, and whether exactly the right ones changed.

use std::sync::Arc;

use vm_memory::{Bytes as _, GuestAddress};

use super::driver::Piece;
use super::model::NOISE;
use super::plan::{Plan, Twist};
use super::rng::Rng;
use crate::memory::GuestMap;

/// Bytes of a slot; each request has one to itself.
pub(crate) const SLOT_BYTES: u64 = 16 << 10;

/// The end of a slot is for the indirect table.
const TABLE_BYTES: u64 = 512;

/// An address that no region has.
const AWAY: u64 = 1 << 40;

/// What the guest leaves in the place of the status.
const NO_STATUS: u8 = 0xee;

/// A place for one request at a time, and what it held when it was last looked at.
#[derive(Debug)]
pub(crate) struct Slot {
    map: Arc<GuestMap>,
    base: u64,
    image: Vec<u8>,
}

/// Where the parts of a request lie.
#[derive(Debug)]
pub(crate) struct Placed {
    /// In chain order.
    pub(crate) pieces: Vec<Piece>,
    /// Address of each run of the bytes that the device may write, in order.
    room: Vec<(u64, u32)>,
    /// For the table.
    pub(crate) table: u64,
}

impl Slot {
    /// A slot from `base` on.
    pub(crate) fn new(map: &Arc<GuestMap>, base: u64) -> Self {
        Self { map: Arc::clone(map), base, image: vec![0; usize::try_from(SLOT_BYTES).expect("small")] }
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.image.len()];
        self.map.read_slice(&mut bytes, GuestAddress(self.base)).expect("slot");
        bytes
    }

    /// Nothing may have changed since the last look: a request that was answered is over.
    pub(crate) fn assert_unchanged(&self) {
        assert!(
            self.read() == self.image,
            "guest memory at {:#x} changed behind the guest's back",
            self.base
        );
    }

    /// What is there now is right.
    pub(crate) fn remember(&mut self) {
        self.image = self.read();
    }

    /// What was there when it was last right.
    pub(crate) fn image(&self) -> &[u8] {
        &self.image
    }

    /// Cuts the request into pieces and puts them into memory.
    pub(crate) fn place(&mut self, rng: &mut Rng, plan: &Plan) -> Placed {
        self.assert_unchanged();
        let noise = rng.index(NOISE.len() - self.image.len());
        let noise = &NOISE[noise..noise + self.image.len()];
        self.map.write_slice(noise, GuestAddress(self.base)).expect("slot");

        let out_len = u32::try_from(plan.out.len()).expect("small");
        let mut lens: Vec<(u32, bool)> =
            cut(rng, out_len, &[16]).into_iter().map(|len| (len, false)).collect();
        if plan.twist != Twist::NoRoom {
            lens.extend(cut(rng, plan.room, &[plan.room - 1]).into_iter().map(|len| (len, true)));
        }
        let mut addrs = self.addresses(rng, &lens);
        self.twist(rng, plan, &mut lens, &mut addrs);
        let pieces: Vec<_> = lens
            .iter()
            .zip(&addrs)
            .map(|((len, writable), addr)| Piece { addr: *addr, len: *len, writable: *writable })
            .collect();

        let mut out = &plan.out[..];
        for piece in pieces.iter().filter(|p| !p.writable && self.holds(p.addr)) {
            let (here, rest) = out.split_at(out.len().min(piece.len as usize));
            self.map.write_slice(here, GuestAddress(piece.addr)).expect("slot");
            out = rest;
        }
        let room: Vec<_> =
            pieces.iter().filter(|p| p.writable && p.len != 0).map(|p| (p.addr, p.len)).collect();
        let placed = Placed { pieces, room, table: self.base + SLOT_BYTES - TABLE_BYTES };
        if let Some(addr) = placed.status_addr().filter(|addr| self.holds(*addr)) {
            self.map.write_obj(NO_STATUS, GuestAddress(addr)).expect("slot");
        }
        self.remember();
        placed
    }

    fn holds(&self, addr: u64) -> bool {
        (self.base..self.base + SLOT_BYTES).contains(&addr)
    }

    /// Places in any order, some touching each other, some on a sector boundary.
    fn addresses(&self, rng: &mut Rng, lens: &[(u32, bool)]) -> Vec<u64> {
        let mut order: Vec<usize> = (0..lens.len()).collect();
        if rng.chance(50) {
            rng.shuffle(&mut order);
        }
        let mut addrs = vec![0; lens.len()];
        let mut at = self.base + rng.below(64);
        for i in order {
            match rng.weighted(&[3, 4, 3]) {
                0 => {}
                1 => at += 1 + rng.below(40),
                _ => at = at.next_multiple_of(512),
            }
            addrs[i] = at;
            at += u64::from(lens[i].0);
        }
        assert!(at <= self.base + SLOT_BYTES - TABLE_BYTES, "a slot is too small");
        addrs
    }

    fn twist(&self, rng: &mut Rng, plan: &Plan, lens: &mut Vec<(u32, bool)>, addrs: &mut Vec<u64>) {
        let is_read = plan.room > 1;
        let first_room = lens.iter().position(|(_, writable)| *writable).unwrap_or(lens.len());
        match plan.twist {
            Twist::StatusAway => {
                lens.push((1, true));
                addrs.push(AWAY + rng.below(512));
            }
            Twist::DataAway => {
                // Behind the header and before the status, whatever else is cut where.
                let at = if is_read { first_room } else { first_room.max(1) };
                lens.insert(at, (512, is_read));
                addrs.insert(at, AWAY);
            }
            Twist::WrongWay => {
                lens.push((1 + rng.below_u32(16), false));
                addrs.push(self.base);
            }
            _ => {}
        }
    }
}

impl Placed {
    /// The status byte that the device has written (or what was there before).
    pub(crate) fn status(&self, slot: &Slot) -> Option<u8> {
        let addr = self.status_addr().filter(|addr| slot.holds(*addr))?;
        Some(slot.map.read_obj(GuestAddress(addr)).expect("slot"))
    }

    fn status_addr(&self) -> Option<u64> {
        self.room.last().map(|(addr, len)| addr + u64::from(*len) - 1)
    }

    /// Checks a request that was answered with `status` (None: none was to be written): of the room's bytes only the
    /// first `data_len` may have changed, and the status. Gives those data.
    pub(crate) fn check(&self, slot: &Slot, status: Option<u8>, data_len: u64) -> Vec<u8> {
        let before = slot.image();
        let after = slot.read();
        let mut expected = before.to_vec();
        let index = |addr: u64| usize::try_from(addr - slot.base).expect("in the slot");
        let mut data = Vec::new();
        let mut left = data_len;
        for (addr, len) in self.room.iter().filter(|(addr, _)| slot.holds(*addr)) {
            let here = left.min(u64::from(*len));
            let part = index(*addr)..index(*addr) + usize::try_from(here).expect("small");
            expected[part.clone()].copy_from_slice(&after[part.clone()]);
            data.extend_from_slice(&after[part]);
            left -= here;
        }
        assert_eq!(left, 0, "less room than data");
        if let Some(status) = status {
            let addr = self.status_addr().expect("a place for the status");
            assert_eq!(after[index(addr)], status, "status byte");
            expected[index(addr)] = status;
        }
        if after != expected {
            let at = (0..after.len()).find(|at| after[*at] != expected[*at]);
            panic!("byte {at:#x?} of the slot at {:#x} changed and is no data: {:x?}", slot.base, self.room);
        }
        data
    }
}

/// Cuts `len` bytes into pieces: as everybody does it, or anywhere, with empty ones.
fn cut(rng: &mut Rng, len: u32, plain: &[u32]) -> Vec<u32> {
    let mut places: Vec<u32> = match rng.below(4) {
        0 | 1 => plain.iter().copied().filter(|at| *at < len).collect(),
        2 => (0..rng.below(4)).map(|_| rng.below_u32(len + 1)).collect(),
        _ => (0..rng.below(4)).map(|_| rng.below_u32(len / 512 + 1) * 512).collect(),
    };
    places.extend([0, len]);
    places.sort_unstable();
    let may_be_empty = rng.chance(5);
    let pieces = places.windows(2).map(|pair| pair[1] - pair[0]);
    pieces.filter(|len| *len != 0 || may_be_empty).collect()
}
