//! One request on its way: all that the kernel may touch until it answers, and how far the work has come.
//!
//! A transfer owns its buffers' map, its path and its bounce buffer, so nothing of it can go away while the
//! kernel works on it. Retrying keeps what was built. What comes next after each answer is decided here, without I/O.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use polypath_paths::failover::Work;
use polypath_paths::{Coverage, Path};
use polypath_selector::Ticket;

use crate::gather::{self, Alignment, Gather, IoVec, OutsideMemory};
use crate::lane::{Lane, Snapshot, View};
use crate::memory::MapLease;
use crate::merge::RunId;
use crate::request::{Buffers, Operation, Request, Status};

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

/// A request and its progress. Boxed once and reused.
#[derive(Debug, Default)]
pub struct Transfer {
    request: Option<Request>,
    /// Segments and ranges of the request.
    pub buffers: Buffers,
    gather: Gather,
    map: Option<Rc<MapLease>>,
    /// The view in which `path`, `tried` and `to_flush` count. Not held: see [`crate::lane`].
    view: Weak<View>,
    path: usize,
    /// The path in use.
    lane: Option<Rc<Lane>>,
    align: Alignment,
    /// Byte offset on the disk where the iovecs begin, and how much of them is to be moved and has been.
    offset: u64,
    len: u64,
    done: u64,
    /// First iovec with bytes left; what was moved of it is cut off.
    first: usize,
    /// Requests that are sent with this one, as one run: see [`run`].
    run: run::Run,
    /// Which range is being worked on, and how much of it is done (when zeros are written).
    range: usize,
    range_done: u64,
    zeroing: Option<zeroing::Zeroing>,
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
    /// What kind of step that is.
    pub sent_work: Work,
    /// When it was sent, in ns, and its bytes.
    pub sent_ns: u64,
    /// See `sent_ns`.
    pub sent_bytes: u64,
    /// Bytes of the disk that the step discards or zeroes without moving any.
    pub sent_range_bytes: u64,
    /// The path that it was sent by: a flush has moved on to its next one when its end is booked.
    pub sent_lane: Option<Rc<Lane>>,
    /// Its index in the view of then.
    pub sent_path: usize,
    /// The run that it is known by while it is under way.
    pub flight: Option<RunId>,
    /// When the request was taken from the ring, in ns.
    pub begun_ns: u64,
    /// When the request met its first path error, in ns; 0: none.
    pub troubled_since_ns: u64,
    /// Since when it is held, in ns; 0: it is not.
    pub held_since_ns: u64,
    /// The name under which its bytes are guarded against later writes.
    pub trouble: Cell<Option<u64>>,
    /// How often every path has refused it.
    pub nr_rounds: u32,
}

