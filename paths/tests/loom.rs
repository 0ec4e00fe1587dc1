//! The flush ledger under every order of its loads and stores that the memory model allows: `vm-tests/sanitize loom`.
#![cfg(loom)]

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;
use polypath_paths::{Coverage, Ledger};

/// A path with a volatile cache, one number of writes for all of its content.
struct Cache {
    ledger: Ledger,
    /// Writes that the path has completed.
    written: AtomicU64,
    /// How many of them are durable.
    durable: AtomicU64,
}

impl Cache {
    /// Clean, for two workers.
    fn new() -> Arc<Self> {
        let (written, durable) = (AtomicU64::new(0), AtomicU64::new(0));
        let cache = Self { ledger: Ledger::new(2), written, durable };
        cache.flush();
        Arc::new(cache)
    }

    /// A worker's write has completed.
    fn write(&self, worker: usize) {
        self.written.fetch_add(1, Ordering::Relaxed);
        self.ledger.note_write(worker);
    }

    /// What a guest's flush does on this path. False: there was nothing to do.
    fn flush(&self) -> bool {
        if !self.ledger.is_dirty() {
            return false;
        }
        let mut coverage = Coverage::default();
        self.ledger.begin_flush(&mut coverage);
        // The sync: it takes what the path has completed by now.
        self.durable.fetch_max(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
        self.ledger.end_flush(&coverage);
        true
    }

    /// When nobody is at work any more.
    fn check(&self) {
        let (written, durable) = (self.written.load(Ordering::Relaxed), self.durable.load(Ordering::Relaxed));
        assert!(self.ledger.is_dirty() || durable == written, "clean, and {durable} of {written} durable");
    }
}

#[test]
fn f16_a_write_that_was_answered_is_covered_by_the_next_flush() {
    loom::model(|| {
        let cache = Cache::new();
        let answered = Arc::new(AtomicBool::new(false));
        let writer = {
            let (cache, answered) = (Arc::clone(&cache), Arc::clone(&answered));
            thread::spawn(move || {
                cache.write(1);
                answered.store(true, Ordering::Release);
            })
        };
        // The guest sends its flush by another queue, after it has seen the answer or before.
        let was_answered = answered.load(Ordering::Acquire);
        cache.flush();
        if was_answered {
            assert_eq!(cache.durable.load(Ordering::Relaxed), 1, "answered, flushed, and not durable");
        }
        writer.join().unwrap();
        cache.check();
    });
}

#[test]
fn f16_flushes_of_two_workers_and_a_third_ones_writes() {
    loom::model(|| {
        let cache = Cache::new();
        let threads: Vec<_> = (0..2)
            .map(|worker| {
                let cache = Arc::clone(&cache);
                thread::spawn(move || {
                    if worker == 0 {
                        cache.write(0);
                    }
                    cache.flush();
                })
            })
            .collect();
        cache.write(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        cache.check();
    });
}

#[test]
fn f03_a_write_of_a_path_that_goes_is_another_ones_to_flush() {
    loom::model(|| {
        let (gone, left) = (Cache::new(), Cache::new());
        let answered = Arc::new(AtomicBool::new(false));
        let worker = {
            let (gone, left, answered) = (Arc::clone(&gone), Arc::clone(&left), Arc::clone(&answered));
            thread::spawn(move || {
                // Completed on a path that is in no table any more.
                gone.write(0);
                left.ledger.note_write(0);
                answered.store(true, Ordering::Release);
            })
        };
        if answered.load(Ordering::Acquire) {
            assert!(left.flush(), "answered, and nothing to flush on the path that is left");
        }
        worker.join().unwrap();
    });
}
