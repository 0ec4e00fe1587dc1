//! service-time: the fewest bytes in flight for the path's throughput (Linux: `drivers/md/dm-ps-service-time.c`).
//!
//! Nothing is measured, in spite of the name: the relative throughput is an argument (0 to 100, default 1).

use crate::rotation::Rotation;
use crate::{Load, PathSet};
use std::cmp::Ordering;

/// Beyond this many bytes a product with a throughput could overflow; 7 bits hold the largest throughput, 100.
const BYTES_EXACT_MAX: u64 = u64::MAX >> THROUGHPUT_BITS;
const THROUGHPUT_BITS: u32 = 7;

/// The path on which the bytes in flight and the new ones take the least time.
#[derive(Clone, Debug)]
pub(crate) struct ServiceTime {
    rotation: Rotation,
    throughput: Box<[u8]>,
}

impl ServiceTime {
    pub(crate) fn new(throughput: Box<[u8]>, nr_paths: u16, first: usize) -> Self {
        Self { rotation: Rotation::new(nr_paths, first), throughput }
    }

    #[inline]
    pub(crate) fn select(
        &mut self,
        bytes: u64,
        usable: &PathSet,
        load: &(impl Load + ?Sized),
    ) -> Option<usize> {
        let mut best: Option<(usize, Candidate)> = None;
        for path in self.rotation.iter().filter(|&path| usable.contains(path)) {
            let candidate =
                Candidate { bytes: load.in_flight_bytes(path), throughput: u64::from(self.throughput[path]) };
            if best.is_none_or(|(_, least)| candidate.compare(least, bytes).is_lt()) {
                best = Some((path, candidate));
            }
        }
        let (path, _) = best?;
        self.rotation.move_to_tail(path);
        Some(path)
    }

    pub(crate) fn reinstate_path(&mut self, path: usize) {
        self.rotation.move_to_tail(path);
    }

    pub(crate) fn throughput(&self, path: usize) -> u8 {
        self.throughput[path]
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    bytes: u64,
    throughput: u64,
}

impl Candidate {
    /// `Less` if this path is the better one for `incoming` more bytes. The kernel's four rules, in its order.
    #[inline]
    fn compare(self, other: Self, incoming: u64) -> Ordering {
        let by_throughput = other.throughput.cmp(&self.throughput);
        if by_throughput.is_eq() {
            return self.bytes.cmp(&other.bytes);
        }
        // Throughput 0 means "only if nothing better is left".
        if self.bytes == other.bytes || self.throughput == 0 || other.throughput == 0 {
            return by_throughput;
        }
        let (mut own, mut others) =
            (self.bytes.saturating_add(incoming), other.bytes.saturating_add(incoming));
        if own >= BYTES_EXACT_MAX || others >= BYTES_EXACT_MAX {
            own >>= THROUGHPUT_BITS;
            others >>= THROUGHPUT_BITS;
        }
        // own / throughput against others / other.throughput, without the division.
        (own * other.throughput).cmp(&(others * self.throughput)).then(by_throughput)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathLoad;
    use Ordering::{Equal, Greater, Less};

    #[test]
    fn the_four_rules() {
        let huge = BYTES_EXACT_MAX;
        // (bytes, throughput) of both, incoming bytes, result
        let table = [
            // 1: equal throughput, the incoming bytes play no part
            ((4096, 1), (8192, 1), 1 << 20, Less),
            ((8192, 50), (4096, 50), 0, Greater),
            ((4096, 0), (4096, 0), 4096, Equal),
            ((8192, 0), (4096, 0), 4096, Greater),
            // 2: equal bytes, or a throughput of 0
            ((0, 4), (0, 1), 4096, Less),
            ((0, 1), (0, 4), 4096, Greater),
            ((0, 0), (1 << 30, 1), 4096, Greater),
            ((1 << 30, 1), (0, 0), 4096, Less),
            // 3: cross products: (s1 + n) r2 against (s2 + n) r1
            ((8192, 4), (0, 1), 4096, Less),        // 12288 < 16384
            ((16384, 4), (0, 1), 4096, Greater),    // 20480 > 16384
            ((0, 1), (16384, 4), 4096, Less),       // the same from the other side
            ((100_000, 100), (999, 1), 0, Greater), // 100000 > 99900
            // 4: equal products: the faster path
            ((12288, 4), (0, 1), 4096, Less),
            ((0, 1), (12288, 4), 4096, Greater),
            // 3 with sums that would overflow: both are shifted first
            ((huge, 100), (huge * 2, 99), 0, Less),
            ((huge - 4096, 100), (1, 99), 4096, Greater),
            ((u64::MAX, 100), (u64::MAX - 1, 1), 4096, Less), // the sums saturate
        ];
        for (own, other, incoming, expected) in table {
            let candidate = |(bytes, throughput)| Candidate { bytes, throughput };
            let result = candidate(own).compare(candidate(other), incoming);
            assert_eq!(result, expected, "{own:?} against {other:?} with {incoming}");
        }
    }

    #[test]
    fn throughput_0_is_used_only_when_nothing_else_is_usable() {
        let mut selector = ServiceTime::new([0, 1, 0].into(), 3, 0);
        let mut usable = PathSet::full(3);
        let load = [PathLoad::default(), PathLoad { in_flight: 64, bytes: 1 << 26 }, PathLoad::default()];
        assert_eq!(selector.select(4096, &usable, &load), Some(1));
        usable.remove(1);
        let picks: Vec<_> = (0..4).filter_map(|_| selector.select(4096, &usable, &load)).collect();
        assert_eq!(picks, [0, 2, 0, 2]);
    }

    #[test]
    fn shares_follow_the_throughput_under_load() {
        let mut selector = ServiceTime::new([3, 1].into(), 2, 0);
        let mut load = [PathLoad::default(); 2];
        for _ in 0..64 {
            let path = selector.select(4096, &PathSet::full(2), &load).unwrap();
            load[path].bytes += 4096;
        }
        assert_eq!(load.map(|path| path.bytes / 4096), [48, 16]);
    }

    #[test]
    fn f40_ties_alternate_between_the_idle_paths() {
        let mut selector = ServiceTime::new([1; 3].into(), 3, 0);
        let load = [PathLoad::default(), PathLoad::default(), PathLoad { in_flight: 1, bytes: 4096 }];
        let picks: Vec<_> = (0..4).filter_map(|_| selector.select(4096, &PathSet::full(3), &load)).collect();
        assert_eq!(picks, [0, 1, 0, 1]);
    }
}
