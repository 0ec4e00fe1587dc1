//! What is wrong with a text, and where.

use std::fmt;

use polypath_selector::{ArgError, UnknownKind};

use super::words::Word;

/// A table line or a message that is not accepted. Prints on one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("word {number}, column {column}: {}", Sentence(.word, .rule))]
pub struct TextError {
    /// The offending word with its quoting removed; empty if one is missing.
    pub word: String,
    /// Its number, from 1 (one more than there are words, if one is missing).
    pub number: usize,
    /// The column that it starts in, in characters from 1 (just behind the last word, if one is missing).
    pub column: usize,
    /// What it breaks.
    pub rule: Rule,
}

impl TextError {
    pub(super) fn new(word: &Word, rule: impl Into<Rule>) -> Self {
        Self { word: word.text.clone(), number: word.number, column: word.column, rule: rule.into() }
    }
}

/// A rule of the text forms. Prints as the end of a sentence that begins with the word, except where it names the
/// word itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum Rule {
    // Words and numbers.
    #[error("the line ends where {expected} is expected")]
    Missing { expected: &'static str },
    #[error("has a control character")]
    Control,
    #[error("is empty")]
    Empty,
    #[error("is not {name}, a number from {least} to {most}")]
    Number { name: &'static str, least: u64, most: u64 },
    #[error("announces more words than follow ({left})")]
    CountBeyondEnd { left: usize },

    // The line as a whole.
    #[error("is not 0, the sector where the only target of a table starts")]
    Start,
    #[error("is not `multipath`, the only target there is here")]
    Target,
    #[error("is one word too many: the announced groups ({groups}) are complete")]
    GroupsExceeded { groups: usize },
    #[error("the line ends after {found} of {groups} groups")]
    GroupsMissing { groups: usize, found: usize },
    #[error("is not an initial group: 0 without groups, else from 1 to their number ({groups})")]
    InitialGroup { groups: usize },

    // Features.
    #[error("is not a feature, valid are {}", FEATURES.join(", "))]
    Feature,
    #[error("needs a value, which is not among the announced feature words ({words})")]
    FeatureValue { words: usize },
    #[error("is not a queue mode, valid are bio, rq, mq")]
    QueueMode,

    // Groups and paths.
    #[error(transparent)]
    Selector(#[from] UnknownKind),
    #[error(transparent)]
    Args(#[from] ArgError),
    #[error("names no queue that is left over by the earlier paths of its group")]
    QueuesTaken,
    #[error("needs quotes: the digits of a mask are hexadecimal")]
    MaskUnquoted,
    #[error("is a weight, which only paths of service-time have")]
    Weight,
    #[error("is a weight beside `args`, which have it as their second word")]
    WeightAndArgs,

    // Messages.
    #[error("is not a message, valid are {}", MESSAGES.join(", "))]
    Message,
    #[error("is one word too many for this message")]
    MessageExceeded,
}

/// Feature words, as listed to users.
pub(super) const FEATURES: [&str; 5] = [
    "queue_if_no_path",
    "retain_attached_hw_handler",
    "pg_init_retries",
    "pg_init_delay_msecs",
    "queue_mode",
];

/// First words of messages, as listed to users.
pub(super) const MESSAGES: [&str; 7] = [
    "queue_if_no_path",
    "fail_if_no_path",
    "switch_group",
    "disable_group",
    "enable_group",
    "fail_path",
    "reinstate_path",
];

/// A text without control characters, for a message on one line.
pub(super) fn printable(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { result.extend(c.escape_debug()) } else { result.push(c) }
    }
    result
}

/// A word and the rule it breaks, as one sentence.
pub(super) struct Sentence<'a>(pub &'a str, pub &'a Rule);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(word, rule) = self;
        match rule {
            Rule::Missing { .. } | Rule::GroupsMissing { .. } | Rule::Selector(_) | Rule::Args(_) => {
                write!(f, "{rule}")
            }
            _ => write!(f, "`{}` {rule}", printable(word)),
        }
    }
}
