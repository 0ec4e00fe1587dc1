//! A test that cannot run here says so and is counted as skipped, never as passed.

use std::fs::OpenOptions;
use std::io::Write as _;

/// Records that the calling test is skipped, and why.
///
/// The line goes to the file named by `POLYPATH_SKIPS` (one write, so parallel tests do not mix), which `vm-tests/run`
/// counts and prints, and to stderr. Use as `if let Err(why) = precondition() { skip("name", why); return; }`.
pub fn skip(test: &str, why: impl std::fmt::Display) {
    let line = format!("SKIPPED {test}: {why}\n");
    eprint!("{line}");
    if let Some(file) = std::env::var_os("POLYPATH_SKIPS") {
        let mut file = OpenOptions::new().append(true).create(true).open(file).expect("open the skip list");
        file.write_all(line.as_bytes()).expect("write the skip list");
    }
}
