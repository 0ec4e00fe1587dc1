//! Chance that can be repeated: xorshift64*, started from a seed.

/// A source of numbers that are the same for the same seed, on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Seeds that differ little give sequences that differ much (the mixing step of splitmix64).
    pub(crate) fn new(seed: u64) -> Self {
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((z ^ z >> 31) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    /// An index into something of this length.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a usize")
    }

    /// A number below `n` that fits in 32 bits.
    pub(crate) fn below_u32(&mut self, n: u32) -> u32 {
        u32::try_from(self.below(n.into())).expect("below a u32")
    }

    /// True so many times out of a hundred.
    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < u64::from(percent)
    }

    /// One of them.
    pub(crate) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.index(all.len())]
    }

    /// Index of one of the weights, as often as it weighs.
    pub(crate) fn weighted(&mut self, weights: &[u32]) -> usize {
        let mut at = self.below(weights.iter().map(|w| u64::from(*w)).sum());
        for (i, weight) in weights.iter().enumerate() {
            match at.checked_sub(u64::from(*weight)) {
                Some(left) => at = left,
                None => return i,
            }
        }
        unreachable!("the sum is above every number below it")
    }

    /// Any order of them.
    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.index(i + 1));
        }
    }
}
