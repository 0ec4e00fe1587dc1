//! The log on stderr: for people with time and level, for the journal with the priority that it reads off each line.

use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, PoisonError};

use env_logger::{Target, WriteStyle};
use log::{Level, LevelFilter};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::stderr;

use crate::cli;

/// Starts logging at `level`, which commands can change later. `POLYPATH_LOG` says more per module, and then bounds them.
pub fn start(level: cli::Level) {
    let mut builder = env_logger::Builder::new();
    builder.filter_level(LevelFilter::Trace).parse_env("POLYPATH_LOG").format_target(false);
    if is_journal() {
        builder.format(|out, record| writeln!(out, "<{}>{}", priority(record.level()), record.args()));
    }
    if io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        builder.write_style(WriteStyle::Always);
    }
    builder.target(Target::Pipe(Box::new(Stderr { is_journal: is_journal(), nr_lost: 0 })));
    builder.init();
    if std::env::var_os("POLYPATH_LOG").is_none() {
        log::set_max_level(level.filter());
    }
}

/// How long a line waits for room, in ns, if the one before it had some.
const PATIENCE_NS: i64 = 100_000_000;

/// What a pipe that has room takes at once (`PIPE_BUF`), in bytes.
const PART_BYTES: usize = 4096;

/// stderr, for as long as it takes what is written. Who reads it may have stopped (a pipe that is full, a terminal that is held),
/// and nobody here waits for that: neither a worker that reports a path nor who is told to stop. What is left out is
/// counted, and said when there is room again.
#[derive(Debug)]
struct Stderr {
    is_journal: bool,
    nr_lost: u64,
}

fn put(part: &[u8]) {
    // Whoever cannot log cannot say so either.
    let _ = rustix::io::retry_on_intr(|| rustix::io::write(stderr(), part));
}

/// Whether stderr takes something, now or within so many ns. May be called in a handler of signals.
pub(crate) fn has_room(within_ns: i64) -> bool {
    let within = Timespec { tv_sec: 0, tv_nsec: within_ns };
    poll(&mut [PollFd::from_borrowed_fd(stderr(), PollFlags::OUT)], Some(&within)) == Ok(1)
}

impl Write for Stderr {
    /// Takes one line. (The logger gives each as a whole.)
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let patience_ns = if self.nr_lost == 0 { PATIENCE_NS } else { 0 };
        if !has_room(patience_ns) {
            self.nr_lost = self.nr_lost.saturating_add(1);
            return Ok(line.len());
        }
        if self.nr_lost != 0 {
            let (prefix, nr) = (if self.is_journal { "<4>" } else { "" }, std::mem::take(&mut self.nr_lost));
            put(format!("{prefix}polypath: lines of the log left out, since nobody read them: {nr}\n")
                .as_bytes());
        }
        line.chunks(PART_BYTES).take_while(|_| has_room(PATIENCE_NS)).for_each(put);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
