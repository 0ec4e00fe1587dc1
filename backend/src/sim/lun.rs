//! The simulated storage behind all paths: what it does with a step, and what it answers.

use super::iovecs;
use super::plan::{IOERR, NR_SECTORS, UNSUPP, What};
use super::rng::Rng;
use crate::gather::{Alignment, IoVec};
use crate::transfer::Action;

/// How often what goes wrong, in percent of the steps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) short: u32,
    pub(crate) busy: u32,
    pub(crate) interrupted: u32,
    /// One answer of a path that is well otherwise.
    pub(crate) path: u32,
    /// A path that may not write.
    pub(crate) not_allowed: u32,
    /// Syncs that fail.
    pub(crate) sync: u32,
    /// Whether the storage can punch holes and zero ranges.
    /// Ports that cannot do it, as bits.
    pub(crate) no_punch: u64,
    pub(crate) no_zero_range: u64,
}

pub(crate) const PATH_ERRORS: [i32; 5] =
    [libc::EIO, libc::ENODEV, libc::ENOLINK, libc::ETIMEDOUT, libc::ENOTCONN];
const TARGET_ERRORS: [i32; 6] =
    [libc::ENODATA, libc::EREMOTEIO, libc::EILSEQ, libc::ENOSPC, libc::EBADE, libc::EINVAL];

/// A step without its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Read { offset: u64, len: u64 },
    Write { offset: u64, len: u64 },
    Sync,
    Allocate { offset: u64, len: u64, is_punch: bool },
}

impl Step {
    /// Checks what every path may ask of a step.
    pub(crate) fn of(action: &Action<'_>, align: Alignment) -> Self {
        let block = align.block_bytes;
        let data = |iovecs: &[IoVec], offset: u64| {
            let len = iovecs::len(iovecs) as u64;
            assert!(!iovecs.is_empty() && iovecs.len() <= 1024, "{} iovecs", iovecs.len());
            assert!((offset | len).is_multiple_of(block as u64) && len != 0, "{len} bytes at {offset}");
            assert!(offset + len <= NR_SECTORS * 512, "past the end of the disk");
            for v in iovecs {
                assert!(v.iov_base.addr().is_multiple_of(align.mem_bytes), "{:?} is not aligned", v.iov_base);
                assert!(v.iov_len.is_multiple_of(block), "{} bytes are no whole blocks", v.iov_len);
            }
            len
        };
        match *action {
            Action::Read { iovecs, offset } => Self::Read { offset, len: data(iovecs, offset) },
            Action::Write { iovecs, offset } => Self::Write { offset, len: data(iovecs, offset) },
            Action::Sync => Self::Sync,
            Action::Allocate { mode, offset, len } => {
                assert!(len != 0 && offset + len <= NR_SECTORS * 512, "{len} bytes at {offset}");
                assert!((offset | len).is_multiple_of(block as u64), "{len} bytes at {offset}");
                assert!([3, 17].contains(&mode), "fallocate mode {mode:#x}");
                Self::Allocate { offset, len, is_punch: mode == 3 }
            }
        }
    }
}

/// The storage.
#[derive(Debug)]
pub(crate) struct Lun {
    pub(crate) data: Vec<u8>,
    faults: Faults,
    /// Sectors that no path can read or write, each with its errno.
    bad: Vec<(u64, i32)>,
    /// Ports that answer nothing else at present.
    pub(crate) broken: [Option<i32>; NR_PORTS],
    /// Ports that do not answer.
    pub(crate) hung: [bool; NR_PORTS],
}

/// Ways to the storage; each has a name, and a path when it is open and in the table.
pub(crate) const NR_PORTS: usize = 4;

impl Lun {
    /// A disk of zeros.
    pub(crate) fn new(rng: &mut Rng, faults: Faults, nr_bad: usize) -> Self {
        let size = usize::try_from(NR_SECTORS * 512).expect("small");
        let bad = (0..nr_bad).map(|_| (rng.below(NR_SECTORS), rng.pick(&TARGET_ERRORS))).collect();
        Self { data: vec![0; size], faults, bad, broken: [None; NR_PORTS], hung: [false; NR_PORTS] }
    }

