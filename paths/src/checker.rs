//! When to probe a path, and what an answer means. Pure: times come in as nanoseconds, probes are somebody else's work.
//!
//! A path that failed is probed at once, then at intervals that double; one that answers is reinstated, unless it has
//! failed so often lately that it is quarantined. A path in use is probed now and then, so that a dead standby is found
//! before it is needed.

use std::collections::VecDeque;

const MS: u64 = 1_000_000;

/// Times of a checker, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckerConfig {
    /// First and longest interval between probes of a failed path.
    pub failed_interval_ms: (u64, u64),
    /// First and longest interval between probes of an active path.
    pub active_interval_ms: (u64, u64),
    /// A probe that takes longer has failed.
    pub probe_timeout_ms: u64,
    /// So many failures within `flap_window_ms` are borne without quarantine.
    pub flaps_max: usize,
    /// How long a failure counts.
    pub flap_window_ms: u64,
    /// First and longest quarantine; each one is twice as long as the one before.
    pub quarantine_ms: (u64, u64),
}

impl Default for CheckerConfig {
    fn default() -> Self {
        Self {
            failed_interval_ms: (250, 5_000),
            active_interval_ms: (5_000, 20_000),
            probe_timeout_ms: 5_000,
            flaps_max: 3,
            flap_window_ms: 60_000,
            quarantine_ms: (5_000, 300_000),
        }
    }
}

/// What follows from an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckerVerdict {
    /// Nothing changes.
    Stay,
    /// Put the path back.
    Reinstate,
    /// Take the path out.
    Fail,
}

/// The checker of one path.
#[derive(Debug, Clone)]
pub struct Checker {
    config: CheckerConfig,
    active: bool,
    /// Taken out by hand: only a hand puts it back.
    operator_failed: bool,
    next_probe_ns: u64,
    interval_ms: u64,
    probing_since_ns: Option<u64>,
    overdue: bool,
    /// Answers to probes that began earlier do not count.
    not_before_ns: u64,
    failures_ns: VecDeque<u64>,
    hold_until_ns: u64,
    hold_ms: u64,
}

impl Checker {
    /// For a path that is active at `now_ns`.
    pub fn new(config: CheckerConfig, now_ns: u64) -> Self {
        Self {
            config,
            active: true,
            operator_failed: false,
            next_probe_ns: now_ns + config.active_interval_ms.0 * MS,
            interval_ms: config.active_interval_ms.0,
            probing_since_ns: None,
            overdue: false,
            not_before_ns: 0,
            failures_ns: VecDeque::new(),
            hold_until_ns: 0,
            hold_ms: 0,
        }
    }

    /// Works by other times from now on.
    pub fn set_config(&mut self, config: CheckerConfig) {
        self.config = config;
    }

    /// Whether the checker takes the path for active.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Whether the path was taken out by hand.
    pub fn is_failed_by_operator(&self) -> bool {
        self.operator_failed
    }

    /// Until when the path is quarantined, in ns; None if it is not.
    pub fn quarantined_until_ns(&self, now_ns: u64) -> Option<u64> {
        (!self.active && self.hold_until_ns > now_ns).then_some(self.hold_until_ns)
    }

    /// I/O or a probe failed the path.
    pub fn failed(&mut self, now_ns: u64) {
        if !self.active {
            return;
        }
        self.active = false;
        let window_ns = self.config.flap_window_ms * MS;
        while self.failures_ns.front().is_some_and(|t| now_ns.saturating_sub(*t) > window_ns) {
            self.failures_ns.pop_front();
        }
        if self.failures_ns.is_empty() {
            self.hold_ms = 0;
        }
        self.failures_ns.push_back(now_ns);
        if self.failures_ns.len() > self.config.flaps_max {
            self.failures_ns.pop_front();
            let (first, longest) = self.config.quarantine_ms;
            self.hold_ms = if self.hold_ms == 0 { first } else { (self.hold_ms * 2).min(longest) };
            self.hold_until_ns = now_ns + self.hold_ms * MS;
        }
        self.probe_soon(now_ns, self.config.failed_interval_ms.0);
    }

    /// I/O on the path gave an error that may be the request's own fault: find out.
    pub fn suspected(&mut self, now_ns: u64) {
        self.next_probe_ns = self.next_probe_ns.min(now_ns);
    }

    /// The operator takes the path out.
    pub fn fail_by_operator(&mut self, now_ns: u64) {
        (self.active, self.operator_failed, self.not_before_ns) = (false, true, now_ns);
    }

    /// The operator wants the path back: it is, as soon as a probe that begins now succeeds.
    pub fn reinstate_by_operator(&mut self, now_ns: u64) {
        (self.operator_failed, self.not_before_ns) = (false, now_ns);
        self.forget_failures();
        self.probe_soon(now_ns, self.config.failed_interval_ms.0);
    }

