//! From a descriptor chain to a request (virtio 1.2, section 5.2.6).
//!
//! A chain is two byte streams: what the device may read, then what it may write. The header is the first 16 bytes of
//! the first, the status the last byte of the second; nothing is assumed about how the streams are cut into descriptors.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::{Bytes as _, GuestAddress};

use crate::memory::{self, GuestAccess as _, GuestMap};
use crate::vring::Descriptor;

/// The unit of sector numbers, in bytes, whatever the block size.
pub const SECTOR_BYTES: u64 = 512;

/// Most segments in one discard or write-zeroes request (`max_discard_seg`, `max_write_zeroes_seg`).
pub const RANGES_MAX: u32 = 16;

/// Length of the header.
const HEADER_BYTES: usize = 16;

/// Length of one discard or write-zeroes segment.
const RANGE_BYTES: usize = 16;

/// The status byte of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// VIRTIO_BLK_S_OK.
    Ok,
    /// VIRTIO_BLK_S_IOERR.
    IoErr,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupp,
}

impl Status {
    /// The byte that the guest reads.
    pub fn byte(self) -> u8 {
        match self {
            Self::Ok => const { VIRTIO_BLK_S_OK.to_le_bytes()[0] },
            Self::IoErr => const { VIRTIO_BLK_S_IOERR.to_le_bytes()[0] },
            Self::Unsupp => const { VIRTIO_BLK_S_UNSUPP.to_le_bytes()[0] },
        }
    }
}

/// What the guest asks for. Offsets and lengths are in bytes and inside the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// VIRTIO_BLK_T_IN.
    Read {
        /// First byte.
        offset: u64,
    },
    /// VIRTIO_BLK_T_OUT.
    Write {
        /// First byte.
        offset: u64,
    },
    /// VIRTIO_BLK_T_FLUSH.
    Flush,
    /// VIRTIO_BLK_T_DISCARD of the ranges.
    Discard,
    /// VIRTIO_BLK_T_WRITE_ZEROES of the ranges.
    WriteZeroes,
    /// VIRTIO_BLK_T_GET_ID.
    GetId,
}

/// One piece of a request's data in guest memory. Neighbours are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub addr: GuestAddress,
    /// Bytes, not 0.
    pub len: u64,
}

/// One range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes; may be 0.
    pub len: u64,
    /// Whether the storage may give the space back (write-zeroes only).
    pub unmap: bool,
}

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub struct DiskLimits {
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Smallest unit of I/O on the strictest path, in bytes.
    pub block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether discard was offered.
    pub discard: bool,
    /// Most sectors in one range of a discard.
    pub discard_sectors_max: u32,
    /// Most sectors in one range of a write-zeroes.
    pub write_zeroes_sectors_max: u32,
}

/// One guest request: taken from the ring, to be returned exactly once.
///
/// Returning consumes it ([`Request::into_head`]); losing one would hang the guest, so that is caught in debug builds.
#[derive(Debug)]
pub struct Request {
    head: u16,
    /// Where the status byte goes, if the chain has a place for it.
    status_addr: Option<GuestAddress>,
    /// What is asked for.
    pub operation: Operation,
    /// Length of the data in bytes.
    pub data_len: u64,
}

impl Request {
    /// Ends the request: its head (to be put on the used ring) and the place of its status byte.
    pub fn into_head(self) -> (u16, Option<GuestAddress>) {
        let ended = (self.head, self.status_addr);
        std::mem::forget(self);
        ended
    }
}

#[cfg(debug_assertions)]
impl Drop for Request {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("head {} was dropped and not returned", self.head);
        }
    }
}

/// The vectors that parsing fills; emptied first, kept for the next request.
#[derive(Debug, Default)]
pub struct Buffers {
    /// The request's data.
    pub segments: Vec<Segment>,
    /// The ranges of a discard or write-zeroes.
    pub ranges: Vec<Range>,
}

/// A request with the answer that it deserves at once, if any.
pub type Parsed = (Request, Option<Status>);

/// Reads a chain. Every byte that matters is read from guest memory once.
///
/// Always gives a request, so that the head is returned; whatever breaks a rule comes with its status.
pub fn parse(
    map: &GuestMap,
    head: u16,
    chain: &[Descriptor],
    disk: &DiskLimits,
    buffers: &mut Buffers,
) -> Parsed {
    buffers.segments.clear();
    buffers.ranges.clear();
    let streams = Streams::split(chain);
    let mut request =
        Request { head, status_addr: streams.status_addr(map), operation: Operation::Flush, data_len: 0 };
    let status = understand(map, &streams, disk, buffers, &mut request).err();
    (request, status)
}

