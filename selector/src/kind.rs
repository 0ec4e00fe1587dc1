//! The names of the selectors.

use std::fmt;
use std::str::FromStr;

/// Which algorithm chooses inside a priority group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every path in turn. As `drivers/md/dm-ps-round-robin.c`.
    RoundRobin,
    /// The path with the fewest requests in flight. As `drivers/md/dm-ps-queue-length.c`.
    QueueLength,
    /// The path with the fewest bytes in flight for its relative throughput. As `drivers/md/dm-ps-service-time.c`.
    ///
    /// The default of multipath-tools; here [`Kind::LearnedServiceTime`] is, which does the same on equal paths.
    ServiceTime,
    /// The path with the least average service time for what it holds. As
    /// `drivers/md/dm-ps-historical-service-time.c`.
    HistoricalServiceTime,
    /// The path that is bound to the request's queue. As `drivers/md/dm-ps-io-affinity.c`, with queues for CPUs.
    IoAffinity,
    /// Shares by measured speed, per direction and size; the default.
    ///
    /// On equal paths it spreads like service-time. On unequal ones it gives each path the share it can serve, learns
    /// that without arguments, and neither a stuck nor a fast-failing path draws requests.
    #[default]
    LearnedServiceTime,
}

impl Kind {
    /// All selectors, in the order in which they are listed to users.
    pub const ALL: [Self; 6] = [
        Self::RoundRobin,
        Self::QueueLength,
        Self::ServiceTime,
        Self::HistoricalServiceTime,
        Self::IoAffinity,
        Self::LearnedServiceTime,
    ];

    /// The word that names it in a table line, in a configuration file and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::QueueLength => "queue-length",
            Self::ServiceTime => "service-time",
            Self::HistoricalServiceTime => "historical-service-time",
            Self::IoAffinity => "io-affinity",
            Self::LearnedServiceTime => "learned-service-time",
        }
    }

    /// Number of words per path in a dm TABLE line (`<#per-path args>`).
    #[must_use]
    pub const fn nr_table_words(self) -> usize {
        match self {
            Self::ServiceTime => 2,
            _ => 1,
        }
    }

    /// Number of words per path in a dm INFO line (`<#per-path status>`).
    #[must_use]
    pub const fn nr_info_words(self) -> usize {
        match self {
            Self::RoundRobin => 0,
            Self::QueueLength | Self::IoAffinity => 1,
            Self::ServiceTime => 2,
            Self::HistoricalServiceTime => 3,
            Self::LearnedServiceTime => 4,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no selector has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown path selector `{given}`, valid are {}", Kind::ALL.map(Kind::name).join(", "))]
pub struct UnknownKind {
    /// The word as it was given.
    pub given: String,
}

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        // Exact match as in the kernel: a near miss that silently became another selector would go unnoticed.
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == given)
            .ok_or_else(|| UnknownKind { given: given.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back_to_its_kind() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
    }

    #[test]
    fn f39_wrong_names_are_refused_with_the_list_of_valid_ones() {
        for given in ["", " ", "Round-Robin", "SERVICE-TIME", "service-time ", "queue-depth", "round_robin"] {
            let error = given.parse::<Kind>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{given}`")), "{error}");
            for kind in Kind::ALL {
                assert!(error.contains(kind.name()), "{error}");
            }
        }
    }

    #[test]
    fn f39_the_default_is_the_documented_one() {
        assert_eq!(Kind::default().name(), "learned-service-time");
    }
}
