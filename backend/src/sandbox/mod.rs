//! The process gives up what it does not need, once it listens and before anybody can connect.
//!
//! | what | by | where |
//! |---|---|---|
//! | calls that a kind of thread does not make | seccomp: the process ends, with the call's number in the log | `calls.rs`, `filters.rs`, `violation.rs` |
//! | opening files | seccomp says that it is forbidden, and landlock as well | `files.rs` |
//! | what io_uring does, past the filters | each ring is restricted | `engine/restrict.rs` |
//! | capabilities | dropped, with those that a program could be given | `capabilities.rs` |
//! | cores with guest data, other processes' looks | `files.rs` |
//!
//! What has to be opened later is opened by the helper (`helper/`). A thread has the filter of the thread that began it
//! and can only add to it, so the control loop's allows what the others' do.

mod calls;
mod capabilities;
mod files;
mod filters;
mod violation;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;

use crate::cli::Sandbox;
use filters::Filters;

/// Kinds of threads, each with a filter of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The main thread: accepts, obeys, watches.
    Control,
    /// Speaks with a front-end, starts and ends workers.
    Session,
    /// Serves a ring.
    Worker,
    /// Looks at a path, has one opened, closes one.
    Probe,
    /// Has the configuration read.
    Reload,
    /// Answers scrapes.
    Metrics,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Control, Self::Session, Self::Worker, Self::Probe, Self::Reload, Self::Metrics];
}

/// Made once; threads that begin later take theirs from here.
static FILTERS: OnceLock<Filters> = OnceLock::new();

static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether the process is confined: what it makes from then on is to be so as well.
pub fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Confines the calling thread, which is the control loop's, and all threads that it begins from now on. What cannot be
/// confined is said in the log, or, if `how` is strict, is an error.
pub fn enter(how: Sandbox) -> anyhow::Result<()> {
    if how == Sandbox::Off {
        log::warn!("sandbox: off; who takes over this process may do whatever its user may");
        return Ok(());
    }
    IS_ON.store(true, Ordering::Relaxed);
    let mut missing: Vec<String> = Vec::new();
    let mut note = |what: &str, done: Result<(), String>| {
        if let Err(why) = done {
            missing.push(format!("{what}: {why}"));
        }
    };
    let text = |error: &dyn std::fmt::Display| error.to_string();
    note("capabilities", capabilities::drop_all());
    note("new privileges", rustix::thread::set_no_new_privs(true).map_err(|error| text(&error)));
    note("core dumps", files::no_cores());
    note("files", files::confine());
    note("calls", filter());
    if missing.is_empty() {
        log::info!("sandbox: on");
        return Ok(());
    }
    if how == Sandbox::Strict {
        bail!("--sandbox strict: not confined: {}", missing.join("; "));
    }
    log::warn!("sandbox: not confined: {}", missing.join("; "));
    Ok(())
}

fn filter() -> Result<(), String> {
    let filters = Filters::new().map_err(|error| error.to_string())?;
    violation::report().map_err(|error| error.to_string())?;
    filters.enter().map_err(|error| error.to_string())?;
    let filters = FILTERS.get_or_init(|| filters);
    filters.apply(Kind::Control).map_err(|error| error.to_string())
}

/// Narrows what the calling thread may do to what its kind does. Without a sandbox nothing happens.
pub fn confine(kind: Kind) {
    if let Some(filters) = FILTERS.get()
        && let Err(error) = filters.apply(kind)
    {
        // It has the filter of the thread that began it.
        log::warn!("sandbox: a thread is less confined than it could be: kind={kind:?} error={error}");
    }
}