    /// Does the step, or a part of it, or nothing; gives the answer.
    pub(crate) fn answer(&mut self, rng: &mut Rng, port: usize, step: Step, action: &Action<'_>) -> i32 {
        if let Some(errno) = self.broken[port] {
            return self.fail(rng, action, errno);
        }
        let faults = self.faults;
        if rng.chance(faults.interrupted) {
            return -libc::EINTR;
        }
        if rng.chance(faults.busy) {
            return -rng.pick(&[libc::EAGAIN, libc::ENOMEM, libc::EBUSY]);
        }
        if rng.chance(faults.not_allowed) {
            return -rng.pick(&[libc::EPERM, libc::EROFS]);
        }
        if rng.chance(faults.path) {
            let errno = rng.pick(&PATH_ERRORS);
            return self.fail(rng, action, errno);
        }
        match step {
            Step::Sync if rng.chance(faults.sync) => -rng.pick(&[libc::EIO, libc::ENODEV, libc::ENOSPC]),
            Step::Sync => 0,
            Step::Allocate { is_punch: true, .. } if faults.no_punch >> port & 1 == 1 => -libc::EOPNOTSUPP,
            Step::Allocate { is_punch: false, .. } if faults.no_zero_range >> port & 1 == 1 => {
                -libc::EOPNOTSUPP
            }
            Step::Allocate { offset, len, .. } => {
                if let Some((_, errno)) = self.first_bad(offset, len) {
                    return -errno;
                }
                let part = range(offset, len);
                self.data[part].fill(0);
                0
            }
            Step::Read { offset, len } | Step::Write { offset, len } => {
                let mut n = len;
                if let Some((good, errno)) = self.first_bad(offset, len) {
                    if good == 0 || rng.chance(50) {
                        return self.fail(rng, action, errno);
                    }
                    n = good;
                }
                if rng.chance(faults.short) {
                    n = match rng.weighted(&[5, 4, 1]) {
                        0 => n.min((rng.below(len / 512) + 1) * 512),
                        1 => n.min(rng.below(len) + 1),
                        _ => rng.below(512),
                    };
                }
                self.move_data(action, n);
                i32::try_from(n).expect("small")
            }
        }
    }

    /// An error; a write may have been done in part all the same.
    fn fail(&mut self, rng: &mut Rng, action: &Action<'_>, errno: i32) -> i32 {
        if let Action::Write { iovecs, .. } = action
            && rng.chance(30)
        {
            self.move_data(action, rng.below(iovecs::len(iovecs) as u64 + 1));
        }
        -errno
    }

    /// Length of the good part, and what comes then.
    fn first_bad(&self, offset: u64, len: u64) -> Option<(u64, i32)> {
        let hit = self.bad.iter().filter(|(sector, _)| (offset..offset + len).contains(&(sector * 512)));
        hit.min().map(|(sector, errno)| (sector * 512 - offset, *errno))
    }

    /// Sectors are never torn: of one that is moved in part, a disk keeps the old.
    fn move_data(&mut self, action: &Action<'_>, n: u64) {
        match *action {
            Action::Read { iovecs, offset } => iovecs::write(iovecs, &self.data[range(offset, n)]),
            Action::Write { iovecs, offset } => {
                let part = range(offset, n / 512 * 512);
                let bytes = iovecs::read(iovecs, part.len());
                self.data[part].copy_from_slice(&bytes);
            }
            Action::Sync | Action::Allocate { .. } => {}
        }
    }
}

fn range(offset: u64, len: u64) -> std::ops::Range<usize> {
    let index = |at| usize::try_from(at).expect("small");
    index(offset)..index(offset + len)
}

/// What the answers to a request mean so far: the rules as the documentation has them, said once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Last {
    #[default]
    Nothing,
    /// A step was done; there may be more of them.
    Success,
    /// To be tried again.
    Retry,
    /// This must be the status.
    Final(u8),
    /// To be tried on another path.
    PathError,
    /// This path may not or cannot do it: to be asked of the others, once each; if all refuse, this is the status.
    NotAllowed(u8),
}

