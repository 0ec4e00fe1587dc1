//! How a worker's ring is made: with calls that send what is queued, or with a thread of the kernel's that looks for it.
//!
//! Such a thread (`IORING_SETUP_SQPOLL`) takes an entry at any time after it was queued, and a call that sends it there is
//! none. So where something must not happen before an entry was taken, that is waited for, or follows from the answer:
//!
//! | what | why it holds |
//! |---|---|
//! | what an entry points to stays | it is in its slot before the entry is queued, and leaves it with the answer |
//! | a registered file's place is used again | when its lane has no request any more: all entries that name it are answered |
//! | registered memory changes | the queue is empty first (`UringEngine::use_memory`) |
//! | the ring ends | all transfers are answered, and the kernel takes nothing from a ring that is being closed |
//! | a kick descriptor is closed before the poll on it was taken | the poll is cancelled by the next entry, and what it says goes by an old generation |

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{Builder, IoUring, cqueue, squeue};

/// Room in the ring beside the transfers: the two watches and the cancelling of an old one.
const NR_EXTRA_ENTRIES: u32 = 8;

/// A ring for so many transfers. `is_off`: it does nothing until it is switched on. `idle_ms`: a thread of the kernel's is
/// to look for what is queued, until there was nothing for so long; 0, or where it cannot be had: calls send it.
pub(super) fn build(nr_slots: u32, is_off: bool, idle_ms: u32) -> io::Result<IoUring> {
    if idle_ms != 0 {
        match build_polled(nr_slots, is_off, idle_ms) {
            Ok(ring) => return Ok(ring),
            Err(error) => say_that_calls_send(&error),
        }
    }
    // One thread submits and waits, so completions need no interrupt of it (since 6.1); older kernels do without.
    let mut builder = builder(is_off);
    let plain = builder.clone();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    match builder.build(nr_entries(nr_slots)) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(nr_entries(nr_slots)),
        result => result,
    }
}

/// One with such a thread, or an error.
pub(super) fn build_polled(nr_slots: u32, is_off: bool, idle_ms: u32) -> io::Result<IoUring> {
    let ring = builder(is_off).setup_sqpoll(idle_ms).build(nr_entries(nr_slots))?;
    if !ring.params().is_feature_sqpoll_nonfixed() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "only from Linux 5.11 on"));
    }
    Ok(ring)
}

/// That there is no thread where one was asked for is worth one line, not one for each queue.
pub(super) fn say_that_calls_send(why: &io::Error) {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_SAID.swap(true, Ordering::Relaxed) {
        log::warn!("no thread of the kernel's sends, calls do: error={why}");
    }
}

fn builder(is_off: bool) -> Builder<squeue::Entry, cqueue::Entry> {
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp();
    if is_off {
        builder.setup_r_disabled();
    }
    builder
}

fn nr_entries(nr_slots: u32) -> u32 {
    (nr_slots + NR_EXTRA_ENTRIES).next_power_of_two()
}