/// A request whose chain could not be read: it is returned without a status.
pub fn unreadable(head: u16) -> Request {
    Request { head, status_addr: None, operation: Operation::Flush, data_len: 0 }
}

fn understand(
    map: &GuestMap,
    streams: &Streams<'_>,
    disk: &DiskLimits,
    buffers: &mut Buffers,
    request: &mut Request,
) -> Result<(), Status> {
    if !streams.in_order || request.status_addr.is_none() {
        return Err(Status::IoErr);
    }
    let header = read_header(map, streams)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
    let (nr_out, nr_in) = (streams.readable_len - HEADER_BYTES as u64, streams.writable_len - 1);

    match word(0) {
        VIRTIO_BLK_T_IN => {
            // Data that the guest marked read-only cannot be read into.
            if nr_out != 0 {
                return Err(Status::IoErr);
            }
            request.operation = Operation::Read { offset: check_range(sector, nr_in, disk)? };
            request.data_len = nr_in;
            take(streams.writable, 0, nr_in, &mut buffers.segments);
        }
        VIRTIO_BLK_T_OUT => {
            if disk.read_only || (nr_out == 0 && nr_in != 0) {
                return Err(Status::IoErr);
            }
            let offset = check_range(sector, nr_out, disk)?;
            // A block cannot be written in part without reading the rest, which another queue may be writing.
            if !is_whole_blocks(offset, nr_out, disk) {
                return Err(Status::IoErr);
            }
            request.operation = Operation::Write { offset };
            request.data_len = nr_out;
            take(streams.readable, HEADER_BYTES as u64, nr_out, &mut buffers.segments);
        }
        VIRTIO_BLK_T_FLUSH => request.operation = Operation::Flush,
        VIRTIO_BLK_T_GET_ID => {
            request.operation = Operation::GetId;
            request.data_len = nr_in;
            take(streams.writable, 0, nr_in, &mut buffers.segments);
        }
        kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
            let discard = kind == VIRTIO_BLK_T_DISCARD;
            if disk.read_only {
                return Err(Status::IoErr);
            }
            if discard && !disk.discard {
                return Err(Status::Unsupp);
            }
            request.operation = if discard { Operation::Discard } else { Operation::WriteZeroes };
            take(streams.readable, HEADER_BYTES as u64, nr_out, &mut buffers.segments);
            read_ranges(map, nr_out, discard, disk, buffers)?;
        }
        _ => return Err(Status::Unsupp),
    }
    Ok(())
}

/// The first bytes that the device may read, however they are cut.
fn read_header(map: &GuestMap, streams: &Streams<'_>) -> Result<[u8; HEADER_BYTES], Status> {
    match streams.readable.first() {
        Some(first) if first.len as usize >= HEADER_BYTES => {
            map.read_at::<u128>(first.addr).map(u128::to_ne_bytes).ok_or(Status::IoErr)
        }
        _ => {
            let mut header = [0; HEADER_BYTES];
            read_stream(map, streams.readable, &mut header)?;
            Ok(header)
        }
    }
}

/// Byte offset of a range that lies inside the disk.
fn check_range(sector: u64, len: u64, disk: &DiskLimits) -> Result<u64, Status> {
    if !len.is_multiple_of(SECTOR_BYTES) {
        return Err(Status::IoErr);
    }
    let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoErr)?;
    let end = offset.checked_add(len).ok_or(Status::IoErr)?;
    if end > disk.size_bytes { Err(Status::IoErr) } else { Ok(offset) }
}

fn is_whole_blocks(offset: u64, len: u64, disk: &DiskLimits) -> bool {
    (offset | len) & u64::from(disk.block_bytes - 1) == 0
}

