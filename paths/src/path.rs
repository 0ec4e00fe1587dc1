//! One path: an open descriptor and its health.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::identity::Identity;
use crate::ledger::Ledger;
use crate::limits::Limits;
use crate::load::Gauges;
use crate::open::{self, OpenError, OpenOptions, Opened};

/// One host file or device that reaches the LUN.
///
/// Health lives here and not in the table, so that old and new tables agree on it.
#[derive(Debug)]
pub struct Path {
    name: PathBuf,
    file: File,
    limits: Limits,
    identity: Identity,
    failed: AtomicBool,
    nr_failures: AtomicU32,
    nr_errors: AtomicU32,
    ledger: Ledger,
    gauges: Gauges,
}

impl Path {
    /// Opens the path; `nr_workers` is the largest number of workers that will ever use it.
    pub fn open(name: PathBuf, options: OpenOptions, nr_workers: usize) -> Result<Self, OpenError> {
        let Opened { file, limits, identity } = open::open(&name, options)?;
        Ok(Self {
            name,
            file,
            limits,
            identity,
            failed: AtomicBool::new(false),
            nr_failures: AtomicU32::new(0),
            nr_errors: AtomicU32::new(0),
            ledger: Ledger::new(nr_workers),
            gauges: Gauges::new(nr_workers),
        })
    }

    /// The name it was opened by.
    pub fn name(&self) -> &std::path::Path {
        &self.name
    }

    /// The descriptor's number, valid as long as the path lives.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// What the path can take.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Which LUN it leads to.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The writes that a flush has to cover.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What the workers have in flight here.
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Whether new I/O may go here.
    pub fn is_active(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// How often the path has failed since the start; never reset.
    pub fn nr_failures(&self) -> u32 {
        self.nr_failures.load(Ordering::Relaxed)
    }

    /// Counts a path error that did not take the path out. True if it is worth a line in the log: the 1st, 2nd, 4th, ...
    pub fn note_error(&self) -> bool {
        (self.nr_errors.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two()
    }

    /// Takes the path out. True for the caller that did it.
    pub(crate) fn set_failed(&self) -> bool {
        let first = !self.failed.swap(true, Ordering::AcqRel);
        if first {
            self.nr_failures.fetch_add(1, Ordering::Relaxed);
        }
        first
    }
}

impl AsFd for Path {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
