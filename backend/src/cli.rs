//! The command line.

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::parser::ValueSource;
use clap::{ArgAction, CommandFactory as _, FromArgMatches as _, Parser, ValueEnum};
use polypath_paths::FailbackPolicy;
use polypath_paths::text::{NoPathRetry, TableSpec};
use polypath_selector::Kind;

use crate::as_text;
use crate::client;
use crate::config::Launch;
use crate::cpus::{CpuList, CpuListError};
use crate::disk::ID_BYTES;
use crate::metrics::Address;
use crate::vring::RING_SIZE_MAX;

/// Most virtqueues of one disk.
pub const NR_QUEUES_MAX: u16 = 64;

/// Serves one virtio-blk disk over vhost-user from one or more paths to the same file or block device.
///
/// It goes from one process to another as JSON, when a confined process has its configuration read.
#[derive(Debug, Clone, PartialEq, Parser, serde::Serialize, serde::Deserialize)]
#[command(name = "polypath", version, max_term_width = 100)]
pub struct Options {
    /// Read options and the table from this TOML file. What is given on the command line as well counts more than the file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Listen on this Unix socket; the file is made at the start and removed at the end.
    #[arg(short, long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,

    /// Listen on this inherited descriptor, a Unix socket that listens already. Without --socket-path and --fd, a
    /// socket passed by systemd (LISTEN_FDS) is used.
    #[arg(long, value_name = "FD")]
    pub fd: Option<RawFd>,

    /// A path to the disk: regular file or block device. Repeat it for every path; all must lead to the same one.
    #[arg(short, long = "path", value_name = "PATH", action = ArgAction::Append)]
    pub paths: Vec<PathBuf>,

    /// The same as --path, by QEMU's conventions for back-ends.
    #[arg(long, value_name = "PATH", action = ArgAction::Append)]
    pub blk_file: Vec<PathBuf>,

    /// The paths as a dm table line: "0 LENGTH multipath ...", with priority groups, selectors and their arguments.
    #[arg(long, value_name = "LINE", conflicts_with_all = ["paths", "blk_file", "table_file"])]
    pub table: Option<String>,

    /// The same from a TOML file, or a file that holds a dm table line.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["paths", "blk_file"])]
    pub table_file: Option<PathBuf>,

    /// Refuse writes, and open the paths for reading only.
    #[arg(short, long)]
    pub read_only: bool,

    /// Virtqueues offered; a VM may use fewer. Only those in use cost anything.
    #[arg(long, value_name = "N", default_value_t = NR_QUEUES_MAX, value_parser = parse_num_queues)]
    pub num_queues: u16,

    /// Size of a virtqueue that the limits shown to the guest are made for (segments = size - 2); a power of two.
    /// Larger and smaller queues are served as well.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_queue_size)]
    pub queue_size: u16,

    /// Serial number that the guest sees, at most 20 bytes [default: made from the identity of the paths]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    pub serial: Option<String>,

