//! Whoever asks: an operator's programs and Prometheus.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::super::host;
use crate::control::Control;

/// What can be asked.
pub(super) const ALL: [What; 8] = [
    What::Hello,
    What::Show,
    What::Counters,
    What::Events,
    What::Dump,
    What::Set,
    What::Message,
    What::Scrape,
];

/// What is asked unless told otherwise: all that looks at a disk, and in between a scrape, five a second at the usual rate.
pub(super) fn looking() -> Vec<What> {
    let commands = [What::Show, What::Counters, What::Events, What::Dump];
    let mut turns = commands.repeat(5);
    turns.pop();
    turns.push(What::Scrape);
    turns
}

/// An answer takes at most this long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Hello,
    Show,
    Counters,
    Events,
    Dump,
    Set,
    Message,
    Scrape,
}

impl What {
    /// As the options name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Show => "show",
            Self::Counters => "counters",
            Self::Events => "events",
            Self::Dump => "dump",
            Self::Set => "set",
            Self::Message => "message",
            Self::Scrape => "scrape",
        }
    }

    /// The question; None for what is not asked on the control socket.
    fn line(self) -> Option<String> {
        let question = match self {
            Self::Hello | Self::Show | Self::Counters => json!({ "command": self.name() }),
            Self::Events => json!({ "command": "events", "last": 20 }),
            Self::Dump => json!({ "command": "dump", "format": "dm_status" }),
            Self::Set => json!({ "command": "set_no_path_retry", "value": 60 }),
            Self::Message => json!({ "command": "message", "message": "switch_group 1" }),
            Self::Scrape => return None,
        };
        Some(format!("{question}\n"))
    }
}

/// Whoever asks, on a thread of its own; silent until it is told how long to ask.
pub(super) struct Asker {
    orders: mpsc::Sender<Duration>,
    /// Number of commands of an order that is done.
    done: mpsc::Receiver<Result<u64>>,
}

impl Asker {
    /// Asks polypath with these sockets, from that core.
    pub(super) fn start(
        control: PathBuf,
        metrics: PathBuf,
        rate: u32,
        turns: Vec<What>,
        core: usize,
    ) -> Self {
        let (orders, ordered) = mpsc::channel::<Duration>();
        let (report, done) = mpsc::channel();
        std::thread::spawn(move || {
            let connected = host::pin_this_thread(core).and_then(|()| Control::connect(&control));
            let mut asking = connected.map(|control| Asking { control, metrics, turns, turn: 0 });
            for time in ordered {
                let asked = match &mut asking {
                    Ok(asking) => asking.ask_for(time, Duration::from_secs(1) / rate),
                    Err(error) => Err(anyhow::anyhow!("{error:#}")),
                };
                if report.send(asked).is_err() {
                    return;
                }
            }
        });
        Self { orders, done }
    }

    /// Lets it ask for so long.
    pub(super) fn begin(&self, time: Duration) -> Result<()> {
        self.orders.send(time).context("the asking thread has ended")
    }

    /// Waits until it has asked. Gives how often.
    pub(super) fn end(&self) -> Result<u64> {
        self.done.recv_timeout(ANSWER_TIMEOUT).context("the asking thread does not end")?
    }
}

struct Asking {
    control: Control,
    metrics: PathBuf,
    turns: Vec<What>,
    turn: usize,
}

impl Asking {
    /// Asks every `step`. Gives how often.
    fn ask_for(&mut self, time: Duration, step: Duration) -> Result<u64> {
        let start = Instant::now();
        let mut nr_asked = 0_u32;
        while step * nr_asked < time {
            std::thread::sleep((step * nr_asked).saturating_sub(start.elapsed()));
            self.ask()?;
            nr_asked += 1;
        }
        Ok(u64::from(nr_asked))
    }

    fn ask(&mut self) -> Result<()> {
        self.turn = (self.turn + 1) % self.turns.len();
        let Some(question) = self.turns[self.turn].line() else { return scrape(&self.metrics) };
        self.control.send_bytes(question.as_bytes())?;
        // Not parsed: what a client makes of its answer is its own affair.
        let line = self.control.line_within(ANSWER_TIMEOUT)?.context("no answer")?;
        ensure!(line.contains("\"ok\":true"), "{question}: {line}");
        Ok(())
    }
}

fn scrape(socket: &Path) -> Result<()> {
    let mut stream = UnixStream::connect(socket).context("connect for a scrape")?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: polypath\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.ends_with(b"# EOF\n"), "half a scrape");
    Ok(())
}
