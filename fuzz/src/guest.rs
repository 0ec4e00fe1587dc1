//! Guest memory that AddressSanitizer watches the ends of, and a ring in it with every word in the target's own hand.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use polypath::memory::GuestMap;
use polypath::vring::RingAddresses;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestRegionMmap};

/// Mapped memory begins at whole pages.
const PAGE_BYTES: usize = 4096;

/// Regions of the guest, each in an allocation of its own: a byte before or behind it is poisoned.
pub struct Guest {
    /// Goes before what it points to, which it does not own.
    map: Arc<GuestMap>,
    regions: Vec<Region>,
}

struct Region {
    addr: u64,
    ptr: *mut u8,
    layout: Layout,
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `Guest::new` with this layout, freed once.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

impl Region {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is that long; nobody writes while the slice is looked at, which only this thread does.
        unsafe { std::slice::from_raw_parts(self.ptr, self.layout.size()) }
    }
}

impl Guest {
    /// Regions at these addresses, of these lengths.
    pub fn new(places: &[(u64, usize)]) -> Self {
        let region = |&(addr, len): &(u64, usize)| {
            let layout = Layout::from_size_align(len, PAGE_BYTES).expect("layout");
            // SAFETY: the length is not 0.
            let ptr = unsafe { alloc_zeroed(layout) };
            if ptr.is_null() {
                handle_alloc_error(layout);
            }
            Region { addr, ptr, layout }
        };
        let regions: Vec<Region> = places.iter().map(region).collect();
        let mapped = regions.iter().map(|region| {
            let builder =
                MmapRegionBuilder::<()>::new(region.layout.size()).with_mmap_prot(3).with_mmap_flags(0x22);
            // SAFETY: the allocation outlives the map, see `regions`.
            let builder = unsafe { builder.with_raw_mmap_pointer(region.ptr) };
            let mapping = builder.build().expect("region");
            Arc::new(GuestRegionMmap::new(mapping, GuestAddress(region.addr)).expect("region"))
        });
        let map = Arc::new(GuestMap::from_arc_regions(mapped.collect()).expect("map"));
        Self { map, regions }
    }

    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// All zeros again.
    pub fn clear(&mut self) {
        for region in &self.regions {
            // SAFETY: the allocation is that long.
            unsafe { region.ptr.write_bytes(0, region.layout.size()) };
        }
    }

    /// A copy of everything.
    pub fn copy_into(&self, copy: &mut Vec<u8>) {
        copy.clear();
        self.regions.iter().for_each(|region| copy.extend_from_slice(region.bytes()));
    }

    /// Each region's address with its bytes in the copy and as they are now.
    fn compared<'a>(&'a self, mut copy: &'a [u8]) -> impl Iterator<Item = (u64, &'a [u8], &'a [u8])> {
        self.regions.iter().map(move |region| {
            let (then, rest) = copy.split_at(region.layout.size());
            copy = rest;
            (region.addr, then, region.bytes())
        })
    }

    /// The first byte that is not as in the copy.
    pub fn first_change(&self, copy: &[u8]) -> Option<u64> {
        self.compared(copy).find(|(_, then, now)| then != now).map(|(addr, then, now)| {
            addr + then.iter().zip(now).position(|(then, now)| then != now).unwrap_or(0) as u64
        })
    }

    /// The pages that are not as in the copy.
    pub fn changed_pages(&self, copy: &[u8]) -> Vec<u64> {
        let mut pages = Vec::new();
        for (addr, then, now) in self.compared(copy) {
            let parts = then.chunks(PAGE_BYTES).zip(now.chunks(PAGE_BYTES));
            let changed = parts.enumerate().filter(|(_, (then, now))| then != now);
            pages.extend(changed.map(|(at, _)| addr / PAGE_BYTES as u64 + at as u64));
        }
        pages
    }

    /// Makes the copy the same as memory in these bytes, as far as there is memory.
    pub fn forgive(&self, copy: &mut [u8], addr: u64, len: u64) {
        let mut base = 0;
        for region in &self.regions {
            let size = region.layout.size();
            let from = addr.saturating_sub(region.addr).min(size as u64) as usize;
            let to = addr.saturating_add(len).saturating_sub(region.addr).min(size as u64) as usize;
            if from < to {
                copy[base + from..base + to].copy_from_slice(&region.bytes()[from..to]);
            }
            base += size;
        }
    }

    /// So many bytes, all of which are in memory.
    pub fn slice(&self, addr: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        if len != 0 {
            self.map.read_slice(&mut bytes, GuestAddress(addr)).expect("memory");
        }
        bytes
    }

    pub fn has(&self, addr: u64) -> bool {
        self.map.address_in_range(GuestAddress(addr))
    }

    /// Writes what lies in the guest's memory of it.
    pub fn write(&self, bytes: &[u8], addr: u64) {
        let _ = self.map.write(bytes, GuestAddress(addr));
    }

    /// Reads so many bytes; None if not all of them are in memory.
    pub fn read<const N: usize>(&self, addr: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        addr.checked_add(N as u64 - 1)?;
        self.map.read_slice(&mut bytes, GuestAddress(addr)).ok().map(|()| bytes)
    }
}

/// Another descriptor follows.
pub const NEXT: u16 = 1;
/// The device writes here.
pub const WRITE: u16 = 2;
/// A table of descriptors is here.
pub const INDIRECT: u16 = 4;

/// Address, length, flags, next.
pub type Raw = (u64, u32, u16, u16);

/// A descriptor as it lies in memory.
pub fn descriptor((addr, len, flags, next): Raw) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// The three parts of a ring.
#[derive(Debug, Clone, Copy)]
pub struct Layout3 {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

impl Layout3 {
    /// One part behind the other from `base` on.
    pub fn at(base: u64, size: u16) -> Self {
        let available = base + 16 * u64::from(size);
        let used = (available + 6 + 2 * u64::from(size)).next_multiple_of(4);
        Self { size, descriptors: base, available, used }
    }

    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.used + self.used_bytes()
    }

    pub fn used_bytes(&self) -> u64 {
        6 + 8 * u64::from(self.size)
    }

    pub fn available_bytes(&self) -> u64 {
        6 + 2 * u64::from(self.size)
    }

    pub fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: GuestAddress(self.descriptors),
            available: GuestAddress(self.available),
            used: GuestAddress(self.used),
        }
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }

    /// Writes `head` where the available index leads.
    pub fn set_available(&self, map: &GuestMap, index: u16, head: u16) {
        let _ = map.write_obj(head.to_le(), GuestAddress(self.available + 4 + 2 * self.slot(index)));
    }

    /// Moves the available index.
    pub fn publish(&self, map: &GuestMap, index: u16) {
        let _ = map.store(index.to_le(), GuestAddress(self.available + 2), Ordering::Release);
    }

    pub fn set_used_index(&self, map: &GuestMap, index: u16) {
        let _ = map.write_obj(index.to_le(), GuestAddress(self.used + 2));
    }

    pub fn used_index(&self, map: &GuestMap) -> u16 {
        map.read_obj(GuestAddress(self.used + 2)).map_or(0, u16::from_le)
    }

    /// Head and length of a used entry.
    pub fn used_entry(&self, map: &GuestMap, index: u16) -> (u32, u32) {
        let word = |at| map.read_obj(GuestAddress(at)).map_or(0, u32::from_le);
        let at = self.used + 4 + 8 * self.slot(index);
        (word(at), word(at + 4))
    }
}
