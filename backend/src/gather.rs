//! From a request's segments to iovecs that direct I/O accepts.
//!
//! Segments that are aligned go to the kernel as they lie in guest memory, neighbours joined. The others, and only
//! those, are bounced: from the first odd piece on until whole blocks are together again.

use std::sync::atomic::{AtomicUsize, Ordering};

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

use crate::memory::{self, GuestMap};
use crate::request::Segment;

/// A run of host memory for the kernel.
///
/// Holds raw addresses: whoever keeps one keeps the map (or buffer) that it points into as well.
pub type IoVec = libc::iovec;

/// What direct I/O asks for, in bytes; both are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of buffer addresses.
    pub mem_bytes: usize,
    /// Of lengths and of the offset on the disk.
    pub block_bytes: usize,
}

impl Default for Alignment {
    fn default() -> Self {
        Self { mem_bytes: 1, block_bytes: 1 }
    }
}

/// Guest memory outside the regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a data segment lies outside guest memory, or is more than can be bounced")]
pub struct OutsideMemory;

/// A piece of guest data that goes through the bounce buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounced {
    /// Where in the buffer.
    at: usize,
    /// Where in the guest.
    addr: GuestAddress,
    len: usize,
}

/// The iovecs of one request, and the bounce buffer for what cannot be used in place. Reused from request to request.
#[derive(Debug, Default)]
pub struct Gather {
    iovecs: Vec<IoVec>,
    bounced: Vec<Bounced>,
    buffer: Vec<u8>,
    /// Start of the aligned part of `buffer`.
    base: usize,
    /// What of [`LARGE_BYTES`] the buffer is.
    large_bytes: usize,
}

/// The strictest alignment of buffer addresses that can be kept everywhere, in bytes: that of the zeros which are written.
pub const MEM_ALIGN_BYTES_MAX: u32 = 4096;

/// Largest bounce buffer that is kept for the next request.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// Bytes that are in bounce buffers larger than those that are kept, of all workers.
static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// From so many of them on no worker takes more requests than one at a time.
const CROWDED_BYTES: usize = 256 << 20;

/// Most of them. Firmware that reads a kernel to wherever it likes asks for 1 GiB at most in one request (EDK II does).
const LARGE_BYTES_MAX: usize = (1 << 30) + CROWDED_BYTES;

/// Most pieces of one request: what a chain has, cut at regions. More are no driver's, and cost memory that is kept.
const PIECES_MAX: usize = 2048;

/// Whether so much is bounced that new requests had better wait: a guest's buffers may be its whole memory many times over, and
/// each bounced piece of a request is memory of the host's.
pub fn is_crowded() -> bool {
    LARGE_BYTES.load(Ordering::Relaxed) > CROWDED_BYTES
}

/// Most bytes that a new request may have bounced.
pub fn room() -> usize {
    LARGE_BYTES_MAX.saturating_sub(LARGE_BYTES.load(Ordering::Relaxed)).max(KEPT_BYTES_MAX)
}

/// One contiguous run of host memory.
#[derive(Debug, Clone, Copy)]
struct Piece {
    ptr: *mut u8,
    addr: GuestAddress,
    len: usize,
}

impl Gather {
    /// The iovecs, in the order of the data.
    pub fn iovecs(&self) -> &[IoVec] {
        &self.iovecs
    }

    /// The same, to cut off what was moved already.
    pub fn iovecs_mut(&mut self) -> &mut [IoVec] {
        &mut self.iovecs
    }

    /// Whether anything goes through the bounce buffer.
    pub fn is_bounced(&self) -> bool {
        !self.bounced.is_empty()
    }

    /// Forgets the request. Large bounce buffers are given back.
    pub fn clear(&mut self) {
        self.iovecs.clear();
        self.bounced.clear();
        if self.buffer.capacity() > KEPT_BYTES_MAX {
            self.buffer = Vec::new();
            self.count();
        }
    }

