//! A split virtqueue as the guest's driver has it, without any policy: every word in the test's own hand.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes as _, GuestAddress};

use crate::memory::GuestMap;
use crate::vring::RingAddresses;

/// Another descriptor follows.
pub(crate) const NEXT: u16 = 1;
/// The device writes here.
pub(crate) const WRITE: u16 = 2;
/// A table of descriptors is here.
pub(crate) const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: u64 = 16;

/// A descriptor as the driver writes it: address, length, flags, next.
pub(crate) type Raw = (u64, u32, u16, u16);

/// The three parts of a ring in guest memory.
#[derive(Debug, Clone)]
pub(crate) struct RawRing {
    map: Arc<GuestMap>,
    size: u16,
    at: RingAddresses,
}

impl RawRing {
    /// Lays a ring out from `base` on (16 bytes aligned). Nothing is written.
    pub(crate) fn new(map: &Arc<GuestMap>, size: u16, base: u64) -> Self {
        let n = u64::from(size);
        let available = base + DESCRIPTOR_BYTES * n;
        let used = (available + 6 + 2 * n).next_multiple_of(4);
        let at = RingAddresses {
            descriptors: GuestAddress(base),
            available: GuestAddress(available),
            used: GuestAddress(used),
        };
        Self { map: Arc::clone(map), size, at }
    }

    /// Where the parts lie.
    pub(crate) fn at(&self) -> RingAddresses {
        self.at
    }

    /// Entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }

    fn put(&self, at: GuestAddress, offset: u64, value: u16) {
        self.map.store(value.to_le(), GuestAddress(at.0 + offset), Ordering::Release).expect("ring");
    }

    fn get(&self, at: GuestAddress, offset: u64) -> u16 {
        u16::from_le(self.map.load(GuestAddress(at.0 + offset), Ordering::Acquire).expect("ring"))
    }

    /// Writes entry `index` of the descriptor table.
    pub(crate) fn set_descriptor(&self, index: u16, raw: Raw) {
        self.set_descriptor_at(self.at.descriptors.0 + DESCRIPTOR_BYTES * u64::from(index), raw);
    }

    /// Writes a descriptor anywhere (into an indirect table).
    pub(crate) fn set_descriptor_at(&self, addr: u64, (buffer, len, flags, next): Raw) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.map.write_slice(&bytes, GuestAddress(addr)).expect("descriptor");
    }

    /// Writes `head` where the available index `index` leads; the device is not told.
    pub(crate) fn set_available(&self, index: u16, head: u16) {
        self.put(self.at.available, 4 + 2 * self.slot(index), head);
    }

    /// Moves the available index.
    pub(crate) fn publish_available(&self, index: u16) {
        self.put(self.at.available, 2, index);
        fence(Ordering::SeqCst);
    }

    /// Sets the used index, as a device before us has left it.
    pub(crate) fn set_used_index(&self, index: u16) {
        self.put(self.at.used, 2, index);
    }

    /// The used index.
    pub(crate) fn used_index(&self) -> u16 {
        self.get(self.at.used, 2)
    }

    /// Head and length of the used entry where index `index` leads.
    pub(crate) fn used(&self, index: u16) -> (u32, u32) {
        let at = GuestAddress(self.at.used.0 + 4 + 8 * self.slot(index));
        let word = |offset| u32::from_le(self.map.read_obj(GuestAddress(at.0 + offset)).expect("ring"));
        (word(0), word(4))
    }

    /// With EVENT_IDX: asks to be told once the used index moves past `index`.
    pub(crate) fn set_used_event(&self, index: u16) {
        self.put(self.at.available, 4 + 2 * u64::from(self.size), index);
        fence(Ordering::SeqCst);
    }

    /// Without EVENT_IDX: asks not to be told, or to be told.
    pub(crate) fn set_no_interrupt(&self, no: bool) {
        self.put(self.at.available, 0, u16::from(no));
        fence(Ordering::SeqCst);
    }

    /// With EVENT_IDX: the available index past which the device wants a kick.
    pub(crate) fn available_event(&self) -> u16 {
        self.get(self.at.used, 4 + 8 * u64::from(self.size))
    }

    /// Without EVENT_IDX: whether the device asks not to be kicked.
    pub(crate) fn is_no_notify(&self) -> bool {
        self.get(self.at.used, 0) & 1 != 0
    }
}

/// Whether an index that moved from `old` to `new` has passed the one that `event` names: the definition, step by step.
pub(crate) fn passes(event: u16, old: u16, new: u16) -> bool {
    let mut at = old;
    while at != new {
        if at == event {
            return true;
        }
        at = at.wrapping_add(1);
    }
    false
}
