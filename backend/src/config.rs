//! The configuration file: TOML with the names of the options as its keys (`-` becomes `_`), and the table.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use polypath_paths::FailbackPolicy;
use polypath_paths::text::{NoPathRetry, TableSection, TableSpec, TomlError};
use polypath_selector::Kind;
use serde::de::{Deserializer, Error as _, Visitor};

use crate::cli::{self, Level, Options, Sandbox, Switch};
use crate::cpus::CpuList;
use crate::metrics::Address;
use crate::setup;

/// A configuration file. No other keys are accepted; a value follows the rules of the option of its name.
///
/// ```toml
/// socket_path = "/run/polypath/disk0.sock"
/// socket_group = "kvm"
/// control = "/run/polypath/disk0.control"
/// path_timeout = 10000            # ms
///
/// [table]                         # or: paths = ["/dev/sda", "/dev/sdb"] and selector = "service-time"
/// no_path_retry = 60
/// [[table.group]]
/// selector = "service-time"
/// [[table.group.path]]
/// device = "/dev/sda"
/// weight = 2
/// ```
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the keys of a configuration file")]
struct File {
    socket_path: Option<PathBuf>,
    fd: Option<i32>,
    #[serde(deserialize_with = "group")]
    socket_group: Option<u32>,
    paths: Option<Vec<PathBuf>>,
    read_only: Option<bool>,
    #[serde(deserialize_with = "num_queues")]
    num_queues: Option<u16>,
    #[serde(deserialize_with = "queue_size")]
    queue_size: Option<u16>,
    #[serde(deserialize_with = "serial")]
    serial: Option<String>,
    #[serde(deserialize_with = "selector")]
    selector: Option<Kind>,
    no_path_retry: Option<NoPathRetry>,
    #[serde(deserialize_with = "path_timeout")]
    path_timeout: Option<u64>,
    #[serde(deserialize_with = "failback")]
    failback: Option<FailbackPolicy>,
    #[serde(deserialize_with = "path_depth")]
    path_depth: Option<u32>,
    #[serde(deserialize_with = "merge_max")]
    merge_max: Option<u32>,
    #[serde(deserialize_with = "poll_us")]
    poll_us: Option<u64>,
    #[serde(deserialize_with = "cpus")]
    cpus: Option<CpuList>,
    register_memory: Option<bool>,
    #[serde(deserialize_with = "sqpoll_idle_ms")]
    sqpoll_idle_ms: Option<u32>,
    trust_paths: Option<bool>,
    control: Option<PathBuf>,
    #[serde(deserialize_with = "user")]
    control_owner: Option<u32>,
    #[serde(deserialize_with = "group")]
    control_group: Option<u32>,
    direct: Option<bool>,
    #[serde(deserialize_with = "metrics")]
    metrics: Option<Address>,
    event_command: Option<PathBuf>,
    sandbox: Option<Sandbox>,
    log_level: Option<Level>,
    table: Option<TableSection>,
}

/// The command line of a server, from which its options are made, with the file, at the start and at every reload.
#[derive(Debug, Clone)]
pub struct Launch {
    /// As the command line has them.
    pub options: Options,
    /// Names of the options that were given there: they count more than the file.
    pub given: BTreeSet<String>,
}

impl Launch {
    /// The options and the table in force, and the table that they describe. Reads files: it may take time.
    pub fn resolve(&self) -> anyhow::Result<(Options, TableSpec)> {
        let mut options = self.options.clone();
        if let Some(file) = &self.options.config {
            let option = || format!("--config {}", file.display());
            let text = std::fs::read_to_string(file).with_context(option)?;
            self.apply(&text, &mut options).with_context(option)?;
        }
        let spec = setup::table_spec(&options)?;
        Ok((options, spec))
    }

    /// The file whose change a reload can bring in.
    pub fn file(&self) -> Option<&Path> {
        self.options.config.as_deref().or(self.options.table_file.as_deref())
    }

    /// What a file with this text makes of the options.
    #[cfg(fuzzing)]
    pub(crate) fn read(&self, text: &str) -> anyhow::Result<Options> {
        let mut options = self.options.clone();
        self.apply(text, &mut options)?;
        Ok(options)
    }

