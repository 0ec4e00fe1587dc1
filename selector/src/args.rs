//! Arguments of selectors, as the word lists of a dm table line.

use crate::{Kind, QueueMask};

/// Arguments of a selector that hold for its whole group (`<#sel args> [arg...]` of a table line).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupArgs {
    /// historical-service-time: weight of the history, 0 to 1023 in 1/1024 (default 972).
    pub base_weight: u16,
    /// historical-service-time: averages count as different only above this ratio (default 0: always).
    pub threshold: u32,
    /// learned-service-time: a path up to this many times slower than the best shares in proportion, a slower one is
    /// left for overflow and probes; 1 to 1000 (default 6).
    pub share_ratio: u16,
}

impl Default for GroupArgs {
    fn default() -> Self {
        Self { base_weight: 972, threshold: 0, share_ratio: 6 }
    }
}

impl GroupArgs {
    /// Reads the group arguments of a selector.
    ///
    /// historical-service-time: `[<base weight> [<threshold>]]`; learned-service-time: `[<share ratio>]`; others none.
    ///
    /// # Errors
    /// Names the first word that cannot be accepted.
    pub fn parse(kind: Kind, words: &[&str]) -> Result<Self, ArgError> {
        let mut args = Self::default();
        let most = match kind {
            Kind::HistoricalServiceTime => 2,
            Kind::LearnedServiceTime => 1,
            _ => 0,
        };
        let reader = Reader::new(kind, words, 0, most)?;
        match kind {
            Kind::HistoricalServiceTime => {
                reader.number(0, "base weight", 0, 1023, &mut args.base_weight)?;
                reader.number(1, "threshold", 0, u32::MAX, &mut args.threshold)?;
            }
            Kind::LearnedServiceTime => {
                reader.number(0, "share ratio", 1, 1000, &mut args.share_ratio)?;
            }
            _ => {}
        }
        Ok(args)
    }

    /// The words of a dm TABLE or INFO line with their number before them, such as `2 972 0` or `0`.
    #[must_use]
    pub fn table(&self, kind: Kind) -> String {
        match kind {
            Kind::HistoricalServiceTime => format!("2 {} {}", self.base_weight, self.threshold),
            Kind::LearnedServiceTime => format!("1 {}", self.share_ratio),
            _ => "0".into(),
        }
    }
}

/// Arguments of a selector for one path (`[per-path args]` of a table line).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathArgs {
    /// As given. It has no effect: since Linux 4.6 every value above 1 is forced to 1, because counting repeats was a
    /// write to shared memory on every request. The caller may say so once.
    pub repeat_count: u32,
    /// service-time: throughput relative to the other paths, 0 (only if nothing else is left) to 100.
    pub relative_throughput: u8,
    /// io-affinity: the queues of this path.
    pub queue_mask: Option<QueueMask>,
}

impl Default for PathArgs {
    fn default() -> Self {
        Self { repeat_count: 1, relative_throughput: 1, queue_mask: None }
    }
}

impl PathArgs {
    /// Reads the arguments of one path.
    ///
    /// service-time: `[<repeat count> [<relative throughput>]]`; io-affinity: `<mask>`; others: `[<repeat count>]`.
    ///
    /// # Errors
    /// Names the first word that cannot be accepted.
    pub fn parse(kind: Kind, words: &[&str]) -> Result<Self, ArgError> {
        let mut args = Self::default();
        let (least, most) = match kind {
            Kind::IoAffinity => (1, 1),
            Kind::ServiceTime => (0, 2),
            _ => (0, 1),
        };
        let reader = Reader::new(kind, words, least, most)?;
        if kind == Kind::IoAffinity {
            args.queue_mask = Some(words[0].parse().map_err(|problem| reader.error(0, problem))?);
        } else {
            reader.number(0, "repeat count", 0, u32::MAX, &mut args.repeat_count)?;
        }
        if kind == Kind::ServiceTime {
            reader.number(1, "relative throughput", 0, 100, &mut args.relative_throughput)?;
        }
        Ok(args)
    }

    /// The arguments of a path for which the operator gave none: io-affinity gets every `nr_paths`th queue.
    #[must_use]
    pub fn for_path(kind: Kind, path: usize, nr_paths: usize) -> Self {
        let queue_mask = (kind == Kind::IoAffinity).then(|| QueueMask::every(path, nr_paths));
        Self { queue_mask, ..Self::default() }
    }

