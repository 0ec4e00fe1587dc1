//! What a path can take, and what the guest may be told when there are several.

/// Whether fsync speaks of a file system or of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// Nothing: I/O ends at once and moves no data, by way of io_uring.
    Null,
    /// The same, answered by the worker itself.
    NullInline,
}

impl FileKind {
    /// Whether there is nothing behind it.
    pub fn is_null(self) -> bool {
        matches!(self, Self::Null | Self::NullInline)
    }
}

/// Sizes in bytes; every alignment is a power of two.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Regular file or block device.
    pub kind: FileKind,
    /// Usable size: a multiple of `logical_block_bytes`, never 0.
    pub size_bytes: u64,
    /// Smallest unit of I/O; offset and length of direct I/O must be multiples. At least 512.
    pub logical_block_bytes: u32,
    /// Unit that the storage writes without read-modify-write.
    pub physical_block_bytes: u32,
    /// Preferred smallest I/O.
    pub io_min_bytes: u32,
    /// Preferred I/O; 0 if the storage names none.
    pub io_opt_bytes: u32,
    /// Alignment that direct I/O asks of buffer addresses.
    pub mem_align_bytes: u32,
    /// Whether discard works.
    pub discard: bool,
    /// Unit in which discarded space is given back; at least `logical_block_bytes`.
    pub discard_granularity_bytes: u32,
    /// Whether the path was opened for reading only.
    pub read_only: bool,
    /// Whether the kernel may sleep in the middle of submitting I/O to it: FUSE does, so a server that hangs would hold
    /// up all that is submitted with it.
    pub may_block: bool,
    /// Whether it is a file of tmpfs: I/O is a copy in memory and done when the call returns, whatever it is asked with.
    pub in_memory: bool,
    /// I/Os that the kernel has room for on the device at a time, of all who use it (`nr_requests` of each of its hardware
    /// queues). One more than that costs a kernel thread that sleeps until there is room. None: no bound is known.
    pub nr_requests: Option<u32>,
}

impl Limits {
    /// The limits that hold on every one of the paths.
    ///
    /// Sizes are expected to be equal (the table's rule); the smallest is taken so that the guest can never be offered
    /// a sector that one path does not have.
    pub fn strictest<'a>(all: impl IntoIterator<Item = &'a Limits>) -> Option<Limits> {
        all.into_iter().cloned().reduce(|a, b| Limits {
            kind: if a.kind == b.kind { a.kind } else { FileKind::Regular },
            size_bytes: a.size_bytes.min(b.size_bytes),
            logical_block_bytes: a.logical_block_bytes.max(b.logical_block_bytes),
            physical_block_bytes: a.physical_block_bytes.max(b.physical_block_bytes),
            io_min_bytes: a.io_min_bytes.max(b.io_min_bytes),
            io_opt_bytes: a.io_opt_bytes.max(b.io_opt_bytes),
            mem_align_bytes: a.mem_align_bytes.max(b.mem_align_bytes),
            discard: a.discard && b.discard,
            discard_granularity_bytes: a.discard_granularity_bytes.max(b.discard_granularity_bytes),
            read_only: a.read_only || b.read_only,
            may_block: a.may_block || b.may_block,
            in_memory: a.in_memory && b.in_memory,
            nr_requests: [a.nr_requests, b.nr_requests].into_iter().flatten().min(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            kind: FileKind::Block,
            size_bytes: 1 << 20,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            io_min_bytes: 512,
            io_opt_bytes: 0,
            mem_align_bytes: 4,
            discard: true,
            discard_granularity_bytes: 512,
            read_only: false,
            may_block: false,
            in_memory: false,
            nr_requests: None,
        }
    }

    #[test]
    fn f11_the_strictest_path_rules() {
        let a = limits();
        let b = Limits { logical_block_bytes: 4096, mem_align_bytes: 512, discard: false, ..limits() };
        let both = Limits::strictest([&a, &b]).unwrap();
        assert_eq!(both.logical_block_bytes, 4096);
        assert_eq!(both.mem_align_bytes, 512);
        assert!(!both.discard);
        assert!(Limits::strictest([]).is_none());
    }
}
