//! io-affinity: each queue has its path (Linux: `drivers/md/dm-ps-io-affinity.c`, with virtqueues for CPUs).
//!
//! A guest binds its queues to its CPUs, so the queue index is what a back-end knows of the submitting CPU. There is
//! no NUMA step in between: where the queue's own path is unusable, the queues of that path spread over all others.

use crate::{NewError, PathSet, QueueMask};

#[derive(Clone, Debug)]
pub(crate) struct IoAffinity {
    /// Path of each queue.
    path_of_queue: Box<[Option<u16>]>,
    nr_paths: usize,
    /// Requests of queues that no mask names.
    misses: u64,
}

impl IoAffinity {
    /// The first mask that names a queue keeps it; a path must get at least one.
    pub(crate) fn new<'a>(masks: impl Iterator<Item = Option<&'a QueueMask>>) -> Result<Self, NewError> {
        let mut path_of_queue = Vec::new();
        let mut nr_paths = 0;
        for (path, mask) in (0u16..).zip(masks) {
            let mask = mask.ok_or(NewError::NoQueueMask { path: nr_paths })?;
            let mut claimed = false;
            for queue in mask.queues() {
                if path_of_queue.len() <= queue {
                    path_of_queue.resize(queue + 1, None);
                }
                claimed |= path_of_queue[queue].is_none();
                path_of_queue[queue].get_or_insert(path);
            }
            if !claimed {
                return Err(NewError::NoQueueLeft { path: nr_paths });
            }
            nr_paths += 1;
        }
        Ok(Self { path_of_queue: path_of_queue.into(), nr_paths, misses: 0 })
    }

    #[inline]
    pub(crate) fn select(&mut self, queue: usize, usable: &PathSet) -> Option<usize> {
        match self.path_of_queue.get(queue).copied().flatten().map(usize::from) {
            Some(path) if usable.contains(path) => Some(path),
            mapped => {
                self.misses += u64::from(mapped.is_none());
                // Not the first usable path for all: one neighbour would get the whole load of a failed path.
                usable.next_from(queue % self.nr_paths.max(1))
            }
        }
    }

    pub(crate) fn misses(&self) -> u64 {
        self.misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masks<const N: usize>(words: [&str; N]) -> Result<IoAffinity, NewError> {
        let masks = words.map(|word| word.parse::<QueueMask>().expect("a mask"));
        IoAffinity::new(masks.iter().map(Some))
    }

    #[test]
    fn each_queue_has_its_path_and_the_first_claim_counts() {
        let mut selector = masks(["5", "e"]).unwrap();
        let all = PathSet::full(2);
        assert_eq!([0, 1, 2, 3].map(|queue| selector.select(queue, &all)), [0, 1, 0, 1].map(Some));
        assert_eq!(selector.misses(), 0);
    }

    #[test]
    fn unmapped_queues_are_counted_and_served() {
        let mut selector = masks(["1", "2"]).unwrap();
        let all = PathSet::full(2);
        assert_eq!([2, 3, 900].map(|queue| selector.select(queue, &all)), [0, 1, 0].map(Some));
        assert_eq!(selector.misses(), 3);
    }

    #[test]
    fn the_queues_of_an_unusable_path_spread_over_the_others() {
        let mut selector = masks(["f", "f0", "f00", "f000"]).unwrap();
        let mut usable = PathSet::full(4);
        usable.remove(0);
        assert_eq!([0, 1, 2, 3, 4].map(|queue| selector.select(queue, &usable)), [1, 1, 2, 3, 1].map(Some));
        assert_eq!(selector.misses(), 0, "mapped, though its path is unusable");
        usable.insert(0);
        assert_eq!(selector.select(0, &usable), Some(0));
        assert_eq!(selector.select(0, &PathSet::empty(4)), None);
    }

    #[test]
    fn a_path_without_a_queue_is_refused() {
        assert_eq!(masks(["3", "2"]).unwrap_err(), NewError::NoQueueLeft { path: 1 });
        assert_eq!(masks(["1", "0"]).unwrap_err(), NewError::NoQueueLeft { path: 1 });
        assert_eq!(IoAffinity::new([None].into_iter()).unwrap_err(), NewError::NoQueueMask { path: 0 });
    }
}
