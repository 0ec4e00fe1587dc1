//! Capabilities: none is needed to serve a disk that is open.

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use crate::engine::UringEngine;
use crate::vring::RING_SIZE_MAX;

/// Drops all of them. One that has to be kept, and is worth something, is an error that says so.
pub(super) fn drop_all() -> Result<(), String> {
    let text = |error: rustix::io::Errno| error.to_string();
    let had = capabilities(None).map_err(text)?.effective;
    let mut kept = CapabilitySet::empty();
    // Who may lock any amount of memory (io_uring's rings, registered guest memory) still may.
    let unlimited = Rlimit { current: None, maximum: None };
    if had.contains(CapabilitySet::IPC_LOCK) && setrlimit(Resource::Memlock, unlimited).is_err() {
        kept |= CapabilitySet::IPC_LOCK;
        log::info!("sandbox: CAP_IPC_LOCK is kept, since the limit on locked memory cannot be raised");
    }
    if had.contains(CapabilitySet::SYS_ADMIN) && !has_rings_without() {
        kept |= CapabilitySet::SYS_ADMIN;
    }
    // Who may not do this cannot be given a capability by a program either: there are no new privileges.
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if !kept.contains(one) && capability_is_in_bounding_set(one).unwrap_or(false) {
            let _ = remove_capability_from_bounding_set(one);
        }
    }
    clear_ambient_capability_set().map_err(text)?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(text)?;
    if kept.contains(CapabilitySet::SYS_ADMIN) {
        let why = "kernel.io_uring_disabled asks for it (membership in the group of kernel.io_uring_group would do)";
        return Err(format!("CAP_SYS_ADMIN is kept: {why}"));
    }
    Ok(())
}

/// Whether a ring can be had without capabilities, tried on a thread that has none.
fn has_rings_without() -> bool {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    std::thread::scope(|scope| {
        let tried = scope.spawn(|| {
            let dropped = set_capabilities(None, sets).is_ok();
            dropped && UringEngine::probe(u32::from(RING_SIZE_MAX)).is_ok()
        });
        tried.join().unwrap_or(false)
    })
}
