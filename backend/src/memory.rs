//! Guest memory: the regions that the front-end shares, and the maps made of them.
//!
//! A map is immutable. Every change makes a new one; a worker that is told of it lets go of the old one when its last
//! request on it has completed, which [`MapLease`] makes known to whoever waits for the region to be unmapped.

use std::convert::Infallible;
use std::fs::File;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    ByteValued, Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap,
    GuestMemoryRegion as _, GuestRegionMmap, MmapRegion, VolatileMemory as _, VolatileSlice,
};

/// Guest memory as a worker sees it: that of `vm-memory`, with a quicker way to what lies inside one region.
#[derive(Debug, Clone, Default)]
pub struct GuestMap {
    memory: GuestMemoryMmap<()>,
    /// Where the regions are, in the order of their addresses.
    places: Box<[Place]>,
}

/// Where a region lies.
#[derive(Debug, Clone, Copy)]
struct Place {
    guest: u64,
    len: u64,
    host: *mut u8,
}

// SAFETY: the pointer is only an address of the mapping in `memory`, which may itself be sent and shared.
unsafe impl Send for GuestMap {}
// SAFETY: as above; the memory is reached by volatile and atomic accesses alone, since the guest writes to it at any time.
unsafe impl Sync for GuestMap {}

impl Deref for GuestMap {
    type Target = GuestMemoryMmap<()>;

    fn deref(&self) -> &Self::Target {
        &self.memory
    }
}

impl From<GuestMemoryMmap<()>> for GuestMap {
    fn from(memory: GuestMemoryMmap<()>) -> Self {
        let place = |region: &GuestRegionMmap<()>| Place {
            guest: region.start_addr().0,
            len: region.len(),
            host: region.as_ptr(),
        };
        Self { places: memory.iter().map(place).collect(), memory }
    }
}

impl GuestMap {
    /// No memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of these mappings, which must be in the order of their addresses.
    ///
    /// # Errors
    /// They overlap, or there is none.
    pub fn from_arc_regions(
        regions: Vec<Arc<GuestRegionMmap<()>>>,
    ) -> Result<Self, vm_memory::GuestRegionCollectionError> {
        GuestMemoryMmap::from_arc_regions(regions).map(Self::from)
    }

    /// Of anonymous memory at these addresses.
    ///
    /// # Errors
    /// They overlap, or there is not so much memory.
    pub fn from_ranges(ranges: &[(GuestAddress, usize)]) -> Result<Self, vm_memory::mmap::FromRangesError> {
        GuestMemoryMmap::from_ranges(ranges).map(Self::from)
    }
}

/// Looking up guest memory where an access lies inside one region, as nearly all do. [`vm_memory::Bytes`] is
/// ready for ranges over several regions, which takes several times the instructions; those fall back to it.
pub trait GuestAccess {
    /// Reads a value; None outside guest memory.
    fn read_at<T: ByteValued>(&self, addr: GuestAddress) -> Option<T>;
    /// Writes a value; None outside guest memory.
    fn write_at<T: ByteValued>(&self, value: T, addr: GuestAddress) -> Option<()>;
    /// Loads 16 bits at once; None outside guest memory or at an odd address.
    fn load_u16(&self, addr: GuestAddress, order: Ordering) -> Option<u16>;
    /// Stores 16 bits at once; None outside guest memory or at an odd address.
    fn store_u16(&self, value: u16, addr: GuestAddress, order: Ordering) -> Option<()>;
}

impl GuestAccess for GuestMap {
    #[inline]
    fn read_at<T: ByteValued>(&self, addr: GuestAddress) -> Option<T> {
        match slice(self, addr, size_of::<T>()) {
            Some(slice) => slice.get_ref(0).ok().map(|value| value.load()),
            None => self.read_obj(addr).ok(),
        }
    }

    #[inline]
    fn write_at<T: ByteValued>(&self, value: T, addr: GuestAddress) -> Option<()> {
        match slice(self, addr, size_of::<T>()) {
            Some(slice) => slice.get_ref(0).ok().map(|place| place.store(value)),
            None => self.write_obj(value, addr).ok(),
        }
    }

    #[inline]
    fn load_u16(&self, addr: GuestAddress, order: Ordering) -> Option<u16> {
        slice(self, addr, 2)?.load(0, order).ok()
    }

    #[inline]
    fn store_u16(&self, value: u16, addr: GuestAddress, order: Ordering) -> Option<()> {
        slice(self, addr, 2)?.store(value, 0, order).ok()
    }
}

/// Bytes that lie in one region; None of others.
#[inline]
pub fn slice(map: &GuestMap, addr: GuestAddress, len: usize) -> Option<VolatileSlice<'_>> {
    #[cfg(fuzzing)]
    crate::fuzzing::looked();
    for place in &map.places {
        let offset = addr.0.wrapping_sub(place.guest);
        if offset >= place.len {
            continue;
        }
        if len as u64 > place.len - offset {
            return None;
        }
        // SAFETY: `len` bytes from `offset` on are inside the region, whose mapping lives as long as `map`, which the slice
        // borrows.
        return Some(unsafe {
            VolatileSlice::new(place.host.wrapping_add(usize::try_from(offset).ok()?), len)
        });
    }
    None
}

