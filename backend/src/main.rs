//! The program: reads its command line, makes the disk, serves it until it is told to stop.

use std::process::ExitCode;

use polypath::cli::{self, Task};
use polypath::{client, control, logging};

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
    let launch = match cli::parse() {
        Ok(Task::Serve(launch)) => launch,
        Ok(Task::Client(command)) => return Ok(client::run(*command)),
        Err(exit) => return Ok(exit),
    };
    let (options, spec) = launch.resolve()?;
    logging::start(options.log_level);
    control::serve(*launch, options, spec)
}
