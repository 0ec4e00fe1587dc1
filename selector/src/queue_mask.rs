//! Which queues belong to a path.

use crate::ArgProblem;
use std::fmt;
use std::str::FromStr;

/// A set of virtqueues, written as the kernel writes CPU masks: hexadecimal, 32 bits between commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueMask {
    /// Queue 0 is the lowest bit of the first word; no trailing zero words.
    words: Vec<u32>,
}

impl QueueMask {
    /// More queues than any front-end has; masks of large machines are that long.
    const QUEUES_MAX: usize = 4096;
    /// A back-end's limit, for masks made here.
    const QUEUES_MADE: usize = 64;

    /// Queues `path`, `path + nr_paths`, ...; every path gets at least one.
    #[must_use]
    pub fn every(path: usize, nr_paths: usize) -> Self {
        let mut words = vec![0; Self::QUEUES_MADE.max(nr_paths).div_ceil(32)];
        let nr_queues = words.len() * 32;
        (path..nr_queues).step_by(nr_paths.max(1)).for_each(|queue| words[queue / 32] |= 1 << (queue % 32));
        Self::trimmed(words)
    }

    /// The queues in it, ascending.
    pub fn queues(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.words.len() * 32).filter(|queue| self.words[queue / 32] >> (queue % 32) & 1 == 1)
    }

    fn trimmed(mut words: Vec<u32>) -> Self {
        words.truncate(words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1));
        Self { words }
    }
}

impl FromStr for QueueMask {
    type Err = ArgProblem;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        let bad = || ArgProblem::NotAMask { given: given.into() };
        let digits_only = |chunk: &str| chunk.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut words = Vec::new();
        let chunks: Vec<&str> = given.strip_prefix("0x").unwrap_or(given).split(',').collect();
        if chunks.len() > Self::QUEUES_MAX / 32 {
            return Err(bad());
        }
        if let [alone] = chunks[..]
            && alone.len() > 8
        {
            // Without commas the kernel takes up to one long; cut it into its 32-bit words.
            let value =
                (alone.len() <= 16 && digits_only(alone)).then(|| u64::from_str_radix(alone, 16).ok());
            let value = value.flatten().ok_or_else(bad)?;
            words.extend([low_half(value), low_half(value >> 32)]);
        } else {
            for chunk in chunks.into_iter().rev() {
                if chunk.is_empty() || chunk.len() > 8 || !digits_only(chunk) {
                    return Err(bad());
                }
                words.push(u32::from_str_radix(chunk, 16).map_err(|_| bad())?);
            }
        }
        Ok(Self::trimmed(words))
    }
}

fn low_half(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

impl fmt::Display for QueueMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.words.iter().rev();
        write!(f, "{:x}", words.next().unwrap_or(&0))?;
        words.try_for_each(|word| write!(f, ",{word:08x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_read_and_printed() {
        for (given, queues, printed) in [
            ("1", vec![0], "1"),
            ("80000001", vec![0, 31], "80000001"),
            ("8000000100000000", vec![32, 63], "80000001,00000000"),
            ("00000001,0", vec![32], "1,00000000"),
            ("0,0,3", vec![0, 1], "3"),
        ] {
            let mask: QueueMask = given.parse().unwrap();
            assert_eq!((mask.queues().collect(), mask.to_string()), (queues, printed.to_string()), "{given}");
        }
        for given in ["", ",", "1,", ",1", "123456789,0", "12345678123456781", "0x", "+1", "1 ", "x"] {
            assert!(given.parse::<QueueMask>().is_err(), "`{given}`");
        }
    }

    #[test]
    fn made_masks_give_every_queue_one_path() {
        for nr_paths in [1, 2, 3, 64, 100] {
            let masks: Vec<_> = (0..nr_paths).map(|path| QueueMask::every(path, nr_paths)).collect();
            let mut queues: Vec<_> = masks.iter().flat_map(QueueMask::queues).collect();
            queues.sort_unstable();
            assert!(queues.len() >= 64 && queues.iter().copied().eq(0..queues.len()), "{nr_paths}");
            assert!(masks.iter().all(|mask| mask.queues().next().is_some()));
        }
    }
}
