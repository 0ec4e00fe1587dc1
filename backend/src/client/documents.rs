//! Completions and manual pages, made from the command line's own description.

use std::path::Path;

use clap::CommandFactory as _;

use super::{Failure, format};
use crate::cli::CommandLine;

/// Exit codes, for the manual.
const EXIT_CODES: &str = "Exit codes: 0 done; 1 refused, or the server could not start; 2 wrong usage; 3 no polypath there; 4 no answer in time.";

pub(super) fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut CommandLine::command(), "polypath", &mut text);
    format::print(&String::from_utf8_lossy(&text))
}

/// One page for the program and one for each command, into `dir`.
pub(super) fn man(dir: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(dir)?;
    let command = CommandLine::command().after_help(EXIT_CODES);
    clap_mangen::generate_to(command, dir).map_err(Failure::from)
}
