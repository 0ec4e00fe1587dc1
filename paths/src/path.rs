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
use crate::open::{self, Facts, OpenError, OpenOptions, Opened};
use crate::stats::{IoStats, WorkerStats};
use crate::sysfs;

/// What stays the same when a path is opened anew: the writes that a flush has to cover, and the history.
#[derive(Debug)]
struct Lasting {
    nr_failures: AtomicU32,
    ledger: Ledger,
    stats: WorkerStats<IoStats>,
}

/// A path before it is open: its name, how to open it, and its history, if it had one.
#[derive(Debug)]
pub struct Seed {
    name: PathBuf,
    options: OpenOptions,
    nr_workers: usize,
    lasting: Arc<Lasting>,
}

impl Seed {
    /// A path without a history; `nr_workers` is the largest number of workers that will ever use it.
    pub fn new(name: PathBuf, options: OpenOptions, nr_workers: usize) -> Self {
        let lasting = Lasting {
            nr_failures: AtomicU32::new(0),
            ledger: Ledger::new(nr_workers),
            stats: WorkerStats::new(nr_workers),
        };
        Self { name, options, nr_workers, lasting: Arc::new(lasting) }
    }

    /// Its name.
    pub fn name(&self) -> &std::path::Path {
        &self.name
    }

    /// How it is to be opened.
    pub fn options(&self) -> OpenOptions {
        self.options
    }

    /// Opens it. Blocks as long as the storage does.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn open(self) -> Result<Path, OpenError> {
        let opened = open::open(&self.name, self.options)?;
        Ok(self.grow(opened))
    }

    /// The path, of what was opened by its name.
    pub fn grow(self, opened: Opened) -> Path {
        Path {
            name: self.name,
            options: self.options,
            file: opened.file,
            facts: opened.facts,
            failed: AtomicBool::new(false),
            suspected: AtomicBool::new(false),
            last_errno: AtomicI32::new(0),
            gauges: Gauges::new(self.nr_workers),
            nr_workers: self.nr_workers,
            lasting: self.lasting,
        }
    }
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
    facts: Facts,
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
        let opened = open::open(&name, options)?;
        Ok(Seed::new(name, options, nr_workers).grow(opened))
    }

    /// What another descriptor of the same path is made of.
    pub fn seed(&self) -> Seed {
        Seed {
            name: self.name.clone(),
            options: self.options,
            nr_workers: self.nr_workers,
            lasting: Arc::clone(&self.lasting),
        }
    }

    /// What was learned of it, and its file: what another process needs to have the same path.
    pub fn into_opened(self) -> Opened {
        Opened { file: self.file, facts: self.facts }
    }

    /// The name it was opened by.
    pub fn name(&self) -> &std::path::Path {
        &self.name
    }

    /// Whether a name means this path: the one that it was opened by, or its device's numbers (`major:minor`).
    pub fn is_named(&self, name: &std::path::Path) -> bool {
        self.name == name || (self.facts.rdev != 0 && sysfs::device_number(name) == Some(self.facts.rdev))
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
        &self.facts.limits
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
        &self.facts.identity
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
