//! Paths that answer at once: what io_uring would hand to a thread of its own, the worker does by itself.
//!
//! A file of tmpfs has no asynchronous direct I/O: a read or write is a copy in memory, and io_uring gives every one to a
//! kernel thread, which costs more than the copy. Nothing else is done this way: the worker sleeps as long as the file does.

use std::io;

use polypath_paths::failover::Work;
use polypath_paths::{FileKind, Limits};

use crate::transfer::{Action, Transfer};

/// Whether the worker itself does the I/O of a path with these limits.
pub(super) fn is_for(limits: &Limits) -> bool {
    limits.kind == FileKind::NullInline || limits.in_memory
}

/// Does the transfer's next step. Bytes moved, or a negative errno.
pub(super) fn run(transfer: &mut Transfer) -> i32 {
    let Some(path) = transfer.path() else { return -libc::EBADF };
    if path.limits().kind.is_null() {
        return i32::try_from(moved_by_null(transfer)).unwrap_or(i32::MAX);
    }
    let fd = path.raw_fd();
    // Chains are bounded (CHAIN_LEN_MAX), and a count above the kernel's own bound comes back as an error.
    let count = |n: usize| libc::c_int::try_from(n).unwrap_or(libc::c_int::MAX);
    let at = |offset: u64| libc::off64_t::try_from(offset).unwrap_or(-1);
    let moved = match transfer.action() {
        Action::Read { iovecs, offset } => {
            // SAFETY: the iovecs and what they point to belong to the transfer: its gather list, map lease, bounce buffer.
            unsafe { libc::preadv64(fd, iovecs.as_ptr(), count(iovecs.len()), at(offset)) }
        }
        Action::Write { iovecs, offset } => {
            // SAFETY: as above.
            unsafe { libc::pwritev64(fd, iovecs.as_ptr(), count(iovecs.len()), at(offset)) }
        }
        // SAFETY: no memory is passed.
        Action::Sync => unsafe { libc::fdatasync(fd) as libc::ssize_t },
        Action::Allocate { mode, offset, len } => {
            // SAFETY: no memory is passed.
            unsafe { libc::fallocate64(fd, mode, at(offset), at(len)) as libc::ssize_t }
        }
    };
    if moved < 0 {
        return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    // Linux moves less than 2 GiB at a time.
    i32::try_from(moved).unwrap_or(i32::MAX)
}

/// What a path without a device says that it has moved.
pub(super) fn moved_by_null(transfer: &Transfer) -> u64 {
    match transfer.work() {
        Work::Read | Work::Write => transfer.nr_bytes(),
        Work::Flush | Work::Discard | Work::WriteZeroes => 0,
    }
}
