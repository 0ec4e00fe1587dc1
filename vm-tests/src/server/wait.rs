//! Waiting for a condition, with a deadline instead of a fixed sleep.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often a condition is looked at; short, so that a test lasts as long as the condition does.
const LOOK_AGAIN_MS: u64 = 2;

/// Calls `condition` until it gives `Some`, or fails when `timeout` has passed.
///
/// `what` names the thing waited for and is all that a failed test shows of it.
pub fn wait_for<T>(what: &str, timeout: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("waited {timeout:?} in vain for: {what}");
        }
        std::thread::sleep(Duration::from_millis(LOOK_AGAIN_MS));
    }
}

/// [`wait_for`] with a plain yes or no.
pub fn wait_until(what: &str, timeout: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    wait_for(what, timeout, || condition().then_some(()))
}