    /// Takes what the file says where the command line says nothing.
    fn apply(&self, text: &str, options: &mut Options) -> anyhow::Result<()> {
        let file: File = toml::from_str(text).map_err(|error| TomlError::syntax(text, &error))?;
        if file.table.is_some() && (file.paths.is_some() || file.selector.is_some()) {
            bail!(
                "`paths` and `selector` describe a table of one group, and there is a `[table]` beside them"
            );
        }
        if file.socket_path.is_some() && file.fd.is_some() {
            bail!("`socket_path` and `fd`: one of them");
        }
        let is_given = |name: &str| self.given.contains(name);
        let gives_paths = ["paths", "blk_file", "table", "table_file"].into_iter().any(is_given);
        let gives_socket = is_given("socket_path") || is_given("fd");
        macro_rules! take {
            ($($key:ident => $value:expr;)*) => {
                $(if let Some($key) = file.$key && !is_given(stringify!($key)) { options.$key = $value; })*
            };
        }
        if !gives_socket {
            (options.socket_path, options.fd) = (file.socket_path, file.fd);
        }
        if !gives_paths {
            options.paths = file.paths.unwrap_or_default();
            options.table_section = file.table.map(|table| table.to_spec(text)).transpose()?;
        }
        take! {
            socket_group => Some(socket_group);
            read_only => read_only;
            num_queues => num_queues;
            queue_size => queue_size;
            serial => Some(serial);
            selector => selector;
            no_path_retry => Some(no_path_retry);
            path_timeout => path_timeout;
            failback => failback;
            path_depth => path_depth;
            merge_max => merge_max;
            poll_us => poll_us;
            cpus => Some(cpus);
            register_memory => register_memory;
            sqpoll_idle_ms => sqpoll_idle_ms;
            trust_paths => trust_paths;
            control => Some(control);
            control_owner => Some(control_owner);
            control_group => Some(control_group);
            direct => if direct { Switch::On } else { Switch::Off };
            metrics => Some(metrics);
            event_command => Some(event_command);
            sandbox => sandbox;
            log_level => log_level;
        }
        Ok(())
    }
}

/// Reads a string or a number as the command line would read it.
struct Word<T> {
    parse: fn(&str) -> Result<T, String>,
    kind: PhantomData<T>,
}

