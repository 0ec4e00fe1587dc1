//! The dialogue with the guest's agent: scripts go in, exit codes and output come out.
//!
//! Host to guest: `run ID SCRIPT`; guest to host: `ready`, and `done ID CODE OUTPUT`. Script and output are in base64, each
//! message is one line. Scripts run side by side in the guest.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::base64;
use crate::server::wait_for;

/// How often a wait looks whether the guest still lives.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Outcome of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub code: i32,
    pub output: String,
}

#[derive(Debug, Default)]
struct Inbox {
    /// Number of boots whose agent has reported.
    boots: u64,
    answers: HashMap<u64, Answer>,
    closed: bool,
}

#[derive(Debug)]
struct Shared {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().expect("no thread panics with the lock")
    }

    fn take(&self, line: &str) {
        let mut words = line.split_whitespace();
        let mut inbox = self.inbox();
        match words.next() {
            Some("ready") => inbox.boots += 1,
            Some("done") => {
                let (Some(id), Some(code)) =
                    (words.next().and_then(|w| w.parse().ok()), words.next().and_then(|w| w.parse().ok()))
                else {
                    return; // cut off by a reset
                };
                let output = base64::decode(words.next().unwrap_or_default());
                inbox
                    .answers
                    .insert(id, Answer { code, output: String::from_utf8_lossy(&output).into_owned() });
            }
            _ => {}
        }
        self.changed.notify_all();
    }
}

#[derive(Debug)]
pub(super) struct Agent {
    stream: Mutex<(UnixStream, u64)>,
    shared: Arc<Shared>,
}

impl Agent {
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self> {
        let stream = wait_for("the agent's socket", timeout, || UnixStream::connect(socket).ok())?;
        let lines = BufReader::new(stream.try_clone()?).lines();
        let shared = Arc::new(Shared { inbox: Mutex::default(), changed: Condvar::new() });
        let for_reader = Arc::clone(&shared);
        // Ends with the connection, that is with QEMU.
        std::thread::Builder::new().name("agent".into()).spawn(move || {
            for line in lines.map_while(Result::ok) {
                for_reader.take(&line);
            }
            for_reader.inbox().closed = true;
            for_reader.changed.notify_all();
        })?;
        Ok(Self { stream: Mutex::new((stream, 0)), shared })
    }

    /// Number of boots that the agent has reported so far.
    pub fn boots(&self) -> u64 {
        self.shared.inbox().boots
    }

    /// Waits until more than `boots` boots are reported. `alive` may say why waiting is in vain.
    pub fn wait_boot(&self, boots: u64, timeout: Duration, alive: impl FnMut() -> Result<()>) -> Result<()> {
        self.wait("the guest's agent", timeout, alive, |inbox| (inbox.boots > boots).then_some(()))
    }

    pub fn start(&self, script: &str) -> Result<(u64, u64)> {
        let boots = self.boots();
        let mut stream = self.stream.lock().expect("no thread panics with the lock");
        let (stream, last_id) = &mut *stream;
        *last_id += 1;
        let line = format!("run {last_id} {}\n", base64::encode(script.as_bytes()));
        stream.write_all(line.as_bytes()).context("send a script to the guest")?;
        Ok((*last_id, boots))
    }

    pub fn is_done(&self, id: u64) -> bool {
        self.shared.inbox().answers.contains_key(&id)
    }

    pub fn wait_answer(
        &self,
        (id, boots): (u64, u64),
        timeout: Duration,
        alive: impl FnMut() -> Result<()>,
    ) -> Result<Answer> {
        self.wait("the end of a script", timeout, alive, |inbox| {
            inbox.answers.remove(&id).or_else(|| {
                let lost = inbox.boots != boots;
                lost.then(|| Answer { code: -1, output: "the guest was reset while the script ran".into() })
            })
        })
    }

    fn wait<T>(
        &self,
        what: &str,
        timeout: Duration,
        mut alive: impl FnMut() -> Result<()>,
        mut look: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        let mut inbox = self.shared.inbox();
        loop {
            if let Some(found) = look(&mut inbox) {
                return Ok(found);
            }
            if inbox.closed {
                bail!("QEMU ended while waiting for {what}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("waited {timeout:?} in vain for {what}");
            }
            inbox =
                self.shared.changed.wait_timeout(inbox, left.min(LOOK_AGAIN)).expect("no poisoned lock").0;
            drop(inbox);
            alive()?;
            inbox = self.shared.inbox();
        }
    }
}