    /// How the path for each request is chosen.
    #[arg(long, value_name = "NAME", default_value = Kind::RoundRobin.name(), value_parser = parse_selector,
        conflicts_with_all = ["table", "table_file"])]
    #[serde(with = "as_text")]
    pub selector: Kind,

    /// What is done with requests while no path is usable: fail, queue (for ever), or wait so many seconds and then fail.
    /// A table that says so itself has its own way. [default: 60]
    #[arg(long, value_name = "fail|queue|SECONDS", value_parser = parse_no_path_retry)]
    pub no_path_retry: Option<NoPathRetry>,

    /// A path that gives no answer for so many milliseconds is taken out; what is on it waits, new I/O goes elsewhere.
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = parse_path_timeout)]
    pub path_timeout: u64,

    /// When to go back to a better priority group: manual, immediate, followover, or after so many seconds.
    #[arg(long, value_name = "POLICY", default_value = "manual", value_parser = parse_failback)]
    #[serde(with = "as_text")]
    pub failback: FailbackPolicy,

    /// Most I/Os that each virtqueue has in flight on one path; more wait, and merge while they do. Of what a block device
    /// takes at a time (`nr_requests` in sysfs), each busy virtqueue has its share.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_path_depth)]
    pub path_depth: u32,

    /// Largest I/O in KiB that adjacent requests are merged into; 0 merges none.
    #[arg(long, value_name = "KIB", default_value_t = 512, value_parser = parse_merge_max)]
    pub merge_max: u32,

    /// For how many microseconds a worker whose guest sends one or two requests at a time looks for the next one before it
    /// sleeps, at most; 0: only for the 3 us that falling asleep costs, while that finds some. An idle disk costs nothing.
    #[arg(long, value_name = "US", default_value_t = 32, value_parser = parse_poll_us)]
    pub poll_us: u64,

    /// Keep the worker of each queue on one processor: queue i on number i of this list (as in 2-5,8), from its beginning
    /// again when it ends. What a worker needs is then in that processor's memory.
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    #[serde(with = "as_text::optional")]
    pub cpus: Option<CpuList>,

    /// Register guest memory with io_uring: less work per I/O, but all of the guest's memory is pinned, once for each
    /// queue. Never with a guest that gives memory back (balloon, free page reporting, unplugging): its data would go to
    /// pages that it does not have any more.
    #[arg(long)]
    pub register_memory: bool,

    /// Have a thread of the kernel's send each queue's I/O, so that sending takes no call: it looks for it all the time, on
    /// a processor that it should have to itself, until there was nothing for so many milliseconds, and then sleeps; 0: none.
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = parse_sqpoll_idle_ms)]
    pub sqpoll_idle_ms: u32,

    /// Use paths even if they do not prove to be the same disk. If they are not, data will be destroyed.
    #[arg(long)]
    pub trust_paths: bool,

    /// Listen for commands on this Unix socket (docs/control.md). `polypath show` and the other commands find it by
    /// themselves under /run/polypath/NAME.control.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Give the control socket to this user (name or number).
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub control_owner: Option<u32>,

    /// Let this group give commands as well (name or number; the control socket's mode is then 0660 in place of 0600).
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub control_group: Option<u32>,

    /// Serve metrics for Prometheus at /metrics on this IP:PORT, or on the Unix socket of this path.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_metrics)]
    #[serde(with = "as_text::optional")]
    pub metrics: Option<Address>,

    /// Run this program for every event (docs/control.md), with the event as a line of JSON on its standard input.
    #[arg(long, value_name = "PROGRAM")]
    pub event_command: Option<PathBuf>,

    /// Go around the host's page cache (O_DIRECT). Off serves one regular file through the cache.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub direct: Switch,

    /// Let this group connect as well (name or number; the socket's mode is then 0660 in place of 0600).
    #[arg(long, value_name = "GROUP", requires = "socket_path", value_parser = parse_group)]
    pub socket_group: Option<u32>,

    /// Confine the process once it listens: it then opens no files, makes no connections and starts no programs; a helper
    /// process opens paths, and nothing else than paths of this disk. With on, what the kernel cannot confine is said in the
    /// log; with strict, the start is refused.
    #[arg(long, value_name = "on|off|strict", default_value = "on")]
    pub sandbox: Sandbox,

    /// What to log on stderr.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: Level,

    /// Print what this back-end can do (JSON, QEMU's conventions) and exit.
    #[arg(long)]
    pub print_capabilities: bool,

    /// The `[table]` of the configuration file.
    #[arg(skip)]
    #[serde(skip)]
    pub table_section: Option<TableSpec>,
}

/// Whether the process gives up what it does not need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// As far as the kernel can.
    On,
    /// No.
    Off,
    /// All of it, or no start.
    Strict,
}

impl Sandbox {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Strict => "strict",
        }
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// Least important messages that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Nothing.
    Off,
    /// The operator must act.
    Error,
    /// A path failed, a guest broke a rule.
    Warn,
    /// Start, connections, changes.
    Info,
    /// What happens in between.
    Debug,
    /// Everything.
    Trace,
}

impl Options {
    /// All paths, in the order given.
    pub fn all_paths(&self) -> Vec<PathBuf> {
        self.paths.iter().chain(&self.blk_file).cloned().collect()
    }
}

impl Level {
    /// The level as the `log` crate has it.
    pub fn filter(self) -> log::LevelFilter {
        match self {
            Self::Off => log::LevelFilter::Off,
            Self::Error => log::LevelFilter::Error,
            Self::Warn => log::LevelFilter::Warn,
            Self::Info => log::LevelFilter::Info,
            Self::Debug => log::LevelFilter::Debug,
            Self::Trace => log::LevelFilter::Trace,
        }
    }
}

/// What the program was called for.
#[derive(Debug, Parser)]
#[command(name = "polypath", version, max_term_width = 100, args_conflicts_with_subcommands = true)]
pub struct CommandLine {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<client::Command>,
}

/// What the program is to do.
#[derive(Debug)]
pub enum Task {
    /// Serve a disk.
    Serve(Box<Launch>),
    /// Something about disks that are served, or about files.
    Client(Box<client::Command>),
}

/// Reads the command line of the process. Help and version are printed; a mistake is one line on stderr.
pub fn parse() -> Result<Task, ExitCode> {
    parse_from(std::env::args_os()).map_err(|error| {
        if error.use_stderr() {
            eprintln!("polypath: {}", one_line(&error));
            ExitCode::from(2)
        } else {
            let _ = error.print();
            ExitCode::SUCCESS
        }
    })
}

fn parse_from(args: impl IntoIterator<Item = OsString>) -> Result<Task, clap::Error> {
    let matches = CommandLine::command().try_get_matches_from(args)?;
    let given = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let given = matches.ids().map(|id| id.as_str()).filter(given).map(str::to_owned).collect();
    let line = CommandLine::from_arg_matches(&matches)?;
    Ok(match line.command {
        Some(command) => Task::Client(Box::new(command)),
        None => Task::Serve(Box::new(Launch { options: line.options, given })),
    })
}