/// The answers to one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) is_started: bool,
    pub(crate) last: Last,
    /// Ports that have failed it, as bits, and when the first did, in ns.
    pub(crate) refused: u64,
    pub(crate) troubled_ns: Option<u64>,
    nr_busy: u32,
    /// When a part was last written by each port.
    pub(crate) parts: [Option<u64>; NR_PORTS],
}

/// When something happened, by both clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) clock: u64,
    pub(crate) ns: u64,
}

impl Record {
    /// The worker hears of an answer.
    pub(crate) fn note(&mut self, what: What, port: usize, step: Step, result: i32, now: Moment, block: u64) {
        if result >= 0 && !matches!(step, Step::Read { .. } | Step::Sync) {
            self.parts[port] = Some(now.clock);
        }
        self.last = match (u64::try_from(result), step) {
            (Ok(moved), Step::Read { len, .. } | Step::Write { len, .. }) => match moved >= len {
                true => Last::Success,
                // Less than a block is nothing, and trying again would never end.
                false if moved < block => Last::Final(IOERR),
                false => Last::Retry,
            },
            (Ok(_), _) => Last::Success,
            (Err(_), _) => self.judge(what, step, -result),
        };
        match self.last {
            Last::NotAllowed(_) => self.refused |= 1 << port,
            Last::PathError => {
                self.refused |= 1 << port;
                self.troubled_ns = self.troubled_ns.or(Some(now.ns));
                self.nr_busy = 0;
            }
            _ if result >= 0 => self.nr_busy = 0,
            _ => {}
        }
    }

    /// The same for one of several requests that were sent as one; its data is at `span` of the disk.
    pub(crate) fn note_member(
        &mut self,
        what: What,
        port: usize,
        step: Step,
        span: std::ops::Range<u64>,
        result: i32,
        now: Moment,
    ) {
        let (Step::Read { offset, len } | Step::Write { offset, len }) = step else {
            self.note(what, port, step, result, now, 1);
            if matches!((self.last, step), (Last::Final(_), Step::Allocate { .. })) {
                // As below.
                (self.last, self.nr_busy) = (Last::Retry, 0);
            }
            return;
        };
        if span.end <= offset {
            return;
        }
        let Ok(moved) = u64::try_from(result) else {
            let was_busy = self.nr_busy;
            self.note(what, port, step, result, now, 1);
            if matches!(self.last, Last::Final(_)) {
                // It may be the fault of another one: each is sent by itself.
                (self.last, self.nr_busy) = (Last::Retry, 0);
            }
            debug_assert!(self.nr_busy <= was_busy + 1);
            return;
        };
        self.nr_busy = 0;
        if span.start >= offset + moved {
            self.last = Last::Retry;
            return;
        }
        if matches!(step, Step::Write { .. }) {
            self.parts[port] = Some(now.clock);
        }
        let is_whole = span.end <= offset + moved.min(len);
        self.last = if is_whole { Last::Success } else { Last::Retry };
    }

    fn judge(&mut self, what: What, step: Step, errno: i32) -> Last {
        match errno {
            libc::EINTR => Last::Retry,
            libc::EAGAIN | libc::ENOMEM | libc::EBUSY => {
                self.nr_busy += 1;
                if self.nr_busy > 12 { Last::PathError } else { Last::Retry }
            }
            libc::EOPNOTSUPP => match (what, step) {
                (What::Zeroes, Step::Allocate { .. }) => Last::Retry,
                (What::Discard, Step::Allocate { .. }) => Last::NotAllowed(UNSUPP),
                _ => Last::Final(IOERR),
            },
            libc::EPERM | libc::EROFS if what.is_change() && step != Step::Sync => Last::NotAllowed(IOERR),
            // The paths are regular files: a sync that fails has lost something.
            libc::EIO if step == Step::Sync => Last::Final(IOERR),
            errno if PATH_ERRORS.contains(&errno) => Last::PathError,
            _ => Last::Final(IOERR),
        }
    }
}