    /// These arguments under another selector, or in another group: what the selector has a use for stays, what it needs
    /// beside that is as [`Self::for_path`] gives it.
    #[must_use]
    pub fn carried_to(&self, kind: Kind, path: usize, nr_paths: usize) -> Self {
        let own = Self::for_path(kind, path, nr_paths);
        let queue_mask = own.queue_mask.map(|own| self.queue_mask.clone().unwrap_or(own));
        Self { queue_mask, ..self.clone() }
    }

    /// The words of a dm TABLE line, [`Kind::nr_table_words`] of them, such as `1 4`.
    #[must_use]
    pub fn table(&self, kind: Kind) -> String {
        match kind {
            Kind::RoundRobin | Kind::QueueLength | Kind::LearnedServiceTime => "1".into(),
            Kind::ServiceTime => format!("1 {}", self.relative_throughput),
            Kind::HistoricalServiceTime => "0".into(),
            Kind::IoAffinity => self.queue_mask.as_ref().map_or_else(|| "0".into(), ToString::to_string),
        }
    }
}

/// A word list that a selector does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("argument {} of {kind}: {problem}", word + 1)]
pub struct ArgError {
    /// The selector.
    pub kind: Kind,
    /// Index of the offending word in the list given (its length, if a word is missing).
    pub word: usize,
    /// What is wrong with it.
    pub problem: ArgProblem,
}

/// What is wrong with a word.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ArgProblem {
    #[error("one word is missing, {least} expected")]
    Missing { least: usize },
    #[error("`{given}` is one word too many, at most {most} expected")]
    Superfluous { given: String, most: usize },
    #[error("`{given}` is not a {name}, a number from {least} to {most}")]
    NotInRange { given: String, name: &'static str, least: u32, most: u32 },
    #[error("`{given}` is not a mask: hexadecimal digits, 32 bits between commas")]
    NotAMask { given: String },
}

/// Checks the length of a word list once and reads its words.
struct Reader<'a> {
    kind: Kind,
    words: &'a [&'a str],
}

