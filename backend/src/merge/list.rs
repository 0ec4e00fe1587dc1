//! Lists of runs in the order in which they came, linked through an array: each run is in one list at most.

use super::NONE;

/// The links of all runs.
#[derive(Debug)]
pub(super) struct Links(Box<[(u16, u16)]>);

impl Links {
    /// For runs with numbers below `nr`.
    pub(super) fn new(nr: u16) -> Self {
        Self(vec![(NONE, NONE); usize::from(nr)].into())
    }
}

/// One list.
#[derive(Debug)]
pub(super) struct List {
    first: u16,
    last: u16,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl List {
    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    pub(super) fn first(&self) -> Option<u16> {
        (self.first != NONE).then_some(self.first)
    }

    pub(super) fn push_back(&mut self, links: &mut Links, run: u16) {
        links.0[usize::from(run)] = (self.last, NONE);
        match self.last {
            NONE => self.first = run,
            last => links.0[usize::from(last)].1 = run,
        }
        self.last = run;
    }

    /// Puts `by`, which is in no list, into the place of a run of this list.
    pub(super) fn replace(&mut self, links: &mut Links, run: u16, by: u16) {
        let (before, after) = links.0[usize::from(run)];
        links.0[usize::from(by)] = (before, after);
        match before {
            NONE => self.first = by,
            before => links.0[usize::from(before)].1 = by,
        }
        match after {
            NONE => self.last = by,
            after => links.0[usize::from(after)].0 = by,
        }
    }

    /// Takes out a run of this list.
    pub(super) fn remove(&mut self, links: &mut Links, run: u16) {
        let (before, after) = links.0[usize::from(run)];
        match before {
            NONE => self.first = after,
            before => links.0[usize::from(before)].1 = after,
        }
        match after {
            NONE => self.last = before,
            after => links.0[usize::from(after)].0 = before,
        }
    }
}
