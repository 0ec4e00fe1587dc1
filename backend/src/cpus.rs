//! Which processors the workers run on.

use std::fmt;
use std::io;
use std::str::FromStr;

use rustix::thread::CpuSet;

/// Processors by number, as written: `2-5,8`. Queue i runs on number i of the list, from its beginning again when it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// Why a list is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuListError {
    /// Neither a number nor a range of two.
    #[error("`{0}` is not a processor's number, nor a range like 2-5")]
    Word(String),
    /// Beyond what the kernel knows.
    #[error("{0} is more than the largest possible number, {max}", max = CpuSet::MAX_CPU - 1)]
    Large(usize),
}

impl CpuList {
    /// The processor of a queue.
    pub fn of(&self, queue: usize) -> Option<usize> {
        self.0.get(queue % self.0.len()).copied()
    }

    /// The first one that this process may not use; None: all are fine.
    pub fn first_forbidden(&self) -> io::Result<Option<usize>> {
        let allowed = rustix::thread::sched_getaffinity(None)?;
        Ok(self.0.iter().copied().find(|&cpu| !allowed.is_set(cpu)))
    }
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut cpus = Vec::new();
        for word in text.split(',') {
            let number = |text: &str| -> Result<usize, CpuListError> {
                let number = text.trim().parse().map_err(|_| CpuListError::Word(word.trim().to_owned()))?;
                if number < CpuSet::MAX_CPU { Ok(number) } else { Err(CpuListError::Large(number)) }
            };
            let (first, last) = match word.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(word)?, number(word)?),
            };
            if first > last {
                return Err(CpuListError::Word(word.trim().to_owned()));
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, cpu) in self.0.iter().enumerate() {
            write!(f, "{}{cpu}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Keeps the calling thread on one processor. What it touches first from then on comes from that processor's memory node.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges() {
        for (text, shown) in
            [("0", "0"), ("2-5,8", "2,3,4,5,8"), ("7, 3", "7,3"), ("1-1", "1"), ("4,4", "4,4")]
        {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), shown);
        }
        for text in ["", "a", "1-", "-1", "5-2", "1,,2", "1-2-3", "99999999"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }

    #[test]
    fn queues_go_round_the_list() {
        let list: CpuList = "3,5,9".parse().unwrap();
        assert_eq!([0, 1, 2, 3, 64].map(|queue| list.of(queue)), [3, 5, 9, 3, 5].map(Some));
    }

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).unwrap();
        std::thread::spawn(move || {
            pin(last).unwrap();
            let now = rustix::thread::sched_getaffinity(None).unwrap();
            assert!(now.is_set(last) && now.count() == 1);
            assert_eq!(rustix::thread::sched_getcpu(), last);
        })
        .join()
        .unwrap();
        let list: CpuList = format!("{last},{}", CpuSet::MAX_CPU - 1).parse().unwrap();
        let forbidden = (last != CpuSet::MAX_CPU - 1).then_some(CpuSet::MAX_CPU - 1);
        assert_eq!(list.first_forbidden().unwrap(), forbidden);
    }
}
