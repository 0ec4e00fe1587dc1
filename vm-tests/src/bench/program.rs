//! What is compared.

use std::fmt;

use super::disk::DiskKind;
use super::workload::{Order, Workload};

/// A program, or one with options that set it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// No program in between; the client waits in the kernel.
    IoUring,
    /// The same, but the client polls.
    IoUringPoll,
    /// QEMU's storage daemon, with an iothread and io_uring.
    Qsd,
    /// The same with Linux' older asynchronous I/O.
    QsdNative,
    /// The first again, but its iothread sleeps at once.
    QsdNoPoll,
    /// This project's with merging off.
    NoMerge,
    /// This project's.
    Polypath,
    /// The same with two paths.
    TwoPaths,
    /// The same with one path that takes 8 I/Os at a time.
    Depth8,
    /// The same with merging off.
    Depth8NoMerge,
    /// The same without polling before a sleep.
    NoPoll,
    /// The same with a thread of the kernel's that sends.
    Sqpoll,
    /// The same by a front-end that has no place for what is in flight.
    NoInflight,
    /// The same without filters on its calls.
    NoSandbox,
}

impl Program {
    /// All there are, in the order of the tables.
    pub const ALL: [Self; 14] = [
        Self::IoUring,
        Self::IoUringPoll,
        Self::Qsd,
        Self::QsdNative,
        Self::QsdNoPoll,
        Self::NoMerge,
        Self::Polypath,
        Self::TwoPaths,
        Self::Depth8,
        Self::Depth8NoMerge,
        Self::NoPoll,
        Self::Sqpoll,
        Self::NoInflight,
        Self::NoSandbox,
    ];

    /// As the options and the tables name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::IoUringPoll => "io_uring-poll",
            Self::Qsd => "qsd",
            Self::QsdNative => "qsd-native",
            Self::QsdNoPoll => "qsd-no-poll",
            Self::NoMerge => "no-merge",
            Self::Polypath => "polypath",
            Self::TwoPaths => "two-paths",
            Self::Depth8 => "depth8",
            Self::Depth8NoMerge => "depth8-no-merge",
            Self::NoPoll => "no-poll",
            Self::Sqpoll => "sqpoll",
            Self::NoInflight => "no-inflight",
            Self::NoSandbox => "no-sandbox",
        }
    }

    pub(super) fn is_direct(self) -> bool {
        matches!(self, Self::IoUring | Self::IoUringPoll)
    }

    pub(super) fn is_qsd(self) -> bool {
        matches!(self, Self::Qsd | Self::QsdNative | Self::QsdNoPoll)
    }

    /// As it is usually run: its iothread polls.
    pub(super) fn is_polling_qsd(self) -> bool {
        self.is_qsd() && self != Self::QsdNoPoll
    }

    /// Whether the front-end has it write down what is in flight, as QEMU does where it is offered.
    pub(super) fn is_tracked(self) -> bool {
        !self.is_direct() && !self.is_qsd() && self != Self::NoInflight
    }

    /// polypath's options that make it this one.
    pub(super) fn polypath_options(self) -> &'static [&'static str] {
        match self {
            Self::NoMerge => &["--merge-max", "0"],
            Self::Depth8 => &["--path-depth", "8"],
            Self::Depth8NoMerge => &["--path-depth", "8", "--merge-max", "0"],
            Self::NoPoll => &["--poll-us", "0"],
            Self::Sqpoll => &["--sqpoll-idle-ms", "10"],
            Self::NoSandbox => &["--sandbox", "off"],
            _ => &[],
        }
    }

    pub(super) fn nr_paths(self) -> usize {
        if self == Self::TwoPaths { 2 } else { 1 }
    }

    /// Whether it can be measured on such a disk at all.
    pub(super) fn can_use(self, disk: DiskKind) -> bool {
        disk.has_device() || !(self.is_direct() || self == Self::QsdNative)
    }

    /// Whether a full run measures it there: where it differs from the others by what it is about.
    pub(super) fn is_usual(self, disk: DiskKind, load: &Workload) -> bool {
        let is_deep = load.depth > 1;
        match self {
            Self::IoUring | Self::Qsd | Self::Polypath => true,
            // A file on tmpfs is read and written during the submission: there is nothing to wait or poll for.
            Self::IoUringPoll | Self::QsdNative => disk == DiskKind::Loop,
            Self::NoMerge => disk.has_device() && (disk == DiskKind::Loop || load.can_merge()),
            Self::TwoPaths => is_deep && disk != DiskKind::Tmpfs,
            Self::Depth8 | Self::Depth8NoMerge => {
                let is_random = load.order == Order::Random && load.depth == 32;
                disk == DiskKind::Loop && load.nr_queues == 1 && (is_random || load.depth == 64)
            }
            Self::NoPoll | Self::QsdNoPoll => !is_deep && disk.has_device(),
            // It wants a third core, which few machines that this runs on have to spare.
            Self::Sqpoll => false,
            // What is written down costs the same everywhere, and shows most where there is least else.
            Self::NoInflight => load.depth == 32 && disk != DiskKind::Tmpfs,
            // Shows where there is a call for each request and nothing else.
            Self::NoSandbox => !is_deep && !disk.has_device(),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
