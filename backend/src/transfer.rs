//! One request on its way: all that the kernel may touch until it answers, and how far the work has come.
//!
//! A transfer owns its buffers' map, its path's table and its bounce buffer, so nothing of it can go away while the
//! kernel works on it. Retrying keeps what was built. What comes next after each answer is decided here, without I/O.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use polypath_paths::failover::{self, Refusal, Verdict, Work};
use polypath_paths::{Coverage, Path, Table};
use polypath_selector::Ticket;

use crate::gather::{Alignment, Gather, IoVec, OutsideMemory};
use crate::memory::MapLease;
use crate::request::{Buffers, Operation, Range, Request, Status};

/// How often one step is tried again when the kernel says "not now": with the waits of [`busy_wait_ms`], about 2 s.
const BUSY_TRIES_MAX: u32 = 12;

/// How often a step that is interrupted is tried again at once.
const INTERRUPTED_TRIES_MAX: u32 = 1000;

/// Zeros are written in pieces of this many bytes where the path cannot zero by itself.
const ZEROS_PER_WRITE: u64 = 1 << 20;

/// How a range is made to read as zeros, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zeroing {
    PunchHole,
    ZeroRange,
    Write,
}

/// What the engine is to do next for a transfer.
#[derive(Debug, Clone, Copy)]
pub enum Action<'a> {
    /// Read into the iovecs.
    Read {
        /// Buffers.
        iovecs: &'a [IoVec],
        /// Byte offset on the path.
        offset: u64,
    },
    /// Write from the iovecs.
    Write {
        /// Buffers.
        iovecs: &'a [IoVec],
        /// Byte offset on the path.
        offset: u64,
    },
    /// fdatasync.
    Sync,
    /// fallocate.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// What to do after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing is left to do: the guest gets this.
    Finished(Status),
    /// The next step (or the rest of this one) on the same path.
    Again,
    /// The same step on the same path, after so many milliseconds.
    Later(u64),
    /// This path failed with that errno: take it out and go on elsewhere.
    Elsewhere(i32),
    /// This path may not or cannot do it, which says nothing about the others: ask each once; no path is at fault. If
    /// all refuse, the guest gets this.
    AskOthers(Status),
}

/// A worker's hold on a table: counted without a shared write.
pub type Snapshot = Rc<Arc<Table>>;

/// A request and its progress. Boxed once and reused.
#[derive(Debug, Default)]
pub struct Transfer {
    request: Option<Request>,
    /// Segments and ranges of the request.
    pub buffers: Buffers,
    gather: Gather,
    map: Option<Rc<MapLease>>,
    table: Option<Snapshot>,
    path: usize,
    /// Byte offset on the disk where the iovecs begin, and how much of them is to be moved and has been.
    offset: u64,
    len: u64,
    done: u64,
    /// First iovec with bytes left; what was moved of it is cut off.
    first: usize,
    /// Which range is being worked on, and how much of it is done (when zeros are written).
    range: usize,
    range_done: u64,
    zeroing: Option<Zeroing>,
    /// Paths that a flush has still to visit, as bits; whether one was visited.
    to_flush: u64,
    /// Whether some path at least has still to be flushed.
    flush_owed: bool,
    coverage: Coverage,
    /// Whether the guest expects what was written to be durable at completion. An fdatasync of our own follows then:
    /// RWF_DSYNC is passed over without a word by some files (FUSE with direct I/O).
    sync_owed: bool,
    /// Paths that failed this request, as bits.
    tried: u64,
    nr_busy: u32,
    nr_interrupted: u32,
    /// Index of the worker, for the ledgers.
    worker: usize,
    /// What the selector gave for the step that is under way.
    pub ticket: Option<Ticket>,
    /// When that step was sent, in ns, and its bytes.
    pub sent_ns: u64,
    /// See `sent_ns`.
    pub sent_bytes: u64,
    /// The path that it was sent by: a flush has moved on to its next one when its end is booked.
    pub sent_path: usize,
    /// When the request met its first path error, in ns; 0: none.
    pub troubled_since_ns: u64,
    /// Since when it is held, in ns; 0: it is not.
    pub held_since_ns: u64,
    /// The name under which its bytes are guarded against later writes.
    pub trouble: Cell<Option<u64>>,
    /// How often every path has refused it.
    pub nr_rounds: u32,
}

/// Waiting grows from 1 ms and is bounded: 1, 2, 4, ... 256 ms.
fn busy_wait_ms(nr_busy: u32) -> u64 {
    1 << nr_busy.min(8)
}

