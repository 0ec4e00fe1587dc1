//! `vm-tests/bench`: see `--help`.

use std::process::ExitCode;

use anyhow::Result;
use polypath_vm_tests::bench::{HELP, Options, main as run};

fn main() -> ExitCode {
    let result: Result<()> = Options::parse(std::env::args().skip(1)).and_then(|options| match options {
        Some(options) => run(&options),
        None => {
            print!("{HELP}");
            Ok(())
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
