//! QEMU's control socket.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::server::wait_for;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
    /// A line that is not complete yet.
    partial: String,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects as soon as the socket is there, and leaves the negotiation mode.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self> {
        let stream = wait_for("QEMU's control socket", timeout, || UnixStream::connect(socket).ok())?;
        let mut qmp =
            Self { stream: BufReader::new(stream), partial: String::new(), events: VecDeque::new() };
        let greeting = qmp.line(Instant::now() + timeout)?.context("QEMU does not greet")?;
        if greeting.get("QMP").is_none() {
            bail!("not a control socket: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// The next message, or `None` when the deadline has passed.
    fn line(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.get_ref().set_read_timeout(Some(left))?;
            match self.stream.read_line(&mut self.partial) {
                Ok(0) => bail!("QEMU closed its control socket"),
                Ok(_) => {
                    let line = std::mem::take(&mut self.partial);
                    return Ok(Some(
                        serde_json::from_str(&line).with_context(|| format!("not JSON: {line}"))?,
                    ));
                }
                // What was read so far stays in `partial`.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(e) => return Err(e).context("read from the control socket"),
            }
        }
    }

    /// Runs a command and gives its return value; events that come in between are kept.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut message = serde_json::to_vec(&json!({ "execute": command, "arguments": arguments }))?;
        message.push(b'\n');
        self.stream.get_mut().write_all(&message).with_context(|| format!("send {command}"))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let Some(mut answer) = self.line(deadline)? else {
                bail!("no answer to {command} within {ANSWER_TIMEOUT:?}")
            };
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else if let Some(error) = answer.get("error") {
                bail!("{command} {arguments}: {error}");
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for an event that `wanted` accepts; others that came before it are dropped.
    pub fn wait_event(
        &mut self,
        name: &str,
        timeout: Duration,
        mut wanted: impl FnMut(&Value) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => match self.line(deadline)? {
                    Some(event) => event,
                    None => bail!("no event {name} within {timeout:?}"),
                },
            };
            if event["event"] == name && wanted(&event["data"]) {
                return Ok(());
            }
        }
    }

    /// Forgets the events so far.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }
}