impl Transfer {
    /// Takes the request in. The segments and ranges are in `buffers` already.
    ///
    /// Fails if data lies outside guest memory; the request stays here and is to be ended with IOERR.
    pub fn begin(
        &mut self,
        request: Request,
        map: &Rc<MapLease>,
        table: &Snapshot,
        write_through: bool,
        worker: usize,
    ) -> Result<(), OutsideMemory> {
        let operation = request.operation;
        let data_len = request.data_len;
        debug_assert!(self.request.is_none());
        self.request = Some(request);
        self.map = Some(Rc::clone(map));
        self.table = Some(Rc::clone(table));
        (self.len, self.done, self.first) = (0, 0, 0);
        (self.range, self.range_done, self.zeroing) = (0, 0, None);
        (self.tried, self.nr_busy, self.nr_interrupted) = (0, 0, 0);
        (self.troubled_since_ns, self.held_since_ns, self.nr_rounds) = (0, 0, 0);
        debug_assert!(self.trouble.get().is_none());
        (self.to_flush, self.flush_owed) = (0, false);
        self.sync_owed = write_through && !matches!(operation, Operation::Read { .. } | Operation::Flush);
        self.worker = worker;
        let limits = table.limits();
        let align = Alignment {
            mem_bytes: limits.mem_align_bytes as usize,
            block_bytes: limits.logical_block_bytes as usize,
        };
        match operation {
            Operation::Read { offset } => {
                let block = u64::from(limits.logical_block_bytes);
                let skip = offset % block;
                let whole = (skip + data_len).next_multiple_of(block);
                (self.offset, self.len) = (offset - skip, whole);
                if whole == data_len {
                    self.gather.map(map.map(), &self.buffers.segments, align)?;
                } else {
                    let (skip, whole) = (to_usize(skip)?, to_usize(whole)?);
                    self.gather.surround(map.map(), &self.buffers.segments, skip, whole, align)?;
                }
            }
            Operation::Write { offset } => {
                (self.offset, self.len) = (offset, data_len);
                self.gather.map(map.map(), &self.buffers.segments, align)?;
                if self.gather.is_bounced() {
                    self.gather.copy_in(map.map())?;
                }
            }
            Operation::Flush => self.plan_flush(),
            Operation::Discard | Operation::WriteZeroes => {
                self.skip_empty_ranges();
                self.begin_range();
            }
            Operation::GetId => debug_assert!(false, "answered without a transfer"),
        }
        Ok(())
    }

    /// Whether there is nothing for a path to do.
    pub fn is_empty(&self) -> bool {
        match self.operation() {
            Some(Operation::Read { .. } | Operation::Write { .. }) => self.len == 0,
            Some(Operation::Flush) => self.to_flush == 0 && !self.flush_owed,
            Some(Operation::Discard | Operation::WriteZeroes) => self.current_range().is_none(),
            Some(Operation::GetId) | None => true,
        }
    }

    /// Ends the transfer and lets go of memory and path; the box can be used again. For a read that succeeded, data in
    /// the bounce buffer is brought to the guest first.
    ///
    /// Gives the request, the number of data bytes written to the guest, and the status to report.
    pub fn end(&mut self, status: Status) -> Option<(Request, u64, Status)> {
        let request = self.request.take()?;
        let mut result = (0, status);
        if let (Status::Ok, Operation::Read { .. }) = (status, request.operation) {
            result.0 = request.data_len;
            if self.gather.is_bounced() {
                let copied = self.map.as_ref().map(|map| self.gather.copy_out(map.map()));
                if copied != Some(Ok(())) {
                    result = (0, Status::IoErr);
                }
            }
        }
        self.gather.clear();
        self.map = None;
        self.table = None;
        Some((request, result.0, result.1))
    }

    fn operation(&self) -> Option<Operation> {
        self.request.as_ref().map(|r| r.operation)
    }

    /// The kind of work in hand, for the errno rules.
    pub fn work(&self) -> Work {
        match self.operation() {
            Some(Operation::Read { .. } | Operation::GetId) | None => Work::Read,
            // A write that is all done is in hand again only to be made durable.
            Some(Operation::Write { .. }) if self.sync_owed && self.is_all_written() => Work::Flush,
            Some(Operation::Write { .. }) => Work::Write,
            Some(Operation::Flush) => Work::Flush,
            Some(Operation::Discard | Operation::WriteZeroes) if self.current_range().is_none() => {
                Work::Flush
            }
            Some(Operation::Discard) => Work::Discard,
            Some(Operation::WriteZeroes) if self.zeroing == Some(Zeroing::Write) => Work::Write,
            Some(Operation::WriteZeroes) => Work::WriteZeroes,
        }
    }

