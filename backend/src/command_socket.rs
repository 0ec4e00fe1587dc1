//! Commands on a Unix socket, a line each; every answer ends with a line `ok` or `error: ...`.
//!
//! | line | does |
//! |---|---|
//! | `fail_path DEV`, `reinstate_path DEV`, `switch_group N`, `disable_group N`, `enable_group N`, `queue_if_no_path`, `fail_if_no_path` | dm's messages |
//! | `status`, `table`, `toml`, `json` | show what is running |
//! | `no_path_retry fail\|queue\|SECONDS` | changes the policy |
//! | `add_path GROUP DEV [ARG ...]` | opens, proves and adds a path; GROUP may be the next new number |
//! | `remove_path DEV` | takes a path out; answers when its descriptor is closed |
//! | `path_args DEV ARG ...` | changes a path's arguments for its selector (service-time: repeat count, weight) |
//! | `regroup_path DEV GROUP` | moves a path |
//!
//! Reads and writes never block: a client that does not take its answers is dropped.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use polypath_paths::text::Message;

use crate::listen::Listener;
use crate::monitor::Monitor;

/// Longest command.
const LINE_BYTES_MAX: usize = 4096;

/// Most clients at a time.
const CLIENTS_MAX: usize = 64;

/// The socket and its clients.
#[derive(Debug)]
pub(crate) struct CommandSocket {
    listener: Listener,
    clients: BTreeMap<u32, Client>,
    next_client: u32,
    /// Which client waits for which answer.
    waiting: BTreeMap<u64, u32>,
    next_token: u64,
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    line: Vec<u8>,
}

/// What became of a command.
enum Done {
    /// Text, to be followed by `ok`.
    Text(String),
    /// The answer comes later.
    Later,
}

impl CommandSocket {
    /// Listens on `path`.
    pub(crate) fn bind(path: &Path) -> anyhow::Result<Self> {
        let listener = Listener::bind(path, None)?;
        listener.socket().set_nonblocking(true)?;
        Ok(Self {
            listener,
            clients: BTreeMap::new(),
            next_client: 0,
            waiting: BTreeMap::new(),
            next_token: 0,
        })
    }

    pub(crate) fn listener(&self) -> &UnixListener {
        self.listener.socket()
    }

    /// Takes new clients in: descriptor and number of each.
    pub(crate) fn accept(&mut self) -> Vec<(RawFd, u32)> {
        let mut accepted = Vec::new();
        while let Ok((stream, _)) = self.listener.socket().accept() {
            if self.clients.len() >= CLIENTS_MAX || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let number = self.next_client;
            self.next_client = (self.next_client + 1) % (1 << 15);
            accepted.push((stream.as_raw_fd(), number));
            self.clients.insert(number, Client { stream, line: Vec::new() });
        }
        accepted
    }

    /// Reads what a client sends and does it. Gives its descriptor if it has gone.
    pub(crate) fn read(&mut self, number: u32, monitor: &mut Monitor, now_ns: u64) -> Option<RawFd> {
        let mut bytes = [0; LINE_BYTES_MAX];
        let client = self.clients.get_mut(&number)?;
        let fd = client.stream.as_raw_fd();
        match client.stream.read(&mut bytes) {
            Ok(0) => return Some(fd),
            Ok(nr_bytes) => client.line.extend_from_slice(bytes.get(..nr_bytes).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
            Err(_) => return Some(fd),
        }
        while let Some(end) = self.clients.get(&number)?.line.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.clients.get_mut(&number)?.line.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let token = self.next_token;
            self.next_token += 1;
            let answer = match run(line.trim(), monitor, token, now_ns) {
                Ok(Done::Text(text)) if text.is_empty() => "ok\n".to_owned(),
                Ok(Done::Text(text)) => format!("{text}\nok\n"),
                Ok(Done::Later) => {
                    self.waiting.insert(token, number);
                    continue;
                }
                Err(error) => format!("error: {error:#}\n"),
            };
            if !self.send(number, &answer) {
                return Some(fd);
            }
        }
        (self.clients.get(&number)?.line.len() > LINE_BYTES_MAX).then_some(fd)
    }

    fn send(&mut self, number: u32, answer: &str) -> bool {
        self.clients.get_mut(&number).is_some_and(|c| c.stream.write_all(answer.as_bytes()).is_ok())
    }

    /// Passes on answers that have become ready.
    pub(crate) fn answer(&mut self, answers: Vec<(u64, String)>) {
        for (token, text) in answers {
            if let Some(number) = self.waiting.remove(&token) {
                // A client that has gone has given up its answer.
                let _ = self.send(number, &format!("{text}\n"));
            }
        }
    }

    /// Forgets a client.
    pub(crate) fn close(&mut self, number: u32) {
        self.clients.remove(&number);
        self.waiting.retain(|_, client| *client != number);
    }
}

fn run(line: &str, monitor: &mut Monitor, token: u64, now_ns: u64) -> anyhow::Result<Done> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let text = |text: String| Ok(Done::Text(text));
    match words.as_slice() {
        [] => bail!("an empty line"),
        ["status"] => return text(monitor.status(now_ns).dmsetup_status()),
        ["table"] => return text(monitor.status(now_ns).dmsetup_table()),
        ["toml"] => return text(monitor.status(now_ns).spec().to_toml().trim_end().to_owned()),
        ["json"] => return text(monitor.status(now_ns).json().to_string()),
        ["no_path_retry", value] => monitor.set_no_path_retry(value.parse()?),
        ["add_path", group, device, args @ ..] => {
            let group = group.parse().with_context(|| format!("{group} is not a group number"))?;
            monitor.add_path(PathBuf::from(device), group, args, token, now_ns)?;
            return Ok(Done::Later);
        }
        ["remove_path", device] => {
            monitor.remove_path(Path::new(device), token, now_ns)?;
            return Ok(Done::Later);
        }
        ["path_args", device, args @ ..] => monitor.set_path_args(Path::new(device), args)?,
        ["regroup_path", device, group] => {
            let group = group.parse().with_context(|| format!("{group} is not a group number"))?;
            monitor.regroup_path(Path::new(device), group)?;
        }
        _ => match line.parse::<Message>()? {
            Message::QueueIfNoPath => {
                monitor.set_no_path_retry(polypath_paths::text::NoPathRetry::Queue);
            }
            Message::FailIfNoPath => monitor.set_no_path_retry(polypath_paths::text::NoPathRetry::Fail),
            Message::SwitchGroup { group } => monitor.switch_group(group)?,
            Message::DisableGroup { group } => monitor.disable_group(group)?,
            Message::EnableGroup { group } => monitor.enable_group(group)?,
            Message::FailPath { device } => monitor.fail_path(Path::new(&device), now_ns)?,
            Message::ReinstatePath { device } => monitor.reinstate_path(Path::new(&device), now_ns)?,
        },
    }
    text(String::new())
}