    /// The operator takes the path for a good one: how often it failed before counts no more.
    pub fn forget_failures(&mut self) {
        self.failures_ns.clear();
        (self.hold_until_ns, self.hold_ms) = (0, 0);
    }

    fn probe_soon(&mut self, now_ns: u64, interval_ms: u64) {
        (self.next_probe_ns, self.interval_ms) = (now_ns, interval_ms);
    }

    /// Whether a probe is to begin now. One at a time: a probe that hangs is waited for.
    pub fn is_due(&self, now_ns: u64) -> bool {
        !self.operator_failed && self.probing_since_ns.is_none() && now_ns >= self.next_probe_ns
    }

    /// A probe begins.
    pub fn begin(&mut self, now_ns: u64) {
        (self.probing_since_ns, self.overdue) = (Some(now_ns), false);
    }

    /// Whether the probe under way has taken too long, which counts as an answer once.
    pub fn check_overdue(&mut self, now_ns: u64) -> CheckerVerdict {
        let since_ns = self.probing_since_ns.unwrap_or(now_ns);
        if self.overdue || now_ns < since_ns + self.config.probe_timeout_ms * MS {
            return CheckerVerdict::Stay;
        }
        self.overdue = true;
        if self.active && since_ns >= self.not_before_ns {
            CheckerVerdict::Fail
        } else {
            CheckerVerdict::Stay
        }
    }

    /// The probe has answered. `is_last`: no other path is active.
    pub fn end(&mut self, now_ns: u64, is_good: bool, is_last: bool) -> CheckerVerdict {
        let began_ns = self.probing_since_ns.take().unwrap_or(now_ns);
        if self.operator_failed {
            return CheckerVerdict::Stay;
        }
        // A good answer that came too late is asked for again: what matters is how the path is now.
        if began_ns < self.not_before_ns || (is_good && self.overdue) {
            self.next_probe_ns = now_ns;
            return CheckerVerdict::Stay;
        }
        let (first, longest) =
            if self.active { self.config.active_interval_ms } else { self.config.failed_interval_ms };
        match (self.active, is_good) {
            (true, true) | (false, false) => {
                self.next_probe_ns = now_ns + self.interval_ms.max(first) * MS;
                self.interval_ms = (self.interval_ms.max(first) * 2).min(longest);
                CheckerVerdict::Stay
            }
            (true, false) => CheckerVerdict::Fail,
            // The last path is not held back: a shaky path is better than none.
            (false, true) if self.hold_until_ns > now_ns && !is_last => {
                self.next_probe_ns = self.hold_until_ns.min(now_ns + longest * MS);
                CheckerVerdict::Stay
            }
            (false, true) => CheckerVerdict::Reinstate,
        }
    }

    /// The path was put back.
    pub fn reinstated(&mut self, now_ns: u64) {
        self.active = true;
        self.probe_soon(now_ns + self.config.active_interval_ms.0 * MS, self.config.active_interval_ms.0);
    }

    /// The path could not be put back after all (it proved to be another LUN): as a bad answer.
    pub fn rejected(&mut self, now_ns: u64) {
        let (first, longest) = self.config.failed_interval_ms;
        self.next_probe_ns = now_ns + self.interval_ms.max(first) * MS;
        self.interval_ms = (self.interval_ms.max(first) * 2).min(longest);
    }

