//! The split virtqueue, from the device's side (virtio 1.2, section 2.7).
//!
//! Differs from the `virtio-queue` crate in what a merging block device needs: the used index is published for many
//! answers at a time, a broken chain is told apart from a short one, notifications are suppressed without EVENT_IDX as well, and
//! a guest that breaks the ring costs one log line. Everything is read from guest memory once, then checked, then used.

mod ahead;

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use vm_memory::{ByteValued, GuestAddress, VolatileMemory as _};

use std::sync::Arc;

use crate::crash;
use crate::dirty_log::DirtyLog;
use crate::inflight::{Garbage, InflightQueue};
use crate::memory::{GuestAccess as _, GuestMap, slice};
use ahead::Ahead;

/// Most entries of a ring (`VIRTQUEUE_MAX_SIZE` in QEMU, and what Linux asks for at most).
pub const RING_SIZE_MAX: u16 = 1024;

/// `VRING_USED_F_NO_NOTIFY` in the width of the flags.
const NO_NOTIFY: u16 = 1;
const _: () = assert!(NO_NOTIFY as u32 == VRING_USED_F_NO_NOTIFY);

/// Most descriptors in one chain, indirect ones included. A guest may use an indirect table that is longer than its
/// ring, as far as seg_max allows (Linux does).
pub const CHAIN_LEN_MAX: u32 = RING_SIZE_MAX as u32 + 2;

/// One descriptor as it lies in guest memory.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct RawDescriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl RawDescriptor {
    fn is_indirect(&self) -> bool {
        u32::from(u16::from_le(self.flags)) & VRING_DESC_F_INDIRECT != 0
    }

    /// The descriptor that follows in the same table, if one does.
    fn next(&self) -> Option<u16> {
        let has_next = u32::from(u16::from_le(self.flags)) & VRING_DESC_F_NEXT != 0;
        has_next.then(|| u16::from_le(self.next))
    }
}

// SAFETY: plain integers in C layout without padding; every bit pattern is a value.
unsafe impl ByteValued for RawDescriptor {}

/// One buffer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest-physical address.
    pub addr: GuestAddress,
    /// Bytes.
    pub len: u32,
    /// Whether the device may write there (and only then).
    pub writable: bool,
}

/// Which rule a chain breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// A descriptor or the table lies outside guest memory.
    #[error("a descriptor lies outside guest memory")]
    Memory,
    /// An index is not in the table.
    #[error("a next index is outside its table")]
    Index,
    /// More descriptors than fit: a loop.
    #[error("a chain is a loop or too long")]
    Loop,
    /// Empty, not a multiple of 16 bytes, too long, nested, with a next descriptor, or not negotiated.
    #[error("an indirect table breaks the rules")]
    Indirect,
}

/// What came of looking for the next chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pop {
    /// A head that was made available.
    Head(u16),
    /// An entry that cannot be used: its number is outside the ring, or it is in flight already. It is consumed.
    BadHead(u16),
    /// Nothing there.
    Empty,
    /// The available index cannot be right; the ring is not touched any more.
    Broken,
}

/// Where a ring's three parts lie in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, 16 bytes aligned.
    pub descriptors: GuestAddress,
    /// Available ring, 2 bytes aligned.
    pub available: GuestAddress,
    /// Used ring, 4 bytes aligned.
    pub used: GuestAddress,
}

/// One split virtqueue.
#[derive(Debug)]
pub struct Vring {
    size: u16,
    at: RingAddresses,
    event_idx: bool,
    indirect: bool,
    /// Next available entry to take, and how far the guest's index was at the last look.
    next_avail: u16,
    avail_seen: u16,
    /// Next used entry to write, how far the index is published, and where the guest was last told.
    next_used: u16,
    published: u16,
    /// Heads that were taken and not returned.
    in_flight: Vec<bool>,
    nr_in_flight: u16,
    /// Where that is written down for a process after this one.
    tracked: Option<InflightQueue>,
    /// Heads that an earlier process took and did not answer, the next one last.
    again: Vec<u16>,
    /// Where writes to guest memory are told, while somebody asks for it.
    log: Option<RingLog>,
    broken: bool,
}

/// A ring's way to the dirty log.
#[derive(Debug)]
struct RingLog {
    log: Arc<DirtyLog>,
    /// The guest address under which the used ring is logged.
    used: Option<u64>,
    chain: Vec<Descriptor>,
}

