//! A client of polypath's command socket: one line asked, the lines of the answer given.
//!
//! ```no_run
//! # use polypath_vm_tests::control::Socket;
//! # use polypath_vm_tests::server::Server;
//! let socket = Socket::new().unwrap();
//! let server = Server::polypath().path("/tmp/a").path("/tmp/b").arg("--control").arg(socket.path()).start().unwrap();
//! let mut control = socket.connect().unwrap();
//! control.run("fail_path /tmp/a").unwrap();
//! assert_eq!(control.json().unwrap().nr_active(), 1);
//! ```

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tempfile::TempDir;

/// How long an answer may take unless said otherwise.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A place for a command socket in a directory of its own.
#[derive(Debug)]
pub struct Socket {
    dir: TempDir,
}

impl Socket {
    /// A free name; the program makes the socket.
    pub fn new() -> Result<Self> {
        Ok(Self { dir: tempfile::Builder::new().prefix("ctl-").tempdir().context("make a directory")? })
    }

    /// Where the program is to listen.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    /// A connection.
    pub fn connect(&self) -> Result<Control> {
        Control::connect(&self.path())
    }
}

/// A connection to the command socket.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
    /// How long an answer may take.
    pub timeout: Duration,
    /// What has come of a line so far.
    partial: String,
}

impl Control {
    /// Connects to `path`.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("connect to {}", path.display()))?;
        Ok(Self { stream: BufReader::new(stream), timeout: TIMEOUT, partial: String::new() })
    }

    /// Sends bytes as they are, for clients that do not keep the rules.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Sends a command and does not wait.
    pub fn send(&mut self, line: &str) -> Result<()> {
        self.send_bytes(format!("{line}\n").as_bytes()).with_context(|| format!("send {line:?}"))
    }

    /// The next line; `None` if it does not come within `timeout`. What has come of it is kept for the next time.
    fn line(&mut self, deadline: Instant) -> Result<Option<String>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.get_ref().set_read_timeout(Some(left))?;
            match self.stream.read_line(&mut self.partial) {
                Ok(_) if self.partial.ends_with('\n') => {
                    let line = std::mem::take(&mut self.partial);
                    return Ok(Some(line.trim_end().to_owned()));
                }
                Ok(_) => bail!("the command socket was closed"),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("read the command socket"),
            }
        }
    }

    /// The next line, as it is; `None` if it does not come within `timeout`.
    pub fn line_within(&mut self, timeout: Duration) -> Result<Option<String>> {
        self.line(Instant::now() + timeout)
    }

    /// The next answer if it comes within `timeout`: its text, or the error.
    pub fn answer_within(&mut self, timeout: Duration) -> Result<Option<Result<String, String>>> {
        let deadline = Instant::now() + timeout;
        let mut text: Vec<String> = Vec::new();
        while let Some(line) = self.line(deadline)? {
            if line == "ok" {
                return Ok(Some(Ok(text.join("\n"))));
            }
            if let Some(error) = line.strip_prefix("error: ") {
                return Ok(Some(Err(error.to_owned())));
            }
            text.push(line);
        }
        // Half an answer would be taken for the next one.
        if text.is_empty() { Ok(None) } else { bail!("half an answer: {text:?}") }
    }

    /// A command that may be refused: its answer.
    pub fn ask(&mut self, line: &str) -> Result<Result<String, String>> {
        self.send(line)?;
        self.answer_within(self.timeout)?
            .with_context(|| format!("no answer to {line:?} in {:?}", self.timeout))
    }

    /// A command that must succeed: its text.
    pub fn run(&mut self, line: &str) -> Result<String> {
        match self.ask(line)? {
            Ok(text) => Ok(text),
            Err(error) => bail!("{line:?} was refused: {error}"),
        }
    }

    /// A command that must be refused: the reason.
    pub fn refused(&mut self, line: &str) -> Result<String> {
        match self.ask(line)? {
            Ok(text) => bail!("{line:?} was not refused: {text:?}"),
            Err(error) => Ok(error),
        }
    }

    /// The next line, which must be a JSON object; `None` if it does not come within `timeout`.
    pub fn object_within(&mut self, timeout: Duration) -> Result<Option<Value>> {
        let line = self.line(Instant::now() + timeout)?;
        line.map(|line| serde_json::from_str(&line).with_context(|| format!("not an object: {line}")))
            .transpose()
    }

    /// A question in JSON: the whole answer.
    pub fn ask_json(&mut self, question: &Value) -> Result<Value> {
        self.send(&question.to_string())?;
        self.object_within(self.timeout)?
            .with_context(|| format!("no answer to {question} in {:?}", self.timeout))
    }

    /// A question in JSON that must have a result.
    pub fn result(&mut self, question: Value) -> Result<Value> {
        let mut answer = self.ask_json(&question)?;
        if answer["ok"] != true {
            bail!("{question} was refused: {answer}");
        }
        Ok(answer["result"].take())
    }

    /// What is running.
    pub fn json(&mut self) -> Result<Status> {
        Ok(Status(serde_json::from_str(&self.run("json")?).context("the answer to `json`")?))
    }
}

/// The JSON form of the status.
#[derive(Clone, Debug, PartialEq)]
pub struct Status(pub Value);

impl Status {
    /// All paths with the number of their group, in table order.
    pub fn paths(&self) -> impl Iterator<Item = (u64, &Value)> {
        let groups = self.0["groups"].as_array().into_iter().flatten();
        groups.flat_map(|group| {
            let number = group["group"].as_u64().unwrap_or(0);
            group["paths"].as_array().into_iter().flatten().map(move |path| (number, path))
        })
    }

    /// A path by its device; null if it is not in the table.
    pub fn path(&self, device: &Path) -> &Value {
        let device = device.to_string_lossy();
        self.paths().find(|(_, path)| path["device"] == *device).map_or(&Value::Null, |(_, path)| path)
    }

    /// Whether a path is in the table.
    pub fn has(&self, device: &Path) -> bool {
        !self.path(device).is_null()
    }

    /// Whether a path is in the table and active.
    pub fn is_active(&self, device: &Path) -> bool {
        self.path(device)["state"] == "active"
    }

    /// Number of active paths.
    pub fn nr_active(&self) -> usize {
        self.paths().filter(|(_, path)| path["state"] == "active").count()
    }

    /// The group in use.
    pub fn current_group(&self) -> Option<u64> {
        self.0["current_group"].as_u64()
    }

    /// State of a group, by its number.
    pub fn group_state(&self, number: usize) -> &str {
        self.0["groups"][number - 1]["state"].as_str().unwrap_or_default()
    }

    /// Number of requests that wait for a path.
    pub fn nr_held(&self) -> u64 {
        self.0["held"]["nr_requests"].as_u64().unwrap_or(u64::MAX)
    }
}
