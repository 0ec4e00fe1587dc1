//! A program of the operator's that is run for every event: one at a time, on a thread of its own, so that one that
//! hangs delays nothing but the next ones.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a run may take before it is killed.
const RUN_MAX: Duration = Duration::from_secs(10);

/// Most events that wait for their run; later ones are left out, which the log says.
const WAITING_MAX: usize = 256;

/// The runner.
#[derive(Debug)]
pub(crate) struct EventCommand {
    queue: mpsc::SyncSender<(String, String)>,
    thread: JoinHandle<()>,
    is_behind: bool,
}

impl EventCommand {
    /// Runs `program` for every event that is told from now on.
    pub(crate) fn start(program: PathBuf) -> std::io::Result<Self> {
        let (queue, events) = mpsc::sync_channel::<(String, String)>(WAITING_MAX);
        let thread = std::thread::Builder::new().name("events".into()).spawn(move || {
            for (name, line) in events {
                if let Err(error) = run(&program, &name, &line) {
                    log::warn!("event command: program={} error={error}", program.display());
                }
            }
        })?;
        Ok(Self { queue, thread, is_behind: false })
    }

    /// This has happened: an event's name, and the line that tells it.
    pub(crate) fn run(&mut self, name: String, line: String) {
        let is_lost = self.queue.try_send((name, line)).is_err();
        if is_lost && !self.is_behind {
            log::warn!("event command: too slow, events are left out");
        }
        self.is_behind = is_lost;
    }

    /// Waits until the program has run for all that was told, but not longer than `max`.
    pub(crate) fn finish(self, max: Duration) {
        drop(self.queue);
        let start = Instant::now();
        while !self.thread.is_finished() && start.elapsed() < max {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn run(program: &Path, name: &str, line: &str) -> std::io::Result<()> {
    let mut child = Command::new(program)
        .arg(name)
        .env("POLYPATH_EVENT", name)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // It need not read it; a line is less than what the pipe holds.
        let _ = writeln!(stdin, "{line}");
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
