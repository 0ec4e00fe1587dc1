//! Guest memory registered with a ring: the kernel then neither looks up nor pins the pages of each I/O.
//!
//! All of guest memory is pinned for as long as it is registered, so this is off unless asked for. It must not be used
//! with a guest whose memory the front-end gives back to the host and takes again (ballooning, free page reporting,
//! unplugging): the ring would go on with the pages that the guest had before.

use std::io;

use io_uring::{IoUring, Probe, squeue};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::gather::IoVec;
use crate::memory::GuestMap;

/// Vectored I/O on a registered buffer (`IORING_OP_READV_FIXED`, `IORING_OP_WRITEV_FIXED`, io_uring.h; since 6.15).
pub(super) const READV_FIXED: u8 = 60;
pub(super) const WRITEV_FIXED: u8 = 61;

/// The kernel registers at most 1 GiB as one buffer.
const CHUNK_BYTES: usize = 1 << 30;
/// Most buffers: 4 TiB of guest memory; what lies beyond goes without.
const NR_MAX: u16 = 4096;

/// A registered piece of guest memory, by the addresses of this process.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    start: usize,
    end: usize,
    place: u16,
}

/// The registered memory of one ring.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    is_on: bool,
    /// Whether the ring has room for buffers.
    has_room: bool,
    has_vectored: bool,
    /// In order of their addresses.
    chunks: Vec<Chunk>,
    /// Places in use.
    nr_used: u16,
}

impl Buffers {
    /// Registers memory from the next map on.
    pub(super) fn turn_on(&mut self, ring: &IoUring) {
        let mut probe = Probe::new();
        let is_known = ring.submitter().register_probe(&mut probe).is_ok();
        self.has_vectored =
            is_known && [READV_FIXED, WRITEV_FIXED].iter().all(|&opcode| probe.is_supported(opcode));
        self.is_on = true;
    }

    /// Whether the memory that is used is registered.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Registers this memory in place of what was before. What is under way keeps what it has; entries that the kernel has
    /// not taken yet must not be there. If the kernel will not have it, I/O works without.
    pub(super) fn replace(&mut self, ring: &IoUring, map: &GuestMap) {
        self.chunks.clear();
        if let Err(error) = self.register(ring, map) {
            // ENOMEM: RLIMIT_MEMLOCK.
            log::warn!(
                "guest memory is not registered, I/O works without: error={error} (the limit on locked memory must be \
                 above the guest's memory for each queue, and the memory must be anonymous, shared, or huge pages)"
            );
            self.chunks.clear();
            self.clear(ring, 0);
        }
    }

    fn register(&mut self, ring: &IoUring, map: &GuestMap) -> io::Result<()> {
        let submitter = ring.submitter();
        if !self.has_room {
            submitter.register_buffers_sparse(u32::from(NR_MAX))?;
            self.has_room = true;
        }
        let mut place = 0;
        for region in map.iter() {
            let start = region.as_ptr().addr();
            let len = usize::try_from(region.len()).unwrap_or(0);
            for at in (0..len).step_by(CHUNK_BYTES) {
                if place == NR_MAX {
                    break;
                }
                let here = CHUNK_BYTES.min(len - at);
                let piece = IoVec { iov_base: region.as_ptr().wrapping_add(at).cast(), iov_len: here };
                // SAFETY: the mapping lives as long as the lease on the map, which the worker holds until it gives the
                // engine another one; the kernel pins the pages by itself.
                unsafe { submitter.register_buffers_update(u32::from(place), &[piece], None)? };
                self.nr_used = self.nr_used.max(place + 1);
                self.chunks.push(Chunk { start: start + at, end: start + at + here, place });
                place += 1;
            }
        }
        self.clear(ring, place);
        self.chunks.sort_unstable_by_key(|chunk| chunk.start);
        Ok(())
    }

    /// Gives back the places from that one on.
    fn clear(&mut self, ring: &IoUring, first: u16) {
        let nothing = IoVec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for place in first..self.nr_used {
            // SAFETY: an empty buffer is no memory.
            let cleared =
                unsafe { ring.submitter().register_buffers_update(u32::from(place), &[nothing], None) };
            if let Err(error) = cleared {
                log::warn!("memory stays registered: error={error}");
            }
        }
        self.nr_used = first;
    }

    /// Unpins everything now: a ring that ends does so some time later.
    pub(super) fn close(&mut self, ring: &IoUring) {
        if self.has_room {
            let _ = ring.submitter().unregister_buffers();
        }
        self.chunks.clear();
    }

    /// The place of the buffer in which all of these lie. None: they are not in one.
    pub(super) fn place(&self, iovecs: &[IoVec]) -> Option<u16> {
        let first = iovecs.first()?.iov_base.addr();
        let index = self.chunks.partition_point(|chunk| chunk.end <= first);
        let chunk = self.chunks.get(index)?;
        let is_inside =
            |v: &IoVec| v.iov_base.addr() >= chunk.start && v.iov_base.addr() + v.iov_len <= chunk.end;
        let can = iovecs.len() == 1 || self.has_vectored;
        (can && iovecs.iter().all(is_inside)).then_some(chunk.place)
    }
}

/// Makes of vectored I/O the same on a registered buffer, which the `io-uring` crate does not know yet.
pub(super) fn in_place(mut entry: squeue::Entry, opcode: u8, buffer: Option<u16>) -> squeue::Entry {
    /// `struct io_uring_sqe`, as far as it matters.
    #[repr(C)]
    struct Sqe {
        opcode: u8,
        others: [u8; 39],
        buf_index: u16,
        rest: [u8; 22],
    }
    const { assert!(size_of::<Sqe>() == size_of::<squeue::Entry>()) };
    let Some(buffer) = buffer else { return entry };
    // SAFETY: an entry is the kernel's structure of 64 bytes and nothing else (`repr(C)`), every value of these two fields
    // is one, and 64-bit fields align it for them.
    let sqe = unsafe { &mut *(&raw mut entry).cast::<Sqe>() };
    (sqe.opcode, sqe.buf_index) = (opcode, buffer);
    entry
}
