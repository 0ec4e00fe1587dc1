//! A program of the operator's that is run for every event: one at a time, on a thread of its own, so that one that
//! hangs delays nothing but the next ones.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::events::Event;

/// How long a run may take before it is killed.
const RUN_MAX: Duration = Duration::from_secs(10);

/// Most events that wait for their run; later ones are left out, which the log says.
const WAITING_MAX: usize = 256;

/// The runner.
#[derive(Debug)]
pub(crate) struct EventCommand {
    queue: mpsc::SyncSender<Arc<Event>>,
    is_behind: bool,
}

impl EventCommand {
    /// Runs `program` for every event that is told from now on.
    pub(crate) fn start(program: PathBuf) -> std::io::Result<Self> {
        let (queue, events) = mpsc::sync_channel::<Arc<Event>>(WAITING_MAX);
        std::thread::Builder::new().name("events".into()).spawn(move || {
            for event in events {
                if let Err(error) = run(&program, &event) {
                    log::warn!("event command: program={} error={error}", program.display());
                }
            }
        })?;
        Ok(Self { queue, is_behind: false })
    }

    /// These have happened.
    pub(crate) fn tell(&mut self, events: &[Arc<Event>]) {
        for event in events {
            let is_lost = self.queue.try_send(Arc::clone(event)).is_err();
            if is_lost && !self.is_behind {
                log::warn!("event command: too slow, events are left out");
            }
            self.is_behind = is_lost;
        }
    }
}

fn run(program: &Path, event: &Event) -> std::io::Result<()> {
    let json = event.json();
    let name = json["event"].as_str().unwrap_or_default();
    let mut child = Command::new(program)
        .arg(name)
        .env("POLYPATH_EVENT", name)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // It need not read it; a line is less than what the pipe holds.
        let _ = writeln!(stdin, "{json}");
    }
    wait(&mut child)
}

fn wait(child: &mut Child) -> std::io::Result<()> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(std::io::Error::other(status.to_string())),
            None if start.elapsed() > RUN_MAX => {
                child.kill()?;
                child.wait()?;
                return Err(std::io::Error::other(format!("killed: it ran for more than {RUN_MAX:?}")));
            }
            None => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(100));
            }
        }
    }
}
