//! How much each worker has in flight on a path.

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
            line.in_flight.store(load.in_flight, Ordering::Relaxed);
            line.bytes.store(load.bytes, Ordering::Relaxed);
        }
    }

    /// `worker` has just heard from the path, or has begun to wait for it.
    pub fn note_progress(&self, worker: usize, now_ns: u64) {
        if let Some(line) = self.lines.get(worker) {
            line.progress_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// Since when (in ns) the worker that waits longest for this path has not heard from it. None if nobody waits.
    pub fn silent_since_ns(&self) -> Option<u64> {
        let waiting = self.lines.iter().filter(|line| line.in_flight.load(Ordering::Relaxed) != 0);
        waiting.map(|line| line.progress_ns.load(Ordering::Relaxed)).min()
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
}
