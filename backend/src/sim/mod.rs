//! What the tests of several modules stand on, and the simulation.
//!
//! The simulation runs the real worker on one thread over an engine that is its whole world: a guest with a driver and
//! real memory, a storage that answers in any order and with any error, a front-end that gives commands. Chance comes
//! from a seed, so whatever goes wrong can be seen again. What must hold is asserted whenever the worker sleeps and
//! whenever the guest gets a request back.

mod check;
mod control;
mod driver;
mod engine;
pub(crate) mod fixture;
mod gaps;
mod guest;
pub(crate) mod iovecs;
mod lun;
mod model;
mod named;
mod plan;
mod ports;
mod profile;
mod race;
pub(crate) mod ring;
mod rng;
mod run;
mod slot;
mod world;