impl Vring {
    /// A ring that goes on at `next_avail`; the used index is taken from where the guest sees it.
    ///
    /// `size` is a power of two up to [`RING_SIZE_MAX`]. None if the ring is not inside guest memory.
    pub fn new(
        map: &GuestMap,
        size: u16,
        at: RingAddresses,
        next_avail: u16,
        event_idx: bool,
        indirect: bool,
    ) -> Option<Self> {
        debug_assert!(size.is_power_of_two() && size <= RING_SIZE_MAX);
        if !Self::lies_in(map, size, at) {
            return None;
        }
        let used =
            u16::from_le(map.load_u16(at.used.0.checked_add(2).map(GuestAddress)?, Ordering::Acquire)?);
        Some(Self {
            size,
            at,
            event_idx,
            indirect,
            next_avail,
            avail_seen: next_avail,
            next_used: used,
            published: used,
            in_flight: vec![false; usize::from(size)],
            nr_in_flight: 0,
            tracked: None,
            again: Vec::new(),
            log: None,
            broken: false,
        })
    }

    /// Writes down from now on what is in flight. What `area` says to be in flight already is popped again, before anything
    /// else; and unless `keeps_index`, the ring goes on behind those and what is answered, whatever index it was made with:
    /// front-ends that lost an earlier process do not know how far it had come.
    ///
    /// # Errors
    /// The content of the area cannot be right. The ring goes on at its index, with nothing in flight.
    pub fn track(
        &mut self,
        map: &GuestMap,
        mut area: InflightQueue,
        keeps_index: bool,
    ) -> Result<usize, Garbage> {
        let used = self.next_used;
        let index = self.load(map, self.at.available, 2, Ordering::Acquire).unwrap_or(used);
        let outstanding = index.wrapping_sub(used).min(self.size);
        let available =
            |index| self.load(map, self.at.available, 4 + 2 * self.slot(index), Ordering::Relaxed);
        let (heads, found) = match area.recover(used, outstanding, available) {
            Ok(heads) => (heads, None),
            Err(garbage) => (Vec::new(), Some(garbage)),
        };
        area.begin(used, &heads);
        self.tracked = Some(area);
        if let Some(garbage) = found {
            return Err(garbage);
        }
        for head in &heads {
            self.mark(*head, true);
        }
        if !keeps_index {
            self.next_avail = used.wrapping_add(u16::try_from(heads.len()).unwrap_or(0));
            self.avail_seen = self.next_avail;
        }
        let nr_heads = heads.len();
        self.again = heads;
        self.again.reverse();
        Ok(nr_heads)
    }

    /// Whether what is in flight is written down.
    pub fn is_tracked(&self) -> bool {
        self.tracked.is_some()
    }

    /// Gives up a head without an answer: it stays written down as in flight, for the next start.
    pub fn leave(&mut self, map: &GuestMap, head: u16) {
        debug_assert!(self.is_tracked());
        self.log_chain(map, head);
        self.mark(head, false);
    }

    /// Requests that were taken and not answered.
    pub fn nr_in_flight(&self) -> u16 {
        self.nr_in_flight
    }

    /// Whether the head was not marked so before.
    fn mark(&mut self, head: u16, is_in_flight: bool) -> bool {
        let Some(marked) = self.in_flight.get_mut(usize::from(head)) else { return false };
        let changed = std::mem::replace(marked, is_in_flight) != is_in_flight;
        match is_in_flight {
            _ if !changed => {}
            true => self.nr_in_flight += 1,
            false => self.nr_in_flight -= 1,
        }
        changed
    }

    /// Marks from now on what is written to guest memory in `log`, the used ring under guest address `used` (if at all); or
    /// marks nothing any more.
    pub fn set_log(&mut self, log: Option<(Arc<DirtyLog>, Option<u64>)>) {
        self.log = log.map(|(log, used)| RingLog { log, used, chain: Vec::new() });
    }

    /// Marks everything that the device may have written for `head`. All that it has written, it has written by now.
    fn log_chain(&mut self, map: &GuestMap, head: u16) {
        let Some(mut log) = self.log.take() else { return };
        // Of a chain that breaks rules, what can be read was acted upon as well.
        let _ = self.read_chain(map, head, &mut log.chain);
        // A guest may name the same memory in each: it is marked once.
        log.chain.retain(|descriptor| descriptor.writable);
        log.chain.sort_unstable_by_key(|descriptor| descriptor.addr);
        let mut marked_to = 0;
        for descriptor in &log.chain {
            let end = descriptor.addr.0.saturating_add(descriptor.len.into());
            let start = descriptor.addr.0.max(marked_to);
            log.log.mark(start, end.saturating_sub(start));
            marked_to = end.max(marked_to);
        }
        self.log = Some(log);
    }

