//! Which writes a flush has still to cover.
//!
//! A path remembers, per worker, how many writes it completed and how many of those a flush has covered since. A
//! worker writes only its own line; whoever flushes reads them all. The counts are kept apart per worker because a
//! sum read while others go on could hide one write behind another.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// One cache line per worker (two, since processors fetch lines in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line {
    written: AtomicU64,
    flushed: AtomicU64,
}

/// The writes of one path.
#[derive(Debug)]
pub struct Ledger {
    lines: Box<[Line]>,
}

/// What a flush that begins now will cover. Kept with the flush and reused, so that flushing allocates nothing.
#[derive(Debug, Default)]
pub struct Coverage {
    written: Vec<u64>,
}

impl Ledger {
    /// A ledger for `nr_workers`. It starts with one write to cover: what an earlier process wrote may still be volatile.
    pub fn new(nr_workers: usize) -> Self {
        // The last line is the control loop's.
        let lines: Box<[Line]> = (0..nr_workers.max(1) + 1).map(|_| Line::default()).collect();
        lines[0].written.store(1, Ordering::Relaxed);
        Self { lines }
    }

    /// Worker `worker` has completed a write on this path. Called before the guest hears of it.
    pub fn note_write(&self, worker: usize) {
        let written = &self.lines[worker].written;
        // Only this worker writes the line, so no read-modify-write is needed.
        written.store(written.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// A path that carried a write goes away: this one has to be flushed in its place. For the control loop only.
    pub fn note_foreign_write(&self) {
        self.note_write(self.lines.len() - 1);
    }

    /// Whether a write has completed that no flush has covered.
    pub fn is_dirty(&self) -> bool {
        self.lines.iter().any(|l| l.written.load(Ordering::Acquire) > l.flushed.load(Ordering::Acquire))
    }

    /// Records what a flush that is sent after this call will cover.
    pub fn begin_flush(&self, coverage: &mut Coverage) {
        coverage.written.clear();
        coverage.written.extend(self.lines.iter().map(|l| l.written.load(Ordering::Acquire)));
    }

    /// That flush succeeded.
    pub fn end_flush(&self, coverage: &Coverage) {
        for (line, written) in self.lines.iter().zip(&coverage.written) {
            line.flushed.fetch_max(*written, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_ledger_covers_an_earlier_process() {
        let ledger = Ledger::new(2);
        assert!(ledger.is_dirty());
        let mut coverage = Coverage::default();
        ledger.begin_flush(&mut coverage);
        ledger.end_flush(&coverage);
        assert!(!ledger.is_dirty());
    }

    #[test]
    fn f16_a_write_after_the_flush_began_is_not_covered() {
        let ledger = Ledger::new(3);
        let mut coverage = Coverage::default();
        ledger.note_write(1);
        ledger.begin_flush(&mut coverage);
        ledger.note_write(2);
        ledger.end_flush(&coverage);
        assert!(ledger.is_dirty());
    }

    #[test]
    fn f16_two_flushes_that_overlap_do_not_uncover_each_other() {
        let ledger = Ledger::new(2);
        let (mut early, mut late) = (Coverage::default(), Coverage::default());
        ledger.note_write(0);
        ledger.begin_flush(&mut early);
        ledger.note_write(1);
        ledger.begin_flush(&mut late);
        ledger.end_flush(&late);
        ledger.end_flush(&early);
        assert!(!ledger.is_dirty());
    }

    #[test]
    fn f16_a_flush_that_failed_leaves_the_writes_uncovered() {
        let ledger = Ledger::new(1);
        let mut coverage = Coverage::default();
        ledger.begin_flush(&mut coverage);
        assert!(ledger.is_dirty());
    }
}
