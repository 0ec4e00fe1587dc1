//! Messages that change what is running.

use std::fmt;
use std::str::FromStr;

use super::error::{Rule, TextError};
use super::spec::GROUPS_MAX;
use super::words::{Line, Words};

/// A message of `dmsetup message <map> 0 ...`, with the words of Linux' `drivers/md/dm-mpath.c`.
///
/// ```
/// use polypath_paths::text::Message;
///
/// let message: Message = "fail_path /dev/sdb".parse()?;
/// assert_eq!(message, Message::FailPath { device: "/dev/sdb".into() });
/// assert_eq!(message.to_string(), "fail_path /dev/sdb");
/// # Ok::<(), polypath_paths::text::TextError>(())
/// ```
///
/// The first word may be in any case. Whether there is such a group or path is for the running table to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Hold I/O while no path is usable.
    QueueIfNoPath,
    /// Fail I/O while no path is usable, and what is held.
    FailIfNoPath,
    /// Use this group next; no group is bypassed any more.
    SwitchGroup {
        /// From 1.
        group: usize,
    },
    /// Bypass this group: it is used only if no other has a path.
    DisableGroup {
        /// From 1.
        group: usize,
    },
    /// Bypass this group no longer.
    EnableGroup {
        /// From 1.
        group: usize,
    },
    /// Take a device out, in every group that it is in.
    FailPath {
        /// As in the table, or another name of it.
        device: String,
    },
    /// Use a device again, in every group that it is in.
    ReinstatePath {
        /// As in the table, or another name of it.
        device: String,
    },
}

impl Message {
    /// Its first word.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::QueueIfNoPath => "queue_if_no_path",
            Self::FailIfNoPath => "fail_if_no_path",
            Self::SwitchGroup { .. } => "switch_group",
            Self::DisableGroup { .. } => "disable_group",
            Self::EnableGroup { .. } => "enable_group",
            Self::FailPath { .. } => "fail_path",
            Self::ReinstatePath { .. } => "reinstate_path",
        }
    }
}

impl FromStr for Message {
    type Err = TextError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words = Words::split(line)?;
        let mut words = words.cursor();
        let name = words.word("a message")?;
        let mut group = || words.number("a number of a group", 1, GROUPS_MAX as u64).map(|(group, _)| group);
        let message = match name.text.to_ascii_lowercase().as_str() {
            "queue_if_no_path" => Self::QueueIfNoPath,
            "fail_if_no_path" => Self::FailIfNoPath,
            "switch_group" => Self::SwitchGroup { group: group()? },
            "disable_group" => Self::DisableGroup { group: group()? },
            "enable_group" => Self::EnableGroup { group: group()? },
            "fail_path" => Self::FailPath { device: words.word("a device")?.text.clone() },
            "reinstate_path" => Self::ReinstatePath { device: words.word("a device")?.text.clone() },
            _ => return Err(TextError::new(name, Rule::Message)),
        };
        match words.word("") {
            Ok(word) => Err(TextError::new(word, Rule::MessageExceeded)),
            Err(_) => Ok(message),
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Line::default();
        line.words(self.name());
        match self {
            Self::QueueIfNoPath | Self::FailIfNoPath => {}
            Self::SwitchGroup { group } | Self::DisableGroup { group } | Self::EnableGroup { group } => {
                line.words(group);
            }
            Self::FailPath { device } | Self::ReinstatePath { device } => {
                line.quoted(device);
            }
        }
        f.write_str(&line.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::MESSAGES;
    use super::super::strategy;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_message_reads_and_prints() {
        let device = || "8:16".to_owned();
        let table = [
            ("queue_if_no_path", Message::QueueIfNoPath),
            ("fail_if_no_path", Message::FailIfNoPath),
            ("switch_group 1", Message::SwitchGroup { group: 1 }),
            ("disable_group 2", Message::DisableGroup { group: 2 }),
            ("enable_group 1024", Message::EnableGroup { group: 1024 }),
            ("fail_path 8:16", Message::FailPath { device: device() }),
            ("reinstate_path 8:16", Message::ReinstatePath { device: device() }),
            ("fail_path /dev/a\\ b", Message::FailPath { device: "/dev/a b".into() }),
        ];
        assert_eq!(table.clone().map(|(_, message)| message.name())[..7], MESSAGES);
        for (line, message) in table {
            assert_eq!(message.to_string(), line);
            assert_eq!(line.parse().as_ref(), Ok(&message));
            let (name, rest) = line.split_at(message.name().len());
            let loud = format!("\t {}{rest}\n", name.to_uppercase());
            assert_eq!(loud.parse(), Ok(message));
        }
    }

    #[test]
    fn every_error_names_the_word_its_place_and_the_rule() {
        let table = [
            ("", 1, 1, "the line ends where a message is expected"),
            (
                "fail_if_no_paths",
                1,
                1,
                "`fail_if_no_paths` is not a message, valid are queue_if_no_path, fail_if_no_path, switch_group, disable_group, enable_group, fail_path, reinstate_path",
            ),
            ("queue_if_no_path 1", 2, 18, "`1` is one word too many for this message"),
            (" fail_if_no_path now", 2, 18, "`now` is one word too many for this message"),
            ("switch_group", 2, 13, "the line ends where a number of a group is expected"),
            ("switch_group 0", 2, 14, "`0` is not a number of a group, a number from 1 to 1024"),
            ("switch_group 1x", 2, 14, "`1x` is not a number of a group, a number from 1 to 1024"),
            ("disable_group -1", 2, 15, "`-1` is not a number of a group, a number from 1 to 1024"),
            ("disable_group +1", 2, 15, "`+1` is not a number of a group, a number from 1 to 1024"),
            (
                "enable_group 4294967297",
                2,
                14,
                "`4294967297` is not a number of a group, a number from 1 to 1024",
            ),
            ("enable_group 1 2", 3, 16, "`2` is one word too many for this message"),
            ("fail_path", 2, 10, "the line ends where a device is expected"),
            ("fail_path 8:0 8:16", 3, 15, "`8:16` is one word too many for this message"),
            ("reinstate_path ", 2, 15, "the line ends where a device is expected"),
            ("reinstate_path a\0", 2, 16, r"`a\0` has a control character"),
        ];
        for (line, number, column, message) in table {
            let error = line.parse::<Message>().unwrap_err();
            assert_eq!(error.to_string(), format!("word {number}, column {column}: {message}"), "{line:?}");
        }
    }

    proptest! {
        #[test]
        fn any_device_reads_back(device in strategy::name()) {
            let message = Message::ReinstatePath { device };
            prop_assert_eq!(message.to_string().parse(), Ok(message));
        }

        #[test]
        fn any_text_is_read_or_refused(name in prop::sample::select(&MESSAGES[..]), rest in any::<String>()) {
            for line in [format!("{name} {rest}"), rest] {
                match line.parse::<Message>() {
                    Ok(message) => prop_assert_eq!(message.to_string().parse(), Ok(message)),
                    Err(error) => prop_assert_eq!(error.to_string().lines().count(), 1),
                }
            }
        }
    }
}