    /// Marks bytes of the used ring.
    #[inline]
    fn log_used(&self, offset: u64, len: u64) {
        if let Some(RingLog { log, used: Some(used), .. }) = &self.log {
            log.mark(used.saturating_add(offset), len);
        }
    }

    /// Whether the three parts of a ring lie inside guest memory.
    pub fn lies_in(map: &GuestMap, size: u16, at: RingAddresses) -> bool {
        use vm_memory::GuestMemoryBackend as _;
        let size = usize::from(size);
        at.descriptors.0.is_multiple_of(16)
            && at.available.0.is_multiple_of(2)
            && at.used.0.is_multiple_of(4)
            && map.check_range(at.descriptors, 16 * size)
            && map.check_range(at.available, 6 + 2 * size)
            && map.check_range(at.used, 6 + 8 * size)
    }

    /// The ring's place after guest memory changed.
    pub fn move_to(&mut self, at: RingAddresses) {
        self.at = at;
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The index that a later start goes on at.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Whether the guest broke the ring.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }

    fn load(&self, map: &GuestMap, at: GuestAddress, offset: u64, order: Ordering) -> Option<u16> {
        map.load_u16(GuestAddress(at.0 + offset), order).map(u16::from_le)
    }

    fn store_used(&self, map: &GuestMap, offset: u64, value: u16, order: Ordering) {
        // The ring was inside guest memory when it was started; if it is not now, the guest cannot see it either.
        let _ = map.store_u16(value.to_le(), GuestAddress(self.at.used.0 + offset), order);
        self.log_used(offset, 2);
    }

    /// Looks how far the guest's available index is. True if there is something to take.
    fn refresh(&mut self, map: &GuestMap) -> bool {
        let Some(index) = self.load(map, self.at.available, 2, Ordering::Acquire) else {
            self.broken = true;
            return false;
        };
        if index.wrapping_sub(self.next_avail) > self.size {
            self.broken = true;
            return false;
        }
        self.avail_seen = index;
        let nr = index.wrapping_sub(self.next_avail);
        if nr > 1
            && let Some(ahead) = Ahead::new(map, self.size, &self.at)
        {
            ahead.begin(self.next_avail, nr);
        }
        nr != 0
    }

    /// Whether there is something to take. Only looks: of a broken index, [`Self::pop`] tells.
    pub fn has_next(&self, map: &GuestMap) -> bool {
        !self.broken
            && (self.next_avail != self.avail_seen
                || !self.again.is_empty()
                || self.load(map, self.at.available, 2, Ordering::Acquire) != Some(self.next_avail))
    }

    /// Takes the next head that the guest made available.
    pub fn pop(&mut self, map: &GuestMap) -> Pop {
        if self.broken {
            return Pop::Empty;
        }
        if let Some(head) = self.again.pop() {
            return Pop::Head(head);
        }
        if self.next_avail == self.avail_seen && !self.refresh(map) {
            return if self.broken { Pop::Broken } else { Pop::Empty };
        }
        let offset = 4 + 2 * self.slot(self.next_avail);
        let Some(head) = self.load(map, self.at.available, offset, Ordering::Relaxed) else {
            self.broken = true;
            return Pop::Broken;
        };
        self.next_avail = self.next_avail.wrapping_add(1);
        let nr_left = self.avail_seen.wrapping_sub(self.next_avail);
        if nr_left >= ahead::LINKS
            && let Some(ahead) = Ahead::new(map, self.size, &self.at)
        {
            ahead.go_on(self.next_avail, nr_left);
        }
        if !self.mark(head, true) {
            return Pop::BadHead(head);
        }
        if let Some(tracked) = &mut self.tracked {
            tracked.mark(head);
        }
        Pop::Head(head)
    }