impl<T> Visitor<'_> for Word<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a word or a number")
    }

    fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<T, E> {
        (self.parse)(word).map_err(|why| E::custom(format!("`{}` {why}", word.escape_debug())))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

macro_rules! words {
    ($($name:ident: $type:ty = $parse:path;)*) => {
        $(fn $name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<$type>, D::Error> {
            deserializer.deserialize_any(Word { parse: $parse, kind: PhantomData }).map(Some)
        })*
    };
}

words! {
    group: u32 = cli::parse_group;
    user: u32 = cli::parse_user;
    num_queues: u16 = cli::parse_num_queues;
    queue_size: u16 = cli::parse_queue_size;
    selector: Kind = cli::parse_selector;
    path_timeout: u64 = cli::parse_path_timeout;
    failback: FailbackPolicy = cli::parse_failback;
    path_depth: u32 = cli::parse_path_depth;
    merge_max: u32 = cli::parse_merge_max;
    poll_us: u64 = cli::parse_poll_us;
    sqpoll_idle_ms: u32 = cli::parse_sqpoll_idle_ms;
    cpus: CpuList = cli::parse_cpus;
    metrics: Address = cli::parse_metrics;
}

fn serial<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text = <String as serde::Deserialize>::deserialize(deserializer)?;
    cli::parse_serial(&text).map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn launch(args: &[&str], given: &[&str]) -> Launch {
        let options = Options::try_parse_from([&["polypath"], args].concat()).unwrap();
        Launch { options, given: given.iter().map(|name| (*name).to_owned()).collect() }
    }

    fn read(text: &str) -> anyhow::Result<Options> {
        let launch = launch(&[], &[]);
        let mut options = launch.options.clone();
        launch.apply(text, &mut options)?;
        Ok(options)
    }

    #[test]
    fn every_key_is_taken() {
        let options = read(
            "socket_path = 's'\nsocket_group = 7\npaths = ['a', 'b']\nread_only = true\nnum_queues = 3\nqueue_size = 256\n\
             serial = 'x'\nselector = 'queue-length'\nno_path_retry = 'queue'\npath_timeout = 500\nfailback = 30\n\
             path_depth = 9\nmerge_max = 0\npoll_us = 20\ncpus = '0-2'\nregister_memory = true\nsqpoll_idle_ms = 5\ntrust_paths = true\ncontrol = 'c'\ncontrol_owner = 0\ncontrol_group = '8'\ndirect = false\nmetrics = '127.0.0.1:9470'\nevent_command = 'e'\nsandbox = 'strict'\n\
             log_level = 'warn'\n",
        )
        .unwrap();
        let expected = Options::try_parse_from([
            "polypath",
            "-s",
            "s",
            "--socket-group",
            "7",
            "--path",
            "a",
            "--path",
            "b",
            "--read-only",
            "--num-queues",
            "3",
            "--queue-size",
            "256",
            "--serial",
            "x",
            "--selector",
            "queue-length",
            "--no-path-retry",
            "queue",
            "--path-timeout",
            "500",
            "--failback",
            "30",
            "--path-depth",
            "9",
            "--merge-max",
            "0",
            "--poll-us",
            "20",
            "--cpus",
            "0-2",
            "--register-memory",
            "--sqpoll-idle-ms",
            "5",
            "--trust-paths",
            "--control",
            "c",
            "--control-owner",
            "0",
            "--control-group",
            "8",
            "--direct",
            "off",
            "--metrics",
            "127.0.0.1:9470",
            "--event-command",
            "e",
            "--sandbox",
            "strict",
            "--log-level",
            "warn",
        ])
        .unwrap();
        assert_eq!(options, expected);
        // A confined process has another one read the file for it.
        let json = serde_json::to_string(&options).unwrap();
        assert_eq!(serde_json::from_str::<Options>(&json).unwrap(), expected);
    }

    #[test]
    fn the_table_is_a_part_of_it() {
        let options =
            read("serial = 'x'\n[table]\nno_path_retry = 5\n[[table.group]]\npath = [{ device = 'a' }]")
                .unwrap();
        let spec = setup::table_spec(&options).unwrap();
        assert_eq!(spec.paths().map(|path| path.device.as_str()).collect::<Vec<_>>(), ["a"]);
        assert_eq!(spec.no_path_retry, "5".parse().ok());
    }

    #[test]
    fn f62_what_is_wrong_is_named_with_its_place() {
        for (text, place, word) in [
            ("serial = 'x'\nspeed = 9", "line 2, column 1", "speed"),
            ("[table]\nspeed = 9", "line 2, column 1", "speed"),
            ("num_queues = 0", "line 1, column 14", "from 1 to 64"),
            ("num_queues = 1000000", "line 1, column 14", "from 1 to 64"),
            ("queue_size = 3", "line 1, column 14", "power of two"),
            ("read_only = 'yes'", "line 1, column 13", "boolean"),
            ("selector = 'rr'", "line 1, column 12", "round-robin"),
            ("failback = 'never'", "line 1, column 12", "manual"),
            ("path_timeout = 1", "line 1, column 16", "ms"),
            ("serial = '123456789012345678901'", "line 1, column 10", "20"),
            ("log_level = 'loud'", "line 1, column 13", "loud"),
            ("sandbox = 'tight'", "line 1, column 11", "strict"),
            ("socket_group = 'no such group'", "line 1, column 16", "no such group"),
            ("\n\npaths = 'a'", "line 3, column 9", "sequence"),
            ("x", "line 1", ""),
            ("[table]\n[[table.group]]\npath = []", "line 2, column 1", "number of paths"),
            ("paths = ['a']\n[table]", "", "[table]"),
            ("fd = 3\nsocket_path = 's'", "", "one of them"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(
                error.contains(place) && error.contains(word) && !error.contains('\n'),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn the_command_line_counts_more() {
        let launch =
            launch(&["--path", "c", "--serial", "line", "-s", "s"], &["paths", "serial", "socket_path"]);
        let mut options = launch.options.clone();
        let text = "fd = 3\npaths = ['a', 'b']\nserial = 'file'\nnum_queues = 2";
        launch.apply(text, &mut options).unwrap();
        assert_eq!((options.serial.as_deref(), options.num_queues), (Some("line"), 2));
        assert_eq!((options.all_paths(), options.fd), (vec![PathBuf::from("c")], None));
    }
}
