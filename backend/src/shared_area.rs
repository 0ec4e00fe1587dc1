//! Memory that is shared with the front-end but is not the guest's: the in-flight area, the dirty log.
//!
//! Whatever stands there may have been written by anybody. Every access is one atomic word, inside the area or not done.

use std::fs::File;
use std::sync::atomic::Ordering;

use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};
use vm_memory::{AtomicAccess, AtomicInteger, FileOffset, VolatileMemory as _};

/// Largest area that is taken: the dirty log of 32 TiB of guest memory.
const BYTES_MAX: u64 = 1 << 30;

/// Why an area cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum AreaError {
    /// mmap said no (an offset that is not whole pages, for one).
    #[error("cannot map it: {0}")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    /// Touching what lies beyond the file's end would end the process (SIGBUS).
    #[error("{size_bytes} bytes from {offset} on are more than its file of {file_bytes}")]
    Short {
        /// Length of the area.
        size_bytes: u64,
        /// Where it begins in the file.
        offset: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Empty or beyond all reason.
    #[error("{0} bytes are not a size for it")]
    Size(u64),
    /// The file cannot be made or asked for its length.
    #[error("its file: {0}")]
    File(#[from] std::io::Error),
}

/// A mapped piece of a file.
#[derive(Debug)]
pub struct SharedArea {
    region: MmapRegion,
}

impl SharedArea {
    /// Maps `size_bytes` of `file` from `offset` on.
    pub fn map(file: File, offset: u64, size_bytes: u64) -> Result<Self, AreaError> {
        if size_bytes == 0 || size_bytes > BYTES_MAX {
            return Err(AreaError::Size(size_bytes));
        }
        let size = usize::try_from(size_bytes).map_err(|_| AreaError::Size(size_bytes))?;
        let file_bytes = file.metadata()?.len();
        if offset.checked_add(size_bytes).is_none_or(|end| end > file_bytes) {
            return Err(AreaError::Short { size_bytes, offset, file_bytes });
        }
        let region = MmapRegionBuilder::new(size)
            .with_file_offset(FileOffset::new(file, offset))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED)
            .build()?;
        Ok(Self { region })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.region.size()
    }

    /// Whether it has none, which it never has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One word of the area; None outside of it or at an odd place.
    #[inline]
    fn word<T: AtomicInteger>(&self, at: usize) -> Option<&T> {
        self.region.get_atomic_ref(at).ok()
    }

    /// Reads a word; 0 where there is none.
    #[inline]
    pub fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        self.word::<T::A>(at).map(|word| word.load(Ordering::Acquire).into()).unwrap_or_default()
    }

    /// Writes a word, if there is one. Stores are seen in the order in which they are made.
    #[inline]
    pub fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        crate::crash::step();
        if let Some(word) = self.word::<T::A>(at) {
            word.store(value.into(), Ordering::Release);
        }
    }

    /// Sets bits of a byte that others set bits of as well.
    pub fn set_bits(&self, at: usize, bits: u8) {
        if let Some(word) = self.word::<std::sync::atomic::AtomicU8>(at) {
            word.fetch_or(bits, Ordering::AcqRel);
        }
    }
}
