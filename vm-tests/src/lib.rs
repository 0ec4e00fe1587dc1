//! End-to-end tests against the built program as a process.
//!
//! Depends on no workspace crate: everything here talks to the programs under test the way users do, through their
//! command line, their socket and the guest.

pub mod bench;
pub mod control;
pub mod faulty;
pub mod front_end;
pub mod guest;
pub mod loopdev;
pub mod screen;
pub mod server;
pub mod skip;
pub mod soak;