impl Transfer {
    /// Takes the request in. The segments and ranges are in `buffers` already.
    ///
    /// Fails if data lies outside guest memory; the request stays here and is to be ended with IOERR.
    pub fn begin(
        &mut self,
        request: Request,
        map: &Rc<MapLease>,
        snapshot: &Snapshot,
        write_through: bool,
        worker: usize,
    ) -> Result<(), OutsideMemory> {
        let operation = request.operation;
        let data_len = request.data_len;
        debug_assert!(self.request.is_none());
        self.request = Some(request);
        self.map = Some(Rc::clone(map));
        self.view = Rc::downgrade(snapshot);
        self.lane = None;
        (self.len, self.done, self.first) = (0, 0, 0);
        (self.range, self.range_done, self.zeroing) = (0, 0, None);
        (self.tried, self.nr_busy, self.nr_interrupted) = (0, 0, 0);
        (self.troubled_since_ns, self.held_since_ns, self.nr_rounds) = (0, 0, 0);
        debug_assert!(self.trouble.get().is_none());
        self.reset_run();
        (self.to_flush, self.flush_owed) = (0, false);
        self.sync_owed = write_through && !matches!(operation, Operation::Read { .. } | Operation::Flush);
        self.worker = worker;
        let limits = snapshot.limits();
        let align = Alignment {
            mem_bytes: limits.mem_align_bytes as usize,
            block_bytes: limits.logical_block_bytes as usize,
        };
        self.align = align;
        let room = gather::room();
        match operation {
            Operation::Read { offset } => {
                let block = u64::from(limits.logical_block_bytes);
                let skip = offset % block;
                let whole = (skip + data_len).next_multiple_of(block);
                (self.offset, self.len) = (offset - skip, whole);
                if whole == data_len {
                    self.gather.map_within(map.map(), &self.buffers.segments, align, room)?;
                } else {
                    let (skip, whole) = (to_usize(skip)?, to_usize(whole)?);
                    if whole > room {
                        return Err(OutsideMemory);
                    }
                    self.gather.surround(map.map(), &self.buffers.segments, skip, whole, align)?;
                }
            }
            Operation::Write { offset } => {
                (self.offset, self.len) = (offset, data_len);
                self.gather.map_within(map.map(), &self.buffers.segments, align, room)?;
                if self.gather.is_bounced() {
                    self.gather.copy_in(map.map())?;
                }
            }
            Operation::Flush => self.plan_flush(snapshot),
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
        (self.lane, self.sent_lane) = (None, None);
        Some((request, result.0, result.1))
    }

    /// What the guest asks for; None between two requests.
    pub fn operation(&self) -> Option<Operation> {
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
            Some(Operation::WriteZeroes) if self.zeroing == Some(zeroing::Zeroing::Write) => Work::Write,
            Some(Operation::WriteZeroes) => Work::WriteZeroes,
        }
    }

    /// Whether a write, discard or write-zeroes has nothing left but to be made durable.
    pub fn is_all_written(&self) -> bool {
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

    /// Whether the transfer goes by this snapshot.
    pub fn is_of(&self, snapshot: &Snapshot) -> bool {
        std::ptr::eq(self.view.as_ptr(), Rc::as_ptr(snapshot))
    }

    /// Goes by another view from now on: what refused it is asked again. Not while a step is under way.
    pub fn rebase(&mut self, snapshot: &Snapshot) {
        if self.is_of(snapshot) {
            return;
        }
        self.view = Rc::downgrade(snapshot);
        self.tried = 0;
        self.ask_alignment(snapshot.limits().mem_align_bytes as usize);
        if self.work() == Work::Flush && !self.is_all_written() {
            self.plan_flush(snapshot);
        }
    }

    /// What its buffers are aligned to.
    pub fn alignment(&self) -> Alignment {
        self.align
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
            Operation::Write { .. } => Some((self.offset, self.offset + self.len)),
            Operation::Discard | Operation::WriteZeroes => {
                let start = self.buffers.ranges.iter().map(|r| r.offset).min()?;
                let end = self.buffers.ranges.iter().map(|r| r.offset + r.len).max()?;
                Some((start, end))
            }
            Operation::Read { .. } | Operation::Flush | Operation::GetId => None,
        }
    }

    /// Length of the data in bytes, of all members.
    pub fn data_len(&self) -> u64 {
        self.members().filter_map(|member| member.request.as_ref()).map(|r| r.data_len).sum()
    }

    /// The path in use.
    pub fn lane(&self) -> Option<&Rc<Lane>> {
        self.lane.as_ref()
    }

    /// The path in use.
    pub fn path(&self) -> Option<&Path> {
        self.lane.as_ref().map(|lane| &**lane.path())
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

    /// Sends what is left down path `index` of the view.
    pub fn set_path(&mut self, index: usize) {
        self.path = index;
        // Without its view it is rebased before it is sent.
        self.lane = self.view.upgrade().and_then(|view| view.lane(index).map(Rc::clone));
        self.begin_sync();
    }

    /// What is written from now on, this sync does not cover.
    fn begin_sync(&mut self) {
        if let (Some(lane), Work::Flush) = (&self.lane, self.work()) {
            lane.path().ledger().begin_flush(&mut self.coverage);
        }
    }
}

fn to_usize(value: u64) -> Result<usize, OutsideMemory> {
    usize::try_from(value).map_err(|_| OutsideMemory)
}

mod flush;
mod run;
mod steps;
mod zeroing;

pub use run::{Span, SpanKind};

#[cfg(test)]
mod tests;
