//! polypath: a vhost-user-blk back-end with multipath inside.
//!
//! The route of a request: [`worker`] pops a chain from the [`vring`], [`request`] makes a checked request of it,
//! [`transfer`] (with [`gather`]) what the kernel needs, [`dispatch`] chooses the path, [`engine`] hands it to io_uring;
//! the answer comes back the same way. [`control`] accepts front-ends, [`session`] speaks vhost-user with one of them.

mod as_text;
pub mod back_channel;
mod check;
pub mod cli;
pub mod client;
pub mod clock;
mod command;
mod command_socket;
pub mod config;
pub mod control;
mod counters;
pub mod cpus;
mod crash;
pub mod dirty_log;
pub mod disk;
pub mod dispatch;
pub mod engine;
mod event_command;
pub mod events;
pub mod fence;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
pub mod gather;
mod helper;
pub mod inflight;
pub mod lane;
pub mod listen;
pub mod logging;
pub mod memory;
pub mod merge;
pub mod metrics;
pub mod monitor;
mod notifier;
mod probe;
mod protocol;
pub mod request;
pub mod running;
pub mod sandbox;
pub mod session;
pub mod setup;
pub mod shared_area;
mod signals;
#[cfg(test)]
mod sim;
pub mod stats;
mod status;
pub mod transfer;
pub mod vring;
pub mod worker;
