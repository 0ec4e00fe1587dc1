//! What a selector shows of a path.

use std::fmt;

/// State of one path in its selector; prints as the per-path words of a dm INFO line,
/// [`Kind::nr_info_words`](crate::Kind::nr_info_words) of them.
///
/// Learned values belong to one worker; [`PathInfo::combine`] makes one line of all workers' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathInfo {
    /// Nothing to show.
    RoundRobin,
    /// Prints the requests in flight.
    QueueLength {
        /// Requests in flight.
        in_flight: u32,
    },
    /// Prints bytes in flight and throughput.
    ServiceTime {
        /// Bytes in flight.
        in_flight_bytes: u64,
        /// As configured, 0 to 100.
        relative_throughput: u8,
    },
    /// Prints all three.
    HistoricalServiceTime {
        /// Average service time in 1/1024 ns.
        average: u64,
        /// Requests in flight.
        in_flight: u32,
        /// When the average goes stale, in ns.
        stale_after_ns: u64,
    },
    /// Prints the misses.
    IoAffinity {
        /// Requests of queues that no mask names (of the selector, not of the path, as in the kernel).
        misses: u64,
    },
    /// Prints all four.
    LearnedServiceTime {
        /// Requests in flight.
        in_flight: u32,
        /// Time per small read, in ns; 0 before the first.
        read_ns: u64,
        /// Time per small write, in ns; 0 before the first.
        write_ns: u64,
        /// Both are counted this many binary places higher because of path errors.
        penalty: u32,
    },
}

impl PathInfo {
    /// One view of several workers' views of the same path: loads are totals already, so the largest view counts;
    /// learned times are averaged over the workers that have learned some.
    #[must_use]
    pub fn combine(views: &[Self]) -> Option<Self> {
        let mut result = *views.first()?;
        match &mut result {
            Self::RoundRobin => {}
            Self::QueueLength { in_flight } => *in_flight = views.iter().map(Self::in_flight).max()?,
            Self::ServiceTime { in_flight_bytes, .. } => {
                let bytes = |view: &Self| match view {
                    Self::ServiceTime { in_flight_bytes, .. } => *in_flight_bytes,
                    _ => 0,
                };
                *in_flight_bytes = views.iter().map(bytes).max()?;
            }
            Self::HistoricalServiceTime { average, in_flight, stale_after_ns } => {
                let history = |view: &Self| match view {
                    Self::HistoricalServiceTime { average, stale_after_ns, .. } => {
                        (*average, *stale_after_ns)
                    }
                    _ => (0, 0),
                };
                // An instance without a sample yet (never stale) has nothing to say.
                let learned = views.iter().map(history).filter(|(_, stale_after_ns)| *stale_after_ns > 0);
                *average = mean(learned.map(|(average, _)| average)).unwrap_or(*average);
                *in_flight = views.iter().map(Self::in_flight).max()?;
                *stale_after_ns = views.iter().map(|view| history(view).1).max()?;
            }
            Self::IoAffinity { misses } => {
                let missed = |view: &Self| match view {
                    Self::IoAffinity { misses } => *misses,
                    _ => 0,
                };
                *misses = views.iter().map(missed).sum();
            }
            Self::LearnedServiceTime { in_flight, read_ns, write_ns, penalty } => {
                let learned = |view: &Self| match view {
                    Self::LearnedServiceTime { read_ns, write_ns, penalty, .. } => {
                        (*read_ns, *write_ns, *penalty)
                    }
                    _ => (0, 0, 0),
                };
                *in_flight = views.iter().map(Self::in_flight).max()?;
                *read_ns = mean(views.iter().map(|view| learned(view).0).filter(|&ns| ns > 0)).unwrap_or(0);
                *write_ns = mean(views.iter().map(|view| learned(view).1).filter(|&ns| ns > 0)).unwrap_or(0);
                *penalty = views.iter().map(|view| learned(view).2).max()?;
            }
        }
        Some(result)
    }

    /// The learned part as plain words, to be shown from one thread to another; all 0 before anything was learned.
    #[must_use]
    pub fn learned(&self) -> [u64; 3] {
        match *self {
            Self::RoundRobin | Self::QueueLength { .. } | Self::ServiceTime { .. } => [0; 3],
            // Without a sample the average is a mere beginning.
            Self::HistoricalServiceTime { stale_after_ns: 0, .. } => [0; 3],
            Self::HistoricalServiceTime { average, stale_after_ns, .. } => [average, stale_after_ns, 0],
            Self::IoAffinity { misses } => [misses, 0, 0],
            Self::LearnedServiceTime { read_ns, write_ns, penalty, .. } => {
                [read_ns, write_ns, penalty.into()]
            }
        }
    }

