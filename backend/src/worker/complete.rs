//! What comes back: the next step, another path, or the answer to the guest.

use std::rc::Rc;

use polypath_paths::stats::IoKind;
use polypath_selector::Outcome;

use super::Worker;
use crate::engine::Engine;
use crate::memory::GuestAccess as _;
use crate::request::{Operation, Request, Status};
use crate::transfer::{Next, Transfer};

impl<E: Engine> Worker<E> {
    pub(super) fn completed(&mut self, mut transfer: Box<Transfer>, result: i32) {
        let next = transfer.complete(result);
        let outcome = match next {
            Next::Elsewhere(_) => Outcome::PathError,
            _ if result >= 0 => Outcome::Success,
            _ => Outcome::TargetError,
        };
        if result >= 0
            && transfer.changes().is_some()
            && !(transfer.is_of(self.dispatcher.snapshot()) && self.dispatcher.is_up_to_date())
        {
            // Its path may have left the table, and flushes go by the table.
            self.dispatcher.note_foreign_write();
        }
        self.dispatcher.end_io(&mut transfer, self.now_ns, outcome);
        match next {
            Next::Finished(status) => self.finish(transfer, status),
            Next::Again if transfer.is_flush() => self.go_on_flushing(transfer),
            Next::Again => {
                self.stats().nr_retries.add_one();
                self.send(transfer);
            }
            Next::Later(wait_ms) => {
                self.stats().nr_retries.add_one();
                let due_ns = self.now_ns + wait_ms * 1_000_000;
                self.delayed.push((due_ns, transfer));
            }
            Next::Elsewhere(errno) => self.fail_over(transfer, errno),
            Next::AskOthers(status) => {
                transfer.note_tried();
                // The table may have changed meanwhile, and a choice is a place in the one of now.
                let snapshot = Rc::clone(self.dispatcher.snapshot());
                transfer.rebase(&snapshot);
                match self.dispatcher.choose(&transfer, self.now_ns) {
                    Some(path) => {
                        transfer.set_path(path);
                        self.send(transfer);
                    }
                    None => self.finish(transfer, status),
                }
            }
        }
    }

    /// A flush has a path more to visit, by the table of now: one that was removed meanwhile is none of them.
    pub(super) fn go_on_flushing(&mut self, mut transfer: Box<Transfer>) {
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.rebase(&snapshot);
        if transfer.is_empty() { self.finish(transfer, Status::Ok) } else { self.dispatch(transfer) }
    }

    pub(super) fn fail_over(&mut self, mut transfer: Box<Transfer>, errno: i32) {
        let now_ns = self.now_ns;
        self.stats().nr_retries.add_one();
        // An EIO that follows this request from path to path may be its own (a bad sector that the storage reports
        // so): the path is probed before it is taken out. All other path errors speak of the path.
        match transfer.path() {
            Some(path) if errno == libc::EIO && transfer.troubled_since_ns != 0 => {
                path.suspect();
                self.map_state().ring();
            }
            _ => self.dispatcher.fail_path(&transfer, errno, now_ns),
        }
        transfer.note_refusal(now_ns);
        if transfer.trouble.get().is_none()
            && let Some((start, end)) = transfer.changes()
        {
            transfer.trouble.set(Some(self.map_state().begin_trouble(start, end)));
        }
        if transfer.is_flush() {
            transfer.flush_target_failed();
        }
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.rebase(&snapshot);
        self.dispatch(transfer);
        if !self.held.is_empty() {
            self.show_held();
        }
    }

    /// The ring stops, and this one cannot go on: it fails, or waits for the next start.
    pub(super) fn give_up(&mut self, mut transfer: Box<Transfer>) {
        if !self.keeps_waiting || !self.vring.is_tracked() {
            return self.finish(transfer, Status::IoErr);
        }
        self.land(&mut transfer);
        if let Some(id) = transfer.trouble.take() {
            self.map_state().end_trouble(id);
        }
        self.leave(&mut transfer);
        while let Some(mut member) = transfer.take_member() {
            self.leave(&mut member);
            self.pool.push(member);
        }
        if let Some(room) = transfer.take_room() {
            self.rooms.push(room);
        }
        self.pool.push(transfer);
    }

