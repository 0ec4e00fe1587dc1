//! Several requests sent as one: adjacent on the disk, of one direction.
//!
//! The first of them leads: it carries the iovecs of all and stands for all while the I/O is under way. The others hang on
//! it in the order of their offsets, untouched, so that each can be answered by itself, or sent by itself after an error
//! that may concern one of them only.

use std::rc::Rc;

use super::{Transfer, to_usize};
use crate::gather::{IoVec, OutsideMemory, push};
use crate::memory::MapLease;
use crate::request::Operation;

/// What a leader has beside its own.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The iovecs of all members; used in place of its own while there are members.
    iovecs: Vec<IoVec>,
    /// The next member.
    next: Option<Box<Transfer>>,
    /// Members that hang on this one.
    nr_members: u32,
    /// Not to be merged: it is sent by itself since a run with it failed.
    is_alone: bool,
}

/// Where a request lies, for merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// Direction.
    pub is_write: bool,
    /// Iovecs that it takes.
    pub nr_iovecs: u32,
}

impl Transfer {
    /// Where the request lies, if it can be merged: data in whole blocks, in place, not tried before.
    pub fn span(&self) -> Option<Span> {
        let request = self.request.as_ref()?;
        let is_write = match request.operation {
            Operation::Read { .. } => false,
            Operation::Write { .. } => true,
            _ => return None,
        };
        let is_plain = self.len == request.data_len && self.done == 0 && !self.gather.is_bounced();
        let is_new = self.tried == 0 && self.troubled_since_ns == 0 && !self.run.is_alone;
        (is_plain && is_new && self.len != 0).then(|| Span {
            start: self.offset,
            end: self.offset + self.len,
            is_write,
            nr_iovecs: u32::try_from(self.gather.iovecs().len()).unwrap_or(u32::MAX),
        })
    }

    /// How far on the disk the data is moved: what lies before is done.
    pub fn done_until(&self) -> u64 {
        self.offset + self.done
    }

    /// Where its data ends on the disk.
    pub fn span_end(&self) -> u64 {
        self.offset + self.len
    }

    /// Whether what it writes is still to be made durable.
    pub fn owes_sync(&self) -> bool {
        self.sync_owed
    }

    /// Members beside this one.
    pub fn nr_members(&self) -> u32 {
        self.run.nr_members
    }

    /// This request and those that hang on it, in the order of their offsets.
    pub fn members(&self) -> impl Iterator<Item = &Transfer> {
        std::iter::successors(Some(self), |transfer| transfer.run.next.as_deref())
    }

    /// Makes this one the leader of `others`, which come in order of their offsets and join up. `iovecs` is room for
    /// those of all.
    pub fn lead(&mut self, others: impl Iterator<Item = Box<Transfer>>, mut iovecs: Vec<IoVec>) {
        debug_assert!(self.run.nr_members == 0 && self.done == 0);
        iovecs.clear();
        iovecs.extend_from_slice(self.gather.iovecs());
        let mut nr_members = 0;
        let mut len = self.len;
        let mut end = &mut self.run.next;
        for member in others {
            debug_assert!(member.offset == self.offset + len);
            member.gather.iovecs().iter().for_each(|v| push(&mut iovecs, v.iov_base.cast(), v.iov_len));
            len += member.len;
            // The guest may have turned its write cache off between the two.
            self.sync_owed |= member.sync_owed;
            nr_members += 1;
            end = &mut end.insert(member).run.next;
        }
        self.len = len;
        (self.run.iovecs, self.run.nr_members) = (iovecs, nr_members);
    }

    /// Takes the next member off.
    pub fn take_member(&mut self) -> Option<Box<Transfer>> {
        let mut member = self.run.next.take()?;
        self.run.next = member.run.next.take();
        self.run.nr_members -= 1;
        Some(member)
    }

    /// Room for iovecs that is not needed any more: none if it led nobody.
    pub fn take_room(&mut self) -> Option<Vec<IoVec>> {
        debug_assert!(self.run.nr_members == 0);
        (self.run.iovecs.capacity() != 0).then(|| std::mem::take(&mut self.run.iovecs))
    }