    /// Whether a write, discard or write-zeroes has nothing left but to be made durable.
    fn is_all_written(&self) -> bool {
        match self.operation() {
            Some(Operation::Write { .. }) => self.done == self.len,
            Some(Operation::Discard | Operation::WriteZeroes) => self.current_range().is_none(),
            _ => false,
        }
    }

    /// Bytes that the next step moves.
    pub fn nr_bytes(&self) -> u64 {
        self.len - self.done
    }

    /// The table that the transfer was begun with.
    pub fn table(&self) -> Option<&Table> {
        self.table.as_ref().map(|t| &***t)
    }

    /// Whether the transfer goes by this snapshot.
    pub fn is_of(&self, snapshot: &Snapshot) -> bool {
        self.table.as_ref().is_some_and(|table| Rc::ptr_eq(table, snapshot))
    }

    /// Goes by another table from now on: what refused it is asked again. Not while a step is under way.
    pub fn rebase(&mut self, snapshot: &Snapshot) {
        if self.is_of(snapshot) {
            return;
        }
        let aligned_bytes = self.table().map_or(0, |table| table.limits().mem_align_bytes);
        self.table = Some(Rc::clone(snapshot));
        self.tried = 0;
        if snapshot.limits().mem_align_bytes > aligned_bytes
            && let Some(map) = self.map.clone()
        {
            // A path has come that asks for more. What was found in this memory before is found again.
            let found = self.remap(&map);
            debug_assert!(found.is_ok());
        }
        if self.work() == Work::Flush && !self.is_all_written() {
            self.plan_flush();
        }
    }

    /// Whether its buffers are looked up in this map.
    pub fn is_in(&self, map: &Rc<MapLease>) -> bool {
        self.map.as_ref().is_some_and(|own| Rc::ptr_eq(own, map))
    }

    /// Lets go of an old map while the transfer waits: its buffers are looked up in the new one.
    ///
    /// # Errors
    /// They are not there any more: the request is to be ended.
    pub fn remap(&mut self, map: &Rc<MapLease>) -> Result<(), OutsideMemory> {
        self.map = Some(Rc::clone(map));
        let Some(request) = &self.request else { return Ok(()) };
        let operation = request.operation;
        if !matches!(operation, Operation::Read { .. } | Operation::Write { .. }) || self.len == 0 {
            return Ok(());
        }
        let Some(table) = &self.table else { return Ok(()) };
        let limits = table.limits();
        let align = Alignment {
            mem_bytes: limits.mem_align_bytes as usize,
            block_bytes: limits.logical_block_bytes as usize,
        };
        let data_len = request.data_len;
        match operation {
            Operation::Read { offset } if self.len != data_len => {
                let (skip, whole) = (to_usize(offset - self.offset)?, to_usize(self.len)?);
                self.gather.surround(map.map(), &self.buffers.segments, skip, whole, align)?;
                // What was read into the old bounce buffer is gone with it.
                self.done = 0;
            }
            _ => {
                let was_bounced = self.gather.is_bounced();
                self.gather.map(map.map(), &self.buffers.segments, align)?;
                if self.gather.is_bounced() && matches!(operation, Operation::Write { .. }) {
                    self.gather.copy_in(map.map())?;
                } else if was_bounced || self.gather.is_bounced() {
                    self.done = 0;
                }
            }
        }
        self.first = 0;
        let done = self.done;
        self.cut_off(done);
        Ok(())
    }

    /// Marks the path in use as one that may not do this.
    pub fn note_tried(&mut self) {
        self.tried |= 1 << self.path;
    }

    /// Marks the path in use as one that refused the request.
    pub fn note_refusal(&mut self, now_ns: u64) {
        self.tried |= 1 << self.path;
        if self.troubled_since_ns == 0 {
            self.troubled_since_ns = now_ns;
        }
    }

    /// Every path has refused it: begins anew.
    pub fn next_round(&mut self) {
        self.nr_rounds += 1;
        self.tried = 0;
    }

    /// Whether it is a flush that the guest asked for.
    pub fn is_flush(&self) -> bool {
        self.operation() == Some(Operation::Flush)
    }

    /// The bytes of the disk that the request changes.
    pub fn changes(&self) -> Option<(u64, u64)> {
        match self.operation()? {
            Operation::Write { offset } => {
                Some((offset, offset + self.request.as_ref().map_or(0, |r| r.data_len)))
            }
            Operation::Discard | Operation::WriteZeroes => {
                let start = self.buffers.ranges.iter().map(|r| r.offset).min()?;
                let end = self.buffers.ranges.iter().map(|r| r.offset + r.len).max()?;
                Some((start, end))
            }
            Operation::Read { .. } | Operation::Flush | Operation::GetId => None,
        }
    }

