//! How many answers are waited for at a time.
//!
//! Waking for each answer of a busy path costs a context switch per I/O. So the worker asks the kernel to let it sleep until
//! several have come, or a short time has passed ([`crate::engine::GATHER_TIME`]). How many is learned from what came: as
//! many as that time was long enough for, and never all that is under way, so that the path has something left to do.

use crate::engine::{GATHER_TIME, SURE_GATHER_TIME, Wanted};

/// Waits in a row that got all they were for in time, after which the next ones do without a short timer.
const SURE_AFTER: u32 = 16;

/// The number of answers that one wait is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch {
    nr: u32,
    /// Waits in a row that got what they were for in time.
    nr_in_time: u32,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { nr: 1, nr_in_time: 0 }
    }

    /// How many to wait for with so many under way: at least 1.
    pub(super) fn wanted(self, nr_in_flight: usize) -> Wanted {
        let most = u32::try_from(nr_in_flight / 4 * 3).unwrap_or(u32::MAX);
        let within = if self.nr_in_time < SURE_AFTER { GATHER_TIME } else { SURE_GATHER_TIME };
        Wanted { nr: self.nr.min(most).max(1), within }
    }

    /// So many came of those `wanted`, after so long.
    pub(super) fn came(&mut self, nr: u32, wanted: u32, ns: u64) {
        let gather_ns = u64::try_from(GATHER_TIME.as_nanos()).unwrap_or(u64::MAX);
        if nr < wanted || ns > 4 * gather_ns {
            self.nr_in_time = 0;
        } else {
            self.nr_in_time = self.nr_in_time.saturating_add(1);
        }
        self.nr = if nr < wanted {
            nr.max(1)
        } else if ns < gather_ns / 2 {
            // There was time for more. (At most a ring can come.)
            (nr.max(wanted) * 2).min(1024)
        } else {
            wanted
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_come_in_time() {
        let mut batch = Batch::new();
        assert_eq!(batch.wanted(128).nr, 1);
        let mut seen = Vec::new();
        for (nr, ns) in
            [(1, 1_000), (2, 3_000), (4, 6_000), (8, 40_000), (8, 40_000), (3, 50_000), (3, 30_000)]
        {
            batch.came(nr, batch.wanted(128).nr, ns);
            seen.push(batch.wanted(128).nr);
        }
        assert_eq!(seen, [2, 4, 8, 8, 8, 3, 3]);
    }

    #[test]
    fn the_short_timer_is_left_out_only_while_all_come_in_time() {
        let mut batch = Batch::new();
        let in_time = |batch: &mut Batch| batch.came(8, 8, 30_000);
        for _ in 0..SURE_AFTER {
            assert_eq!(batch.wanted(128).within, GATHER_TIME);
            in_time(&mut batch);
        }
        assert_eq!(batch.wanted(128).within, SURE_GATHER_TIME);
        // Fewer came, or it took long: from the beginning.
        for (nr, ns) in [(7, 30_000), (8, 1_000_000)] {
            batch.came(nr, 8, ns);
            assert_eq!(batch.wanted(128).within, GATHER_TIME);
            (0..SURE_AFTER).for_each(|_| in_time(&mut batch));
            assert_eq!(batch.wanted(128).within, SURE_GATHER_TIME);
        }
    }

    #[test]
    fn the_path_keeps_something_to_do() {
        let mut batch = Batch::new();
        for _ in 0..20 {
            batch.came(2000, batch.wanted(2000).nr, 0);
        }
        for (in_flight, wanted) in [(0, 1), (1, 1), (2, 1), (4, 3), (32, 24), (128, 96)] {
            assert_eq!(batch.wanted(in_flight).nr, wanted);
        }
    }
}
