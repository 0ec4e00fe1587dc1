//! A table as text: what an operator writes, and what the program answers.
//!
//! | text | read | printed |
//! |---|---|---|
//! | table line of `dmsetup` | [`TableSpec::parse_dm`] | [`TableSpec::to_dm`] |
//! | TOML | [`TableSpec::parse_toml`], [`TableSection`] inside a larger file | [`TableSpec::to_toml`] |
//! | message of `dmsetup message` | [`Message`]'s `FromStr` | its `Display` |
//! | INFO and TABLE of `dmsetup` | | [`TableStatus::info`], [`TableStatus::table`] |
//! | JSON | | [`TableStatus::json`] |
//!
//! Nothing here opens a path or knows whether it exists: a [`TableSpec`] is only what was asked for. What is read is
//! checked as a whole, so a table that was accepted can be built as far as its text goes; the back-end still has to
//! open the paths, and takes fewer than dm does ([`crate::PATHS_MAX`]).
//!
//! The syntax of lines and messages, and all their limits, are those of Linux' `drivers/md/dm-mpath.c` (words and
//! quoting: `dm_split_args()` in `drivers/md/dm-table.c`). An error names the word, where it stands, and the rule that
//! it breaks, in one line:
//!
//! ```
//! use polypath_paths::text::TableSpec;
//!
//! let error = TableSpec::parse_dm("0 2048 multipath 1 queue_if_not_path 0 0 0").unwrap_err();
//! assert_eq!((error.number, error.column), (5, 20));
//! assert!(error.to_string().starts_with("word 5, column 20: `queue_if_not_path` is not a feature, valid are"));
//! ```

mod check;
mod dm;
mod error;
mod json;
mod message;
mod spec;
mod status;
#[cfg(test)]
mod strategy;
mod toml;
mod words;

pub use check::SpecError;
pub use dm::NoLength;
pub use error::{Rule, TextError};
pub use json::{GroupView, PathView, SelectorInfo};
pub use message::Message;
pub use spec::{Features, GroupSpec, NoPathRetry, NotNoPathRetry, PathSpec, QueueMode, TableSpec};
pub use status::{GroupState, GroupStatus, Held, PathStatus, TableStatus};
pub use toml::{TableSection, TomlError, TomlProblem};
