//! What goes into a choice and what comes back from it.

/// What a request does, as far as its duration depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Data from the path.
    Read,
    /// Data to the path.
    Write,
    /// Flush, discard, write-zeroes: commands whose duration says nothing about data transfers.
    Other,
}

/// The request (merged or not) for which a path is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Length in bytes; 0 for a flush.
    pub bytes: u64,
    /// What it does.
    pub direction: Direction,
    /// Index of the virtqueue that it came from.
    pub queue: usize,
    /// Time of the choice, in ns; one reading per batch is enough.
    pub now_ns: u64,
}

/// How an I/O ended, as far as the path is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Data moved: its duration counts.
    Success,
    /// The target refused it; the path did its work, but the duration is not that of an I/O.
    TargetError,
    /// The path failed it: however fast that was, it must not look like a fast path.
    PathError,
}

/// An I/O under way: from [`Selector::start_io`](crate::Selector::start_io), through the in-flight slot, to
/// [`Selector::end_io`](crate::Selector::end_io).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) start_ns: u64,
    pub(crate) path: u16,
    /// Requests that were in flight on the path before this one.
    pub(crate) ahead: u16,
    /// Cell of the learned times (direction and size).
    pub(crate) cell: u8,
}

impl Ticket {
    /// Index in its group of the path that carries the I/O.
    #[must_use]
    pub fn path(&self) -> usize {
        usize::from(self.path)
    }

    /// When the I/O was started, in ns.
    #[must_use]
    pub fn start_ns(&self) -> u64 {
        self.start_ns
    }
}

/// View of what the paths of the group hold: this worker's I/O exactly, the other workers' at most a batch old.
pub trait Load {
    /// Requests in flight on the path.
    fn in_flight(&self, path: usize) -> u32;
    /// Bytes in flight on the path.
    fn in_flight_bytes(&self, path: usize) -> u64;
}

/// The load of one path; an array or slice of them, indexed by path, is a [`Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathLoad {
    /// Requests in flight.
    pub in_flight: u32,
    /// Bytes in flight.
    pub bytes: u64,
}

impl Load for [PathLoad] {
    fn in_flight(&self, path: usize) -> u32 {
        self[path].in_flight
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self[path].bytes
    }
}

impl<const N: usize> Load for [PathLoad; N] {
    fn in_flight(&self, path: usize) -> u32 {
        self[path].in_flight
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self[path].bytes
    }
}

impl Load for Vec<PathLoad> {
    fn in_flight(&self, path: usize) -> u32 {
        self[path].in_flight
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        self[path].bytes
    }
}
