//! Opening a path: the descriptor, its limits and its identity, all asked of the open descriptor.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};

use rustix::fs::{AtFlags, FallocateFlags, SeekFrom, StatxFlags};

use crate::identity::Identity;
use crate::limits::{FileKind, Limits};
use crate::null::Null;
use crate::sysfs::{self, BlockDevice};

/// `f_type` of FUSE file systems (`include/uapi/linux/magic.h`).
const FUSE_SUPER_MAGIC: rustix::fs::FsWord = 0x6573_5546;

/// `f_type` of tmpfs, as above.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// How to open a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OpenOptions {
    /// Open for reading only.
    pub read_only: bool,
    /// Go around the host's page cache (`O_DIRECT`).
    pub direct: bool,
}

/// Why a path cannot be used. The messages do not repeat the path's name: the caller has it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The name leads to something else.
    #[error("neither a regular file nor a block device")]
    Kind,
    /// The name is that of no file, and wrong.
    #[error("{0}")]
    Name(String),
    /// open(2) said no.
    #[error("cannot open for {mode}: {why}")]
    Open {
        /// What it was opened for.
        mode: &'static str,
        /// The kernel's answer.
        why: io::Error,
    },
    /// The file system has no direct I/O.
    #[error(
        "direct I/O is not supported there (--direct=off serves one regular file through the page cache)"
    )]
    NoDirect,
    /// A query on the open descriptor failed.
    #[error("cannot query: {0}")]
    Query(#[from] io::Error),
    /// There is not one whole block.
    #[error("size is {size_bytes} bytes, less than one block of {block_bytes}")]
    TooSmall {
        /// Size as found.
        size_bytes: u64,
        /// Logical block size.
        block_bytes: u32,
    },
}

/// An open descriptor with what was learned of it.
#[derive(Debug)]
pub struct Opened {
    /// The descriptor.
    pub file: File,
    /// What was learned.
    pub facts: Facts,
}

/// What is learned of a path when it is opened. One process may open it for another, and tell it so.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Facts {
    /// What it can take.
    pub limits: Limits,
    /// Which LUN it leads to.
    pub identity: Identity,
    /// As in `st_rdev`; 0 for what is no device.
    pub rdev: u64,
}

/// Opens `name` and proves what it is. Blocks as long as the storage does.
pub(crate) fn open(name: &std::path::Path, options: OpenOptions) -> Result<Opened, OpenError> {
    if let Some(null) = Null::parse(name) {
        return open_null(null.map_err(OpenError::Name)?, options);
    }
    let name = &*sysfs::node(name);
    let mode = if options.read_only { "reading" } else { "reading and writing" };
    let open_error = |why| OpenError::Open { mode, why };
    // Looked at before opening: opening a FIFO or a tape has effects of its own.
    let kind = fs::metadata(name).map_err(open_error)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(OpenError::Kind);
    }
    let file = fs::OpenOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(if options.direct { libc::O_DIRECT } else { 0 })
        .open(name)
        .map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) if options.direct => OpenError::NoDirect,
            _ => open_error(source),
        })?;
    let meta = file.metadata()?;
    let kind = match meta.file_type() {
        kind if kind.is_file() => FileKind::Regular,
        kind if kind.is_block_device() => FileKind::Block,
        _ => return Err(OpenError::Kind),
    };
    let limits = probe_limits(&file, &meta, kind, options)?;
    let raw_size_bytes = size_of(&file)?;
    if raw_size_bytes != limits.size_bytes {
        log::warn!(
            "size rounded down: path={} size_bytes={raw_size_bytes} used_bytes={}",
            name.display(),
            limits.size_bytes
        );
    }
    let rdev = if kind == FileKind::Block { meta.rdev() } else { 0 };
    Ok(Opened { facts: Facts { identity: Identity::of(&meta), limits, rdev }, file })
}

fn open_null(null: Null, options: OpenOptions) -> Result<Opened, OpenError> {
    let file = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let size_bytes = null.size_bytes / 512 * 512;
    if size_bytes == 0 {
        return Err(OpenError::TooSmall { size_bytes: null.size_bytes, block_bytes: 512 });
    }
    let limits = Limits {
        kind: if null.is_inline { FileKind::NullInline } else { FileKind::Null },
        size_bytes,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        io_min_bytes: 512,
        io_opt_bytes: 0,
        mem_align_bytes: 1,
        discard: !options.read_only,
        discard_granularity_bytes: 512,
        read_only: options.read_only,
        may_block: false,
        in_memory: false,
        nr_requests: None,
    };
    Ok(Opened { file, facts: Facts { limits, identity: Identity::Null { size_bytes }, rdev: 0 } })
}

/// Size in bytes as the descriptor shows it now.
pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    // The end of a block device is its size as well; no I/O uses the file position.
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

