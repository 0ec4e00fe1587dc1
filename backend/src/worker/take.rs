//! Taking requests from the ring.

use std::rc::Rc;

use vm_memory::Bytes as _;

use super::Worker;
use crate::engine::Engine;
use crate::logging::LineLimit;
use crate::request::{self, Operation, Segment, Status};
use crate::transfer::Transfer;
use crate::vring::Pop;

/// Lines about guests, of all queues together.
static LINES: LineLimit = LineLimit::new();

/// Broken rules after which a queue gives way to the others.
const FAULTS_MAX: u64 = 256;

/// Requests in a row that are refused as they stand after which it does as well: none of them costs the guest any I/O.
const REFUSED_MAX: u32 = 1024;

/// Kicks after which it does as well, without anything to take or to answer since the first of them.
const IDLE_KICKS_MAX: u32 = 4096;

/// Kicks for nothing.
#[derive(Debug, Default)]
pub(super) struct IdleKicks {
    /// Since something was taken or answered.
    nr: u32,
}

impl IdleKicks {
    /// Notes a turn with a kick, with work, or with both; true if there were too many kicks. A lawful driver may kick for what
    /// was found without it, each time and late; but then there is work in between.
    pub(super) fn note(&mut self, kicked: bool, has_worked: bool) -> bool {
        match (kicked, has_worked) {
            (_, true) => self.nr = 0,
            (true, false) => self.nr = self.nr.saturating_add(1),
            (false, false) => {}
        }
        kicked && self.nr == IDLE_KICKS_MAX
    }
}

impl<E: Engine> Worker<E> {
    /// Takes what is available, at most a ring's worth.
    pub(super) fn take_requests(&mut self) {
        for nr_taken in 0..self.vring.size() {
            if self.is_crowded() {
                return;
            }
            match self.vring.pop(self.map.map()) {
                Pop::Empty => return,
                Pop::Head(head) => {
                    if nr_taken == 0 {
                        self.vring.suppress_kicks(self.map.map());
                    }
                    self.take(head);
                }
                Pop::BadHead(head) => self.guest_fault(format_args!("head {head} cannot be made available")),
                Pop::Broken => {
                    self.guest_fault(format_args!(
                        "the available index is impossible; the queue is left alone"
                    ));
                    if let Some(error) = &self.config.error {
                        error.notify();
                    }
                    // Nothing that a kick could mean will be looked at any more.
                    self.engine.watch_kick(None);
                }
            }
        }
    }

    /// Counts a broken rule; only the first is logged, so that a guest cannot fill the log.
    pub(super) fn guest_fault(&mut self, what: std::fmt::Arguments<'_>) {
        self.nr_guest_faults += 1;
        if self.nr_guest_faults == 1 && LINES.allows(self.now_ns) {
            log::warn!(
                "guest broke a rule (later ones are only counted): queue={} rule={what}",
                self.config.index
            );
        }
        if self.nr_guest_faults == FAULTS_MAX {
            self.give_way("goes on breaking rules");
        }
    }

    /// A queue whose guest is no good driver gets the time that the others leave, until it is started anew.
    pub(super) fn give_way(&mut self, why: &str) {
        if std::mem::replace(&mut self.gives_way, true) {
            return;
        }
        self.engine.give_way();
        if !LINES.allows(self.now_ns) {
            return;
        }
        log::warn!("the queue gives way to others: queue={} reason=guest {why}", self.config.index);
    }

    pub(super) fn take(&mut self, head: u16) {
        let mut transfer = self.pool.pop().unwrap_or_default();
        if let Err(error) = self.vring.read_chain(self.map.map(), head, &mut self.chain) {
            self.guest_fault(format_args!("{error}"));
            self.pool.push(transfer);
            return self.answer(request::unreadable(head), 0, Status::IoErr);
        }
        let limits = self.config.disk.limits();
        let (request, status) =
            request::parse(self.map.map(), head, &self.chain, &limits, &mut transfer.buffers);
        if let Some(status) = status {
            self.pool.push(transfer);
            self.nr_refused = self.nr_refused.saturating_add(1);
            if self.nr_refused == REFUSED_MAX {
                self.give_way("asks for nothing that can be done");
            }
            return self.answer(request, 0, status);
        }
        self.nr_refused = 0;
        if request.operation == Operation::GetId {
            let written = self.write_id(&transfer.buffers.segments);
            self.pool.push(transfer);
            return match written {
                Some(nr_bytes) => self.answer(request, nr_bytes, Status::Ok),
                None => self.answer(request, 0, Status::IoErr),
            };
        }
        let write_through = self.config.disk.is_write_through(self.config.features);
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.begun_ns = self.now_ns;
        match transfer.begin(request, &self.map, &snapshot, write_through, self.config.index) {
            Err(_) => self.finish(transfer, Status::IoErr),
            Ok(()) if transfer.is_empty() => self.finish(transfer, Status::Ok),
            Ok(()) => self.enqueue(transfer),
        }
    }

    /// Lets a request wait where it can merge; what cannot merge goes out.
    pub(super) fn enqueue(&mut self, transfer: Box<Transfer>) {
        match transfer.span() {
            Some(span) => self.queue.add(transfer, span, self.now_ns),
            None => {
                if transfer.is_flush() {
                    self.queue.seal();
                }
                self.dispatch(transfer);
            }
        }
    }

    /// The disk's serial number, as far as the guest's buffer goes.
    pub(super) fn write_id(&self, segments: &[Segment]) -> Option<u64> {
        let id = self.config.disk.id();
        let mut rest = &id[..];
        for segment in segments {
            let here = rest.len().min(usize::try_from(segment.len).unwrap_or(usize::MAX));
            let (part, left) = rest.split_at(here);
            self.map.map().write_slice(part, segment.addr).ok()?;
            rest = left;
        }
        Some((id.len() - rest.len()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kicks_without_any_work_between_them_are_too_many() {
        let mut kicks = IdleKicks::default();
        let storm =
            |kicks: &mut IdleKicks| (0..3 * IDLE_KICKS_MAX).filter(|_| kicks.note(true, false)).count();
        assert_eq!(storm(&mut kicks), 1, "said once");
        // Each request is found before its kick comes.
        for _ in 0..2 * IDLE_KICKS_MAX {
            assert!(!kicks.note(false, true) && !kicks.note(true, false) && !kicks.note(false, false));
        }
        assert_eq!(storm(&mut kicks), 1);
    }
}
