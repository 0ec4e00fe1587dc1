//! round-robin: every path in turn (Linux: `drivers/md/dm-ps-round-robin.c`).

use crate::PathSet;

/// The next usable path after the last one; a reinstated path comes first, once.
#[derive(Clone, Debug)]
pub(crate) struct RoundRobin {
    nr_paths: usize,
    /// Where the next search begins.
    next: usize,
    /// Reinstated and not chosen since.
    returned: Option<usize>,
}

impl RoundRobin {
    pub(crate) fn new(nr_paths: usize, first: usize) -> Self {
        Self { nr_paths, next: first % nr_paths.max(1), returned: None }
    }

    #[inline]
    pub(crate) fn select(&mut self, usable: &PathSet) -> Option<usize> {
        if let Some(path) = self.returned.take_if(|path| usable.contains(*path)) {
            // Out of turn: the turn of the others does not move, unless it was this path's anyway.
            if self.next == path {
                self.go_past(path);
            }
            return Some(path);
        }
        let path = usable.next_from(self.next)?;
        self.go_past(path);
        Some(path)
    }

    /// Goes round here, so that the search need not: with one path it would in every request.
    #[inline]
    fn go_past(&mut self, path: usize) {
        self.next = if path + 1 < self.nr_paths { path + 1 } else { 0 };
    }

    pub(crate) fn fail_path(&mut self, path: usize) {
        self.returned.take_if(|returned| *returned == path);
    }

    /// The kernel puts it at the head of the list (the other selectors: at the tail).
    pub(crate) fn reinstate_path(&mut self, path: usize) {
        self.returned = Some(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picks(selector: &mut RoundRobin, usable: &PathSet, count: usize) -> Vec<usize> {
        (0..count).filter_map(|_| selector.select(usable)).collect()
    }

    #[test]
    fn takes_turns_from_the_first() {
        let all = PathSet::full(3);
        assert_eq!(picks(&mut RoundRobin::new(3, 0), &all, 6), [0, 1, 2, 0, 1, 2]);
        assert_eq!(picks(&mut RoundRobin::new(3, 5), &all, 4), [2, 0, 1, 2]);
    }

    #[test]
    fn passes_over_unusable_paths_evenly() {
        let mut usable = PathSet::full(4);
        usable.remove(1);
        assert_eq!(picks(&mut RoundRobin::new(4, 0), &usable, 6), [0, 2, 3, 0, 2, 3]);
    }

    #[test]
    fn a_reinstated_path_goes_to_the_head_and_the_others_keep_their_turn() {
        let mut usable = PathSet::full(4);
        let mut selector = RoundRobin::new(4, 0);
        usable.remove(3);
        selector.fail_path(3);
        assert_eq!(picks(&mut selector, &usable, 4), [0, 1, 2, 0]);
        usable.insert(3);
        selector.reinstate_path(3);
        assert_eq!(picks(&mut selector, &usable, 6), [3, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn a_path_that_failed_again_loses_its_place_at_the_head() {
        let mut usable = PathSet::full(3);
        let mut selector = RoundRobin::new(3, 0);
        selector.reinstate_path(2);
        usable.remove(2);
        selector.fail_path(2);
        assert_eq!(picks(&mut selector, &usable, 3), [0, 1, 0]);
    }
}
