//! What the kernel does with iovecs, done by hand.

use crate::gather::IoVec;

/// Bytes that the iovecs hold together.
pub(crate) fn len(iovecs: &[IoVec]) -> usize {
    iovecs.iter().map(|v| v.iov_len).sum()
}

/// Reads up to `max` bytes out of them, as a write does.
pub(crate) fn read(iovecs: &[IoVec], max: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for v in iovecs {
        let here = v.iov_len.min(max - bytes.len());
        let from = bytes.len();
        bytes.resize(from + here, 0);
        // SAFETY: the iovecs of a gather list lead to memory that their map or buffer keeps alive, which the caller
        // holds; nothing else writes there while a test runs, and the target is a vector of its own.
        unsafe { v.iov_base.cast::<u8>().copy_to_nonoverlapping(bytes[from..].as_mut_ptr(), here) };
    }
    bytes
}

/// Writes the bytes into them, as a read does.
pub(crate) fn write(iovecs: &[IoVec], mut bytes: &[u8]) {
    for v in iovecs {
        let here = v.iov_len.min(bytes.len());
        let (part, rest) = bytes.split_at(here);
        // SAFETY: as above; iovecs that are read into never lead to memory that is read-only.
        unsafe { v.iov_base.cast::<u8>().copy_from_nonoverlapping(part.as_ptr(), here) };
        bytes = rest;
    }
    assert!(bytes.is_empty(), "more bytes than room");
}