    /// Length of the request's data in bytes.
    pub fn data_len(&self) -> u64 {
        self.request.as_ref().map_or(0, |r| r.data_len)
    }

    /// The path that the last step was sent by, to be kept.
    pub fn sent_path_arc(&self) -> Option<&Arc<Path>> {
        self.table.as_ref().and_then(|t| t.paths().get(self.sent_path))
    }

    /// The path in use.
    pub fn path(&self) -> Option<&Path> {
        self.table.as_ref().and_then(|t| t.paths().get(self.path)).map(|p| &**p)
    }

    /// Index of the path in use.
    pub fn path_index(&self) -> usize {
        self.path
    }

    /// Paths that have failed this request, as bits.
    pub fn tried(&self) -> u64 {
        self.tried
    }

    /// The path that a flush must visit next; other work may go anywhere.
    pub fn required_path(&self) -> Option<usize> {
        match self.operation() {
            Some(Operation::Flush) if self.to_flush != 0 => Some(self.to_flush.trailing_zeros() as usize),
            _ => None,
        }
    }

    /// Sends what is left down path `index`.
    pub fn set_path(&mut self, index: usize) {
        self.path = index;
        let path = self.table.as_ref().and_then(|t| t.paths().get(index));
        if let (Some(path), Work::Flush) = (path, self.work()) {
            path.ledger().begin_flush(&mut self.coverage);
        }
    }

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
        self.gather.iovecs().get(self.first..).unwrap_or_default()
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
                self.flush_owed = false;
                let finished = self.drop_flush_target();
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
            self.set_path(self.path);
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
        let block = self.table.as_ref().map_or(1, |t| u64::from(t.limits().logical_block_bytes));
        let whole = (self.offset + self.done + moved) / block * block;
        let done = whole.saturating_sub(self.offset).max(self.done);
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

    /// Moves the start of the iovecs by `bytes`, in place.
    fn cut_off(&mut self, bytes: u64) {
        let (mut first, mut bytes) = (self.first, usize::try_from(bytes).unwrap_or(usize::MAX));
        while let Some(vec) = self.gather.iovecs_mut().get_mut(first) {
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

    /// The path cannot zero in this way: the next best one. False if there is none, or it was a discard.
    fn fall_back(&mut self) -> bool {
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

    fn current_range(&self) -> Option<Range> {
        self.buffers.ranges.get(self.range).copied()
    }

    fn skip_empty_ranges(&mut self) {
        while self.current_range().is_some_and(|r| r.len == 0) {
            self.range += 1;
        }
    }

    fn begin_range(&mut self) {
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

    fn begin_zero_write(&mut self) {
        let Some(range) = self.current_range() else { return };
        let len = (range.len - self.range_done).min(ZEROS_PER_WRITE);
        (self.offset, self.len, self.done) = (range.offset + self.range_done, len, 0);
        self.first = 0;
        self.gather.zeros(usize::try_from(len).unwrap_or(0));
    }

    /// A flush visits every active path that carried a write since its last flush.
    fn plan_flush(&mut self) {
        let Some(table) = &self.table else { return };
        let bits = |wanted: &dyn Fn(&Path) -> bool| {
            let paths = table.paths().iter().enumerate();
            paths.filter(|(_, p)| wanted(p)).fold(0u64, |bits, (i, _)| bits | 1 << i)
        };
        let dirty = bits(&|p| p.ledger().is_dirty());
        self.to_flush = dirty & bits(&|p| p.is_active());
        // What a failed path carried reached the LUN (writes are direct): any path's flush covers it.
        self.flush_owed = dirty != 0;
    }

    /// A path that was to be flushed may have failed meanwhile: see [`Self::plan_flush`].
    fn skip_dead_flushes(&mut self) {
        let Some(table) = &self.table else { return };
        for (i, path) in table.paths().iter().enumerate() {
            if !path.is_active() {
                self.to_flush &= !(1 << i);
            }
        }
    }

    /// The path that a flush was on cannot do it. True if the flush is complete without it.
    pub fn drop_flush_target(&mut self) -> bool {
        self.to_flush &= !(1 << self.path);
        self.skip_dead_flushes();
        self.is_empty()
    }
}

fn to_usize(value: u64) -> Result<usize, OutsideMemory> {
    usize::try_from(value).map_err(|_| OutsideMemory)
}

#[cfg(test)]
mod tests;
