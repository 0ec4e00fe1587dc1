//! One clock for all threads of the process.

use std::sync::OnceLock;
use std::time::Instant;

/// Nanoseconds since the process first asked, never 0; moves only forward.
pub fn now_ns() -> u64 {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    let elapsed = EPOCH.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}
