//! A real guest under QEMU on a disk served by the program under test.
//!
//! `POLYPATH_TEST_PROGRAM=qsd` runs those tests that hold for any back-end against qemu-storage-daemon: what fails there is
//! the harness's fault.

mod boot;
mod crash;
mod discard;
mod events;
mod files;
mod hotplug;
mod lifecycle;
mod migration;
mod paths;
mod read_only;
mod resize;
mod seeds;
mod soak;
mod support;
mod verify;