fn read_ranges(
    map: &GuestMap,
    len: u64,
    discard: bool,
    disk: &DiskLimits,
    buffers: &mut Buffers,
) -> Result<(), Status> {
    let mut bytes = [0; RANGES_MAX as usize * RANGE_BYTES];
    let bytes = usize::try_from(len).ok().and_then(|len| bytes.get_mut(..len)).ok_or(Status::IoErr)?;
    if bytes.is_empty() || !bytes.len().is_multiple_of(RANGE_BYTES) {
        return Err(Status::IoErr);
    }
    read_segments(map, &buffers.segments, bytes)?;
    let sectors_max = if discard { disk.discard_sectors_max } else { disk.write_zeroes_sectors_max };
    let (mut bad, mut unknown) = (false, false);
    for raw in bytes.chunks_exact(RANGE_BYTES) {
        let word = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
        let (nr_sectors, flags) = (word(8), word(12));
        // Unmap is not a wish that a discard can have; other bits are reserved (5.2.6.2).
        unknown |= flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (discard && flags != 0);
        let len = u64::from(nr_sectors) * SECTOR_BYTES;
        let Ok(offset) = check_range(sector, len, disk) else {
            bad = true;
            continue;
        };
        bad |= nr_sectors > sectors_max;
        if discard {
            buffers.ranges.push(shrink(offset, len, disk));
        } else {
            bad |= !is_whole_blocks(offset, len, disk);
            let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            buffers.ranges.push(Range { offset, len, unmap });
        }
    }
    match (unknown, bad) {
        (true, _) => Err(Status::Unsupp),
        (false, true) => Err(Status::IoErr),
        (false, false) => Ok(()),
    }
}

/// A discard is a hint: what does not fill a block is left alone.
fn shrink(offset: u64, len: u64, disk: &DiskLimits) -> Range {
    let block = u64::from(disk.block_bytes);
    let (start, end) = (offset.next_multiple_of(block), (offset + len) / block * block);
    Range { offset: start, len: end.saturating_sub(start), unmap: true }
}

/// The two byte streams of a chain.
struct Streams<'a> {
    readable: &'a [Descriptor],
    writable: &'a [Descriptor],
    readable_len: u64,
    writable_len: u64,
    /// The last writable descriptor that is not empty.
    last: Option<&'a Descriptor>,
    /// Whether no readable descriptor comes after a writable one.
    in_order: bool,
}

impl<'a> Streams<'a> {
    fn split(chain: &'a [Descriptor]) -> Self {
        let mut nr_readable = 0;
        let (mut readable_len, mut writable_len) = (0, 0);
        let (mut last, mut in_order) = (None, true);
        for (index, descriptor) in chain.iter().enumerate() {
            let len = u64::from(descriptor.len);
            if descriptor.writable {
                writable_len += len;
                if len != 0 {
                    last = Some(descriptor);
                }
            } else {
                readable_len += len;
                in_order &= nr_readable == index;
                nr_readable += 1;
            }
        }
        // Out of order, the streams are not looked at.
        let (readable, writable) = chain.split_at(nr_readable);
        Self { readable, writable, readable_len, writable_len, last, in_order }
    }

    /// The last writable byte, if it lies in guest memory.
    fn status_addr(&self, map: &GuestMap) -> Option<GuestAddress> {
        let last = self.last?;
        let addr = GuestAddress(last.addr.0.checked_add(u64::from(last.len) - 1)?);
        memory::slice(map, addr, 1).map(|_| addr)
    }
}

/// The segments of `len` bytes of a stream after the first `skip`.
fn take(stream: &[Descriptor], mut skip: u64, mut len: u64, segments: &mut Vec<Segment>) {
    for descriptor in stream {
        let here = u64::from(descriptor.len);
        let from = skip.min(here);
        skip -= from;
        let piece = (here - from).min(len);
        len -= piece;
        if piece == 0 {
            continue;
        }
        // A wrapped address is outside every memory and is found out when it is looked up.
        let addr = GuestAddress(descriptor.addr.0.wrapping_add(from));
        match segments.last_mut() {
            Some(last) if last.addr.0.checked_add(last.len) == Some(addr.0) => last.len += piece,
            _ => segments.push(Segment { addr, len: piece }),
        }
    }
}

fn read_stream(map: &GuestMap, stream: &[Descriptor], mut bytes: &mut [u8]) -> Result<(), Status> {
    for descriptor in stream {
        let here = bytes.len().min(descriptor.len as usize);
        let (part, rest) = bytes.split_at_mut(here);
        map.read_slice(part, descriptor.addr).map_err(|_| Status::IoErr)?;
        bytes = rest;
        if bytes.is_empty() {
            return Ok(());
        }
    }
    Err(Status::IoErr)
}

fn read_segments(map: &GuestMap, segments: &[Segment], mut bytes: &mut [u8]) -> Result<(), Status> {
    for segment in segments {
        let here = bytes.len().min(usize::try_from(segment.len).unwrap_or(usize::MAX));
        let (part, rest) = bytes.split_at_mut(here);
        map.read_slice(part, segment.addr).map_err(|_| Status::IoErr)?;
        bytes = rest;
    }
    if bytes.is_empty() { Ok(()) } else { Err(Status::IoErr) }
}

#[cfg(test)]
mod tests;
