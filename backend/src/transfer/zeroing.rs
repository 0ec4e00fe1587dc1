//! Discard and write-zeroes: range by range, each way of zeroing as far as the path can do it.

use polypath_paths::failover::Work;

use super::Transfer;
use crate::request::{Operation, Range};

/// Zeros are written in pieces of this many bytes where the path cannot zero by itself.
const ZEROS_PER_WRITE: u64 = 1 << 20;

/// How a range is made to read as zeros, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroing {
    PunchHole,
    ZeroRange,
    Write,
}

impl Transfer {
    /// The path cannot zero in this way: the next best one. False if there is none, or it was a discard.
    pub(super) fn fall_back(&mut self) -> bool {
        match self.zeroing {
            Some(Zeroing::PunchHole) => self.zeroing = Some(Zeroing::ZeroRange),
            Some(Zeroing::ZeroRange) => {
                self.zeroing = Some(Zeroing::Write);
                self.begin_zero_write();
            }
            Some(Zeroing::Write) | None => return false,
        }
        true
    }

    pub(super) fn current_range(&self) -> Option<Range> {
        self.buffers.ranges.get(self.range).copied()
    }

    /// Bytes of the disk that the next step discards or zeroes without moving any.
    pub fn step_range_bytes(&self) -> u64 {
        match self.work() {
            Work::Discard | Work::WriteZeroes => self.current_range().map_or(0, |range| range.len),
            Work::Read | Work::Write | Work::Flush => 0,
        }
    }

    pub(super) fn skip_empty_ranges(&mut self) {
        while self.current_range().is_some_and(|r| r.len == 0) {
            self.range += 1;
        }
    }

    pub(super) fn begin_range(&mut self) {
        self.range_done = 0;
        (self.len, self.done) = (0, 0);
        let Some(range) = self.current_range() else { return };
        if self.operation() != Some(Operation::WriteZeroes) {
            self.zeroing = None;
            return;
        }
        // What the path could not do for the range before it cannot do for this one.
        self.zeroing = match self.zeroing {
            Some(Zeroing::Write) => Some(Zeroing::Write),
            Some(Zeroing::ZeroRange) => Some(Zeroing::ZeroRange),
            _ if range.unmap => Some(Zeroing::PunchHole),
            _ => Some(Zeroing::ZeroRange),
        };
        if self.zeroing == Some(Zeroing::Write) {
            self.begin_zero_write();
        }
    }

    pub(super) fn begin_zero_write(&mut self) {
        let Some(range) = self.current_range() else { return };
        let len = (range.len - self.range_done).min(ZEROS_PER_WRITE);
        (self.offset, self.len, self.done) = (range.offset + self.range_done, len, 0);
        self.first = 0;
        self.gather.zeros(usize::try_from(len).unwrap_or(0));
    }
}
