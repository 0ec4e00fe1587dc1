//! `vm-tests/bench`: see `--help`.

use std::process::ExitCode;

use anyhow::Result;
use polypath_vm_tests::bench::{self, neighbour, traffic};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if_eq("traffic").is_some() {
        return match traffic::Options::parse(args)? {
            Some(options) => traffic::main(&options),
            None => help(traffic::HELP),
        };
    }
    if args.next_if_eq("hostile").is_some() {
        return match neighbour::Options::parse(args)? {
            Some(options) => neighbour::main(&options),
            None => help(neighbour::HELP),
        };
    }
    match bench::Options::parse(args)? {
        Some(options) => bench::main(&options),
        None => help(bench::HELP),
    }
}

#[expect(clippy::unnecessary_wraps, reason = "ends a run that went well")]
fn help(text: &str) -> Result<()> {
    print!("{text}");
    Ok(())
}
