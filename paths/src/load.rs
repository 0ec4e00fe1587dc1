//! How much each worker has in flight on a path, and for how long.
//!
//! The age of the oldest request is known exactly only to the worker that sent it, and finding it out is a walk over
//! all that it has in flight. So it is not kept up: what stands here is a lower bound of when the oldest was sent, and
//! the control loop asks the worker to look ([`crate::MapState::ask_look`]) when by that bound one may be overdue, which
//! is once per path timeout at most.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use polypath_selector::PathLoad;

/// One worker's share; lines of their own, so that no worker writes what another writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line {
    in_flight: AtomicU32,
    bytes: AtomicU64,
    /// When the worker last sent to an idle path or heard from it, in ns.
    progress_ns: AtomicU64,
    /// No request that is out was sent before this, in ns.
    oldest_ns: AtomicU64,
    /// When that was exact, in ns.
    looked_ns: AtomicU64,
    /// What the worker's selector has learned of the path, as its `PathInfo::learned` has it.
    learned: [AtomicU64; 3],
}

/// How long a worker waits for answers of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The last sign of life, in ns.
    pub heard_ns: u64,
    /// No request that is out was sent before this, in ns.
    pub oldest_ns: u64,
    /// When the worker last looked: then `oldest_ns` was exact.
    pub looked_ns: u64,
}

/// The load of one path, kept apart per worker.
#[derive(Debug)]
pub struct Gauges {
    lines: Box<[Line]>,
}

impl Gauges {
    /// Gauges for `nr_workers`, all at 0.
    pub fn new(nr_workers: usize) -> Self {
        Self { lines: (0..nr_workers.max(1)).map(|_| Line::default()).collect() }
    }

    /// Shows the others what `worker` has in flight. Two plain stores to its own line.
    pub fn show(&self, worker: usize, load: PathLoad) {
        if let Some(line) = self.lines.get(worker) {
            line.bytes.store(load.bytes, Ordering::Relaxed);
            // After the times of what is in flight.
            line.in_flight.store(load.in_flight, Ordering::Release);
        }
    }

    /// `worker` sends to the path, where it had nothing before.
    pub fn note_first(&self, worker: usize, now_ns: u64) {
        self.note_progress(worker, now_ns);
        self.note_oldest(worker, now_ns, now_ns);
    }

    /// `worker` has looked at `now_ns`: the oldest request that it has here was sent at `oldest_ns`.
    pub fn note_oldest(&self, worker: usize, oldest_ns: u64, now_ns: u64) {
        if let Some(line) = self.lines.get(worker) {
            line.oldest_ns.store(oldest_ns, Ordering::Relaxed);
            line.looked_ns.store(now_ns, Ordering::Release);
        }
    }

    /// `worker` has just heard from the path.
    pub fn note_progress(&self, worker: usize, now_ns: u64) {
        if let Some(line) = self.lines.get(worker) {
            line.progress_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// How long each worker that has something here waits for it.
    pub fn waiting(&self) -> impl Iterator<Item = Waiting> + '_ {
        let waiting = self.lines.iter().filter(|line| line.in_flight.load(Ordering::Acquire) != 0);
        waiting.map(|line| {
            // A look that ends meanwhile must not make an older bound exact.
            let looked_ns = line.looked_ns.load(Ordering::Acquire);
            Waiting {
                heard_ns: line.progress_ns.load(Ordering::Relaxed),
                oldest_ns: line.oldest_ns.load(Ordering::Relaxed),
                looked_ns,
            }
        })
    }

    /// Shows the others what `worker` has learned. Plain stores to its own line.
    pub fn show_learned(&self, worker: usize, words: [u64; 3]) {
        if let Some(line) = self.lines.get(worker) {
            line.learned.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        }
    }

    /// What each worker that has learned something has. (One that is just learning may show old and new words mixed.)
    pub fn learned(&self) -> impl Iterator<Item = [u64; 3]> + '_ {
        let words = self.lines.iter().map(|l| l.learned.each_ref().map(|word| word.load(Ordering::Relaxed)));
        words.filter(|words| *words != [0; 3])
    }

    /// What all workers have in flight.
    pub fn sum(&self) -> PathLoad {
        self.sum_of_others(usize::MAX, self.lines.len())
    }

    /// What all workers but `worker` have in flight, among the first `nr_workers`.
    pub fn sum_of_others(&self, worker: usize, nr_workers: usize) -> PathLoad {
        let others = self.lines.iter().take(nr_workers).enumerate().filter(|(i, _)| *i != worker);
        others.fold(PathLoad::default(), |sum, (_, line)| PathLoad {
            in_flight: sum.in_flight.saturating_add(line.in_flight.load(Ordering::Relaxed)),
            bytes: sum.bytes.saturating_add(line.bytes.load(Ordering::Relaxed)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_sees_the_others_and_not_itself() {
        let gauges = Gauges::new(3);
        gauges.show(0, PathLoad { in_flight: 1, bytes: 512 });
        gauges.show(1, PathLoad { in_flight: 2, bytes: 1024 });
        gauges.show(2, PathLoad { in_flight: 4, bytes: 4096 });
        assert_eq!(gauges.sum_of_others(1, 3), PathLoad { in_flight: 5, bytes: 4608 });
        assert_eq!(gauges.sum_of_others(1, 2), PathLoad { in_flight: 1, bytes: 512 });
        gauges.show(9, PathLoad { in_flight: 1, bytes: 1 });
        assert_eq!(gauges.sum_of_others(9, 9).in_flight, 7);
    }

    #[test]
    fn f10_only_who_waits_is_asked_since_when() {
        let gauges = Gauges::new(3);
        assert_eq!(gauges.waiting().count(), 0);
        gauges.note_first(1, 10);
        gauges.show(1, PathLoad { in_flight: 2, bytes: 1 });
        gauges.note_progress(1, 30);
        assert_eq!(
            gauges.waiting().collect::<Vec<_>>(),
            [Waiting { heard_ns: 30, oldest_ns: 10, looked_ns: 10 }]
        );
        gauges.note_oldest(1, 25, 40);
        assert_eq!(
            gauges.waiting().collect::<Vec<_>>(),
            [Waiting { heard_ns: 30, oldest_ns: 25, looked_ns: 40 }]
        );
        gauges.show(1, PathLoad::default());
        assert_eq!(gauges.waiting().count(), 0);
    }
}