    /// Counts the buffer as large, if it is, and no more if it was.
    fn count(&mut self) {
        let capacity = self.buffer.capacity();
        let large_bytes = if capacity > KEPT_BYTES_MAX { capacity } else { 0 };
        let before = std::mem::replace(&mut self.large_bytes, large_bytes);
        if before != large_bytes {
            LARGE_BYTES.fetch_add(large_bytes.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Iovecs for data that starts at a whole block of the disk and fills whole blocks.
    pub fn map(
        &mut self,
        map: &GuestMap,
        segments: &[Segment],
        align: Alignment,
    ) -> Result<(), OutsideMemory> {
        self.map_within(map, segments, align, usize::MAX)
    }

    /// The same with at most so many bytes that are bounced.
    pub fn map_within(
        &mut self,
        map: &GuestMap,
        segments: &[Segment],
        align: Alignment,
        bounced_bytes_max: usize,
    ) -> Result<(), OutsideMemory> {
        self.clear();
        let mut all_aligned = true;
        for_each_piece(map, segments, |piece| {
            all_aligned &= is_aligned(&piece, align);
            push(&mut self.iovecs, piece.ptr, piece.len);
        })?;
        // Joined neighbours may be aligned where their parts are not.
        if all_aligned || self.iovecs.iter().all(|v| is_aligned_vec(v, align)) {
            return Ok(());
        }
        self.bounce_odd_pieces(map, segments, align, bounced_bytes_max)
    }

    fn bounce_odd_pieces(
        &mut self,
        map: &GuestMap,
        segments: &[Segment],
        align: Alignment,
        bounced_bytes_max: usize,
    ) -> Result<(), OutsideMemory> {
        self.iovecs.clear();
        let place = |run: &mut usize, at: &mut usize, piece: &Piece| {
            // Outside a run, an aligned piece stays where it is.
            if *run == 0 && is_aligned(piece, align) {
                return None;
            }
            if *run == 0 {
                *at = at.next_multiple_of(align.mem_bytes.max(16));
            }
            let here = *at;
            *at += piece.len;
            *run = (*run + piece.len) % align.block_bytes;
            Some(here)
        };
        let (mut run, mut at) = (0, 0);
        for_each_piece(map, segments, |piece| {
            if let Some(here) = place(&mut run, &mut at, &piece) {
                self.bounced.push(Bounced { at: here, addr: piece.addr, len: piece.len });
            }
        })?;
        if at > bounced_bytes_max {
            return Err(OutsideMemory);
        }
        self.reserve(at, align);
        let base = self.buffer.as_mut_ptr().wrapping_add(self.base);
        let (mut run, mut at) = (0, 0);
        for_each_piece(map, segments, |piece| match place(&mut run, &mut at, &piece) {
            Some(here) => push(&mut self.iovecs, base.wrapping_add(here), piece.len),
            None => push(&mut self.iovecs, piece.ptr, piece.len),
        })
    }

    /// Iovecs for a read of `len` bytes of which the request's data is the part from `skip` on: the whole blocks around
    /// it are read, and all of it is bounced.
    pub fn surround(
        &mut self,
        map: &GuestMap,
        segments: &[Segment],
        skip: usize,
        len: usize,
        align: Alignment,
    ) -> Result<(), OutsideMemory> {
        self.clear();
        let mut at = skip;
        for_each_piece(map, segments, |piece| {
            self.bounced.push(Bounced { at, addr: piece.addr, len: piece.len });
            at += piece.len;
        })?;
        debug_assert!(at <= len);
        self.reserve(len, align);
        let base = self.buffer.as_mut_ptr().wrapping_add(self.base);
        push(&mut self.iovecs, base, len);
        Ok(())
    }

    /// Iovecs for writing `len` zeros.
    pub fn zeros(&mut self, len: usize) {
        self.clear();
        let mut left = len;
        while left != 0 {
            let here = left.min(ZEROS.0.len());
            // The kernel only reads from the buffers of a write.
            self.iovecs.push(IoVec { iov_base: ZEROS.0.as_ptr().cast_mut().cast(), iov_len: here });
            left -= here;
        }
    }

    fn reserve(&mut self, len: usize, align: Alignment) {
        let align = align.mem_bytes.max(16);
        self.buffer.resize(len + align, 0);
        self.base = self.buffer.as_ptr().align_offset(align);
        self.count();
    }

    /// Before a write: guest data into the bounce buffer.
    pub fn copy_in(&mut self, map: &GuestMap) -> Result<(), OutsideMemory> {
        for piece in &self.bounced {
            let part = self.buffer.get_mut(self.base + piece.at..).and_then(|b| b.get_mut(..piece.len));
            map.read_slice(part.ok_or(OutsideMemory)?, piece.addr).map_err(|_| OutsideMemory)?;
        }
        Ok(())
    }

    /// After a read: from the bounce buffer into guest memory.
    pub fn copy_out(&self, map: &GuestMap) -> Result<(), OutsideMemory> {
        for piece in &self.bounced {
            let part = self.buffer.get(self.base + piece.at..).and_then(|b| b.get(..piece.len));
            map.write_slice(part.ok_or(OutsideMemory)?, piece.addr).map_err(|_| OutsideMemory)?;
        }
        Ok(())
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        self.buffer = Vec::new();
        self.count();
    }
}

#[repr(align(4096))]
struct Zeros([u8; 64 << 10]);

static ZEROS: Zeros = Zeros([0; 64 << 10]);

fn is_aligned(piece: &Piece, align: Alignment) -> bool {
    (piece.ptr.addr() & (align.mem_bytes - 1)) | (piece.len & (align.block_bytes - 1)) == 0
}

fn is_aligned_vec(vec: &IoVec, align: Alignment) -> bool {
    (vec.iov_base.addr() & (align.mem_bytes - 1)) | (vec.iov_len & (align.block_bytes - 1)) == 0
}

/// Appends a piece; one that begins where the last ends is joined to it.
pub fn push(iovecs: &mut Vec<IoVec>, ptr: *mut u8, len: usize) {
    match iovecs.last_mut() {
        Some(last) if last.iov_base.addr() + last.iov_len == ptr.addr() => last.iov_len += len,
        _ => iovecs.push(IoVec { iov_base: ptr.cast(), iov_len: len }),
    }
}

fn for_each_piece(
    map: &GuestMap,
    segments: &[Segment],
    mut each: impl FnMut(Piece),
) -> Result<(), OutsideMemory> {
    let mut nr_left = PIECES_MAX;
    let mut each = |piece| -> Result<(), OutsideMemory> {
        nr_left = nr_left.checked_sub(1).ok_or(OutsideMemory)?;
        each(piece);
        Ok(())
    };
    for segment in segments {
        let mut addr = segment.addr;
        let len = usize::try_from(segment.len).map_err(|_| OutsideMemory)?;
        if let Some(slice) = memory::slice(map, addr, len) {
            each(Piece { ptr: slice.ptr_guard_mut().as_ptr(), addr, len })?;
            continue;
        }
        // A segment may cross from one region into the next.
        for slice in map.get_slices(addr, len) {
            let slice = slice.map_err(|_| OutsideMemory)?;
            each(Piece { ptr: slice.ptr_guard_mut().as_ptr(), addr, len: slice.len() })?;
            addr = GuestAddress(addr.0.checked_add(slice.len() as u64).ok_or(OutsideMemory)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
