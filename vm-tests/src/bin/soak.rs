//! `vm-tests/soak`: see `--help`.

use std::process::ExitCode;

use polypath_vm_tests::soak::{self, HELP, Options};

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| match options {
        Some(options) => soak::main(&options),
        None => {
            print!("{HELP}");
            Ok(true)
        }
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::from(2)
        }
    }
}
