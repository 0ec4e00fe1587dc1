//! When to go back to a better group (multipath-tools' `failback`; the kernel never does by itself).

use std::fmt;
use std::str::FromStr;

/// The policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FailbackPolicy {
    /// Never.
    #[default]
    Manual,
    /// As soon as a better group has a path.
    Immediate,
    /// So many seconds after a better group got a path, if no path fails meanwhile.
    After(u32),
    /// Only when the first path of the best group comes up: not when another host's failover brought us elsewhere.
    Followover,
}

/// The word is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be manual, immediate, followover or a number of seconds")]
pub struct BadFailback;

impl FromStr for FailbackPolicy {
    type Err = BadFailback;

    fn from_str(text: &str) -> Result<Self, BadFailback> {
        match text {
            "manual" => Ok(Self::Manual),
            "immediate" => Ok(Self::Immediate),
            "followover" => Ok(Self::Followover),
            _ => match text.parse() {
                Ok(0) => Ok(Self::Immediate),
                Ok(seconds) => Ok(Self::After(seconds)),
                Err(_) => Err(BadFailback),
            },
        }
    }
}

impl fmt::Display for FailbackPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manual => f.write_str("manual"),
            Self::Immediate => f.write_str("immediate"),
            Self::After(seconds) => write!(f, "{seconds}"),
            Self::Followover => f.write_str("followover"),
        }
    }
}

/// Decides about going back.
#[derive(Debug, Clone, Default)]
pub struct Failback {
    policy: FailbackPolicy,
    /// When the countdown ends, in ns.
    due_ns: Option<u64>,
}

impl Failback {
    /// With this policy.
    pub fn new(policy: FailbackPolicy) -> Self {
        Self { policy, due_ns: None }
    }

    /// The policy.
    pub fn policy(&self) -> FailbackPolicy {
        self.policy
    }

    /// A path of `group` came up and was `first` active one of it. True if the best group is to be put in use now.
    pub fn path_up(
        &mut self,
        now_ns: u64,
        group: usize,
        first: bool,
        best: usize,
        current: Option<usize>,
    ) -> bool {
        if current == Some(best) {
            self.due_ns = None;
            return false;
        }
        match self.policy {
            FailbackPolicy::Manual => false,
            FailbackPolicy::Immediate => true,
            FailbackPolicy::Followover => group == best && first,
            FailbackPolicy::After(seconds) => {
                self.due_ns = Some(now_ns + u64::from(seconds) * 1_000_000_000);
                false
            }
        }
    }

    /// A path failed: no going back before one comes up again.
    pub fn path_failed(&mut self) {
        self.due_ns = None;
    }

    /// When to ask [`Self::is_due`] again.
    pub fn next_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Whether the countdown has ended. True once.
    pub fn is_due(&mut self, now_ns: u64) -> bool {
        let due = self.due_ns.is_some_and(|due_ns| now_ns >= due_ns);
        if due {
            self.due_ns = None;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn failback(text: &str) -> Failback {
        let policy: FailbackPolicy = text.parse().unwrap();
        assert_eq!(policy.to_string(), text);
        Failback::new(policy)
    }

    #[test]
    fn the_policies() {
        for (text, group, first, back) in [
            ("manual", 0, true, false),
            ("immediate", 0, true, true),
            ("immediate", 0, false, true),
            ("followover", 0, true, true),
            ("followover", 0, false, false),
            ("followover", 1, true, false),
            ("10", 0, true, false),
        ] {
            assert_eq!(failback(text).path_up(S, group, first, 0, Some(1)), back, "{text} {group} {first}");
            assert!(!failback(text).path_up(S, group, first, 0, Some(0)), "{text}: there already");
        }
        assert!("often".parse::<FailbackPolicy>().is_err());
    }

    #[test]
    fn the_countdown_starts_anew_and_is_cancelled() {
        let mut f = failback("10");
        f.path_up(S, 0, true, 0, Some(1));
        assert!(!f.is_due(10 * S));
        f.path_up(5 * S, 0, false, 0, Some(1));
        assert!(!f.is_due(14 * S));
        assert!(f.is_due(15 * S) && !f.is_due(16 * S));
        f.path_up(20 * S, 0, true, 0, Some(1));
        f.path_failed();
        assert!(!f.is_due(100 * S) && f.next_ns().is_none());
    }
}
