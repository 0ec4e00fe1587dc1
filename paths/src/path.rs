//! One path: an open descriptor and its health.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use crate::identity::Identity;
use crate::ledger::Ledger;
use crate::limits::Limits;
use crate::load::Gauges;
use crate::open::{self, OpenError, OpenOptions, Opened};
use crate::stats::{IoStats, WorkerStats};
use crate::sysfs;

/// What stays the same when a path is opened anew: the writes that a flush has to cover, and the history.
#[derive(Debug)]
struct Lasting {
    nr_failures: AtomicU32,
    ledger: Ledger,
    stats: WorkerStats<IoStats>,
}

/// One host file or device that reaches the LUN, open.
///
/// Health lives here and not in the table, so that old and new tables agree on it. A path that returns after a failure
/// is opened anew and becomes another `Path`, so that late errors of the old descriptor do not touch it.
#[derive(Debug)]
pub struct Path {
    name: PathBuf,
    options: OpenOptions,
    file: File,
    limits: Limits,
    identity: Identity,
    rdev: u64,
    failed: AtomicBool,
    suspected: AtomicBool,
    /// Of the error that it was last blamed for; 0: none.
    last_errno: AtomicI32,
    gauges: Gauges,
    nr_workers: usize,
    lasting: Arc<Lasting>,
}

impl Path {
    /// Opens the path; `nr_workers` is the largest number of workers that will ever use it. Blocks as long as the
    /// storage does.
    pub fn open(name: PathBuf, options: OpenOptions, nr_workers: usize) -> Result<Self, OpenError> {
        let lasting = Lasting {
            nr_failures: AtomicU32::new(0),
            ledger: Ledger::new(nr_workers),
            stats: WorkerStats::new(nr_workers),
        };
        Self::open_with(name, options, nr_workers, Arc::new(lasting))
    }

    fn open_with(
        name: PathBuf,
        options: OpenOptions,
        nr_workers: usize,
        lasting: Arc<Lasting>,
    ) -> Result<Self, OpenError> {
        let Opened { file, limits, identity, rdev } = open::open(&name, options)?;
        Ok(Self {
            name,
            options,
            file,
            limits,
            identity,
            rdev,
            failed: AtomicBool::new(false),
            suspected: AtomicBool::new(false),
            last_errno: AtomicI32::new(0),
            gauges: Gauges::new(nr_workers),
            nr_workers,
            lasting,
        })
    }

    /// Opens the same name again, with a new descriptor, and keeps the history. Blocks as long as the storage does.
    pub fn reopen(&self) -> Result<Self, OpenError> {
        Self::open_with(self.name.clone(), self.options, self.nr_workers, Arc::clone(&self.lasting))
    }

    /// The name it was opened by.
    pub fn name(&self) -> &std::path::Path {
        &self.name
    }

    /// Whether a name means this path: the one that it was opened by, or its device's numbers (`major:minor`).
    pub fn is_named(&self, name: &std::path::Path) -> bool {
        self.name == name || (self.rdev != 0 && sysfs::device_number(name) == Some(self.rdev))
    }

    /// The descriptor's number, valid as long as the path lives.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The open file, for probes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What the path can take.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Size in bytes as the path shows it now; it may not be whole blocks. Blocks as long as the storage does.
    ///
    /// # Errors
    /// It cannot be asked.
    pub fn shown_size_bytes(&self) -> std::io::Result<u64> {
        open::size_of(&self.file)
    }

    /// Which LUN it leads to.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The writes that a flush has to cover.
    pub fn ledger(&self) -> &Ledger {
        &self.lasting.ledger
    }

    /// What was done here since the start, by worker; kept when the path is opened anew.
    pub fn stats(&self) -> &WorkerStats<IoStats> {
        &self.lasting.stats
    }

    /// What the workers have in flight here.
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Whether new I/O may go here.
    pub fn is_active(&self) -> bool {
        !self.failed.load(Ordering::Acquire)
    }

    /// How often the path has failed since the start; never reset.
    pub fn nr_failures(&self) -> u32 {
        self.lasting.nr_failures.load(Ordering::Relaxed)
    }

    /// An error here may be the request's own fault: the path is to be probed.
    pub fn suspect(&self) {
        self.suspected.store(true, Ordering::Release);
    }

    /// A request on this path met an error that the path is blamed for. To be said before the path is taken out for it.
    pub fn note_errno(&self, errno: i32) {
        self.last_errno.store(errno, Ordering::Release);
    }

    /// The error that the path was last blamed for.
    pub fn last_errno(&self) -> Option<i32> {
        Some(self.last_errno.load(Ordering::Acquire)).filter(|errno| *errno != 0)
    }

    /// Whether the path was suspected since the last time this was asked.
    pub fn take_suspicion(&self) -> bool {
        self.suspected.swap(false, Ordering::AcqRel)
    }

    /// Takes the path out. True for the caller that did it.
    pub(crate) fn set_failed(&self) -> bool {
        let first = !self.failed.swap(true, Ordering::AcqRel);
        if first {
            self.lasting.nr_failures.fetch_add(1, Ordering::Relaxed);
        }
        first
    }

    /// Puts the path back.
    pub(crate) fn set_active(&self) {
        self.failed.store(false, Ordering::Release);
    }
}

impl AsFd for Path {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
