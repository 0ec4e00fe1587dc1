//! What the tests of several modules stand on, and the simulation.

pub(crate) mod fixture;
pub(crate) mod iovecs;
pub(crate) mod ring;
