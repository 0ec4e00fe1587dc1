//! Descriptor chains, piece by piece.

use super::queue::{INDIRECT, WRITE};

/// A descriptor as it stands in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Flags.
    pub flags: u16,
    /// Index of the next one.
    pub next: u16,
}

impl Desc {
    /// Its 16 bytes.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// How much of a chain goes to an indirect table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Table {
    #[default]
    None,
    /// Pieces from this one on are in a table at this guest address.
    From(usize, u64),
}

/// A chain of buffers, to be put on a queue.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    pieces: Vec<Desc>,
    table: Table,
}

impl Chain {
    /// An empty chain.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer that the device reads.
    pub fn readable(self, addr: u64, len: u32) -> Self {
        self.piece(addr, len, 0)
    }

    /// Adds a buffer that the device writes.
    pub fn writable(self, addr: u64, len: u32) -> Self {
        self.piece(addr, len, WRITE)
    }

    /// Adds a buffer with any flags (NEXT is seen to by the queue).
    pub fn piece(mut self, addr: u64, len: u32, flags: u16) -> Self {
        self.pieces.push(Desc { addr, len, flags, next: 0 });
        self
    }

    /// Puts all pieces in an indirect table at `addr`.
    pub fn indirect(self, addr: u64) -> Self {
        self.indirect_from(0, addr)
    }

    /// Puts the pieces from number `first` on in an indirect table at `addr`, behind the others.
    pub fn indirect_from(mut self, first: usize, addr: u64) -> Self {
        self.table = Table::From(first, addr);
        self
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are no pieces.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The entries for the queue's table, not yet linked, and those of the indirect table, linked.
    pub(super) fn layout(&self) -> (Vec<Desc>, Option<(u64, Vec<Desc>)>) {
        let Table::From(first, addr) = self.table else { return (self.pieces.clone(), None) };
        let mut direct = self.pieces[..first].to_vec();
        let entries = link(&self.pieces[first..]);
        let len = u32::try_from(entries.len() * 16).expect("a table of sane size");
        direct.push(Desc { addr, len, flags: INDIRECT, next: 0 });
        (direct, Some((addr, entries)))
    }
}

/// Links descriptors in their order, from index 0 on.
pub fn link(descs: &[Desc]) -> Vec<Desc> {
    let mut linked = descs.to_vec();
    let last = linked.len().saturating_sub(1);
    for (i, desc) in linked.iter_mut().take(last).enumerate() {
        desc.flags |= super::queue::NEXT;
        desc.next = u16::try_from(i + 1).expect("a table of sane size");
    }
    linked
}