/// Asks the processor for the cache line where `slice` begins, to be read, without waiting for it. Does nothing on
/// processors for which the instruction is not known here.
#[inline]
pub fn prefetch(slice: &VolatileSlice<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it gives no value, changes none and does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.ptr_guard().as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}

/// Most regions that the front-end may have at a time (`VHOST_USER_GET_MAX_MEM_SLOTS`; the value that QEMU's own library uses).
pub const MEM_SLOTS_MAX: usize = 509;

/// Why a region cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// mmap said no, or the file is shorter than the region.
    #[error("cannot map a region: {0}")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    /// Touching what lies beyond the file's end would end the process (SIGBUS).
    #[error("a region of {size_bytes} bytes from {offset} on is longer than its file of {file_bytes}")]
    Short {
        /// Length of the region.
        size_bytes: u64,
        /// Where it begins in the file.
        offset: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The file cannot be asked for its length.
    #[error("a region's file: {0}")]
    File(#[from] std::io::Error),
    /// The region's end is beyond the address space.
    #[error("a region wraps around the address space")]
    Wraps,
    /// Regions overlap.
    #[error("regions do not form a memory: {0}")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
    /// There are too many.
    #[error("more than {MEM_SLOTS_MAX} regions")]
    TooMany,
    /// No region is where one should be removed.
    #[error("no such region")]
    NoSuchRegion,
}

/// A region's place: in the guest, and in the front-end's own address space (where it says that the rings are).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionAddress {
    /// Guest-physical start.
    pub guest: u64,
    /// Start in the front-end's address space.
    pub user: u64,
    /// Length in bytes.
    pub size_bytes: u64,
}

#[derive(Debug, Clone)]
struct Region {
    at: RegionAddress,
    mapping: Arc<GuestRegionMmap<()>>,
}

/// All regions of one front-end.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    regions: Vec<Region>,
    map: Arc<GuestMap>,
}

impl Memory {
    /// Takes a whole table (`VHOST_USER_SET_MEM_TABLE`).
    pub fn new(regions: impl IntoIterator<Item = (RegionAddress, FileOffset)>) -> Result<Self, MemoryError> {
        let regions =
            regions.into_iter().map(|(at, file)| map_region(at, file)).collect::<Result<Vec<_>, _>>()?;
        Self::from_regions(regions)
    }

    fn from_regions(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.len() > MEM_SLOTS_MAX {
            return Err(MemoryError::TooMany);
        }
        regions.sort_by_key(|region| region.at.guest);
        let map = if regions.is_empty() {
            GuestMap::new()
        } else {
            GuestMap::from_arc_regions(regions.iter().map(|r| Arc::clone(&r.mapping)).collect())?
        };
        Ok(Self { regions, map: Arc::new(map) })
    }

    /// With one more region (`VHOST_USER_ADD_MEM_REG`).
    pub fn with(&self, at: RegionAddress, file: File, offset: u64) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(map_region(at, FileOffset::new(file, offset))?);
        Self::from_regions(regions)
    }

    /// Without the region at that place (`VHOST_USER_REM_MEM_REG`).
    pub fn without(&self, at: RegionAddress) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        let index = regions.iter().position(|r| r.at == at).ok_or(MemoryError::NoSuchRegion)?;
        regions.remove(index);
        Self::from_regions(regions)
    }

    /// The map of all regions.
    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Where an address of the front-end's lies in the guest.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|r| {
            let offset = user.checked_sub(r.at.user)?;
            (offset < r.at.size_bytes).then(|| GuestAddress(r.at.guest + offset))
        })
    }
}

fn map_region(at: RegionAddress, file: FileOffset) -> Result<Region, MemoryError> {
    let size = usize::try_from(at.size_bytes).map_err(|_| MemoryError::Wraps)?;
    if at.user.checked_add(at.size_bytes).is_none() {
        return Err(MemoryError::Wraps);
    }
    let (meta, offset) = (file.file().metadata()?, file.start());
    // A device (DAX) has no length to compare.
    if meta.is_file() && offset.checked_add(at.size_bytes).is_none_or(|end| end > meta.len()) {
        return Err(MemoryError::Short { size_bytes: at.size_bytes, offset, file_bytes: meta.len() });
    }
    let mapping = MmapRegionBuilder::<()>::new(size)
        .with_file_offset(file)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
        .build()?;
    leave_out_of_cores(&mapping);
    let mapping = GuestRegionMmap::new(mapping, GuestAddress(at.guest)).ok_or(MemoryError::Wraps)?;
    debug_assert_eq!(mapping.len(), at.size_bytes);
    Ok(Region { at, mapping: Arc::new(mapping) })
}

/// What a guest has in its memory is nobody's to read in a core of this process.
fn leave_out_of_cores(mapping: &MmapRegion) {
    // SAFETY: the range is that of the mapping; the advice changes nothing of what is in it.
    if unsafe { libc::madvise(mapping.as_ptr().cast(), mapping.size(), libc::MADV_DONTDUMP) } == -1 {
        log::warn!("guest memory may be in a core: error={}", std::io::Error::last_os_error());
    }
}

