//! The order in which a scanning selector looks at the paths.

/// The paths of a group in the order of their last choice, oldest first.
///
/// A scan takes the first of the best, so ties go to the path that was chosen longest ago. Rotating by position is not
/// enough: of three paths with the third busy, one idle path got twice the share of the other (Linux commit
/// f20426056f2e). A doubly linked ring in two arrays; the entry after the last path is its head.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    next: Box<[u16]>,
    prev: Box<[u16]>,
}

impl Rotation {
    /// The paths from `first` (modulo their number) on, going round.
    pub(crate) fn new(nr_paths: u16, first: usize) -> Self {
        let len = usize::from(nr_paths) + 1;
        let mut rotation = Self { next: vec![nr_paths; len].into(), prev: vec![nr_paths; len].into() };
        for offset in 0..usize::from(nr_paths) {
            rotation.append((first + offset) % usize::from(nr_paths));
        }
        rotation
    }

    /// Oldest choice first.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let head = self.head();
        std::iter::successors(Some(usize::from(self.next[head])), move |&path| {
            Some(usize::from(self.next[path]))
        })
        .take_while(move |&path| path != head)
    }

    /// Makes the path the one chosen last.
    #[inline]
    pub(crate) fn move_to_tail(&mut self, path: usize) {
        let (before, after) = (self.prev[path], self.next[path]);
        self.next[usize::from(before)] = after;
        self.prev[usize::from(after)] = before;
        self.append(path);
    }

    fn head(&self) -> usize {
        self.next.len() - 1
    }

    fn append(&mut self, path: usize) {
        let head = self.head();
        let tail = usize::from(self.prev[head]);
        self.prev[path] = self.prev[head];
        self.next[path] = self.next[tail];
        // The index fits: it came in as an entry of these arrays.
        let index = u16::try_from(path).unwrap_or(u16::MAX);
        self.next[tail] = index;
        self.prev[head] = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(rotation: &Rotation) -> Vec<usize> {
        rotation.iter().collect()
    }

    #[test]
    fn chosen_paths_go_to_the_tail() {
        let mut rotation = Rotation::new(4, 6);
        assert_eq!(order(&rotation), [2, 3, 0, 1]);
        rotation.move_to_tail(3);
        assert_eq!(order(&rotation), [2, 0, 1, 3]);
        rotation.move_to_tail(3);
        assert_eq!(order(&rotation), [2, 0, 1, 3]);
        rotation.move_to_tail(2);
        assert_eq!(order(&rotation), [0, 1, 3, 2]);
    }

    #[test]
    fn groups_of_no_and_one_path() {
        assert_eq!(order(&Rotation::new(0, 3)), []);
        let mut one = Rotation::new(1, 3);
        one.move_to_tail(0);
        assert_eq!(order(&one), [0]);
    }
}