/// clap's message without its usage lines.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let kept = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let line = kept.collect::<Vec<_>>().join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

/// What QEMU's management tools ask for (docs/interop/vhost-user.json).
pub fn capabilities() -> serde_json::Value {
    serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] })
}

/// A number of `what` in a range.
fn number_in<T: FromStr + PartialOrd + Display>(
    text: &str,
    what: &str,
    range: RangeInclusive<T>,
) -> Result<T, String> {
    text.parse()
        .ok()
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("must be a number{what} from {} to {}", range.start(), range.end()))
}

pub(crate) fn parse_num_queues(text: &str) -> Result<u16, String> {
    number_in(text, "", 1..=NR_QUEUES_MAX)
}

pub(crate) fn parse_path_depth(text: &str) -> Result<u32, String> {
    number_in(text, "", 1..=1024)
}

pub(crate) fn parse_poll_us(text: &str) -> Result<u64, String> {
    number_in(text, " of us", 0..=10_000)
}

pub(crate) fn parse_sqpoll_idle_ms(text: &str) -> Result<u32, String> {
    number_in(text, " of ms", 0..=10_000)
}

pub(crate) fn parse_cpus(text: &str) -> Result<CpuList, String> {
    text.parse().map_err(|error: CpuListError| format!("is no list of processors: {error}"))
}

pub(crate) fn parse_merge_max(text: &str) -> Result<u32, String> {
    number_in(text, " of KiB", 0..=16_384)
}

pub(crate) fn parse_path_timeout(text: &str) -> Result<u64, String> {
    number_in(text, " of ms", 10..=3_600_000)
}

pub(crate) fn parse_queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(size) if size.is_power_of_two() && (4..=RING_SIZE_MAX).contains(&size) => Ok(size),
        _ => Err(format!("must be a power of two from 4 to {RING_SIZE_MAX}")),
    }
}

pub(crate) fn parse_serial(text: &str) -> Result<String, String> {
    match text.len() {
        0..=ID_BYTES => Ok(text.to_owned()),
        len => Err(format!("is {len} bytes long, at most {ID_BYTES} fit")),
    }
}

pub(crate) fn parse_selector(text: &str) -> Result<Kind, String> {
    text.parse::<Kind>().map_err(|error| error.to_string())
}

pub(crate) fn parse_no_path_retry(text: &str) -> Result<NoPathRetry, String> {
    text.parse().map_err(|error: polypath_paths::text::NotNoPathRetry| error.to_string())
}

pub(crate) fn parse_failback(text: &str) -> Result<FailbackPolicy, String> {
    text.parse().map_err(|error: polypath_paths::BadFailback| error.to_string())
}

pub(crate) fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match nix::unistd::Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err("no such group".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

pub(crate) fn parse_metrics(text: &str) -> Result<Address, String> {
    text.parse()
}

pub(crate) fn parse_user(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match nix::unistd::User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err("no such user".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let args = std::iter::once("polypath").chain(line.split(' ').filter(|w| !w.is_empty()));
        match parse_from(args.map(OsString::from)).map_err(|error| one_line(&error))? {
            Task::Serve(launch) => Ok(launch.options),
            Task::Client(command) => panic!("{command:?}"),
        }
    }

    #[test]
    fn f62_bad_options_are_named_in_one_line() {
        for (line, option) in [
            ("--num-queues 0", "--num-queues"),
            ("--num-queues 65", "--num-queues"),
            ("--num-queues 1000000", "--num-queues"),
            ("--queue-size 0", "--queue-size"),
            ("--queue-size 3", "--queue-size"),
            ("--queue-size 100000", "--queue-size"),
            ("--sqpoll-idle-ms 10001", "--sqpoll-idle-ms"),
            ("--serial 123456789012345678901", "--serial"),
            ("--selector Round-Robin", "--selector"),
            ("--selector=", "--selector"),
            ("--log-level loud", "--log-level"),
            ("--fd x", "--fd"),
            ("--fd 3 --socket-path s", "--fd"),
            ("--unknown", "--unknown"),
            ("stray", "stray"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(option) && !error.contains('\n'), "{line}: {error}");
        }
    }

    #[test]
    fn f39_a_wrong_selector_is_answered_with_the_right_ones() {
        let error = parse("--selector rr").unwrap_err();
        for kind in Kind::ALL {
            assert!(error.contains(kind.name()), "{error}");
            assert_eq!(parse(&format!("--selector {}", kind.name())).unwrap().selector, kind);
        }
    }

    #[test]
    fn f48_the_default_is_enough_for_ordinary_vms() {
        let options = parse("--path a --blk-file b").unwrap();
        assert_eq!(options.num_queues, 64);
        assert_eq!(options.all_paths(), [PathBuf::from("a"), PathBuf::from("b")]);
    }
}
