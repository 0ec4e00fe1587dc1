//! The command line for people: what can be asked of disks that are served, by their control sockets.

mod check;
mod connection;
mod counters;
mod documents;
mod events;
mod find;
mod format;
mod show;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use polypath_paths::text::NoPathRetry;
use serde_json::{Value, json};

use crate::cli::{self, Level};
use connection::Connection;

/// Commands beside serving.
///
/// Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no polypath there, 4 no answer in time.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "text on a flattened field would become a part of the help")]
pub enum Command {
    /// Show disks, their paths, and what is wrong with them.
    Show {
        #[command(flatten)]
        target: Target,
        /// Print what the program answered, a JSON object per disk.
        #[arg(long)]
        json: bool,
    },
    /// Take a path out until it is reinstated.
    FailPath {
        /// Its name in the table.
        path: String,
        #[command(flatten)]
        target: Target,
    },
    /// Use a path again as soon as a probe proves it well.
    ReinstatePath {
        /// Its name in the table.
        path: String,
        #[command(flatten)]
        target: Target,
    },
    /// Add, remove, change a path.
    #[command(subcommand)]
    Path(PathCommand),
    /// Enable all groups and use this one.
    SwitchGroup {
        /// From 1.
        group: usize,
        #[command(flatten)]
        target: Target,
    },
    /// Use a group only if no other has a path.
    DisableGroup {
        /// From 1.
        group: usize,
        #[command(flatten)]
        target: Target,
    },
    /// Use a group as its priority says.
    EnableGroup {
        /// From 1.
        group: usize,
        #[command(flatten)]
        target: Target,
    },
    /// Choose paths of a group in another way.
    Selector {
        /// From 1.
        group: usize,
        /// Name of the selector.
        selector: String,
        /// Its arguments.
        args: Vec<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Ask the paths for their size and give it to the disk; the guest is told at once.
    Resize {
        /// Take a smaller size over too: what lies beyond it is out of the guest's reach.
        #[arg(long)]
        shrink: bool,
        #[command(flatten)]
        target: Target,
    },
    /// What is done with requests while no path is usable.
    NoPathRetry {
        /// fail, queue, or a number of seconds.
        #[arg(value_parser = cli::parse_no_path_retry)]
        value: NoPathRetry,
        #[command(flatten)]
        target: Target,
    },
    /// A message in dm-multipath's words, such as "fail_path /dev/sda".
    Message {
        /// All its words.
        #[arg(required = true)]
        message: Vec<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Show what has happened.
    Events {
        /// Go on with what happens from now on.
        #[arg(short, long)]
        follow: bool,
        /// How many of the past.
        #[arg(short = 'n', long, default_value_t = 20)]
        last: usize,
        #[command(flatten)]
        target: Target,
        /// A JSON object per event.
        #[arg(long)]
        json: bool,
    },
    /// Change what is logged.
    LogLevel {
        /// The least important messages.
        level: Level,
        #[command(flatten)]
        target: Target,
    },
    /// Print what was done since the start or the last reset: I/Os, merges, latencies, by path and queue.
    Counters {
        /// Count from here on.
        #[arg(long)]
        reset: bool,
        /// Print it as JSON, with histograms.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        target: Target,
    },
    /// Print the running table as a configuration file.
    Dump {
        /// As dm's table line.
        #[arg(long)]
        dm: bool,
        /// As dm's status line.
        #[arg(long, conflicts_with = "dm")]
        dm_status: bool,
        #[command(flatten)]
        target: Target,
    },
    /// Read the configuration file again and bring its changes in.
    Reload {
        #[command(flatten)]
        target: Target,
    },
    /// Finish the requests in flight and end.
    Shutdown {
        #[command(flatten)]
        target: Target,
    },
    /// Look at everything that a start with a configuration file needs, and change nothing.
    Check {
        /// The file.
        file: PathBuf,
        /// A JSON object per finding.
        #[arg(long)]
        json: bool,
    },
    /// Watch a disk at work; keys take paths out and put them back.
    Top {
        #[command(flatten)]
        target: Target,
        /// Look so often, in ms.
        #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
        interval: u64,
    },
    /// Print completions for a shell.
    Completions {
        /// Which.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages.
    Man {
        /// Where to.
        dir: PathBuf,
    },
}

/// What can be done to a path of the table.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "as above")]
pub enum PathCommand {
    /// Open a path, prove that it leads to the same disk, use it.
    Add {
        /// File or block device.
        path: PathBuf,
        /// Group, from 1; the number after the last makes a new one [default: the one in use]
        #[arg(long)]
        group: Option<usize>,
        /// Arguments for the group's selector.
        args: Vec<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Take a path out of the table; done when its last request has come back.
    Remove {
        /// Its name in the table.
        path: String,
        #[command(flatten)]
        target: Target,
    },
    /// Change the weight of a path (selector service-time).
    Weight {
        /// Its name in the table.
        path: String,
        /// 0 to 100; 0 is used only if no other path is there.
        weight: u8,
        #[command(flatten)]
        target: Target,
    },
    /// Change the arguments of a path for its selector.
    Args {
        /// Its name in the table.
        path: String,
        /// As in a dm table line.
        #[arg(required = true)]
        args: Vec<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Move a path to another group.
    Move {
        /// Its name in the table.
        path: String,
        /// From 1.
        group: usize,
        #[command(flatten)]
        target: Target,
    },
}

/// Which disk, and how long to wait for it.
#[derive(Debug, Clone, Args)]
pub struct Target {
    /// The disk with this control socket.
    #[arg(short, long, value_name = "SOCKET", conflicts_with = "disk")]
    control: Option<PathBuf>,
    /// The disk with the control socket NAME.control under /run/polypath.
    #[arg(short, long, value_name = "NAME")]
    disk: Option<String>,
    /// Where control sockets are looked for.
    #[arg(long, value_name = "DIR", default_value = "/run/polypath", hide = true)]
    run_dir: PathBuf,
    /// Wait so many seconds for the answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

impl Target {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// The one disk that is meant.
    fn connect(&self) -> Result<Connection, Failure> {
        let socket = find::one(self)?;
        Connection::open(&socket, self.timeout())
    }
}

/// Why a command was not done. Each kind has its exit code.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NotThere(String),
    #[error("{0}")]
    TimedOut(String),
}

impl Failure {
    fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Refused(_) => 1,
            Self::NotThere(_) => 3,
            Self::TimedOut(_) => 4,
        })
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// Does it, and gives the exit code.
pub fn run(command: Command) -> ExitCode {
    match try_run(command) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the output has seen enough (`polypath show | head -1`).
        Err(Failure::Refused(why)) if why.contains("Broken pipe") => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("polypath: {failure}");
            failure.code()
        }
    }
}

fn try_run(command: Command) -> Result<(), Failure> {
    let told = |target: &Target, question: Value| target.connect()?.ask(question).map(drop);
    match command {
        Command::Show { target, json } => show::run(&target, json),
        Command::FailPath { path, target } => told(&target, json!({ "command": "fail_path", "path": path })),
        Command::ReinstatePath { path, target } => {
            told(&target, json!({ "command": "reinstate_path", "path": path }))
        }
        Command::Path(command) => path(command),
        Command::SwitchGroup { group, target } => {
            told(&target, json!({ "command": "switch_group", "group": group }))
        }
        Command::DisableGroup { group, target } => {
            told(&target, json!({ "command": "disable_group", "group": group }))
        }
        Command::EnableGroup { group, target } => {
            told(&target, json!({ "command": "enable_group", "group": group }))
        }
        Command::Selector { group, selector, args, target } => told(
            &target,
            json!({ "command": "set_selector", "group": group, "selector": selector, "args": args }),
        ),
        Command::Resize { shrink, target } => {
            let answer = target.connect()?.ask(json!({ "command": "resize", "shrink": shrink }))?;
            let size_bytes = answer["size_bytes"].as_u64().unwrap_or(0);
            format::print(&format!("the disk has {size_bytes} bytes ({})\n", format::bytes(size_bytes)))
        }
        Command::NoPathRetry { value, target } => {
            told(&target, json!({ "command": "set_no_path_retry", "value": value.to_string() }))
        }
        Command::Message { message, target } => {
            told(&target, json!({ "command": "message", "message": message.join(" ") }))
        }
        Command::Events { follow, last, target, json } => events::run(&target, follow, last, json),
        Command::LogLevel { level, target } => {
            let level = level.filter().to_string().to_lowercase();
            told(&target, json!({ "command": "set_log_level", "level": level }))
        }
        Command::Counters { reset, json, target } => counters::run(&target, reset, json),
        Command::Dump { dm, dm_status, target } => {
            let format = if dm {
                "dm"
            } else if dm_status {
                "dm_status"
            } else {
                "toml"
            };
            let answer = target.connect()?.ask(json!({ "command": "dump", "format": format }))?;
            format::print(&format!("{}\n", answer["text"].as_str().unwrap_or_default()))
        }
        Command::Reload { target } => {
            let answer = target.connect()?.ask(json!({ "command": "reload" }))?;
            format::print(&reloaded(&answer))
        }
        Command::Shutdown { target } => told(&target, json!({ "command": "shutdown" })),
        Command::Check { file, json } => check::run(&file, json),
        Command::Top { target, interval } => top::run(&target, Duration::from_millis(interval)),
        Command::Completions { shell } => documents::completions(shell),
        Command::Man { dir } => documents::man(&dir),
    }
}

fn path(command: PathCommand) -> Result<(), Failure> {
    match command {
        PathCommand::Add { path, group, args, target } => {
            let question = json!({ "command": "add_path", "path": path, "group": group, "args": args });
            target.connect()?.ask(question).map(drop)
        }
        PathCommand::Remove { path, target } => {
            let answer = target.connect()?.ask(json!({ "command": "remove_path", "path": path }))?;
            let ms = answer["drained_ms"].as_u64().unwrap_or(0);
            format::print(&format!("{path}: its last request came back and it was closed after {ms} ms\n"))
        }
        PathCommand::Weight { path, weight, target } => {
            let question = json!({ "command": "set_path_weight", "path": path, "weight": weight });
            target.connect()?.ask(question).map(drop)
        }
        PathCommand::Args { path, args, target } => {
            let question = json!({ "command": "set_path_args", "path": path, "args": args });
            target.connect()?.ask(question).map(drop)
        }
        PathCommand::Move { path, group, target } => {
            let question = json!({ "command": "move_path", "path": path, "group": group });
            target.connect()?.ask(question).map(drop)
        }
    }
}

fn reloaded(answer: &Value) -> String {
    let texts = |name: &str| answer[name].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut lines: Vec<String> = texts("changed").map(|text| format!("changed: {text}")).collect();
    lines
        .extend(texts("needs_restart").map(|option| {
            format!("needs a restart: {option} (the file says something else than what runs)")
        }));
    if lines.is_empty() {
        lines.push("nothing has changed".to_owned());
    }
    lines.join("\n") + "\n"
}
