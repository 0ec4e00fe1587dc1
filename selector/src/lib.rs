//! WHICH path: pure path-selection policy. No I/O, no threads, no clock.
//!
//! A worker owns one [`Selector`] per priority group and calls it around every dispatch. Nothing in it is shared, so
//! choosing a path writes no cache line of another worker; what the others do is seen through [`Load`], which may be
//! a batch old. After construction nothing allocates.
//!
//! ```
//! use polypath_selector::{Direction, GroupArgs, Kind, Outcome, PathArgs, PathLoad, PathSet, Request, Selector};
//!
//! let kind: Kind = "service-time".parse()?;                // dm's names; the error lists them all
//! let group = GroupArgs::parse(kind, &[])?;                // words as in a dm table line
//! let paths = [PathArgs::parse(kind, &["1000", "2"])?, PathArgs::parse(kind, &["1000", "1"])?];
//! let worker = 0;                                          // staggers the first choice of each worker
//! let mut selector = Selector::new(kind, &group, &paths, worker)?;
//!
//! let mut usable = PathSet::full(2);                       // active and with room: the worker keeps it
//! let mut load = [PathLoad::default(); 2];                 // any `impl Load`: own + other workers' I/O
//! let request = Request { bytes: 4096, direction: Direction::Read, queue: 0, now_ns: 1_000 };
//!
//! let path = selector.select(&request, &usable, &load).expect("some path is usable");
//! let ticket = selector.start_io(path, &request, &load);   // keep it in the in-flight slot
//! load[path] = PathLoad { in_flight: 1, bytes: 4096 };
//!
//! load[path] = PathLoad::default();                        // ... completed
//! selector.end_io(ticket, 81_000, Outcome::Success);
//! usable.remove(path);                                     // the failover rules took it out
//! selector.fail_path(path);
//! assert_ne!(selector.select(&request, &usable, &load), Some(path));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | selector | chooses | instructions per request with 1, 8, 64 paths |
//! |---|---|---|
//! | [`round-robin`](Kind::RoundRobin) | the next in turn | 95, 95, 95 |
//! | [`queue-length`](Kind::QueueLength) | fewest requests in flight | 153, 335, 1790 |
//! | [`service-time`](Kind::ServiceTime) | fewest bytes in flight per relative throughput | 159, 460, 2870 |
//! | [`historical-service-time`](Kind::HistoricalServiceTime) | measured, one average per path | 223, 769, 5100 |
//! | [`io-affinity`](Kind::IoAffinity) | by the queue the request came from | 86, 86, 86 |
//! | [`learned-service-time`](Kind::LearnedServiceTime) | measured per direction and size, shares by speed | 331, 779, 4360 |
//!
//! (Choice, start and end together, some 80 of them the loop of `examples/cost.rs`, counted by callgrind.)
//!
//! The first five keep the rules and the argument words of Linux' `drivers/md/dm-ps-*.c`; the last is ours and is the
//! default (its module says why, with numbers).
//!
//! # Contract
//! - `usable` alone decides what may be chosen: `select` answers `Some` exactly if a path of the group is in it, and
//!   never a path outside of it. [`fail_path`](Selector::fail_path) and
//!   [`reinstate_path`](Selector::reinstate_path) only adjust order and history.
//! - Equal paths get equal shares: ties go to the path that was chosen longest ago, and workers start at different
//!   paths.
//! - Times are nanoseconds of one monotonic clock of the caller's choice; a clock that steps back does no harm.
//! - What a selector has learned outlives a change of the table by [`inherit`](Selector::inherit).
#![forbid(unsafe_code)]

mod args;
mod historical_service_time;
mod info;
mod io_affinity;
mod kind;
mod learned_service_time;
mod path_set;
mod queue_length;
mod queue_mask;
mod request;
mod rotation;
mod round_robin;
mod selector;
mod service_time;

pub use args::{ArgError, ArgProblem, GroupArgs, PathArgs};
pub use info::PathInfo;
pub use kind::{Kind, UnknownKind};
pub use path_set::PathSet;
pub use queue_mask::QueueMask;
pub use request::{Direction, Load, Outcome, PathLoad, Request, Ticket};
pub use selector::{NewError, PATHS_MAX, Selector};
