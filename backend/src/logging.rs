//! The log on stderr: for people with time and level, for the journal with the priority that it reads off each line.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;

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
fn is_journal() -> bool {
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