    /// After its members were taken off: this request alone, from its beginning.
    pub fn begin_alone(&mut self) {
        debug_assert!(self.run.nr_members == 0);
        self.run.is_alone = true;
        self.run.iovecs.clear();
        self.len = self.request.as_ref().map_or(0, |r| r.data_len);
        (self.done, self.first) = (0, 0);
        (self.tried, self.nr_rounds, self.nr_busy, self.nr_interrupted) = (0, 0, 0, 0);
    }

    /// The iovecs in use.
    pub(super) fn iovecs(&self) -> &[IoVec] {
        if self.run.nr_members == 0 { self.gather.iovecs() } else { &self.run.iovecs }
    }

    pub(super) fn iovecs_mut(&mut self) -> &mut [IoVec] {
        if self.run.nr_members == 0 { self.gather.iovecs_mut() } else { &mut self.run.iovecs }
    }

    /// Whether it may be merged again.
    pub(super) fn reset_run(&mut self) {
        debug_assert!(self.run.nr_members == 0);
        self.run.is_alone = false;
    }

    /// Whether its buffers are looked up in this map.
    pub fn is_in(&self, map: &Rc<MapLease>) -> bool {
        self.map.as_ref().is_some_and(|own| Rc::ptr_eq(own, map))
    }

    /// A path has come that asks for more alignment than it was made for: what does not have it is bounced.
    pub(super) fn ask_alignment(&mut self, mem_bytes: usize) {
        if mem_bytes <= self.align.mem_bytes {
            return;
        }
        self.align.mem_bytes = mem_bytes;
        let mut next = &mut self.run.next;
        while let Some(member) = next {
            member.align.mem_bytes = mem_bytes;
            next = &mut member.run.next;
        }
        if let Some(map) = self.map.clone() {
            // What was found in this memory before is found again.
            let found = self.remap(&map);
            debug_assert!(found.is_ok());
        }
    }

    /// Lets go of an old map while the transfer waits: its buffers, and those of its members, are looked up in the new one.
    ///
    /// # Errors
    /// Some of them are not there any more: the request (or run) is to be ended.
    pub fn remap(&mut self, map: &Rc<MapLease>) -> Result<(), OutsideMemory> {
        if self.run.nr_members == 0 {
            return self.remap_own(map);
        }
        let (len, done) = (self.len, self.done);
        self.len = self.request.as_ref().map_or(0, |r| r.data_len);
        (self.done, self.first) = (0, 0);
        let mut result = self.remap_own(map);
        let mut is_bounced = self.gather.is_bounced();
        self.run.iovecs.clear();
        self.run.iovecs.extend_from_slice(self.gather.iovecs());
        let mut next = &mut self.run.next;
        while let Some(member) = next {
            result = result.and(member.remap_own(map));
            is_bounced |= member.gather.is_bounced();
            for v in member.gather.iovecs() {
                push(&mut self.run.iovecs, v.iov_base.cast(), v.iov_len);
            }
            next = &mut member.run.next;
        }
        self.len = len;
        // What was read into a bounce buffer of before is gone with it.
        self.done = if is_bounced { 0 } else { done };
        let done = self.done;
        self.cut_off(done);
        result
    }

    fn remap_own(&mut self, map: &Rc<MapLease>) -> Result<(), OutsideMemory> {
        self.map = Some(Rc::clone(map));
        let found = self.look_up(map);
        if found.is_err() {
            // So that it is looked up again, and refused again, if it is sent by itself.
            self.map = None;
        }
        found
    }

    fn look_up(&mut self, map: &Rc<MapLease>) -> Result<(), OutsideMemory> {
        let Some(request) = &self.request else { return Ok(()) };
        let operation = request.operation;
        if !matches!(operation, Operation::Read { .. } | Operation::Write { .. }) || self.len == 0 {
            return Ok(());
        }
        let align = self.align;
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
}
