//! Guest memory that belongs to the test: memfds, mapped here and handed to the back-end.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use anyhow::{Context as _, Result, ensure};

/// Where the first region starts in the guest's address space: not 0, so that address 0 is an error, and far from where
/// this process maps it, so that no address works by chance in the wrong space.
pub const GUEST_BASE: u64 = 1 << 32;
/// Smallest piece that the arena hands out.
const CLASS_MIN_BITS: u32 = 6;

/// One contiguous piece of guest memory.
#[derive(Debug)]
pub struct Region {
    /// First guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the region in its file.
    pub mmap_offset: u64,
    file: File,
    ptr: NonNull<u8>,
}

// SAFETY: the mapping is plain shared memory, reached only through copies and atomics.
unsafe impl Send for Region {}
// SAFETY: as above; the other side of the memory is another process anyway.
unsafe impl Sync for Region {}

impl Region {
    /// A region of `len` bytes at guest address `guest`, at `mmap_offset` in a file of its own.
    pub fn new(guest: u64, len: u64, mmap_offset: u64) -> Result<Self> {
        let file = anonymous_file(mmap_offset + len).context("make a memfd")?;
        Self::of_file(file, guest, len, mmap_offset)
    }

    /// A region of `len` bytes in huge pages of 2 MiB.
    pub fn huge(guest: u64, len: u64) -> Result<Self> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        let file = memfd(len, flags).context("make a memfd of huge pages")?;
        Self::of_file(file, guest, len, 0)
    }

    fn of_file(file: File, guest: u64, len: u64, mmap_offset: u64) -> Result<Self> {
        let (size, offset) = (usize::try_from(len)?, libc::off_t::try_from(mmap_offset)?);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let ptr = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                offset,
            )
        };
        ensure!(ptr != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let ptr = NonNull::new(ptr.cast()).context("mapped at 0")?;
        Ok(Self { guest, len, mmap_offset, file, ptr })
    }

    /// The region's address in this process, which is what vhost-user calls the user address.
    pub fn user(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    fn at(&self, addr: u64, len: usize) -> Option<*mut u8> {
        let offset = addr.checked_sub(self.guest)?;
        let end = offset.checked_add(len as u64)?;
        // SAFETY: `offset` is inside the mapping, checked just here.
        (end <= self.len)
            .then(|| unsafe { self.ptr.as_ptr().add(usize::try_from(offset).expect("in a mapping")) })
    }
}

impl AsRawFd for Region {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length and nobody can reach it any more.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), usize::try_from(self.len).expect("as mapped")) };
    }
}

/// A file in memory without a name.
pub fn anonymous_file(size: u64) -> io::Result<File> {
    memfd(size, libc::MFD_CLOEXEC)
}

