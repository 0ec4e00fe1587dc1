//! Looking ahead in the ring: what the next requests will be read from is asked for before they are taken.
//!
//! The guest wrote all of it on another processor, so that each line takes as long to come as a request takes to be handled; and
//! which line is next is known only when the one before is there. In a batch, the lines of several requests come at the same
//! time in place of one after the other. Nothing that is read here decides anything: it may be something else when the
//! request is taken.

use vm_memory::{GuestAddress, VolatileMemory as _, VolatileSlice};

use super::{RawDescriptor, RingAddresses};
use crate::memory::{GuestAccess as _, GuestMap, prefetch, slice};

/// How many requests ahead the first descriptor is asked for, what it leads to, and what that leads to.
const DESCRIPTORS: u16 = 9;
const BUFFERS: u16 = 6;
pub(super) const LINKS: u16 = 3;

/// A ring whose parts lie in one region each.
pub(super) struct Ahead<'a> {
    map: &'a GuestMap,
    size: u16,
    available: VolatileSlice<'a>,
    table: VolatileSlice<'a>,
}

impl<'a> Ahead<'a> {
    /// The ring of so many entries; None if it lies across regions.
    #[inline]
    pub(super) fn new(map: &'a GuestMap, size: u16, at: &RingAddresses) -> Option<Self> {
        let available = slice(map, at.available, 6 + 2 * usize::from(size))?;
        let table = slice(map, at.descriptors, 16 * usize::from(size))?;
        Some(Self { map, size, available, table })
    }

    /// `nr` entries from `next` on were found to be available. Of a single one all is wanted at once, and nothing is ahead.
    pub(super) fn begin(&self, next: u16, nr: u16) {
        (0..nr.min(DESCRIPTORS)).for_each(|n| self.ask_for_descriptor(next.wrapping_add(n)));
        (0..nr.min(BUFFERS)).for_each(|n| self.ask_for_buffer(next.wrapping_add(n)));
        (0..nr.min(LINKS)).for_each(|n| self.ask_for_link(next.wrapping_add(n)));
    }

    /// One has been taken; `nr` are left from `next` on, [`LINKS`] at least.
    #[inline]
    pub(super) fn go_on(&self, next: u16, nr: u16) {
        if nr >= DESCRIPTORS {
            self.ask_for_descriptor(next.wrapping_add(DESCRIPTORS - 1));
        }
        if nr >= BUFFERS {
            self.ask_for_buffer(next.wrapping_add(BUFFERS - 1));
        }
        self.ask_for_link(next.wrapping_add(LINKS - 1));
    }

    #[inline]
    fn head(&self, index: u16) -> Option<u16> {
        let offset = 4 + 2 * usize::from(index & (self.size - 1));
        self.available.get_ref::<u16>(offset).ok().map(|head| u16::from_le(head.load()))
    }

    #[inline]
    fn place(&self, index: u16) -> Option<VolatileSlice<'a>> {
        self.table.subslice(16 * usize::from(index), 16).ok()
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Option<RawDescriptor> {
        self.table.get_ref(16 * usize::from(index)).ok().map(|descriptor| descriptor.load())
    }

    /// The first descriptor.
    #[inline]
    fn ask_for_descriptor(&self, index: u16) {
        if let Some(place) = self.head(index).and_then(|head| self.place(head)) {
            prefetch(&place);
        }
    }

    /// What that leads to: a header or an indirect table, and the second descriptor.
    #[inline]
    fn ask_for_buffer(&self, index: u16) {
        let Some(first) = self.head(index).and_then(|head| self.descriptor(head)) else { return };
        if let Some(buffer) = slice(self.map, first.addr(), 1) {
            prefetch(&buffer);
        }
        if let Some(place) = first.next().and_then(|next| self.place(next)) {
            prefetch(&place);
        }
    }

    /// What that leads to: the header that an indirect table begins with, or the third descriptor.
    #[inline]
    fn ask_for_link(&self, index: u16) {
        let Some(first) = self.head(index).and_then(|head| self.descriptor(head)) else { return };
        let link = if first.is_indirect() {
            let inner = self.map.read_at::<RawDescriptor>(first.addr());
            inner.and_then(|inner| slice(self.map, inner.addr(), 1))
        } else {
            let second = first.next().and_then(|next| self.descriptor(next));
            second.and_then(|second| self.place(second.next()?))
        };
        if let Some(link) = link {
            prefetch(&link);
        }
    }
}

impl RawDescriptor {
    fn addr(&self) -> GuestAddress {
        GuestAddress(u64::from_le(self.addr))
    }
}
