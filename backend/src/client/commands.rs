//! What can be typed: the commands beside serving, with their arguments. Help, completions and manual pages are made of it.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use polypath_paths::text::NoPathRetry;

use crate::cli::{self, Level};

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
    pub(super) control: Option<PathBuf>,
    /// The disk with the control socket NAME.control under /run/polypath.
    #[arg(short, long, value_name = "NAME")]
    pub(super) disk: Option<String>,
    /// Where control sockets are looked for.
    #[arg(long, value_name = "DIR", default_value = "/run/polypath", hide = true)]
    pub(super) run_dir: PathBuf,
    /// Wait so many seconds for the answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout: u64,
    /// Print what the program answered, as JSON: an object per disk or event; an error as an object on stderr.
    #[arg(long)]
    pub(super) json: bool,
}

impl Command {
    /// Whether programs read what it prints.
    pub(super) fn is_json(&self) -> bool {
        match self {
            Self::Check { json, .. } => *json,
            Self::Completions { .. } | Self::Man { .. } => false,
            Self::Show { target }
            | Self::FailPath { target, .. }
            | Self::ReinstatePath { target, .. }
            | Self::SwitchGroup { target, .. }
            | Self::DisableGroup { target, .. }
            | Self::EnableGroup { target, .. }
            | Self::Selector { target, .. }
            | Self::Resize { target, .. }
            | Self::NoPathRetry { target, .. }
            | Self::Message { target, .. }
            | Self::Events { target, .. }
            | Self::LogLevel { target, .. }
            | Self::Counters { target, .. }
            | Self::Dump { target, .. }
            | Self::Reload { target }
            | Self::Shutdown { target }
            | Self::Top { target, .. } => target.json,
            Self::Path(
                PathCommand::Add { target, .. }
                | PathCommand::Remove { target, .. }
                | PathCommand::Weight { target, .. }
                | PathCommand::Args { target, .. }
                | PathCommand::Move { target, .. },
            ) => target.json,
        }
    }
}
