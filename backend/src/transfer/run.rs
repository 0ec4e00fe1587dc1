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
    /// Own length of a range that stands for those of all members; 0: it leads no ranges.
    range_len: u64,
    /// Not to be merged: it is sent by itself since a run with it failed.
    is_alone: bool,
}

/// What can be merged with its like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SpanKind {
    /// Data to the guest.
    Read,
    /// Data to the disk.
    Write,
    /// The content does not matter any more.
    Discard,
    /// To read as zeros, with the space kept.
    Zero,
    /// To read as zeros; the space may go.
    ZeroUnmap,
}

/// Where a request lies, for merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// What is merged with this one.
    pub kind: SpanKind,
    /// Iovecs that it takes.
    pub nr_iovecs: u32,
}

impl Transfer {
    /// Where the request lies, if it can be merged: data in whole blocks, in place, or one range; not tried before.
    pub fn span(&self) -> Option<Span> {
        let request = self.request.as_ref()?;
        let is_new = self.tried == 0 && self.troubled_since_ns == 0 && !self.run.is_alone;
        if !is_new {
            return None;
        }
        let kind = match request.operation {
            Operation::Read { .. } => SpanKind::Read,
            Operation::Write { .. } => SpanKind::Write,
            Operation::Discard | Operation::WriteZeroes => return self.range_span(request.operation),
            Operation::Flush | Operation::GetId => return None,
        };
        let is_plain = self.len == request.data_len && self.done == 0 && !self.gather.is_bounced();
        (is_plain && self.len != 0).then(|| Span {
            start: self.offset,
            end: self.offset + self.len,
            kind,
            nr_iovecs: u32::try_from(self.gather.iovecs().len()).unwrap_or(u32::MAX),
        })
    }

    /// The only range of a discard or write-zeroes that has one.
    fn range_span(&self, operation: Operation) -> Option<Span> {
        let is_begun = self.range_done != 0 || self.len != 0;
        let mut ranges = self.buffers.ranges.iter().filter(|range| range.len != 0);
        let (range, None, false) = (ranges.next()?, ranges.next(), is_begun) else { return None };
        let kind = match operation {
            Operation::Discard => SpanKind::Discard,
            _ if range.unmap => SpanKind::ZeroUnmap,
            _ => SpanKind::Zero,
        };
        Some(Span { start: range.offset, end: range.offset + range.len, kind, nr_iovecs: 0 })
    }

    /// Where it lies with its members, as it is about to be sent for the first time: what follows may wait for it.
    pub fn flight_span(&self) -> Option<Span> {
        if self.run.nr_members == 0 || self.leads_ranges() {
            return self.span();
        }
        let kind = match self.operation()? {
            Operation::Write { .. } => SpanKind::Write,
            _ => SpanKind::Read,
        };
        let is_new = self.done == 0 && self.tried == 0 && self.troubled_since_ns == 0;
        is_new.then(|| Span { start: self.offset, end: self.offset + self.len, kind, nr_iovecs: 0 })
    }

    fn leads_ranges(&self) -> bool {
        self.run.range_len != 0
    }

    fn has_ranges(&self) -> bool {
        matches!(self.operation(), Some(Operation::Discard | Operation::WriteZeroes))
    }

    /// Bytes of the disk that the request itself discards or zeroes, without its members.
    pub fn own_range_bytes(&self) -> u64 {
        match self.run.range_len {
            0 => self.buffers.ranges.iter().map(|range| range.len).sum(),
            own => own,
        }
    }

    /// Whether a member's data is moved already; of ranges nobody knows, and they are done again.
    pub fn has_moved(&self, member: &Self) -> bool {
        !self.has_ranges() && member.offset + member.len <= self.offset + self.done
    }

    /// The same for the leader's own data.
    pub fn has_moved_own(&self) -> bool {
        !self.has_ranges() && self.request.as_ref().is_some_and(|request| request.data_len <= self.done)
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
        if self.has_ranges() {
            return self.lead_ranges(others, iovecs);
        }
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

    /// The same for ranges: that of the leader grows over those of the others.
    fn lead_ranges(&mut self, others: impl Iterator<Item = Box<Transfer>>, iovecs: Vec<IoVec>) {
        let Some(own) = self.current_range() else { return debug_assert!(false, "a span has a range") };
        let (mut len, mut nr_members) = (own.len, 0);
        let mut end = &mut self.run.next;
        for member in others {
            debug_assert!(member.current_range().is_some_and(|range| range.offset == own.offset + len));
            len += member.current_range().map_or(0, |range| range.len);
            self.sync_owed |= member.sync_owed;
            nr_members += 1;
            end = &mut end.insert(member).run.next;
        }
        (self.run.iovecs, self.run.nr_members, self.run.range_len) = (iovecs, nr_members, own.len);
        if let Some(range) = self.buffers.ranges.get_mut(self.range) {
            range.len = len;
        }
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
        if self.has_ranges() {
            let own_len = std::mem::take(&mut self.run.range_len);
            (self.range, self.zeroing) = (0, None);
            self.skip_empty_ranges();
            if let (1.., Some(range)) = (own_len, self.buffers.ranges.get_mut(self.range)) {
                range.len = own_len;
            }
            self.begin_range();
        }
        (self.tried, self.nr_rounds, self.nr_busy, self.nr_interrupted) = (0, 0, 0, 0);
    }

    /// The iovecs in use.
    pub(super) fn iovecs(&self) -> &[IoVec] {
        if self.run.nr_members == 0 || self.leads_ranges() { self.gather.iovecs() } else { &self.run.iovecs }
    }

    pub(super) fn iovecs_mut(&mut self) -> &mut [IoVec] {
        if self.run.nr_members == 0 || self.leads_ranges() {
            self.gather.iovecs_mut()
        } else {
            &mut self.run.iovecs
        }
    }

    /// Whether it may be merged again.
    pub(super) fn reset_run(&mut self) {
        debug_assert!(self.run.nr_members == 0);
        (self.run.is_alone, self.run.range_len) = (false, 0);
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
        if self.leads_ranges() {
            // Ranges were read from the guest before; what is written of them are our own zeros.
            let mut next = Some(&mut *self);
            while let Some(transfer) = next {
                transfer.map = Some(Rc::clone(map));
                next = transfer.run.next.as_deref_mut();
            }
            return Ok(());
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
