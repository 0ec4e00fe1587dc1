//! queue-length: the fewest requests in flight (Linux: `drivers/md/dm-ps-queue-length.c`).

use crate::rotation::Rotation;
use crate::{Load, PathSet};

/// The path that holds the fewest requests, whatever their size.
#[derive(Clone, Debug)]
pub(crate) struct QueueLength {
    rotation: Rotation,
}

impl QueueLength {
    pub(crate) fn new(nr_paths: u16, first: usize) -> Self {
        Self { rotation: Rotation::new(nr_paths, first) }
    }

    #[inline]
    pub(crate) fn select(&mut self, usable: &PathSet, load: &(impl Load + ?Sized)) -> Option<usize> {
        let mut best: Option<(usize, u32)> = None;
        for path in self.rotation.iter().filter(|&path| usable.contains(path)) {
            let in_flight = load.in_flight(path);
            if best.is_none_or(|(_, least)| in_flight < least) {
                best = Some((path, in_flight));
                if in_flight == 0 {
                    break;
                }
            }
        }
        let (path, _) = best?;
        self.rotation.move_to_tail(path);
        Some(path)
    }

    pub(crate) fn reinstate_path(&mut self, path: usize) {
        self.rotation.move_to_tail(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathLoad;

    fn loads<const N: usize>(in_flight: [u32; N]) -> [PathLoad; N] {
        in_flight.map(|in_flight| PathLoad { in_flight, bytes: 0 })
    }

    #[test]
    fn takes_the_path_with_the_fewest_requests() {
        for (in_flight, expected) in [([3, 1, 2], 1), ([1, 1, 2], 0), ([2, 1, 0], 2), ([0, 0, 0], 0)] {
            let mut selector = QueueLength::new(3, 0);
            assert_eq!(
                selector.select(&PathSet::full(3), &loads(in_flight)),
                Some(expected),
                "{in_flight:?}"
            );
        }
    }

    #[test]
    fn f40_ties_alternate_between_the_idle_paths() {
        let mut selector = QueueLength::new(3, 0);
        let busy_third = loads([0, 0, 1]);
        let picks: Vec<_> = (0..6).filter_map(|_| selector.select(&PathSet::full(3), &busy_third)).collect();
        assert_eq!(picks, [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn a_reinstated_path_goes_to_the_tail() {
        let mut selector = QueueLength::new(3, 0);
        selector.reinstate_path(0);
        assert_eq!(selector.select(&PathSet::full(3), &loads([0; 3])), Some(1));
    }
}
