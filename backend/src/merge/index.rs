//! Finding runs by an offset: a hash table of fixed size, chained through an array.

use super::NONE;

/// Run numbers by key. Several runs may have the same key.
#[derive(Debug)]
pub(super) struct Index {
    buckets: Box<[u16]>,
    /// The next run in the same bucket, by run number.
    next: Box<[u16]>,
    shift: u32,
}

impl Index {
    /// For runs with numbers below `nr`.
    pub(super) fn new(nr: u16) -> Self {
        let nr_buckets = (usize::from(nr) * 2).next_power_of_two().max(2);
        Self {
            buckets: vec![NONE; nr_buckets].into(),
            next: vec![NONE; usize::from(nr)].into(),
            shift: 64 - nr_buckets.trailing_zeros(),
        }
    }

    fn bucket(&self, key: u64) -> usize {
        // Multiplicative hashing: the high bits depend on all of the key (Knuth's constant, 2^64 / golden ratio).
        usize::try_from(key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift).unwrap_or(0)
    }

    pub(super) fn insert(&mut self, key: u64, run: u16) {
        let bucket = self.bucket(key);
        self.next[usize::from(run)] = std::mem::replace(&mut self.buckets[bucket], run);
    }

    /// Takes out a run that was put in under this key.
    pub(super) fn remove(&mut self, key: u64, run: u16) {
        let bucket = self.bucket(key);
        let next = self.next[usize::from(run)];
        if self.buckets[bucket] == run {
            self.buckets[bucket] = next;
            return;
        }
        let mut at = self.buckets[bucket];
        while at != NONE {
            let after = &mut self.next[usize::from(at)];
            if *after == run {
                *after = next;
                return;
            }
            at = *after;
        }
        debug_assert!(false, "run {run} is not in the index");
    }

    /// A run with this key's hash for which `is_it` holds.
    pub(super) fn find(&self, key: u64, is_it: impl Fn(u16) -> bool) -> Option<u16> {
        let mut at = self.buckets[self.bucket(key)];
        while at != NONE {
            if is_it(at) {
                return Some(at);
            }
            at = self.next[usize::from(at)];
        }
        None
    }
}
