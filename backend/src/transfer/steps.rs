//! What comes next: the step to send, and what follows from its answer.

use polypath_paths::failover::{self, Refusal, Verdict, Work};

use super::zeroing::Zeroing;
use super::{Action, Next, Transfer};
use crate::gather::IoVec;
use crate::request::{Operation, Status};

/// How often one step is tried again when the kernel says "not now": with the waits of [`busy_wait_ms`], about 2 s.
const BUSY_TRIES_MAX: u32 = 12;

/// How often a step that is interrupted is tried again at once.
const INTERRUPTED_TRIES_MAX: u32 = 1000;

/// Waiting grows from 1 ms and is bounded: 1, 2, 4, ... 256 ms.
fn busy_wait_ms(nr_busy: u32) -> u64 {
    1 << nr_busy.min(8)
}

impl Transfer {
    /// The next thing to do. Call only when the transfer is not empty.
    pub fn action(&mut self) -> Action<'_> {
        match self.operation() {
            Some(Operation::Read { .. } | Operation::GetId) | None => {
                Action::Read { offset: self.offset + self.done, iovecs: self.rest() }
            }
            Some(Operation::Flush) => Action::Sync,
            Some(_) if self.is_all_written() => Action::Sync,
            Some(Operation::Write { .. }) => {
                Action::Write { offset: self.offset + self.done, iovecs: self.rest() }
            }
            Some(Operation::Discard | Operation::WriteZeroes) => {
                let Some(range) = self.current_range() else { return Action::Sync };
                let (offset, len) = (range.offset, range.len);
                match self.zeroing {
                    Some(Zeroing::Write) => {
                        Action::Write { offset: self.offset + self.done, iovecs: self.rest() }
                    }
                    Some(Zeroing::ZeroRange) => {
                        let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                        Action::Allocate { mode, offset, len }
                    }
                    Some(Zeroing::PunchHole) | None => {
                        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                        Action::Allocate { mode, offset, len }
                    }
                }
            }
        }
    }

    /// The iovecs from the first byte on that has not been moved.
    fn rest(&self) -> &[IoVec] {
        self.iovecs().get(self.first..).unwrap_or_default()
    }

    /// Judges an answer of the kernel: bytes moved, or a negative errno.
    pub fn complete(&mut self, result: i32) -> Next {
        match u64::try_from(result) {
            Ok(moved) => self.advance(moved),
            Err(_) => self.judge(-result),
        }
    }

    fn advance(&mut self, moved: u64) -> Next {
        let work = self.work();
        let sync = work == Work::Flush;
        if !sync
            && work != Work::Read
            && let Some(path) = self.path()
        {
            path.ledger().note_write(self.worker);
        }
        match self.operation() {
            Some(Operation::Read { .. }) => self.advance_data(moved),
            Some(Operation::Flush) => {
                if let Some(path) = self.path() {
                    path.ledger().end_flush(&self.coverage);
                }
                let finished = self.flush_target_done();
                self.next_step(finished)
            }
            Some(_) if sync => {
                if let Some(path) = self.path() {
                    path.ledger().end_flush(&self.coverage);
                }
                Next::Finished(Status::Ok)
            }
            Some(Operation::Write { .. }) => match self.advance_data(moved) {
                Next::Finished(Status::Ok) => self.after_write(),
                next => next,
            },
            Some(Operation::Discard | Operation::WriteZeroes) => {
                if self.zeroing == Some(Zeroing::Write) {
                    match self.advance_data(moved) {
                        Next::Finished(Status::Ok) => {}
                        short => return short,
                    }
                    self.range_done += self.len;
                    if self.current_range().is_some_and(|r| self.range_done < r.len) {
                        self.begin_zero_write();
                        return self.next_step(false);
                    }
                }
                self.range += 1;
                self.skip_empty_ranges();
                self.begin_range();
                if self.current_range().is_some() { self.next_step(false) } else { self.after_write() }
            }
            Some(Operation::GetId) | None => Next::Finished(Status::IoErr),
        }
    }

    /// All is written; the sync that write-through owes goes down the path that did the last of it.
    fn after_write(&mut self) -> Next {
        if self.sync_owed {
            self.begin_sync();
        }
        self.next_step(!self.sync_owed)
    }

    fn next_step(&mut self, finished: bool) -> Next {
        (self.nr_busy, self.nr_interrupted) = (0, 0);
        match (finished, self.required_path()) {
            (true, _) => Next::Finished(Status::Ok),
            (false, Some(path)) => {
                self.set_path(path);
                Next::Again
            }
            (false, None) => Next::Again,
        }
    }

    fn advance_data(&mut self, moved: u64) -> Next {
        let left = self.len - self.done;
        if moved >= left {
            self.done = self.len;
            return Next::Finished(Status::Ok);
        }
        // Direct I/O goes on at whole blocks only; what was moved beyond is moved again.
        let block = self.align.block_bytes as u64;
        let whole = (self.offset + self.done + moved) / block * block;
        let done = whole.saturating_sub(self.offset).max(self.done);
        let done = self.done + self.aligned_step(done - self.done);
        if done == self.done {
            log::debug!("no progress: offset={} moved={moved}", self.offset + self.done);
            // The end of the file, or a path that gives less than a block: trying again would never end.
            return Next::Finished(Status::IoErr);
        }
        let step = done - self.done;
        self.done = done;
        self.cut_off(step);
        (self.nr_busy, self.nr_interrupted) = (0, 0);
        Next::Again
    }

    /// The largest part of a step of `bytes` after which the rest begins where direct I/O accepts it: storage may ask for
    /// more of an address than a block has.
    fn aligned_step(&self, bytes: u64) -> u64 {
        let mut left = bytes;
        for vec in self.rest() {
            let len = vec.iov_len as u64;
            if left < len {
                return bytes - left % self.align.mem_bytes as u64;
            }
            left -= len;
        }
        bytes
    }

    /// Moves the start of the iovecs by `bytes`, in place.
    pub(super) fn cut_off(&mut self, bytes: u64) {
        let (mut first, mut bytes) = (self.first, usize::try_from(bytes).unwrap_or(usize::MAX));
        let iovecs = self.iovecs_mut();
        while let Some(vec) = iovecs.get_mut(first) {
            if bytes < vec.iov_len {
                vec.iov_base = vec.iov_base.wrapping_byte_add(bytes);
                vec.iov_len -= bytes;
                break;
            }
            bytes -= vec.iov_len;
            first += 1;
        }
        self.first = first;
    }

    fn judge(&mut self, errno: i32) -> Next {
        let Some(path) = self.path() else { return Next::Finished(Status::IoErr) };
        let kind = path.limits().kind;
        match failover::judge(self.work(), kind, errno) {
            Verdict::PathError => self.elsewhere(errno),
            Verdict::Interrupted if self.nr_interrupted < INTERRUPTED_TRIES_MAX => {
                self.nr_interrupted += 1;
                Next::Again
            }
            Verdict::Busy if self.nr_busy < BUSY_TRIES_MAX => {
                let wait_ms = busy_wait_ms(self.nr_busy);
                self.nr_busy += 1;
                Next::Later(wait_ms)
            }
            Verdict::Busy | Verdict::Interrupted => self.elsewhere(errno),
            // A path may be made read-only by itself (blockdev --setro).
            Verdict::TargetError(_)
                if self.changes().is_some()
                    && self.work() != Work::Flush
                    && matches!(errno, libc::EPERM | libc::EACCES | libc::EROFS) =>
            {
                Next::AskOthers(Status::IoErr)
            }
            Verdict::TargetError(Refusal::Unsupp) if self.fall_back() => Next::Again,
            // A path that came later may not be able to discard, where those that were there can.
            Verdict::TargetError(Refusal::Unsupp) => Next::AskOthers(Status::Unsupp),
            Verdict::TargetError(Refusal::IoErr) => Next::Finished(Status::IoErr),
        }
    }

    fn elsewhere(&mut self, errno: i32) -> Next {
        (self.nr_busy, self.nr_interrupted) = (0, 0);
        Next::Elsewhere(errno)
    }
}
