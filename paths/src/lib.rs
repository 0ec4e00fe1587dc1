//! WHAT paths exist and their health.
//!
//! A [`Path`] is one open host file or device that reaches the LUN; a [`Table`] is an immutable set of them, published
//! whole through a [`TableCell`]. What an errno says about a path is decided in [`failover`]. Nothing here moves guest
//! data: the back-end borrows a path's descriptor to do that.
#![forbid(unsafe_code)]

mod checker;
mod failback;
pub mod failover;
mod identity;
mod ledger;
mod limits;
mod load;
mod map;
mod null;
mod open;
mod path;
mod proof;
pub mod stats;
mod sysfs;
mod table;
pub mod text;

pub use checker::{Checker, CheckerConfig, CheckerVerdict};
pub use failback::{BadFailback, Failback, FailbackPolicy};
pub use identity::Identity;
pub use ledger::{Coverage, Ledger};
pub use limits::{FileKind, Limits};
pub use load::{Gauges, Waiting};
pub use map::{Held, MapState, WithoutPath};
pub use open::{Facts, OpenError, OpenOptions, Opened};
pub use path::{Path, Seed};
pub use proof::{ProofError, prove};
pub use table::{FailOutcome, Group, Mismatch, PATHS_MAX, Table, TableCell, TableError, TableReader};