    /// Lets go of a request that stays in flight.
    pub(super) fn leave(&mut self, transfer: &mut Transfer) {
        if let Some((request, ..)) = transfer.end(Status::IoErr) {
            let (head, _) = request.into_head();
            self.vring.leave(self.map.map(), head);
        }
    }

    pub(super) fn finish(&mut self, mut transfer: Box<Transfer>, status: Status) {
        self.land(&mut transfer);
        // What is lost when a sync fails is nobody's in particular, and another sync would not say so again.
        if transfer.nr_members() != 0 && status != Status::Ok && !transfer.is_all_written() {
            return self.send_apart(transfer);
        }
        if let Some(id) = transfer.trouble.take() {
            self.map_state().end_trouble(id);
        }
        self.end(&mut transfer, status, false);
        while let Some(mut member) = transfer.take_member() {
            self.end(&mut member, status, true);
            self.pool.push(member);
        }
        if let Some(room) = transfer.take_room() {
            self.rooms.push(room);
        }
        self.pool.push(transfer);
    }

    /// Ends one request, and counts it: with an I/O of its own, or as one that went with another.
    fn end(&mut self, transfer: &mut Transfer, status: Status, is_merged: bool) {
        let kind = kind_of(transfer.operation());
        let begun_ns = transfer.begun_ns;
        if let Some((request, nr_bytes, status)) = transfer.end(status) {
            match status {
                Status::Ok => {
                    let ns = self.now_ns.saturating_sub(begun_ns);
                    let bytes = match kind {
                        IoKind::Discard => transfer.own_range_bytes(),
                        _ => request.data_len,
                    };
                    match is_merged {
                        false => self.stats().io.record(kind, 1, bytes, ns),
                        true => self.stats().io.record_merged(kind, bytes, ns),
                    }
                }
                _ => self.stats().io.record_error(kind),
            }
            self.answer(request, nr_bytes, status);
        }
    }

    /// A merged run failed for a reason that may be one member's: each goes out by itself.
    pub(super) fn send_apart(&mut self, mut leader: Box<Transfer>) {
        let mut pieces = Vec::new();
        let mut is_moved = vec![leader.has_moved_own()];
        while let Some(member) = leader.take_member() {
            is_moved.push(leader.has_moved(&member));
            pieces.push(member);
        }
        leader.begin_alone();
        if let Some(room) = leader.take_room() {
            self.rooms.push(room);
        }
        let (trouble, since_ns) = (leader.trouble.take(), leader.troubled_since_ns);
        pieces.insert(0, leader);
        for piece in &mut pieces {
            piece.begin_alone();
            piece.rebase(self.dispatcher.snapshot());
            piece.troubled_since_ns = since_ns;
            if let (Some(_), Some((start, end))) = (trouble, piece.changes()) {
                piece.trouble.set(Some(self.map_state().begin_trouble(start, end)));
            }
        }
        if let Some(id) = trouble {
            self.map_state().end_trouble(id);
        }
        for (piece, is_moved) in pieces.into_iter().zip(is_moved) {
            match is_moved && !piece.owes_sync() {
                true => self.finish(piece, Status::Ok),
                false => self.dispatch(piece),
            }
        }
    }

    /// Returns a request to the guest: status byte, used entry.
    pub(super) fn answer(&mut self, request: Request, nr_bytes: u64, status: Status) {
        let (head, status_addr) = request.into_head();
        let map = self.map.map();
        let written = status_addr.is_some_and(|addr| map.write_at(status.byte(), addr).is_some());
        let len = if written { u32::try_from(nr_bytes + 1).unwrap_or(u32::MAX) } else { 0 };
        self.vring.push_used(map, head, len);
    }
}

fn kind_of(operation: Option<Operation>) -> IoKind {
    match operation {
        Some(Operation::Write { .. }) => IoKind::Write,
        Some(Operation::Flush) => IoKind::Flush,
        Some(Operation::Discard | Operation::WriteZeroes) => IoKind::Discard,
        Some(Operation::Read { .. } | Operation::GetId) | None => IoKind::Read,
    }
}
