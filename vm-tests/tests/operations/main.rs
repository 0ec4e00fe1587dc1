//! How the program is operated: control socket, command line, configuration, metrics, packages. The program is real, and
//! so are its clients.
//!
//! Names that begin with an F and a number are cases of the project's list of known faults of such programs.

#[allow(dead_code, reason = "shared with other tests")]
#[path = "../vmless/common.rs"]
mod common;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../vmless/rig.rs"]
mod rig;

mod cli;
mod clients;
mod config;
mod documents;
mod events;
mod limits;
mod metrics;
mod packaging;
mod protocol;
mod resize;
mod run;
