//! Proving that a path leads to the same disk as the others.
//!
//! An identifier decides where there is one. Where there is none that both sides share (block devices without a WWID,
//! FUSE files on different mounts), block samples are compared, read-only. Blank samples prove nothing.

use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::Duration;

use crate::identity::Identity;
use crate::path::Path;

/// Blocks that are compared, spread evenly from the first to the last.
const NR_SAMPLES: u64 = 64;

/// The guest may write between two reads of one block, so a difference is looked at again, this often.
const NR_TRIES: u32 = 4;

/// Time between two looks.
const RETRY_WAIT: Duration = Duration::from_millis(20);

/// Why a path is not used.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The identifiers differ.
    #[error("not the same disk: {found} there, {known} expected")]
    Identity {
        /// What the path proved to be.
        found: Box<Identity>,
        /// What it should be.
        known: Box<Identity>,
    },
    /// There is no common identifier, and the contents differ.
    #[error("not the same disk: no common identifier, and the block at byte {offset} differs")]
    Contents {
        /// Byte offset of the first sample that differs.
        offset: u64,
    },
    /// There is no common identifier, and nothing but zeros to compare.
    #[error(
        "cannot be told from another disk: no common identifier, and all samples are blank (--trust-paths overrides)"
    )]
    Blank,
    /// There is no common identifier, and no other path to compare with.
    #[error("cannot be told from another disk: no common identifier, and no other path is active")]
    NoReference,
    /// The sizes differ.
    #[error("its size is {found_bytes} bytes, expected {known_bytes}")]
    Size {
        /// Size of the path.
        found_bytes: u64,
        /// Size of the disk.
        known_bytes: u64,
    },
    /// A sample cannot be read.
    #[error("cannot read a sample: {0}")]
    Read(#[from] io::Error),
}

/// Whether `path` leads to the disk that `known` identifies, or, where identifiers do not tell, to the one that
/// `reference` leads to. Reads from both; blocks as long as they do.
///
/// # Errors
/// The path must not be used.
pub fn prove(
    path: &Path,
    known: &Identity,
    size_bytes: u64,
    reference: Option<&Path>,
) -> Result<(), ProofError> {
    // A larger one that is surely the same has been enlarged, and the others not yet.
    let found_bytes = path.limits().size_bytes;
    if found_bytes < size_bytes || (found_bytes != size_bytes && path.identity() != known) {
        return Err(ProofError::Size { found_bytes: path.limits().size_bytes, known_bytes: size_bytes });
    }
    if path.identity() == known {
        return Ok(());
    }
    let mismatch =
        || ProofError::Identity { found: Box::new(path.identity().clone()), known: Box::new(known.clone()) };
    let one_mount = match (path.identity(), known) {
        (Identity::File { dev, .. }, Identity::File { dev: known_dev, .. }) => dev == known_dev,
        _ => false,
    };
    if one_mount || !is_weak(path) {
        return Err(mismatch());
    }
    let reference = reference.ok_or(ProofError::NoReference)?;
    if !is_weak(reference) {
        return Err(mismatch());
    }
    for nr_tries in 1.. {
        match compare(path, reference)? {
            None => return Ok(()),
            Some(offset) if nr_tries == NR_TRIES => return Err(ProofError::Contents { offset }),
            Some(_) => thread::sleep(RETRY_WAIT),
        }
    }
    Ok(())
}

/// Whether the identity says "this very thing" only, so that two ways to one disk cannot be recognised by it.
fn is_weak(path: &Path) -> bool {
    match path.identity() {
        Identity::Device { .. } => true,
        // FUSE: device and inode belong to the mount.
        Identity::File { .. } => path.limits().may_block,
        Identity::Wwid(_) | Identity::Null { .. } => false,
    }
}

/// Byte offset of the first sample that differs, if any.
fn compare(a: &Path, b: &Path) -> Result<Option<u64>, ProofError> {
    let block = u64::from(a.limits().logical_block_bytes.max(b.limits().logical_block_bytes)).max(4096);
    let nr_blocks = (a.limits().size_bytes.min(b.limits().size_bytes) / block).max(1);
    let mut is_blank = true;
    for i in 0..NR_SAMPLES.min(nr_blocks) {
        let index = if nr_blocks <= NR_SAMPLES { i } else { (nr_blocks - 1) * i / (NR_SAMPLES - 1) };
        let offset = index * block;
        let (of_a, of_b) = (digest(a, offset, block)?, digest(b, offset, block)?);
        if of_a != of_b {
            return Ok(Some(offset));
        }
        is_blank &= of_a.is_none();
    }
    if is_blank { Err(ProofError::Blank) } else { Ok(None) }
}

/// A digest of a block; None if it is all zeros.
fn digest(path: &Path, offset: u64, len: u64) -> io::Result<Option<u64>> {
    let left = path.limits().size_bytes - offset;
    let len = usize::try_from(len.min(left)).unwrap_or(4096);
    let align = (path.limits().mem_align_bytes as usize).max(4096);
    let mut buffer = vec![0; len + align];
    let start = buffer.as_ptr().align_offset(align);
    let block = buffer.get_mut(start..start + len).ok_or(io::ErrorKind::InvalidInput)?;
    path.file().read_exact_at(block, offset)?;
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let mut hasher = DefaultHasher::new();
    hasher.write(block);
    Ok(Some(hasher.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::OpenOptions;

    const CACHED: OpenOptions = OpenOptions { read_only: true, direct: false };

    fn path(dir: &std::path::Path, name: &str, contents: &[u8]) -> Path {
        let name = dir.join(name);
        std::fs::write(&name, contents).unwrap();
        Path::open(name, CACHED, 1).unwrap()
    }

    #[test]
    fn f05_identifiers_decide_where_there_are_some() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (path(dir.path(), "a", &[1; 8192]), path(dir.path(), "b", &[1; 8192]));
        assert!(prove(&a, a.identity(), 8192, None).is_ok());
        // The same contents are no excuse.
        let error = prove(&b, a.identity(), 8192, Some(&a)).unwrap_err();
        assert!(matches!(error, ProofError::Identity { .. }));
        assert_eq!(error.to_string().matches("inode").count(), 2, "both are named: {error}");
        // Larger is right for the very same disk, which has been enlarged; smaller never is.
        assert!(prove(&a, a.identity(), 4096, None).is_ok());
        assert!(matches!(prove(&b, a.identity(), 4096, Some(&a)), Err(ProofError::Size { .. })));
        assert!(matches!(prove(&a, a.identity(), 12288, None), Err(ProofError::Size { .. })));
    }

    #[test]
    fn samples_tell_contents_apart_and_blank_ones_prove_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut contents = vec![0; 1 << 20];
        let blank = (path(dir.path(), "a", &contents), path(dir.path(), "b", &contents));
        assert!(matches!(compare(&blank.0, &blank.1), Err(ProofError::Blank)));
        contents[0] = 1;
        let same = (path(dir.path(), "c", &contents), path(dir.path(), "d", &contents));
        assert_eq!(compare(&same.0, &same.1).unwrap(), None);
        // The last block is always among them.
        *contents.last_mut().unwrap() = 1;
        let other = path(dir.path(), "e", &contents);
        assert_eq!(compare(&same.0, &other).unwrap(), Some((1 << 20) - 4096));
    }

    #[test]
    fn a_disk_of_less_than_a_sample_can_be_compared() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (path(dir.path(), "a", &[7; 1536]), path(dir.path(), "b", &[7; 1536]));
        assert_eq!(compare(&a, &b).unwrap(), None);
    }
}