impl<'a> Reader<'a> {
    fn new(kind: Kind, words: &'a [&'a str], least: usize, most: usize) -> Result<Self, ArgError> {
        let reader = Self { kind, words };
        if words.len() < least {
            return Err(reader.error(words.len(), ArgProblem::Missing { least }));
        }
        match words.get(most) {
            Some(&given) => Err(reader.error(most, ArgProblem::Superfluous { given: given.into(), most })),
            None => Ok(reader),
        }
    }

    fn error(&self, word: usize, problem: ArgProblem) -> ArgError {
        ArgError { kind: self.kind, word, problem }
    }

    /// Overwrites `value` with the word, if it was given.
    fn number<T: TryFrom<u32>>(
        &self,
        word: usize,
        name: &'static str,
        least: u32,
        most: u32,
        value: &mut T,
    ) -> Result<(), ArgError> {
        let Some(&given) = self.words.get(word) else { return Ok(()) };
        // Digits only: `parse` alone would accept a leading `+`.
        let digits = !given.is_empty() && given.bytes().all(|byte| byte.is_ascii_digit());
        *value = digits
            .then(|| given.parse::<u32>().ok())
            .flatten()
            .filter(|number| (least..=most).contains(number))
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| {
                self.error(word, ArgProblem::NotInRange { given: given.into(), name, least, most })
            })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{HistoricalServiceTime, IoAffinity, LearnedServiceTime, QueueLength, RoundRobin, ServiceTime};

    #[test]
    fn group_words_read_and_printed() {
        let table: [(Kind, &[&str], &str); 9] = [
            (RoundRobin, &[], "0"),
            (QueueLength, &[], "0"),
            (ServiceTime, &[], "0"),
            (IoAffinity, &[], "0"),
            (HistoricalServiceTime, &[], "2 972 0"),
            (HistoricalServiceTime, &["0"], "2 0 0"),
            (HistoricalServiceTime, &["1023", "4294967295"], "2 1023 4294967295"),
            (LearnedServiceTime, &[], "1 6"),
            (LearnedServiceTime, &["1000"], "1 1000"),
        ];
        for (kind, words, printed) in table {
            assert_eq!(GroupArgs::parse(kind, words).unwrap().table(kind), printed, "{kind} {words:?}");
        }
    }

    #[test]
    fn path_words_read_and_printed() {
        let table: [(Kind, &[&str], &str); 12] = [
            (RoundRobin, &[], "1"),
            (RoundRobin, &["1000"], "1"),
            (QueueLength, &["0"], "1"),
            (ServiceTime, &[], "1 1"),
            (ServiceTime, &["1000"], "1 1"),
            (ServiceTime, &["1000", "0"], "1 0"),
            (ServiceTime, &["1", "100"], "1 100"),
            (HistoricalServiceTime, &["7"], "0"),
            (LearnedServiceTime, &["7"], "1"),
            (IoAffinity, &["0"], "0"),
            (IoAffinity, &["0xFF"], "ff"),
            (IoAffinity, &["0,1,00000000"], "1,00000000"),
        ];
        for (kind, words, printed) in table {
            let args = PathArgs::parse(kind, words).unwrap();
            assert_eq!(args.table(kind), printed, "{kind} {words:?}");
            assert_eq!(args.table(kind).split(' ').count(), kind.nr_table_words());
        }
        assert_eq!(PathArgs::parse(ServiceTime, &["1000", "1"]).unwrap().repeat_count, 1000);
    }

    #[test]
    fn arguments_go_along_where_they_have_a_meaning() {
        let weight = PathArgs::parse(ServiceTime, &["1", "7"]).unwrap();
        assert_eq!(weight.carried_to(ServiceTime, 1, 2).table(ServiceTime), "1 7");
        // A selector without weights does not lose it for the way back.
        let other = weight.carried_to(QueueLength, 1, 2);
        assert_eq!(
            (other.table(QueueLength), other.carried_to(ServiceTime, 0, 1).table(ServiceTime)),
            ("1".into(), "1 7".into())
        );
        let mask = PathArgs::parse(IoAffinity, &["c"]).unwrap();
        assert_eq!(mask.carried_to(IoAffinity, 0, 1).table(IoAffinity), "c");
        assert_eq!(mask.carried_to(RoundRobin, 0, 1), PathArgs::default());
        assert_eq!(
            weight.carried_to(IoAffinity, 1, 2).queue_mask,
            PathArgs::for_path(IoAffinity, 1, 2).queue_mask
        );
    }

    #[test]
    fn errors_name_the_word() {
        let table: [(Kind, &[&str], &str); 9] = [
            (
                RoundRobin,
                &["1", "2"],
                "argument 2 of round-robin: `2` is one word too many, at most 1 expected",
            ),
            (
                RoundRobin,
                &["x"],
                "argument 1 of round-robin: `x` is not a repeat count, a number from 0 to 4294967295",
            ),
            (
                ServiceTime,
                &["1", "101"],
                "argument 2 of service-time: `101` is not a relative throughput, a number from 0 to 100",
            ),
            (
                ServiceTime,
                &["1", "1", "1"],
                "argument 3 of service-time: `1` is one word too many, at most 2 expected",
            ),
            (
                ServiceTime,
                &["-1"],
                "argument 1 of service-time: `-1` is not a repeat count, a number from 0 to 4294967295",
            ),
            (
                QueueLength,
                &["+1"],
                "argument 1 of queue-length: `+1` is not a repeat count, a number from 0 to 4294967295",
            ),
            (IoAffinity, &[], "argument 1 of io-affinity: one word is missing, 1 expected"),
            (
                IoAffinity,
                &["g"],
                "argument 1 of io-affinity: `g` is not a mask: hexadecimal digits, 32 bits between commas",
            ),
            (
                LearnedServiceTime,
                &["4294967296"],
                "argument 1 of learned-service-time: `4294967296` is not a repeat count, a number from 0 to 4294967295",
            ),
        ];
        for (kind, words, message) in table {
            assert_eq!(PathArgs::parse(kind, words).unwrap_err().to_string(), message);
        }
        let group: [(Kind, &[&str], usize); 5] = [
            (HistoricalServiceTime, &["1024"], 0),
            (HistoricalServiceTime, &["1", "x"], 1),
            (HistoricalServiceTime, &["1", "2", "3"], 2),
            (LearnedServiceTime, &["0"], 0),
            (ServiceTime, &["1"], 0),
        ];
        for (kind, words, word) in group {
            assert_eq!(GroupArgs::parse(kind, words).unwrap_err().word, word, "{kind} {words:?}");
        }
    }
}
