//! A place to crash, for tests: each store that a later process may find goes by [`step`] first.
//!
//! Outside tests and fuzzing there is nothing here.

/// The process may be killed at this point.
#[cfg(not(any(test, fuzzing)))]
#[inline(always)]
pub(crate) fn step() {}

#[cfg(any(test, fuzzing))]
pub use hook::at_step;
#[cfg(any(test, fuzzing))]
pub(crate) use hook::step;

#[cfg(any(test, fuzzing))]
mod hook {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local! {
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// What a crash unwinds with.
    struct Crash;

    /// Counts down to the crash.
    pub(crate) fn step() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                resume_unwind(Box::new(Crash));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }

    /// Runs `what` and ends it in the midst, after `nr_steps` stores. None if it ended so.
    pub fn at_step<T>(nr_steps: usize, what: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(nr_steps));
        let ended = catch_unwind(AssertUnwindSafe(what));
        LEFT.set(None);
        match ended {
            Ok(done) => Some(done),
            Err(payload) if payload.is::<Crash>() => None,
            Err(payload) => resume_unwind(payload),
        }
    }
}
