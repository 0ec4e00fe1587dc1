//! Requests of virtio-blk and the ways to frame them in descriptors.

/// Bytes of a sector on the wire.
pub const SECTOR: usize = 512;
/// Bytes of the request header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of an identity.
pub const ID_BYTES: usize = 20;

/// Request types.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const GET_LIFETIME: u32 = 10;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    pub const SECURE_ERASE: u32 = 14;
}

/// Status: done.
pub const OK: u8 = 0;
/// Status: failed.
pub const IOERR: u8 = 1;
/// Status: not supported.
pub const UNSUPP: u8 = 2;
/// What a status byte holds before the device writes it.
pub const UNTOUCHED: u8 = 0xEE;

/// Write-zeroes flag: the device may deallocate.
pub const UNMAP: u32 = 1;

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub num: u32,
    /// Flags.
    pub flags: u32,
}

impl Segment {
    /// A range without flags.
    pub fn new(sector: u64, num: u32) -> Self {
        Self { sector, num, flags: 0 }
    }

    /// The same range with flags.
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    /// Its 16 bytes.
    pub fn bytes(&self) -> Vec<u8> {
        [&self.sector.to_le_bytes()[..], &self.num.to_le_bytes(), &self.flags.to_le_bytes()].concat()
    }
}

/// The header's 16 bytes.
pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read `len` bytes from `sector` on.
    Read {
        /// First sector.
        sector: u64,
        /// Length in bytes.
        len: usize,
    },
    /// Write.
    Write {
        /// First sector.
        sector: u64,
        /// What to write.
        data: Vec<u8>,
    },
    /// Make what was written durable.
    Flush,
    /// Ask for the identity.
    GetId,
    /// Discard ranges.
    Discard(Vec<Segment>),
    /// Zero ranges.
    WriteZeroes(Vec<Segment>),
    /// Anything else.
    Other {
        /// Request type.
        kind: u32,
        /// Sector in the header.
        sector: u64,
        /// Bytes behind the header.
        out: Vec<u8>,
        /// Bytes before the status.
        in_len: usize,
    },
}

impl Op {
    /// A read of whole sectors.
    pub fn read(sector: u64, num: usize) -> Self {
        Self::Read { sector, len: num * SECTOR }
    }

    /// A write.
    pub fn write(sector: u64, data: impl Into<Vec<u8>>) -> Self {
        Self::Write { sector, data: data.into() }
    }

    /// What the device reads: header and data.
    pub fn out_bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let join = |segments: &[Segment]| segments.iter().flat_map(Segment::bytes).collect();
        match self {
            Self::Read { sector, .. } => (header(kind::IN, *sector), Vec::new()),
            Self::Write { sector, data } => (header(kind::OUT, *sector), data.clone()),
            Self::Flush => (header(kind::FLUSH, 0), Vec::new()),
            Self::GetId => (header(kind::GET_ID, 0), Vec::new()),
            Self::Discard(segments) => (header(kind::DISCARD, 0), join(segments)),
            Self::WriteZeroes(segments) => (header(kind::WRITE_ZEROES, 0), join(segments)),
            Self::Other { kind, sector, out, .. } => (header(*kind, *sector), out.clone()),
        }
    }

    /// How much the device may write before the status.
    pub fn in_len(&self) -> usize {
        match self {
            Self::Read { len, .. } => *len,
            Self::GetId => ID_BYTES,
            Self::Other { in_len, .. } => *in_len,
            _ => 0,
        }
    }
}

/// How a request lies in its descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// Header, data, status: one descriptor each (no data: none for it), in the queue's table.
    #[default]
    Plain,
    /// The same in an indirect table.
    Indirect,
    /// Cut anywhere.
    Cut(Cut),
}

/// A framing by piece lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Lengths of the pieces of header and data together; what is left over is the last piece.
    pub out: Vec<usize>,
    /// Lengths of the pieces of read data and status together; likewise.
    pub into: Vec<usize>,
    /// Bytes by which each piece starts off a 64-byte boundary.
    pub misalign: usize,
    /// In an indirect table.
    pub indirect: bool,
    /// With `indirect`: this many pieces stay in the queue's own table.
    pub direct_pieces: usize,
}

/// The lengths of the pieces that `cuts` makes of `total` bytes.
pub fn pieces(total: usize, cuts: &[usize]) -> Vec<usize> {
    let mut left = total;
    let mut lens = Vec::new();
    for &cut in cuts {
        let len = cut.min(left);
        if len > 0 {
            lens.push(len);
        }
        left -= len;
    }
    if left > 0 {
        lens.push(left);
    }
    lens
}
