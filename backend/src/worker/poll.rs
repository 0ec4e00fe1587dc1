//! Looking for requests for a moment before sleeping, when nothing is under way.
//!
//! A sleep costs two context switches and a notification; on a fast path that is more than the I/O itself. The window in
//! which the worker looks by itself grows while its sleeps are so short that a longer look would have found the work, and
//! is gone after a long sleep, so that an idle disk costs nothing.

/// First window of a worker that has slept briefly, in ns.
const WINDOW_NS_MIN: u64 = 2_000;

/// How long to look before sleeping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    ns: u64,
    ns_max: u64,
}

impl Window {
    /// Windows of at most `ns_max`; 0: never looks.
    pub(super) fn new(ns_max: u64) -> Self {
        Self { ns: 0, ns_max }
    }

    /// The window of now, in ns.
    pub(super) fn ns(self) -> u64 {
        self.ns
    }

    /// The worker was woken by work after so long.
    pub(super) fn slept(&mut self, ns: u64) {
        if self.ns_max == 0 {
            return;
        }
        if ns > self.ns_max {
            self.ns = 0;
        } else if ns > self.ns {
            self.ns = (self.ns * 2).clamp(WINDOW_NS_MIN.min(self.ns_max), self.ns_max);
        }
    }
}

/// A glance, in ns: less than falling asleep and being woken costs.
pub(super) const GLANCE_NS: u64 = 3_000;

/// Glances in vain after which they become rare, and how rare.
const VAIN_MAX: u32 = 8;
const VAIN_INTERVAL: u32 = 64;

/// Whether to have one more look, after an answer, for the request that a guest sends because of it. This has nothing to do
/// with the window: it costs no more than the sleep that it may save.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Glance {
    nr_in_vain: u32,
}

impl Glance {
    /// Whether it is worth it: while it finds something, and once in a while.
    pub(super) fn is_due(self) -> bool {
        self.nr_in_vain < VAIN_MAX || self.nr_in_vain.is_multiple_of(VAIN_INTERVAL)
    }

    /// An answer was followed by a look that found something, or not, or by none.
    pub(super) fn note(&mut self, found: bool) {
        self.nr_in_vain = if found { 0 } else { self.nr_in_vain.wrapping_add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glances_become_rare_while_they_find_nothing() {
        let mut glance = Glance::default();
        let mut count = |nr: u32, found: bool| {
            (0..nr)
                .filter(|_| {
                    let is_due = glance.is_due();
                    glance.note(is_due && found);
                    is_due
                })
                .count()
        };
        assert_eq!(count(100, true), 100);
        assert_eq!(count(8, false), 8);
        assert_eq!(count(6400 - 8, false), 99);
        // The next that finds something brings them back.
        assert_eq!(count(64, true), 64);
    }

    #[test]
    fn grows_while_a_longer_look_would_have_found_work_and_goes_when_idle() {
        let mut window = Window::new(20_000);
        assert_eq!(window.ns(), 0);
        let mut seen = Vec::new();
        for slept in [15_000, 15_000, 15_000, 15_000, 15_000, 3_000, 25_000] {
            window.slept(slept);
            seen.push(window.ns());
        }
        assert_eq!(seen, [2_000, 4_000, 8_000, 16_000, 16_000, 16_000, 0]);
        let mut off = Window::new(0);
        off.slept(1);
        assert_eq!(off.ns(), 0);
        let mut short = Window::new(500);
        short.slept(1);
        assert_eq!(short.ns(), 500);
    }
}
