//! The state of one disk that outlives its tables: which group is in use, what is done without a path, what is held.
//!
//! Workers read it once per batch; it is written when a path or a group changes, which is rare.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::text::NoPathRetry;

/// No group is in use.
const NO_GROUP: usize = usize::MAX;

/// What to do with one request for which there is no path now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutPath {
    /// The guest gets an error.
    Fail,
    /// Hold it, and look again at this time (in ns) at the latest, if any.
    Hold(Option<u64>),
}

/// What one worker holds; a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct HeldLine {
    nr_requests: AtomicU32,
    bytes: AtomicU64,
    oldest_ns: AtomicU64,
}

/// What is held without a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Requests.
    pub nr_requests: u32,
    /// Bytes of their data.
    pub bytes: u64,
    /// Since when the oldest waits, in ns; 0 if nothing is held.
    pub oldest_ns: u64,
}

/// A write whose first copy has not come back from a path that failed: nothing may overtake it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Troubled {
    id: u64,
    start: u64,
    end: u64,
}

/// State of one disk, shared by all its tables.
pub struct MapState {
    epoch: AtomicU64,
    current_group: AtomicUsize,
    no_path_retry: Mutex<NoPathRetry>,
    /// `no_path_retry` for the workers: 0 fail, `u64::MAX` queue, else ns.
    retry_ns: AtomicU64,
    /// When the last path went, in ns; 0 while there is one.
    no_path_since_ns: AtomicU64,
    held: Box<[HeldLine]>,
    nr_troubled: AtomicUsize,
    troubled: Mutex<Vec<Troubled>>,
    next_id: AtomicU64,
    /// How often the workers were asked for the age of what they have in flight.
    nr_looks: AtomicU64,
    /// Rung when something happened that the control loop has to see to.
    bell: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for MapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapState").field("current_group", &self.current_group()).finish_non_exhaustive()
    }
}

impl MapState {
    /// For `nr_workers` workers at most. `bell` is rung when a path fails; it must not block.
    pub fn new(
        nr_workers: usize,
        no_path_retry: NoPathRetry,
        bell: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let state = Self {
            epoch: AtomicU64::new(1),
            current_group: AtomicUsize::new(NO_GROUP),
            no_path_retry: Mutex::new(no_path_retry),
            retry_ns: AtomicU64::new(0),
            no_path_since_ns: AtomicU64::new(0),
            held: (0..nr_workers.max(1)).map(|_| HeldLine::default()).collect(),
            nr_troubled: AtomicUsize::new(0),
            troubled: Mutex::new(Vec::new()),
            next_id: AtomicU64::new(1),
            nr_looks: AtomicU64::new(0),
            bell: Box::new(bell),
        };
        state.set_no_path_retry(no_path_retry);
        state
    }

    /// Changes whenever a path's health, the group in use or the table does. Workers compare it once per batch.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn changed(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Asks the control loop to look.
    pub fn ring(&self) {
        (self.bell)();
    }

    /// Asks all workers to look at the age of what they have in flight. They are to be woken for it.
    pub fn ask_look(&self) {
        self.nr_looks.fetch_add(1, Ordering::AcqRel);
    }

    /// How often [`Self::ask_look`] was called: a worker that finds it changed looks, and rings.
    pub fn nr_looks(&self) -> u64 {
        self.nr_looks.load(Ordering::Acquire)
    }

    /// The group in use.
    pub fn current_group(&self) -> Option<usize> {
        Some(self.current_group.load(Ordering::Acquire)).filter(|group| *group != NO_GROUP)
    }

    /// Puts `to` in use if `from` still is. Whoever comes too late takes what the other chose.
    pub(crate) fn move_group(&self, from: Option<usize>, to: Option<usize>) {
        let raw = |group: Option<usize>| group.unwrap_or(NO_GROUP);
        let swapped =
            self.current_group.compare_exchange(raw(from), raw(to), Ordering::AcqRel, Ordering::Acquire);
        if swapped.is_ok() && from != to {
            self.changed();
            self.ring();
        }
    }

    /// The policy in force.
    pub fn no_path_retry(&self) -> NoPathRetry {
        self.no_path_retry.lock().map_or(NoPathRetry::Fail, |policy| *policy)
    }

    /// For how long requests wait while there is no path, in ns: 0 not at all, `u64::MAX` for ever.
    pub fn retry_ns(&self) -> u64 {
        self.retry_ns.load(Ordering::Acquire)
    }

    /// Changes the policy, for held requests as well.
    pub fn set_no_path_retry(&self, policy: NoPathRetry) {
        if let Ok(mut current) = self.no_path_retry.lock() {
            *current = policy;
        }
        let ns = match policy {
            NoPathRetry::Fail => 0,
            NoPathRetry::Queue => u64::MAX,
            NoPathRetry::Seconds(seconds) => u64::from(seconds.get()) * 1_000_000_000,
        };
        self.retry_ns.store(ns, Ordering::Release);
        self.changed();
    }

    /// When the last path went, in ns.
    pub fn no_path_since_ns(&self) -> Option<u64> {
        Some(self.no_path_since_ns.load(Ordering::Acquire)).filter(|since| *since != 0)
    }

    /// The last path went now, unless that is known already.
    pub(crate) fn note_no_path(&self, now_ns: u64) {
        let _ = self.no_path_since_ns.compare_exchange(0, now_ns.max(1), Ordering::AcqRel, Ordering::Acquire);
    }

    /// There is a path: said again by the control loop, in case a worker that failed another one came too late.
    pub fn note_path_exists(&self) {
        self.note_path();
    }

    /// There is a path.
    pub(crate) fn note_path(&self) {
        self.no_path_since_ns.store(0, Ordering::Release);
    }

