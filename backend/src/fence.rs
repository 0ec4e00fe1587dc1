//! Keeps what a killed process still has with the kernel apart from what the next one does.
//!
//! io_uring does not hold up the end of a process for direct I/O that is under way, so a write of the old process may land,
//! and a read of it fill its buffer, long after the new one has done the same request again. What shows that there is
//! such I/O is a lock on the in-flight area: the front-end hands the same area to one process after the other, each
//! opens it anew and locks that open file (`flock`), and registers it with the io_uring of every worker. A ring and
//! what is registered with it live until its last I/O is over, whatever becomes of the process (seen on Linux 6.18 for
//! reads and writes; for a flush or a discard a thread of the kernel's waits, and the process does not end before it; with
//! `--sqpoll-idle-ms` one waits for whatever it has sent).
//! So as long as the lock is not to be had, the rings are not served ([`Gate`]).

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FlockOperation, fcntl_get_seals, flock};
use rustix::io::Errno;

use crate::helper;

/// Why an area cannot carry a lock.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// Asking for a lock on it may hang.
    #[error("its file is not in memory")]
    NotInMemory,
    /// It cannot be opened again (no `/proc`, for one).
    #[error("it cannot be opened again: {0}")]
    File(#[from] std::io::Error),
}

/// Whether it is a file of tmpfs or hugetlbfs: neither opening nor locking that waits for anybody. Only those have seals
/// (fcntl(2)), and asking for them asks no file system; a FIFO there has none, and opening that would wait for a writer.
fn is_in_memory(area: &File) -> bool {
    fcntl_get_seals(area).is_ok()
}

/// An open file of its own for an area, for reading.
pub(crate) fn open_anew(area: &File) -> Result<File, FenceError> {
    if !is_in_memory(area) {
        return Err(FenceError::NotInMemory);
    }
    Ok(File::open(format!("/proc/self/fd/{}", area.as_raw_fd()))?)
}

/// The lock on one in-flight area. Given back on drop, when no worker that had it registered runs any more; by a process
/// that is killed, when the kernel has finished its I/O.
#[derive(Debug)]
pub struct Fence {
    /// An open file of our own: the front-end's is shared with it.
    file: File,
    /// Device and inode of the area.
    id: (u64, u64),
}

impl Fence {
    /// A lock on the file of an area. It is not held yet.
    pub fn over(area: &File) -> Result<Arc<Self>, FenceError> {
        let file = match helper::client() {
            // The same, done by who may open files.
            Some(helper) if is_in_memory(area) => helper.reopen(area)?,
            _ => open_anew(area)?,
        };
        let metadata = file.metadata()?;
        Ok(Arc::new(Self { file, id: (metadata.dev(), metadata.ino()) }))
    }

    /// Whether it is the lock on this file.
    pub fn is_over(&self, area: &File) -> bool {
        area.metadata().is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.id)
    }

    /// What is registered with the workers' rings.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Takes the lock if nobody else has it. True if it is held now.
    fn try_lock(&self) -> bool {
        match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => false,
            Err(error) => {
                log::debug!("the lock on the in-flight area: {error}");
                false
            }
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // Here and now: the kernel takes a moment to let go of a ring that was closed, and the next session may come before.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// What a look at the gate has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// It was open.
    Open,
    /// It is open since this look: workers that found it shut sleep, and are to be woken.
    Opened,
    /// It stays shut.
    Shut,
}

/// Shut while an earlier process has I/O under way. Workers look at it, the control loop opens it.
#[derive(Debug, Default)]
pub struct Gate {
    nr_awaited: AtomicUsize,
    /// Locks that others have. They outlive their session: the I/O of old may also hit who comes after a reset.
    awaited: Mutex<Vec<Arc<Fence>>>,
}

impl Gate {
    /// Whether rings may be served.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.nr_awaited.load(Ordering::Acquire) == 0
    }

    /// Takes the lock, or shuts the gate until it is to be had. True if it is held now.
    pub fn pass(&self, fence: &Arc<Fence>) -> bool {
        let is_held = fence.try_lock();
        if !is_held {
            let mut awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
            // One for each area, however often it is given: each has a descriptor.
            awaited.retain(|known| known.id != fence.id);
            awaited.push(Arc::clone(fence));
            self.nr_awaited.store(awaited.len(), Ordering::Release);
        }
        is_held
    }

    /// Looks again for the locks that were not to be had.
    pub fn look(&self) -> Look {
        if self.is_open() {
            return Look::Open;
        }
        let mut awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        awaited.retain(|fence| !fence.try_lock());
        self.nr_awaited.store(awaited.len(), Ordering::Release);
        if awaited.is_empty() { Look::Opened } else { Look::Shut }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt as _;

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;
    use crate::inflight;

    fn area() -> File {
        inflight::create(1, 16, 1).unwrap().0
    }

    #[test]
    fn one_process_at_a_time_has_the_lock() {
        let area = area();
        let gate = Gate::default();
        let (old, new) = (Fence::over(&area).unwrap(), Fence::over(&area).unwrap());
        assert!(gate.pass(&old) && gate.is_open());
        assert!(!gate.pass(&new) && !gate.is_open());
        assert_eq!(gate.look(), Look::Shut);
        // A worker of the old one has it still.
        let registered = Arc::clone(&old);
        drop(old);
        assert_eq!(gate.look(), Look::Shut);
        drop(registered);
        // Said once, also when it is the first look: whoever found it shut has to be woken.
        assert_eq!((gate.look(), gate.look()), (Look::Opened, Look::Open));
        assert!(gate.is_open());
        assert!(!Gate::default().pass(&Fence::over(&area).unwrap()), "the new one has it now");
    }

    #[test]
    fn the_gate_stays_shut_when_who_shut_it_has_gone() {
        let (area, other) = (area(), area());
        let gate = Gate::default();
        let old = Fence::over(&area).unwrap();
        assert!(gate.pass(&old));
        assert!(!gate.pass(&Fence::over(&area).unwrap()));
        assert!(gate.pass(&Fence::over(&other).unwrap()), "another area has another lock");
        assert_eq!(gate.look(), Look::Shut);
        drop(old);
        assert_eq!(gate.look(), Look::Opened);
    }

    #[test]
    fn f45_an_area_that_is_given_again_and_again_is_awaited_once() {
        let (one, two) = (area(), area());
        let gate = Gate::default();
        let others = [Fence::over(&one).unwrap(), Fence::over(&two).unwrap()];
        assert!(others.iter().all(|fence| gate.pass(fence)));
        for _ in 0..8 {
            assert!(!gate.pass(&Fence::over(&one).unwrap()) && !gate.pass(&Fence::over(&two).unwrap()));
        }
        assert_eq!(gate.awaited.lock().unwrap().len(), 2);
        drop(others);
        assert_eq!(gate.look(), Look::Opened);
    }

    #[test]
    fn areas_are_told_apart_and_files_that_may_hang_refused() {
        let (one, two) = (area(), area());
        let fence = Fence::over(&one).unwrap();
        assert!(fence.is_over(&one) && !fence.is_over(&two));
        let on_proc = File::open("/proc/self/status").unwrap();
        assert!(matches!(Fence::over(&on_proc), Err(FenceError::NotInMemory)));
    }

    /// To open it again would wait for who writes to it.
    #[test]
    fn a_fifo_is_refused_wherever_it_lies() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let name = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &name, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let fifo = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&name).unwrap();
        assert!(matches!(Fence::over(&fifo), Err(FenceError::NotInMemory)));
    }
}