    /// When to look again at the latest, in ns.
    pub fn next_ns(&self) -> Option<u64> {
        match self.probing_since_ns {
            Some(_) if self.overdue => None,
            Some(since_ns) => Some(since_ns + self.config.probe_timeout_ms * MS),
            None if self.operator_failed => None,
            None => Some(self.next_probe_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1000 * MS;

    fn checker() -> Checker {
        Checker::new(CheckerConfig::default(), 0)
    }

    /// Probes at `now` with an immediate answer.
    fn probe(checker: &mut Checker, now_ns: u64, is_good: bool) -> CheckerVerdict {
        assert!(checker.is_due(now_ns));
        checker.begin(now_ns);
        assert!(!checker.is_due(now_ns), "one at a time");
        checker.end(now_ns, is_good, false)
    }

    #[test]
    fn f36_a_path_that_failed_is_probed_at_once_and_comes_back() {
        let mut c = checker();
        c.failed(10 * S);
        assert_eq!(probe(&mut c, 10 * S, true), CheckerVerdict::Reinstate);
        c.reinstated(10 * S);
        assert!(c.is_active() && !c.is_due(14 * S) && c.is_due(15 * S));
    }

    #[test]
    fn intervals_double_and_start_again() {
        let mut c = checker();
        c.failed(S);
        let mut now = S;
        for wait_ms in [250, 500, 1000, 2000, 4000, 5000, 5000] {
            assert_eq!(probe(&mut c, now, false), CheckerVerdict::Stay);
            assert_eq!(c.next_ns(), Some(now + wait_ms * MS));
            now += wait_ms * MS;
        }
        assert_eq!(probe(&mut c, now, true), CheckerVerdict::Reinstate);
        c.reinstated(now);
        for wait_ms in [5_000, 10_000, 20_000, 20_000] {
            now = c.next_ns().unwrap();
            assert_eq!(probe(&mut c, now, true), CheckerVerdict::Stay);
            assert_eq!(c.next_ns(), Some(now + wait_ms * MS), "active");
        }
        assert_eq!(probe(&mut c, now + 20 * S, false), CheckerVerdict::Fail);
    }

    #[test]
    fn f13_a_probe_under_way_does_not_undo_the_operators_fail() {
        let mut c = checker();
        c.begin(S);
        c.fail_by_operator(2 * S);
        assert_eq!(c.end(4 * S, true, false), CheckerVerdict::Stay);
        assert!(!c.is_due(1000 * S) && c.next_ns().is_none(), "until the operator says so");
        c.reinstate_by_operator(1000 * S);
        assert_eq!(probe(&mut c, 1000 * S, true), CheckerVerdict::Reinstate);
    }

    #[test]
    fn a_probe_that_began_before_the_operators_reinstate_does_not_count() {
        let mut c = checker();
        c.fail_by_operator(S);
        c.begin(2 * S);
        c.reinstate_by_operator(3 * S);
        assert_eq!(c.end(4 * S, true, false), CheckerVerdict::Stay);
        assert_eq!(probe(&mut c, 4 * S, true), CheckerVerdict::Reinstate);
    }

    #[test]
    fn f10_a_probe_that_hangs_fails_the_path_once_and_is_waited_for() {
        let mut c = checker();
        c.begin(S);
        assert_eq!(c.check_overdue(5 * S), CheckerVerdict::Stay);
        assert_eq!(c.check_overdue(6 * S), CheckerVerdict::Fail);
        c.failed(6 * S);
        assert_eq!(c.check_overdue(7 * S), CheckerVerdict::Stay);
        assert!(!c.is_due(60 * S));
        // Its answer is old; a new probe tells how the path is now.
        assert_eq!(c.end(60 * S, true, false), CheckerVerdict::Stay);
        assert_eq!(probe(&mut c, 60 * S, true), CheckerVerdict::Reinstate);
    }

    #[test]
    fn f37_a_path_that_flaps_is_held_back_for_longer_each_time() {
        let mut c = checker();
        let mut now = S;
        for _ in 0..3 {
            c.failed(now);
            assert_eq!(probe(&mut c, now, true), CheckerVerdict::Reinstate);
            c.reinstated(now);
            now += 100 * MS;
        }
        for hold_s in [5, 10, 20, 40] {
            c.failed(now);
            assert_eq!(c.quarantined_until_ns(now), Some(now + hold_s * S));
            assert_eq!(probe(&mut c, now, true), CheckerVerdict::Stay);
            now += hold_s * S;
            assert_eq!(probe(&mut c, now, true), CheckerVerdict::Reinstate);
            c.reinstated(now);
            assert_eq!(c.quarantined_until_ns(now), None);
        }
        now += 200 * S;
        c.failed(now);
        assert_eq!(probe(&mut c, now, true), CheckerVerdict::Reinstate, "forgotten after a quiet time");
    }

    /// More failures than are borne, each followed by a return before its time, since no other path is active.
    fn flap_as_the_last(c: &mut Checker) {
        for now in [1, 2, 3, 4] {
            c.failed(now);
            c.begin(now);
            assert_eq!(c.end(now, true, true), CheckerVerdict::Reinstate);
            c.reinstated(now);
        }
    }

    #[test]
    fn f37_what_the_operator_takes_for_good_has_a_clean_record() {
        let mut c = checker();
        flap_as_the_last(&mut c);
        c.forget_failures();
        c.failed(5);
        assert_eq!(c.quarantined_until_ns(5), None);
        assert_eq!(probe(&mut c, 5, true), CheckerVerdict::Reinstate);
    }

    #[test]
    fn the_last_path_is_not_held_back() {
        flap_as_the_last(&mut checker());
    }

    #[test]
    fn a_suspected_path_is_probed_at_once() {
        let mut c = checker();
        assert!(!c.is_due(S));
        c.suspected(S);
        assert_eq!(probe(&mut c, S, true), CheckerVerdict::Stay);
    }
}