    /// Reads the chain that begins at `head` into `chain` (which is emptied first). On an error, `chain` holds what was
    /// read until then.
    pub fn read_chain(
        &self,
        map: &GuestMap,
        head: u16,
        chain: &mut Vec<Descriptor>,
    ) -> Result<(), ChainError> {
        chain.clear();
        let (mut table, mut table_len) = (self.at.descriptors, u32::from(self.size));
        // Looked up once where the table lies in one region, as nearly all do.
        let whole = |table: GuestAddress, table_len: u32| slice(map, table, 16 * table_len as usize);
        let mut found = whole(table, table_len);
        let mut in_indirect = false;
        let mut nr_left = u32::from(self.size);
        let mut index = u32::from(head);
        loop {
            if index >= table_len {
                return Err(ChainError::Index);
            }
            nr_left = nr_left.checked_sub(1).ok_or(ChainError::Loop)?;
            let raw: RawDescriptor = match &found {
                Some(found) => found.get_ref(16 * index as usize).map_err(|_| ChainError::Memory)?.load(),
                None => {
                    let at = table.0.checked_add(16 * u64::from(index)).ok_or(ChainError::Memory)?;
                    map.read_at(GuestAddress(at)).ok_or(ChainError::Memory)?
                }
            };
            let flags = u32::from(u16::from_le(raw.flags));
            let (addr, len) = (GuestAddress(u64::from_le(raw.addr)), u32::from_le(raw.len));
            if flags & VRING_DESC_F_INDIRECT != 0 {
                let lawful = self.indirect && !in_indirect && flags & VRING_DESC_F_NEXT == 0;
                if !lawful || len == 0 || !len.is_multiple_of(16) || len / 16 > CHAIN_LEN_MAX {
                    return Err(ChainError::Indirect);
                }
                in_indirect = true;
                (table, table_len, index) = (addr, len / 16, 0);
                found = whole(table, table_len);
                nr_left = CHAIN_LEN_MAX - (u32::from(self.size) - nr_left);
                continue;
            }
            chain.push(Descriptor { addr, len, writable: flags & VRING_DESC_F_WRITE != 0 });
            if flags & VRING_DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = u32::from(u16::from_le(raw.next));
        }
    }

    /// Writes the used entry of `head`; `len` bytes were written into its buffers. The guest sees it at the next
    /// [`Self::publish`].
    pub fn push_used(&mut self, map: &GuestMap, head: u16, len: u32) {
        let was_out = self.mark(head, false);
        debug_assert!(was_out, "head {head} is returned twice");
        self.log_chain(map, head);
        let element = u64::from(head) | u64::from(len) << 32;
        let offset = 4 + 8 * self.slot(self.next_used);
        crash::step();
        let _ = map.write_at(element.to_le(), GuestAddress(self.at.used.0 + offset));
        self.log_used(offset, 8);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(tracked) = &mut self.tracked {
            tracked.add_used(head);
        }
    }

    /// Shows the guest all used entries written since the last time. True if the guest wants to be told.
    pub fn publish(&mut self, map: &GuestMap) -> bool {
        let old = self.published;
        if self.next_used == old {
            return false;
        }
        crash::step();
        self.store_used(map, 2, self.next_used, Ordering::Release);
        self.published = self.next_used;
        if let Some(tracked) = &mut self.tracked {
            tracked.published(self.next_used);
        }
        // The index must be visible before the guest's wish is read (virtio 1.2, 2.7.7.2): either we see that it wants
        // to be told, or it sees the entries before it waits.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let offset = 4 + 2 * u64::from(self.size);
            let Some(event) = self.load(map, self.at.available, offset, Ordering::Relaxed) else {
                return true;
            };
            self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
        } else {
            let flags = self.load(map, self.at.available, 0, Ordering::Relaxed).unwrap_or(0);
            u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Whether used entries wait to be published.
    pub fn has_unpublished(&self) -> bool {
        self.next_used != self.published
    }

    /// Asks the guest not to kick while its ring is being worked on. With EVENT_IDX there is nothing to do: the guest
    /// kicks once past the armed index and no more.
    pub fn suppress_kicks(&self, map: &GuestMap) {
        if !self.event_idx {
            self.store_used(map, 0, NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// Asks for a kick at the next available entry. True if one came in meanwhile: look again, no kick will come for it.
    pub fn arm_kicks(&self, map: &GuestMap) -> bool {
        if self.broken {
            return false;
        }
        if self.event_idx {
            let offset = 4 + 8 * u64::from(self.size);
            self.store_used(map, offset, self.next_avail, Ordering::Relaxed);
        } else {
            self.store_used(map, 0, 0, Ordering::Relaxed);
        }
        // The wish must be visible before the index is read again (2.7.10.1). Of an impossible one, too, `pop` tells.
        fence(Ordering::SeqCst);
        self.has_next(map)
    }
}

#[cfg(test)]
mod tests;
