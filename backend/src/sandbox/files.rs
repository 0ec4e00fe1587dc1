//! No files, no connections, no signals to others (landlock), no cores with what a guest has written.

use landlock::{ABI, Access as _, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr as _, Scope};
use rustix::process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior};

/// What is asked for; an older kernel gives what it has.
const WANTED: ABI = ABI::V9;

/// What each version of landlock adds that a confined process lacks on older kernels (Documentation/userspace-api/landlock.rst).
const ADDED: [(i32, &str); 3] = [
    (3, "truncating files by name"),
    (4, "TCP connections"),
    (6, "signals to other processes and abstract Unix sockets"),
];

/// From here on the thread, and those that it begins, can open, make, remove and run nothing, whoever they belong to. What is
/// open stays so, and so does what others pass on.
pub(super) fn confine() -> Result<(), String> {
    let restrict = || {
        Ruleset::default()
            .handle_access(AccessFs::from_all(WANTED))?
            .handle_access(AccessNet::from_all(WANTED))?
            .scope(Scope::from_all(WANTED))?
            .create()?
            .restrict_self()
    };
    let status = restrict().map_err(|error| error.to_string())?;
    match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => {
            let abi = effective_abi as i32;
            let lacks: Vec<&str> =
                ADDED.iter().filter(|(since, _)| *since > abi).map(|(_, what)| *what).collect();
            if lacks.is_empty() {
                return Ok(());
            }
            Err(format!("landlock of this kernel (version {abi}) leaves {}", lacks.join(", ")))
        }
        LandlockStatus::NotEnabled => {
            Err("landlock is not enabled in this kernel (lsm=landlock,...)".to_owned())
        }
        LandlockStatus::NotImplemented => Err("this kernel has no landlock".to_owned()),
    }
}

/// Where no core is wanted (`ulimit -c 0`, `LimitCORE=0`), there is none by way of a pipe either, and no other process of
/// the user can look into this one. Where one is wanted it is made, without guest memory ([`crate::memory`]).
pub(super) fn no_cores() -> Result<(), String> {
    if getrlimit(Resource::Core).current == Some(0) {
        set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|error| error.to_string())?;
    }
    Ok(())
}