fn probe_limits(
    file: &File,
    meta: &fs::Metadata,
    kind: FileKind,
    options: OpenOptions,
) -> Result<Limits, OpenError> {
    // The kernel's own word on direct I/O (STATX_DIOALIGN, since 6.1); zeros where it has none.
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let known =
        statx.filter(|s| s.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && s.stx_dio_offset_align != 0);
    let (dio_mem, dio_offset) = known.map_or((0, 0), |s| (s.stx_dio_mem_align, s.stx_dio_offset_align));

    let device = BlockDevice::new(meta.rdev());
    let queue = |name: &str| match kind {
        FileKind::Block => device.queue(name).and_then(|value| u32::try_from(value).ok()),
        _ => None,
    };
    let logical_block_bytes = power_of_two(match kind {
        FileKind::Block => queue("logical_block_size").unwrap_or(512).max(dio_offset),
        FileKind::Regular if options.direct => dio_offset,
        _ => 512,
    });
    let mem_align_bytes = match (options.direct, dio_mem) {
        (false, _) => 1,
        (true, 0) => 512,
        (true, align) => align.next_power_of_two(),
    };
    let raw_size_bytes = size_of(file)?;
    let block = u64::from(logical_block_bytes);
    let size_bytes = raw_size_bytes / block * block;
    if size_bytes == 0 {
        return Err(OpenError::TooSmall { size_bytes: raw_size_bytes, block_bytes: logical_block_bytes });
    }
    let file_block = u32::try_from(meta.blksize()).unwrap_or(4096).clamp(512, 1 << 20);
    let physical_block_bytes = match kind {
        FileKind::Block => queue("physical_block_size").unwrap_or(logical_block_bytes),
        // Beyond a page the file system's hint speaks of its own caching.
        _ => file_block.min(4096),
    };
    let file_system = rustix::fs::fstatfs(file).map(|fs| fs.f_type).ok();
    Ok(Limits {
        kind,
        size_bytes,
        logical_block_bytes,
        physical_block_bytes: power_of_two(physical_block_bytes.max(logical_block_bytes)),
        io_min_bytes: queue("minimum_io_size").unwrap_or(physical_block_bytes).max(logical_block_bytes),
        io_opt_bytes: queue("optimal_io_size").unwrap_or(0),
        mem_align_bytes,
        discard: !options.read_only && can_discard(file, kind, size_bytes, queue("discard_max_bytes")),
        discard_granularity_bytes: power_of_two(
            queue("discard_granularity").unwrap_or(file_block).max(logical_block_bytes),
        ),
        read_only: options.read_only,
        may_block: file_system == Some(FUSE_SUPER_MAGIC),
        // What lies behind a device node on tmpfs is the device's.
        in_memory: kind == FileKind::Regular && file_system == Some(TMPFS_MAGIC),
        nr_requests: if kind == FileKind::Block { device.nr_requests() } else { None },
    })
}

/// Rounds up; the kernel names powers of two, but nobody divides by what a broken one says.
fn power_of_two(bytes: u32) -> u32 {
    bytes.clamp(512, 1 << 30).next_power_of_two()
}

fn can_discard(file: &File, kind: FileKind, size_bytes: u64, discard_max_bytes: Option<u32>) -> bool {
    match kind {
        // May be larger than 32 bits, which reads as absent: only a plain 0 says no.
        FileKind::Block => discard_max_bytes != Some(0),
        // A hole beyond the end changes nothing, and says whether holes can be made.
        _ => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let beyond = size_bytes.next_multiple_of(1 << 20);
            rustix::fs::fallocate(file, mode, beyond, 4096).is_ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const CACHED: OpenOptions = OpenOptions { read_only: false, direct: false };

    fn file_of(size_bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size_bytes).unwrap();
        file
    }

    #[test]
    fn f32_sizes_are_rounded_down_to_whole_blocks() {
        for (size, usable) in [(512, 512), (513, 512), (123_456_789, 123_456_512)] {
            let file = file_of(size);
            assert_eq!(open(file.path(), CACHED).unwrap().facts.limits.size_bytes, usable);
            assert_eq!(file.as_file().metadata().unwrap().len(), size, "looking must not change the file");
        }
    }

    #[test]
    fn f32_less_than_a_block_is_refused() {
        for size in [0, 1, 511] {
            let file = file_of(size);
            assert!(
                matches!(open(file.path(), CACHED), Err(OpenError::TooSmall { size_bytes, .. }) if size_bytes == size)
            );
        }
    }

    #[test]
    fn only_files_and_block_devices_are_paths() {
        assert!(matches!(open(Path::new("/dev/null"), CACHED), Err(OpenError::Kind)));
        assert!(matches!(open(Path::new("/"), CACHED), Err(OpenError::Kind)));
        let missing = open(Path::new("/nonexistent/x"), CACHED).unwrap_err();
        assert!(missing.to_string().contains("No such file"), "{missing}");
    }
}