fn memfd(size: u64, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: a valid C string; the result is a new descriptor that nobody else owns.
    let fd = unsafe { libc::memfd_create(c"guest-memory".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just created and belongs to no one else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size)?;
    Ok(file)
}

/// Free lists by power of two, over the first region.
#[derive(Debug)]
struct Arena {
    next: u64,
    end: u64,
    free: [Vec<u64>; 64],
}

/// All guest memory of one front-end.
#[derive(Debug)]
pub struct Memory {
    regions: RwLock<Vec<Arc<Region>>>,
    arena: Mutex<Arena>,
}

impl Memory {
    /// One region of `len` bytes; pages cost nothing until used.
    pub fn new(len: u64) -> Result<Arc<Self>> {
        let first = Region::new(GUEST_BASE, len, 0)?;
        let arena =
            Arena { next: GUEST_BASE, end: GUEST_BASE + len, free: std::array::from_fn(|_| Vec::new()) };
        Ok(Arc::new(Self { regions: RwLock::new(vec![Arc::new(first)]), arena: Mutex::new(arena) }))
    }

    /// Adds a region; the back-end must be told by the caller.
    pub fn add(&self, region: Region) -> Arc<Region> {
        let region = Arc::new(region);
        self.regions.write().expect("no panic with the lock").push(Arc::clone(&region));
        region
    }

    /// Removes the region that starts at `guest`.
    pub fn remove(&self, guest: u64) {
        self.regions.write().expect("no panic with the lock").retain(|region| region.guest != guest);
    }

    /// The regions of now.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().expect("no panic with the lock").clone()
    }

    /// First address behind all regions: an address that is not guest memory.
    pub fn end(&self) -> u64 {
        self.regions().iter().map(|r| r.guest + r.len).max().unwrap_or(0)
    }

    fn with<T>(&self, addr: u64, len: usize, f: impl FnOnce(*mut u8) -> T) -> T {
        let regions = self.regions.read().expect("no panic with the lock");
        let at = regions.iter().find_map(|region| region.at(addr, len));
        f(at.unwrap_or_else(|| panic!("{addr:#x}+{len} is not guest memory")))
    }

    /// The address in this process of a guest address (for ring addresses on the wire).
    pub fn user_of(&self, addr: u64) -> u64 {
        self.with(addr, 1, |ptr| ptr as u64)
    }

    /// Copies out of guest memory.
    pub fn read(&self, addr: u64, buf: &mut [u8]) {
        // SAFETY: `with` checked the range; the copy lets the back-end race but not the compiler.
        self.with(addr, buf.len(), |ptr| unsafe {
            ptr::copy_nonoverlapping(ptr, buf.as_mut_ptr(), buf.len())
        });
    }

    /// Copies out of guest memory.
    pub fn read_vec(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0; len];
        self.read(addr, &mut buf);
        buf
    }

    /// Copies into guest memory.
    pub fn write(&self, addr: u64, data: &[u8]) {
        // SAFETY: as for `read`.
        self.with(addr, data.len(), |ptr| unsafe {
            ptr::copy_nonoverlapping(data.as_ptr(), ptr, data.len())
        });
    }

    /// Fills guest memory.
    pub fn fill(&self, addr: u64, len: usize, byte: u8) {
        // SAFETY: `with` checked the range.
        self.with(addr, len, |ptr| unsafe { ptr::write_bytes(ptr, byte, len) });
    }

    /// A 16-bit load that later reads cannot overtake.
    pub fn load_u16(&self, addr: u64) -> u16 {
        self.with(addr, 2, |ptr| {
            // SAFETY: ring fields are aligned and inside a region; the back-end uses them atomically too.
            u16::from_le(unsafe { AtomicU16::from_ptr(ptr.cast()) }.load(Ordering::SeqCst))
        })
    }

    /// A 16-bit store that earlier writes cannot follow.
    pub fn store_u16(&self, addr: u64, value: u16) {
        self.with(addr, 2, |ptr| {
            // SAFETY: as for `load_u16`.
            unsafe { AtomicU16::from_ptr(ptr.cast()) }.store(value.to_le(), Ordering::SeqCst);
        });
    }

    /// A zeroed buffer of at least `len` bytes, aligned to its size rounded up to a power of two (so, to a page when it is
    /// a page or more). Given back on drop.
    pub fn alloc(self: &Arc<Self>, len: usize) -> Buf {
        let class = (len.max(1) as u64).next_power_of_two().trailing_zeros().max(CLASS_MIN_BITS);
        let size = 1_u64 << class;
        let addr = {
            let mut arena = self.arena.lock().expect("no panic with the lock");
            arena.free[class as usize].pop().unwrap_or_else(|| {
                let addr = arena.next.next_multiple_of(size);
                assert!(addr + size <= arena.end, "the test's guest memory is used up");
                arena.next = addr + size;
                addr
            })
        };
        let buf = Buf { mem: Arc::clone(self), addr, len, class };
        self.fill(addr, len, 0);
        buf
    }

    /// [`Memory::alloc`], filled with `data`.
    pub fn alloc_with(self: &Arc<Self>, data: &[u8]) -> Buf {
        let buf = self.alloc(data.len());
        self.write(buf.addr, data);
        buf
    }
}

/// A piece of guest memory in use by the test.
#[derive(Debug)]
pub struct Buf {
    mem: Arc<Memory>,
    /// Guest address.
    pub addr: u64,
    /// Asked-for length.
    pub len: usize,
    class: u32,
}

impl Buf {
    /// The contents of now.
    pub fn bytes(&self) -> Vec<u8> {
        self.mem.read_vec(self.addr, self.len)
    }

    /// Fills the whole buffer.
    pub fn fill(&self, byte: u8) {
        self.mem.fill(self.addr, self.len, byte);
    }

    /// Overwrites the start of the buffer.
    pub fn put(&self, data: &[u8]) {
        assert!(data.len() <= self.len);
        self.mem.write(self.addr, data);
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Ok(mut arena) = self.mem.arena.lock() {
            arena.free[self.class as usize].push(self.addr);
        }
    }
}