/// A worker's hold on a map.
#[derive(Debug)]
pub struct MapLease {
    map: Arc<GuestMap>,
    _held: mpsc::Sender<Infallible>,
}

impl MapLease {
    /// The map.
    pub fn map(&self) -> &GuestMap {
        &self.map
    }
}

/// Hands out the leases of one map, and waits for their end.
#[derive(Debug)]
pub struct Lessor {
    map: Arc<GuestMap>,
    held: mpsc::Sender<Infallible>,
    ended: mpsc::Receiver<Infallible>,
}

impl Lessor {
    /// Nobody holds the map yet.
    pub fn new(map: Arc<GuestMap>) -> Self {
        let (held, ended) = mpsc::channel();
        Self { map, held, ended }
    }

    /// One more hold.
    pub fn lease(&self) -> MapLease {
        MapLease { map: Arc::clone(&self.map), _held: self.held.clone() }
    }

    /// Blocks until every lease has ended, however long requests on it take: guest memory is not taken from under a
    /// request that the kernel still works on.
    pub fn wait_for_end(self) {
        let Self { map, held, ended } = self;
        drop(held);
        // Nothing is ever sent: the answer is the error that comes when the last sender is gone.
        let _ = ended.recv();
        drop(map);
    }
}

/// Test support: one region of anonymous memory from guest address 0.
#[cfg(test)]
pub(crate) fn anonymous(size_bytes: usize) -> Arc<GuestMap> {
    Arc::new(GuestMap::from_ranges(&[(GuestAddress(0), size_bytes)]).expect("map"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file
    }

    #[test]
    fn addresses_of_the_front_end_are_translated() {
        let at = RegionAddress { guest: 0x1000, user: 0x7000_0000, size_bytes: 0x2000 };
        let memory = Memory::new([(at, FileOffset::new(file(0x2000), 0))]).unwrap();
        assert_eq!(memory.guest_address(0x7000_0010), Some(GuestAddress(0x1010)));
        assert_eq!(memory.guest_address(0x7000_2000), None);
        assert_eq!(memory.guest_address(0x10), None);
        let memory = memory.without(at).unwrap();
        assert_eq!(memory.guest_address(0x7000_0010), None);
        assert!(matches!(memory.without(at), Err(MemoryError::NoSuchRegion)));
    }

    #[test]
    fn f45_a_slice_lies_in_one_region_or_is_none() {
        let page = 0x1000_u64;
        let regions = [page, 2 * page, 5 * page].map(|guest| (GuestAddress(guest), 0x1000));
        let map = GuestMap::from_ranges(&regions).unwrap();
        let length = |addr, len| slice(&map, GuestAddress(addr), len).map(|slice| slice.len());
        for start in [page, 2 * page, 5 * page] {
            assert_eq!(length(start, 0x1000), Some(0x1000));
            assert_eq!(length(start + 0xfff, 1), Some(1));
            assert_eq!(length(start + 0xfff, 2), None);
            assert_eq!(length(start + 1, usize::MAX), None);
        }
        for addr in [0, page - 1, 3 * page, 5 * page - 1, 6 * page, u64::MAX] {
            assert_eq!(length(addr, 1), None, "{addr:x}");
        }
        assert!(slice(&GuestMap::new(), GuestAddress(0), 1).is_none());
        // Each leads where the other way does.
        for addr in [page, 2 * page + 8, 5 * page + 0xff8] {
            map.write_at(addr, GuestAddress(addr)).unwrap();
            assert_eq!(map.read_obj::<u64>(GuestAddress(addr)).unwrap(), addr);
            assert_eq!(map.read_at::<u64>(GuestAddress(addr)), Some(addr));
        }
        // Over two regions, and over an end.
        map.write_at(u64::MAX, GuestAddress(2 * page - 4)).unwrap();
        assert_eq!(map.read_at::<u64>(GuestAddress(2 * page - 4)), Some(u64::MAX));
        assert_eq!(map.read_at::<u64>(GuestAddress(3 * page - 4)), None);
    }

    #[test]
    fn f45_bad_regions_are_refused() {
        let at = |guest| RegionAddress { guest, user: 0, size_bytes: 0x2000 };
        let short = Memory::new([(at(0), FileOffset::new(file(0x1000), 0))]);
        assert!(matches!(short, Err(MemoryError::Short { .. })));
        let overlap =
            [(at(0), FileOffset::new(file(0x2000), 0)), (at(0x1000), FileOffset::new(file(0x2000), 0))];
        assert!(matches!(Memory::new(overlap), Err(MemoryError::Regions(_))));
        assert!(Memory::new([(at(u64::MAX - 0x1000), FileOffset::new(file(0x2000), 0))]).is_err());
    }

    #[test]
    fn f19_a_map_ends_when_its_last_lease_does() {
        let lessor = Lessor::new(anonymous(4096));
        let (a, b) = (lessor.lease(), lessor.lease());
        let waiter = std::thread::spawn(move || lessor.wait_for_end());
        drop(a);
        assert!(!waiter.is_finished());
        drop(b);
        waiter.join().unwrap();
    }
}
