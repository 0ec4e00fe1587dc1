//! The seam to the kernel: takes transfers, gives them back with an answer.
//!
//! The engine owns a transfer from [`Engine::start`] until it comes back in [`Event::Done`], and with it everything
//! that the kernel may touch meanwhile.

mod at_once;
mod buffers;
mod files;
mod restrict;
mod ring;
mod uring;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

pub use uring::UringEngine;

use crate::memory::GuestMap;
use crate::transfer::Transfer;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A transfer's step has ended: bytes moved, or a negative errno.
    Done(Box<Transfer>, i32),
    /// The guest has kicked.
    Kick,
    /// A command waits.
    Wake,
}

/// How long more events are waited for than one.
pub const GATHER_TIME: Duration = Duration::from_micros(50);

/// The same where they have come within [`GATHER_TIME`] again and again: just in case. Longer than the kernel's tick (4 ms
/// at 250 Hz): such a timer is hardly ever the next one of its processor, so that setting and stopping it leaves the
/// hardware alone, which in a virtual machine costs several microseconds each time.
pub const SURE_GATHER_TIME: Duration = Duration::from_millis(5);

/// Events that a wait is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// How many.
    pub nr: u32,
    /// How long for more than one.
    pub within: Duration,
}

impl Wanted {
    /// The next event, whatever it is.
    pub const ONE: Self = Self { nr: 1, within: Duration::ZERO };
}

/// What a worker needs of the kernel.
pub trait Engine {
    /// Queues the transfer's next step. It goes out at the next [`Engine::wait`] at the latest, together with all others.
    fn start(&mut self, transfer: Box<Transfer>);

    /// Sends what is queued, in one call, and waits for an event or the timeout, whichever comes first. None waits for
    /// ever; zero only looks. More than one event is waited for as long as `wanted` says.
    ///
    /// # Errors
    /// Only if the ring itself is broken.
    fn wait(&mut self, timeout: Option<Duration>, wanted: Wanted) -> io::Result<()>;

    /// Sends what is queued, without waiting.
    ///
    /// # Errors
    /// As [`Engine::wait`].
    fn submit(&mut self) -> io::Result<()>;

    /// Whether an event may have happened since the last look: [`Engine::next_event`] is worth a call.
    fn has_event(&mut self) -> bool;

    /// The next event that has happened.
    fn next_event(&mut self) -> Option<Event>;

    /// Watches an eventfd for kicks, in place of the one before.
    fn watch_kick(&mut self, kick: Option<OwnedFd>);

    /// The worker goes by a new view of the paths: those that left are let go of when nothing is under way there.
    fn note_new_view(&mut self);

    /// Requests go by this memory from now on, until another is named; those under way by the one that they have.
    fn use_memory(&mut self, _map: &GuestMap) {}

    /// Leaves the processor to others from now on, where they want it.
    fn give_way(&mut self) {}

    /// Shows every transfer that is with the kernel.
    fn visit(&self, each: &mut dyn FnMut(&Transfer));

    /// Transfers that are with the kernel.
    fn nr_in_flight(&self) -> usize;

    /// Nanoseconds on the clock of the process ([`crate::clock`]), or a simulated one.
    fn now_ns(&self) -> u64;
}
