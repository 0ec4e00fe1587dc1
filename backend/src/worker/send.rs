//! Sending: what goes out now, and by which path.

use std::rc::Rc;

use polypath_selector::Direction;

use super::Worker;
use crate::dispatch::Choice;
use crate::engine::Engine;
use crate::merge::RunId;
use crate::request::Status;
use crate::transfer::{SpanKind, Transfer};

/// Transfers that go out before what has come back is looked at: a quarter of what waits, within these bounds. A path that
/// answers during the submission would otherwise keep all answers until the last request is done, and the guest without
/// work for as long.
const CHUNK_MIN: usize = 8;
const CHUNK_MAX: usize = 32;

impl<E: Engine> Worker<E> {
    /// Sends what waits, as far as the paths take it and at most a chunk at a time.
    pub(super) fn send_queued(&mut self) {
        // One size for as long as there is more: pieces of what is left would become smaller and smaller.
        let chunk = (self.queue.len() / 4).clamp(CHUNK_MIN, CHUNK_MAX);
        self.chunk = if self.has_more { self.chunk.max(chunk) } else { chunk };
        self.has_more = false;
        if self.queue.is_empty() {
            return;
        }
        if self.stopping {
            self.queue.expire_all();
        } else {
            self.queue.expire(self.now_ns);
        }
        self.dispatcher.catch_up();
        let mut nr_sent = 0;
        while let Some((run, bytes, kind)) = self.queue.first() {
            if nr_sent == self.chunk && !self.stopping {
                self.has_more = true;
                return;
            }
            nr_sent += 1;
            let (direction, bytes) = match kind {
                SpanKind::Read => (Direction::Read, bytes),
                SpanKind::Write => (Direction::Write, bytes),
                // No data moves.
                SpanKind::Discard | SpanKind::Zero | SpanKind::ZeroUnmap => (Direction::Other, 0),
            };
            let choice = self.dispatcher.choose_open(bytes, direction, self.now_ns);
            // While the ring stops nothing waits for room.
            if choice == Choice::Full && !self.stopping {
                return;
            }
            let Some(leader) = self.assemble(run) else { continue };
            match choice {
                Choice::Path(index) => {
                    if let Some(mut leader) = self.admit(leader) {
                        leader.set_path(index);
                        self.send(leader);
                    }
                }
                Choice::Full | Choice::Nowhere => self.dispatch(leader),
            }
        }
    }

    /// Makes one transfer of a run.
    pub(super) fn assemble(&mut self, run: RunId) -> Option<Box<Transfer>> {
        let mut requests = self.queue.take(run);
        let mut leader = requests.next()?;
        if !requests.is_empty() {
            leader.lead(requests, self.rooms.pop().unwrap_or_default());
        }
        leader.rebase(self.dispatcher.snapshot());
        Some(leader)
    }

    /// Passes on what may be sent now. Its memory may be gone, or it would overtake a write that is stuck.
    pub(super) fn admit(&mut self, mut transfer: Box<Transfer>) -> Option<Box<Transfer>> {
        // Memory may have changed while it was on a path, and it may have to wait now.
        if !transfer.is_in(&self.map) && transfer.remap(&self.map).is_err() {
            self.finish(transfer, Status::IoErr);
            return None;
        }
        if transfer.trouble.get().is_none()
            && let Some((start, end)) = transfer.changes()
            && self.map_state().must_wait(start, end)
        {
            if self.stopping {
                self.give_up(transfer);
            } else {
                self.land(&mut transfer);
                self.blocked.push(transfer);
            }
            return None;
        }
        Some(transfer)
    }

    /// Sends a transfer down the path that it needs, or that the selector chooses; or lets it wait.
    pub(super) fn dispatch(&mut self, transfer: Box<Transfer>) {
        let Some(mut transfer) = self.admit(transfer) else { return };
        self.dispatcher.catch_up();
        transfer.rebase(self.dispatcher.snapshot());
        if transfer.is_flush() && transfer.is_empty() {
            // A flush that has nothing to do by the table of now.
            return self.finish(transfer, Status::Ok);
        }
        let path = match transfer.required_path() {
            Some(path) => Some(path),
            None => self.dispatcher.choose(&transfer, self.now_ns),
        };
        match path {
            Some(path) => {
                transfer.held_since_ns = 0;
                transfer.set_path(path);
                self.send(transfer);
            }
            None => self.without_path(transfer),
        }
    }

    pub(super) fn send(&mut self, mut transfer: Box<Transfer>) {
        if transfer.flight.is_none()
            && let Some(span) = transfer.flight_span()
        {
            transfer.flight = self.queue.fly(span);
        }
        self.dispatcher.start_io(&mut transfer, self.now_ns);
        self.engine.start(transfer);
    }

    /// The transfer is under way no more.
    pub(super) fn land(&mut self, transfer: &mut Transfer) {
        if let Some(flight) = transfer.flight.take() {
            self.queue.land(flight);
        }
    }

    pub(super) fn send_delayed(&mut self) {
        if self.delayed.is_empty() {
            return;
        }
        let now_ns = self.now_ns;
        while let Some(index) = self.delayed.iter().position(|(due_ns, _)| *due_ns <= now_ns) {
            let (_, mut transfer) = self.delayed.swap_remove(index);
            if transfer.troubled_since_ns == 0 && transfer.path().is_some_and(|path| path.is_active()) {
                self.send(transfer);
            } else {
                // The path went while the transfer waited for it.
                let snapshot = Rc::clone(self.dispatcher.snapshot());
                transfer.rebase(&snapshot);
                self.dispatch(transfer);
            }
        }
    }
}
