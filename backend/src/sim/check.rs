//! What must hold whenever the worker goes to sleep.

use std::sync::Arc;
use std::time::Duration;

use polypath_paths::text::NoPathRetry;
use polypath_selector::PathLoad;

use super::ports::port_of;
use super::world::{Ended, World};

impl World {
    /// The worker waits (with this timeout), or has ended.
    pub(crate) fn end_of_turn(&mut self, wait: Option<Option<Duration>>) {
        assert!(self.events.is_empty() && self.answered.is_empty(), "an event was left lying");
        self.control.assert_answered();
        self.check_calls();
        self.check_paths();
        self.mark_returned();
        match wait {
            Some(None) => self.check_sleep_for_ever(),
            Some(Some(_)) if self.is_overdue() => {
                panic!("requests wait for a path after their time: since {:?}", self.no_path_ns);
            }
            Some(Some(timeout)) if timeout != Duration::ZERO && self.control.is_served() => {
                assert!(self.driver.is_kick_armed() || self.control.kick, "sleeps without an armed kick");
            }
            _ => {}
        }
    }

    /// The guest is called when it asked for it, once per turn at most, and not when it did not.
    fn check_calls(&mut self) {
        let nr = self.control.drain_calls();
        self.control.nr_calls += nr;
        self.control.nr_calls_since_armed += nr;
        let (is_due, is_owed) = (self.driver.is_call_due(), std::mem::take(&mut self.control.call_owed));
        let was_due = std::mem::take(&mut self.control.was_call_due);
        if self.control.has_call {
            assert!(nr <= 1, "called {nr} times in one turn");
            assert!(nr == 1 || !is_owed, "not called for a new descriptor");
            let was_called = self.control.nr_calls_since_armed != 0;
            assert!(!is_due || was_called, "the guest waits for a call that does not come");
            assert!(nr == 0 || is_due || was_due || is_owed, "called without a wish");
        }
    }

    /// Paths are taken out for errors that speak of them, for all of those, and for nothing else.
    fn check_paths(&mut self) {
        for path in self.must_be_out.drain(..) {
            assert!(!path.is_active(), "path {} had an error and is in use", port_of(&path));
        }
        for path in self.table().paths() {
            let port = port_of(path);
            assert!(path.is_active() || self.may_be_out[port], "path {port} is out for no reason");
        }
        self.note_no_path();
    }

    /// Keeps count of the time without a path, any or one of them.
    pub(crate) fn note_no_path(&mut self) {
        let active = self.active_ports();
        for (port, last_out) in self.last_out.iter_mut().enumerate() {
            if active & 1 << port == 0 {
                *last_out = self.clock;
            }
        }
        match (active, self.no_path_ns) {
            (0, None) => self.no_path_ns = Some(self.now_ns),
            (0, Some(_)) => {}
            _ => {
                self.no_path_ns = None;
                // The monitor is rung for every failure and says so at once.
                self.disk.map().note_path_exists();
            }
        }
    }

    /// Whether requests wait although no path has been there for longer than they are to wait.
    fn is_overdue(&self) -> bool {
        let (NoPathRetry::Seconds(s), Some(since_ns)) = (self.profile.policy, self.no_path_ns) else {
            return false;
        };
        // A busy path, or one that was asked again, is given some time more.
        let until_ns = since_ns + u64::from(s.get()) * 1_000_000_000 + 1_000_000_000;
        let has_stuck = self.outstanding.values().any(|o| o.is_stuck);
        self.now_ns > until_ns
            && self.control.is_served()
            && !has_stuck
            && !self.control.kick
            && self.nr_with_device() > self.nr_in_flight()
    }

    /// How things stood for the requests that were returned in this turn, so far.
    pub(crate) fn mark_returned(&mut self) {
        if !self.control.in_memory {
            self.control.unreachable_until = self.clock;
        }
        let ended = Ended {
            active_before: self.control.active_before,
            active: self.active_ports(),
            stopping: self.control.stopping,
            ns: self.now_ns,
            no_path_ns: self.no_path_ns,
        };
        for head in self.driver.used_heads() {
            if let Some(request) = self.outstanding.get_mut(&head)
                && request.ended.is_none()
            {
                request.ended = Some(ended);
                request.is_stuck = false;
            }
        }
    }

    /// Nothing is delayed: whatever the worker has taken is with the kernel, or waits for a path or for another write;
    /// and of what comes it will hear.
    fn check_sleep_for_ever(&mut self) {
        let (nr_flight, nr_with_device) = (self.nr_in_flight(), self.nr_with_device());
        assert!(nr_flight <= nr_with_device, "more in flight than was taken");
        assert!(!self.control.stopping || nr_flight != 0, "a stop that waits for nothing");
        let is_news_coming = self.control.wake || self.is_monitor_due();
        if self.control.is_served() && !self.control.kick {
            assert!(self.driver.is_kick_armed(), "sleeps without an armed kick");
            self.driver.all_taken();
            let may_hold = self.active_ports() == 0 && self.profile.policy == NoPathRetry::Queue;
            let may_block = self.outstanding.values().any(|o| o.is_stuck);
            // What waits for room on a path hears of it when something comes back.
            let may_queue =
                nr_flight != 0 && self.disk.tuning().path_depth < u32::from(self.profile.ring_size);
            if !may_hold && !may_block && !is_news_coming && !may_queue {
                assert_eq!(nr_with_device, nr_flight, "sleeps with requests not taken, or lost");
            }
            if may_hold && !may_block && !may_queue && !self.profile.gaps.held {
                let shown = self.disk.map().held().nr_requests as usize;
                assert_eq!(shown, nr_with_device - nr_flight, "shown as held");
            }
        }
        if nr_with_device == 0 && !is_news_coming {
            let held = self.old_maps.iter().filter(|map| map.strong_count() != 0).count();
            assert_eq!(held, 0, "maps that were replaced are held without a request");
            self.old_maps.clear();
            let held = self.old_paths.iter().filter(|path| path.strong_count() != 0).count();
            // A load that never ends holds its path as well.
            assert!(
                held == 0 || self.profile.gaps.load,
                "paths that left the table are held without a request"
            );
            self.old_paths.clear();
        }
        if nr_flight == 0 && !self.profile.gaps.load {
            for path in self.table().paths() {
                assert_eq!(path.gauges().sum(), PathLoad::default(), "load of an idle path");
            }
        }
    }

    /// The worker has heard of paths that are out: what changes the disk and is still on its way there is stuck.
    pub(crate) fn note_stuck(&mut self) {
        for op in self.ops.iter().chain(&self.answered) {
            for head in &op.heads {
                if let Some(request) = self.outstanding.get_mut(head)
                    && request.plan.what.is_change()
                {
                    request.is_stuck |= !op.path.is_active();
                }
            }
        }
    }

    /// Whether this is a path of the table.
    pub(crate) fn is_in_table(&self, path: &Arc<polypath_paths::Path>) -> bool {
        self.table().paths().iter().any(|p| Arc::ptr_eq(p, path))
    }
}