    /// What to do at `now_ns` with a request for which there is no path, and which met its first path error at
    /// `troubled_since_ns` (0: none yet). A request that circulates between paths that come and go has the same time
    /// as one that waits for the last to come back.
    pub fn without_path(&self, now_ns: u64, troubled_since_ns: u64) -> WithoutPath {
        let retry_ns = self.retry_ns();
        match retry_ns {
            0 => return WithoutPath::Fail,
            u64::MAX => return WithoutPath::Hold(None),
            _ => {}
        }
        // The last path may have gone in a way that no worker saw (it was removed).
        self.note_no_path(now_ns);
        let since = self.no_path_since_ns().unwrap_or(now_ns);
        let since = if troubled_since_ns == 0 { since } else { since.min(troubled_since_ns) };
        let until = since.saturating_add(retry_ns);
        if now_ns >= until { WithoutPath::Fail } else { WithoutPath::Hold(Some(until)) }
    }

    /// Shows what `worker` holds now.
    pub fn show_held(&self, worker: usize, held: Held) {
        if let Some(line) = self.held.get(worker) {
            line.nr_requests.store(held.nr_requests, Ordering::Relaxed);
            line.bytes.store(held.bytes, Ordering::Relaxed);
            line.oldest_ns.store(held.oldest_ns, Ordering::Relaxed);
        }
    }

    /// What all workers hold.
    pub fn held(&self) -> Held {
        self.held.iter().fold(Held::default(), |sum, line| {
            let oldest = line.oldest_ns.load(Ordering::Relaxed);
            Held {
                nr_requests: sum.nr_requests + line.nr_requests.load(Ordering::Relaxed),
                bytes: sum.bytes + line.bytes.load(Ordering::Relaxed),
                oldest_ns: match (sum.oldest_ns, oldest) {
                    (0, other) | (other, 0) => other,
                    (a, b) => a.min(b),
                },
            }
        })
    }

    /// A write of these bytes is in trouble: later writes that overlap it wait. Gives the name to end that by.
    pub fn begin_trouble(&self, start: u64, end: u64) -> u64 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut troubled) = self.troubled.lock() {
            troubled.push(Troubled { id, start, end });
            self.nr_troubled.store(troubled.len(), Ordering::Release);
        }
        id
    }

    /// That write has ended.
    pub fn end_trouble(&self, id: u64) {
        if let Ok(mut troubled) = self.troubled.lock() {
            troubled.retain(|t| t.id != id);
            self.nr_troubled.store(troubled.len(), Ordering::Release);
        }
        self.changed();
        self.ring();
    }

    /// How many writes are in trouble.
    pub fn nr_troubled(&self) -> usize {
        self.nr_troubled.load(Ordering::Acquire)
    }

    /// Whether a write of these bytes must wait for one in trouble. Costs one load as long as there is none.
    pub fn must_wait(&self, start: u64, end: u64) -> bool {
        self.nr_troubled.load(Ordering::Acquire) != 0
            && self.troubled.lock().is_ok_and(|all| all.iter().any(|t| t.start < end && start < t.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn state(policy: &str) -> MapState {
        MapState::new(2, policy.parse().unwrap(), || {})
    }

    #[test]
    fn f14_the_policies() {
        let (fail, queue, five) = (state("fail"), state("queue"), state("5"));
        for state in [&fail, &queue, &five] {
            state.note_no_path(100 * S);
        }
        assert_eq!(fail.without_path(100 * S, 0), WithoutPath::Fail);
        assert_eq!(queue.without_path(9000 * S, 0), WithoutPath::Hold(None));
        assert_eq!(five.without_path(104 * S, 0), WithoutPath::Hold(Some(105 * S)));
        assert_eq!(five.without_path(105 * S, 0), WithoutPath::Fail);
        // Later I/O fails at once, until a path returns.
        assert_eq!(five.without_path(500 * S, 0), WithoutPath::Fail);
        five.note_path();
        five.note_no_path(500 * S);
        assert_eq!(five.without_path(500 * S, 0), WithoutPath::Hold(Some(505 * S)));
    }

    #[test]
    fn f37_a_request_that_circulates_has_no_more_time_than_one_that_waits() {
        let ten = state("10");
        ten.note_no_path(100 * S);
        assert_eq!(ten.without_path(100 * S, 91 * S), WithoutPath::Hold(Some(101 * S)));
        assert_eq!(ten.without_path(101 * S, 91 * S), WithoutPath::Fail);
    }

    #[test]
    fn the_time_counts_from_the_last_path() {
        let state = state("5");
        state.note_no_path(10 * S);
        state.note_no_path(12 * S);
        assert_eq!(state.no_path_since_ns(), Some(10 * S));
    }

    #[test]
    fn f02_overlapping_writes_wait_and_others_do_not() {
        let state = state("5");
        assert!(!state.must_wait(0, u64::MAX));
        let id = state.begin_trouble(4096, 8192);
        assert!(state.must_wait(8191, 9000) && state.must_wait(0, 4097) && state.must_wait(5000, 5001));
        assert!(!state.must_wait(8192, 9000) && !state.must_wait(0, 4096));
        state.end_trouble(id);
        assert!(!state.must_wait(4096, 8192));
    }

    #[test]
    fn held_requests_are_summed_over_the_workers() {
        let state = state("5");
        state.show_held(0, Held { nr_requests: 1, bytes: 10, oldest_ns: 7 });
        state.show_held(1, Held { nr_requests: 2, bytes: 20, oldest_ns: 5 });
        assert_eq!(state.held(), Held { nr_requests: 3, bytes: 30, oldest_ns: 5 });
        state.show_held(1, Held::default());
        assert_eq!(state.held().oldest_ns, 7);
    }
}
