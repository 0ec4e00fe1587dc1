//! What has to wait: for a path, for a write that is stuck, for memory that changes.

use std::rc::Rc;

use polypath_paths::{Held, WithoutPath};

use super::{REFUSED_NS_MAX, REFUSED_WAIT_NS, Worker};
use crate::engine::Engine;
use crate::request::Status;
use crate::transfer::Transfer;

impl<E: Engine> Worker<E> {
    /// What waits here must not keep an old map: its end is waited for.
    pub(super) fn remap_waiting(&mut self) {
        let mut lost = Vec::new();
        let map = &self.map;
        let mut keep = |transfer: &mut Box<Transfer>| {
            let is_there = transfer.remap(map).is_ok();
            if !is_there {
                lost.push(std::mem::take(transfer));
            }
            is_there
        };
        self.held.retain_mut(&mut keep);
        self.blocked.retain_mut(&mut keep);
        self.delayed.retain_mut(|(_, transfer)| keep(transfer));
        for transfer in lost {
            self.finish(transfer, Status::IoErr);
        }
        for mut transfer in self.queue.drain() {
            match transfer.remap(&self.map) {
                Ok(()) => self.enqueue(transfer),
                Err(_) => self.finish(transfer, Status::IoErr),
            }
        }
    }

    /// No path is there, or every active one has refused this request.
    pub(super) fn without_path(&mut self, mut transfer: Box<Transfer>) {
        let now_ns = self.now_ns;
        if transfer.tried() != 0 && self.dispatcher.has_active_path() {
            // Every active path says no. Each is probed for that; if they prove well and say no again, it is the
            // request. With a path missing, the probes get some time first.
            let is_missing = self.dispatcher.has_failed_path();
            let waited_ns = now_ns.saturating_sub(transfer.troubled_since_ns);
            let is_over = match is_missing {
                true => {
                    transfer.nr_rounds >= 2 && waited_ns >= REFUSED_NS_MAX.min(self.map_state().retry_ns())
                }
                false => transfer.nr_rounds >= 1,
            };
            if is_over || self.stopping {
                return self.finish(transfer, Status::IoErr);
            }
            transfer.next_round();
            if is_missing {
                return self.delayed.push((now_ns + REFUSED_WAIT_NS, transfer));
            }
            return self.dispatch(transfer);
        }
        let verdict = self.map_state().without_path(now_ns, transfer.troubled_since_ns);
        match verdict {
            WithoutPath::Hold(until_ns) if !self.stopping => {
                if transfer.held_since_ns == 0 {
                    transfer.held_since_ns = now_ns;
                }
                self.held_until_ns = self.held_until_ns.into_iter().chain(until_ns).min();
                self.land(&mut transfer);
                self.held.push_back(transfer);
            }
            // Nothing may wait for a path while the ring stops.
            WithoutPath::Hold(_) => self.give_up(transfer),
            WithoutPath::Fail => self.finish(transfer, Status::IoErr),
        }
    }

    /// Looks again at what is held and blocked, in order, if there is a reason to.
    pub(super) fn send_waiting(&mut self) {
        if self.held.is_empty() && self.blocked.is_empty() {
            return;
        }
        let epoch = self.map_state().epoch();
        let due = self.held_until_ns.is_some_and(|until_ns| until_ns <= self.now_ns);
        if epoch == self.waiting_epoch && !due && !self.stopping {
            return;
        }
        self.waiting_epoch = epoch;
        self.held_until_ns = None;
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        for _ in 0..self.held.len() {
            if let Some(mut transfer) = self.held.pop_front() {
                transfer.rebase(&snapshot);
                self.dispatch(transfer);
            }
        }
        for mut transfer in std::mem::take(&mut self.blocked) {
            transfer.rebase(&snapshot);
            self.dispatch(transfer);
        }
        self.show_held();
    }

    pub(super) fn show_held(&mut self) {
        self.nr_held_shown = self.nr_held();
        let held = Held {
            nr_requests: self.nr_held_shown,
            bytes: self.held.iter().map(|t| t.data_len()).sum(),
            oldest_ns: self.held.iter().map(|t| t.held_since_ns).min().unwrap_or(0),
        };
        self.map_state().show_held(self.config.index, held);
    }

    /// Requests that are held.
    pub(super) fn nr_held(&self) -> u32 {
        self.held.iter().map(|transfer| 1 + transfer.nr_members()).sum()
    }

    /// Writes that are out on a path that has failed: later ones must not overtake them.
    pub(super) fn guard_stuck_writes(&self) {
        self.engine.visit(&mut |transfer| {
            if transfer.trouble.get().is_none()
                && transfer.path().is_some_and(|path| !path.is_active())
                && let Some((start, end)) = transfer.changes()
            {
                transfer.trouble.set(Some(self.map_state().begin_trouble(start, end)));
            }
        });
    }

    /// Tells the control loop, if it has asked, for how long the paths have owed their answers. What has come back by
    /// now is taken already, so a worker that was late itself blames no path.
    pub(super) fn look(&mut self) {
        let nr_looks = self.map_state().nr_looks();
        if nr_looks != self.nr_looks {
            self.nr_looks = nr_looks;
            self.dispatcher.show_oldest(self.engine.now_ns(), |each| self.engine.visit(each));
            self.map_state().ring();
        }
    }
}
