//! A set of paths of one group, as bits.

/// Set of path indices of one group; finding the next member costs the same for 1 and for 64 paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSet {
    words: Box<[u64]>,
    nr_paths: usize,
}

impl PathSet {
    /// The empty set for a group of `nr_paths` paths. The only allocation.
    #[must_use]
    pub fn empty(nr_paths: usize) -> Self {
        Self { words: vec![0; nr_paths.div_ceil(64)].into(), nr_paths }
    }

    /// The set of all `nr_paths` paths of a group.
    #[must_use]
    pub fn full(nr_paths: usize) -> Self {
        let mut set = Self::empty(nr_paths);
        (0..nr_paths).for_each(|path| set.insert(path));
        set
    }

    /// Number of paths in the group, members or not.
    #[must_use]
    pub fn nr_paths(&self) -> usize {
        self.nr_paths
    }

    /// Adds a path.
    ///
    /// # Panics
    /// If the group has no such path.
    pub fn insert(&mut self, path: usize) {
        assert!(path < self.nr_paths, "path {path} of {}", self.nr_paths);
        self.words[path / 64] |= 1 << (path % 64);
    }

    /// Takes a path out.
    pub fn remove(&mut self, path: usize) {
        if let Some(word) = self.words.get_mut(path / 64) {
            *word &= !(1 << (path % 64));
        }
    }

    /// Whether the path is in the set; false for a path that the group does not have.
    #[must_use]
    #[inline]
    pub fn contains(&self, path: usize) -> bool {
        self.words.get(path / 64).is_some_and(|word| word >> (path % 64) & 1 == 1)
    }

    /// Whether no path is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Number of paths in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// The first member at or after `from`, going on at path 0 after the last.
    #[must_use]
    #[inline]
    pub fn next_from(&self, from: usize) -> Option<usize> {
        self.first_in(from, self.words.len())
            .or_else(|| self.first_in(0, (from / 64 + 1).min(self.words.len())))
    }

    /// The members in ascending order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        Members { words: &self.words, next_word: 0, rest: 0 }
    }

    /// The first member at or after `from` in the words before `end`.
    #[inline]
    fn first_in(&self, from: usize, end: usize) -> Option<usize> {
        let mut mask = u64::MAX << (from % 64);
        for index in from / 64..end {
            let word = self.words[index] & mask;
            if word != 0 {
                return Some(index * 64 + lowest(word));
            }
            mask = u64::MAX;
        }
        None
    }
}

struct Members<'a> {
    words: &'a [u64],
    next_word: usize,
    /// Members of the word before `next_word` that are still to come.
    rest: u64,
}

impl Iterator for Members<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.rest == 0 {
            self.rest = *self.words.get(self.next_word)?;
            self.next_word += 1;
        }
        let path = (self.next_word - 1) * 64 + lowest(self.rest);
        self.rest &= self.rest - 1;
        Some(path)
    }
}

#[inline]
fn lowest(word: u64) -> usize {
    word.trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_goes_round_and_finds_every_member() {
        for nr_paths in [1, 2, 63, 64, 65, 128, 200] {
            let mut set = PathSet::empty(nr_paths);
            assert_eq!(set.next_from(0), None);
            let members = [0, 1, 40, 63, 64, 127, 199].into_iter().filter(|&path| path < nr_paths);
            members.clone().for_each(|path| set.insert(path));
            assert_eq!(set.iter().collect::<Vec<_>>(), members.clone().collect::<Vec<_>>());
            assert_eq!(set.len(), members.clone().count());
            for from in 0..nr_paths {
                let expected = members.clone().find(|&path| path >= from).or(members.clone().next());
                assert_eq!(set.next_from(from), expected, "{nr_paths} paths from {from}");
            }
        }
    }

    #[test]
    fn a_path_outside_of_the_group_is_no_member() {
        let mut set = PathSet::full(3);
        set.remove(200);
        assert!(set.contains(2) && !set.contains(3) && !set.contains(200));
        assert!(PathSet::empty(0).is_empty() && PathSet::full(0).next_from(0).is_none());
    }
}
