//! The command line for people: asks disks that are served, by their control sockets, and prints what they answer.

mod check;
mod commands;
mod connection;
mod counters;
mod documents;
mod events;
mod find;
mod format;
mod show;
mod top;

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

pub use commands::{Command, PathCommand, Target};
use connection::Connection;

impl Target {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// The one disk that is meant.
    fn connect(&self) -> Result<Connection, Failure> {
        let socket = find::one(self)?;
        Connection::open(&socket, self.timeout())
    }

    /// Asks it, and prints the answer: as it is for programs, as `text` for people.
    fn ask(&self, question: Value, text: impl Fn(&Value) -> String) -> Result<(), Failure> {
        let answer = self.connect()?.ask(question)?;
        format::print(&if self.json { format!("{answer}\n") } else { text(&answer) })
    }

    /// Asks it for something that is done without a word.
    fn tell(&self, question: Value) -> Result<(), Failure> {
        self.ask(question, |_| String::new())
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

    /// A line on stderr, for programs or for people.
    fn say(&self, json: bool) {
        let code = match self {
            Self::Refused(_) => "refused",
            Self::NotThere(_) => "not_there",
            Self::TimedOut(_) => "timed_out",
        };
        match json {
            true => eprintln!("{}", json!({ "error": { "code": code, "message": self.to_string() } })),
            false => eprintln!("polypath: {self}"),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// Does it, and gives the exit code.
pub fn run(command: Command) -> ExitCode {
    let json = command.is_json();
    match try_run(command) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the output has seen enough (`polypath show | head -1`).
        Err(Failure::Refused(why)) if why.contains("Broken pipe") => ExitCode::SUCCESS,
        Err(failure) => {
            failure.say(json);
            failure.code()
        }
    }
}

fn try_run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Show { target } => show::run(&target),
        Command::FailPath { path, target } => target.tell(json!({ "command": "fail_path", "path": path })),
        Command::ReinstatePath { path, target } => {
            target.tell(json!({ "command": "reinstate_path", "path": path }))
        }
        Command::Path(command) => path(command),
        Command::SwitchGroup { group, target } => {
            target.tell(json!({ "command": "switch_group", "group": group }))
        }
        Command::DisableGroup { group, target } => {
            target.tell(json!({ "command": "disable_group", "group": group }))
        }
        Command::EnableGroup { group, target } => {
            target.tell(json!({ "command": "enable_group", "group": group }))
        }
        Command::Selector { group, selector, args, target } => target
            .tell(json!({ "command": "set_selector", "group": group, "selector": selector, "args": args })),
        Command::Resize { shrink, target } => {
            target.ask(json!({ "command": "resize", "shrink": shrink }), |answer| {
                let size_bytes = answer["size_bytes"].as_u64().unwrap_or(0);
                format!("the disk has {size_bytes} bytes ({})\n", format::bytes(size_bytes))
            })
        }
        Command::NoPathRetry { value, target } => {
            target.tell(json!({ "command": "set_no_path_retry", "value": value.to_string() }))
        }
        Command::Message { message, target } => {
            target.tell(json!({ "command": "message", "message": message.join(" ") }))
        }
        Command::Events { follow, last, target } => events::run(&target, follow, last),
        Command::LogLevel { level, target } => {
            let level = level.filter().to_string().to_lowercase();
            target.tell(json!({ "command": "set_log_level", "level": level }))
        }
        Command::Counters { reset, target } => counters::run(&target, reset),
        Command::Dump { dm, dm_status, target } => {
            let format = if dm {
                "dm"
            } else if dm_status {
                "dm_status"
            } else {
                "toml"
            };
            target.ask(json!({ "command": "dump", "format": format }), |answer| {
                format!("{}\n", answer["text"].as_str().unwrap_or_default())
            })
        }
        Command::Reload { target } => target.ask(json!({ "command": "reload" }), reloaded),
        Command::Shutdown { target } => target.tell(json!({ "command": "shutdown" })),
        Command::Check { file, json } => check::run(&file, json),
        Command::Top { target, interval } => top::run(&target, Duration::from_millis(interval)),
        Command::Completions { shell } => documents::completions(shell),
        Command::Man { dir } => documents::man(&dir),
    }
}

fn path(command: PathCommand) -> Result<(), Failure> {
    match command {
        PathCommand::Add { path, group, args, target } => {
            target.tell(json!({ "command": "add_path", "path": path, "group": group, "args": args }))
        }
        PathCommand::Remove { path, target } => {
            target.ask(json!({ "command": "remove_path", "path": path }), |answer| {
                let ms = answer["drained_ms"].as_u64().unwrap_or(0);
                format!("{path}: its last request came back and it was closed after {ms} ms\n")
            })
        }
        PathCommand::Weight { path, weight, target } => {
            target.tell(json!({ "command": "set_path_weight", "path": path, "weight": weight }))
        }
        PathCommand::Args { path, args, target } => {
            target.tell(json!({ "command": "set_path_args", "path": path, "args": args }))
        }
        PathCommand::Move { path, group, target } => {
            target.tell(json!({ "command": "move_path", "path": path, "group": group }))
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