    /// The same info with another learned part, as [`Self::learned`] gave it.
    #[must_use]
    pub fn with_learned(mut self, words: [u64; 3]) -> Self {
        match &mut self {
            Self::RoundRobin | Self::QueueLength { .. } | Self::ServiceTime { .. } => {}
            Self::HistoricalServiceTime { average, stale_after_ns, .. } => {
                (*average, *stale_after_ns) = (words[0], words[1]);
            }
            Self::IoAffinity { misses } => *misses = words[0],
            Self::LearnedServiceTime { read_ns, write_ns, penalty, .. } => {
                (*read_ns, *write_ns) = (words[0], words[1]);
                *penalty = u32::try_from(words[2]).unwrap_or(u32::MAX);
            }
        }
        self
    }

    fn in_flight(&self) -> u32 {
        match self {
            Self::QueueLength { in_flight }
            | Self::HistoricalServiceTime { in_flight, .. }
            | Self::LearnedServiceTime { in_flight, .. } => *in_flight,
            _ => 0,
        }
    }
}

impl fmt::Display for PathInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoundRobin => Ok(()),
            Self::QueueLength { in_flight } => write!(f, "{in_flight}"),
            Self::ServiceTime { in_flight_bytes, relative_throughput } => {
                write!(f, "{in_flight_bytes} {relative_throughput}")
            }
            Self::HistoricalServiceTime { average, in_flight, stale_after_ns } => {
                write!(f, "{average} {in_flight} {stale_after_ns}")
            }
            Self::IoAffinity { misses } => write!(f, "{misses}"),
            Self::LearnedServiceTime { in_flight, read_ns, write_ns, penalty } => {
                write!(f, "{in_flight} {read_ns} {write_ns} {penalty}")
            }
        }
    }
}

fn mean(values: impl Iterator<Item = u64>) -> Option<u64> {
    let (sum, count) =
        values.fold((0u128, 0u128), |(sum, count), value| (sum + u128::from(value), count + 1));
    u64::try_from(sum.checked_div(count)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_workers_views_become_one() {
        let learned = |in_flight, read_ns, penalty| PathInfo::LearnedServiceTime {
            in_flight,
            read_ns,
            write_ns: 0,
            penalty,
        };
        let historical = |average, stale_after_ns| PathInfo::HistoricalServiceTime {
            average,
            in_flight: 1,
            stale_after_ns,
        };
        let table: [(&[PathInfo], &str); 6] = [
            (&[PathInfo::RoundRobin], ""),
            (&[PathInfo::QueueLength { in_flight: 3 }, PathInfo::QueueLength { in_flight: 4 }], "4"),
            (&[PathInfo::ServiceTime { in_flight_bytes: 8192, relative_throughput: 4 }], "8192 4"),
            (&[historical(1024, 0), historical(3000, 7), historical(5000, 6)], "4000 1 7"),
            (&[PathInfo::IoAffinity { misses: 3 }, PathInfo::IoAffinity { misses: 4 }], "7"),
            (&[learned(2, 0, 0), learned(1, 100, 2), learned(1, 300, 0)], "2 200 0 2"),
        ];
        for (views, line) in table {
            assert_eq!(PathInfo::combine(views).unwrap().to_string(), line);
        }
        assert_eq!(PathInfo::combine(&[]), None);
    }

    #[test]
    fn what_was_learned_goes_through_words() {
        let empty = PathInfo::HistoricalServiceTime { average: 0, in_flight: 3, stale_after_ns: 0 };
        let full = PathInfo::HistoricalServiceTime { average: 5000, in_flight: 3, stale_after_ns: 6 };
        assert_eq!(empty.with_learned(full.learned()), full);
        let begun = PathInfo::HistoricalServiceTime { average: 1024, in_flight: 3, stale_after_ns: 0 };
        assert_eq!(begun.learned(), [0; 3]);
        let empty = PathInfo::LearnedServiceTime { in_flight: 1, read_ns: 0, write_ns: 0, penalty: 0 };
        let full = PathInfo::LearnedServiceTime { in_flight: 1, read_ns: 7, write_ns: 8, penalty: 9 };
        assert_eq!(empty.with_learned(full.learned()), full);
        let misses = PathInfo::IoAffinity { misses: 4 };
        assert_eq!(PathInfo::IoAffinity { misses: 0 }.with_learned(misses.learned()), misses);
        for nothing in [PathInfo::RoundRobin, PathInfo::QueueLength { in_flight: 3 }] {
            assert_eq!((nothing.learned(), nothing.with_learned([1; 3])), ([0; 3], nothing));
        }
    }
}
