//! End-to-end tests without a VM: the front-end is the test itself.
//!
//! Names that begin with an F and a number are cases of the project's list of known faults of such programs.
//! `POLYPATH_TEST_PROGRAM=qsd` runs those tests that hold for any back-end against QEMU's storage daemon.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the numbers of a test are known"
)]

mod bad_chains;
mod chaos;
mod cli;
mod commands;
mod common;
mod crash;
mod discard;
mod failover;
mod fairness;
mod fence;
mod flush;
mod framing;
mod gain;
mod groups;
mod hang;
mod harness;
mod held;
mod hostile;
mod identity;
mod inflight;
mod io;
mod leaks;
mod learned;
mod lifecycle;
mod live;
mod load;
mod lost_memory;
mod malformed;
mod memory;
mod merge;
mod migration;
mod multipath;
mod orders;
mod power;
mod protocol;
mod ranges;
mod resize;
mod retry;
mod rig;
mod sandbox;
mod scarce;
mod soak;
mod sqpoll;
mod stop;
mod tables;
