//! The log on stderr: for people with time and level, for the journal with the priority that it reads off each line.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, PoisonError};

use log::{Level, LevelFilter};

use crate::cli;

/// Starts logging at `level`, which commands can change later. `POLYPATH_LOG` says more per module, and then bounds them.
pub fn start(level: cli::Level) {
    let mut builder = env_logger::Builder::new();
    builder.filter_level(LevelFilter::Trace).parse_env("POLYPATH_LOG").format_target(false);
    if is_journal() {
        builder.format(|out, record| writeln!(out, "<{}>{}", priority(record.level()), record.args()));
    }
    builder.init();
    if std::env::var_os("POLYPATH_LOG").is_none() {
        log::set_max_level(level.filter());
    }
}

/// Whether stderr leads to systemd's journal (systemd.exec(5), `JOURNAL_STREAM`), which adds time and name itself.
pub(crate) fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(meta) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", meta.dev(), meta.ino())
}

/// syslog(3)'s number for a level.
fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

/// Length of the time in which so many lines of one kind may be written, in ns.
const WINDOW_NS: u64 = 60_000_000_000;
/// Lines in that time.
const NR_LINES: u32 = 30;

/// Keeps a guest from filling the log by causing the same kind of line again and again, as by resets.
#[derive(Debug)]
pub(crate) struct LineLimit {
    /// When the first line of this time was written, and how many there were since.
    state: Mutex<(u64, u32)>,
}

impl LineLimit {
    /// Nothing was written yet.
    pub const fn new() -> Self {
        Self { state: Mutex::new((0, 0)) }
    }

    /// Whether one more line may be written at this time.
    pub fn allows(&self, now_ns: u64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now_ns.saturating_sub(state.0) > WINDOW_NS {
            *state = (now_ns, 0);
        }
        state.1 = state.1.saturating_add(1);
        state.1 <= NR_LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_in_a_minute_and_then_as_many_again() {
        let limit = LineLimit::new();
        let allowed = |at_ns| (0..100).filter(|_| limit.allows(at_ns)).count();
        assert_eq!([1, 2, WINDOW_NS, WINDOW_NS + 2, WINDOW_NS + 3].map(allowed), [30, 0, 0, 30, 0]);
    }
}
