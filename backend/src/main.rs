//! The program: reads its command line, makes the disk, serves it until it is told to stop.

use std::process::ExitCode;

use polypath::{cli, control};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            // The whole chain on one line: what was wanted, and why it could not be had.
            eprintln!("polypath: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    if std::env::args_os().any(|arg| arg == "--print-capabilities") {
        println!("{}", cli::capabilities());
        return Ok(ExitCode::SUCCESS);
    }
    let options = match cli::parse() {
        Ok(options) => options,
        Err(exit) => return Ok(exit),
    };
    env_logger::Builder::new()
        .filter_level(options.log_level())
        .parse_env("POLYPATH_LOG")
        .format_target(false)
        .init();
    control::serve(options)
}
