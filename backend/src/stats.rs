//! What each virtqueue's worker has done. Written by the worker, read by anybody.

use std::sync::atomic::{AtomicU64, Ordering};

use polypath_paths::stats::IoStats;

/// Counters of one virtqueue, kept over restarts of the queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Requests by kind, from the moment they were taken from the ring until they were answered.
    pub io: IoStats,
    /// Requests that were taken from the ring and not answered, as of the end of the worker's last turn.
    pub nr_in_flight: Gauge,
    /// Turns of the worker's loop.
    pub nr_turns: Count,
    /// Waits in the kernel.
    pub nr_sleeps: Count,
    /// Times that polling found work, and times that it found none before its window was over.
    pub nr_polls_found: Count,
    /// See `nr_polls_found`.
    pub nr_polls_missed: Count,
    /// Times that the guest was called.
    pub nr_calls: Count,
    /// I/Os that were sent again: after an error, or for what was left of a short one.
    pub nr_retries: Count,
}

/// A number of now, with one writer.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// It is so much. Only for the writer.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// What was set last.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that only grows, with one writer.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// One more. Only for the writer.
    #[inline]
    pub fn add_one(&self) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// The number of now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
