//! The helper's own process.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::net::SendFlags;

use super::proof::Proof;
use super::wire::{self, Answer, Question};
use crate::config::Launch;
use crate::event_command::EventCommand;
use crate::events;
use crate::fence;
use crate::listen::SocketFile;
use crate::signals;

/// Most questions that are worked on at a time: one for each path, and some.
const THREADS_MAX: usize = 256;

/// How long events that have happened may take to be passed on after the other process has ended.
const LAST_EVENTS_MAX: Duration = Duration::from_secs(10);

/// Makes the process. Returns in the one that called.
pub(super) fn fork(launch: Launch, event_command: Option<PathBuf>, channel: OwnedFd) -> io::Result<()> {
    // SAFETY: the process has one thread, so the child may do whatever a process may; it never returns from here.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { .. } => Ok(()),
        nix::unistd::ForkResult::Child => {
            // An unwinding child would go on as the parent does.
            let run = || run(launch, event_command, channel);
            let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                Ok(Ok(())) => 0,
                Ok(Err(error)) => {
                    log::error!("the helper process: {error}");
                    1
                }
                Err(_) => 1,
            };
            // SAFETY: ends the process; nothing of what the parent has is cleaned up.
            unsafe { libc::_exit(code) }
        }
    }
}

fn run(launch: Launch, event_command: Option<PathBuf>, channel: OwnedFd) -> io::Result<()> {
    // It ends when the other one does, not before: signals to a whole group are not for it.
    signals::ignore()?;
    let channel = keep_only(channel)?;
    rustix::thread::set_name(c"polypath-helper")?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let mut event_command = event_command.map(EventCommand::start).transpose()?;
    let shared = Arc::new(Shared { launch, begun: OnceLock::new(), nr_threads: AtomicUsize::new(0) });
    while let Some((bytes, fds)) = wire::receive_packet(&channel)? {
        match serde_json::from_slice(&bytes) {
            Ok(Question::Event { name, line }) => {
                if let Some(event_command) = event_command.as_mut().filter(|_| events::is_name(&name)) {
                    event_command.run(name, line);
                }
            }
            Ok(question) => shared.begin(question, fds),
            Err(error) => log::debug!("the helper process: {error}"),
        }
    }
    if let Some(event_command) = event_command {
        event_command.finish(LAST_EVENTS_MAX);
    }
    Ok(())
}

/// Closes everything but the log and the channel, which gets another number.
fn keep_only(channel: OwnedFd) -> io::Result<OwnedFd> {
    let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    let first = libc::STDERR_FILENO.unsigned_abs() + 1;
    let own = channel.as_raw_fd().unsigned_abs();
    for (from, to) in [(first, own.saturating_sub(1)), (own + 1, libc::c_uint::MAX)] {
        if from > to {
            continue;
        }
        // SAFETY: what is closed belongs to objects of the parent's code, which never run here again; the channel is left.
        if unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    std::mem::forget(null);
    Ok(channel)
}

struct Shared {
    launch: Launch,
    /// What it was told first, and once.
    begun: OnceLock<(Proof, Vec<SocketFile>)>,
    nr_threads: AtomicUsize,
}

impl Shared {
    /// Works on a question, on a thread of its own: a path may hang for ever. Whoever gets no answer sees the socket closed.
    fn begin(self: &Arc<Self>, question: Question, fds: Vec<OwnedFd>) {
        let mut fds = fds.into_iter();
        let Some(answer_to) = fds.next() else { return };
        if self.nr_threads.load(Ordering::Relaxed) >= THREADS_MAX {
            return;
        }
        self.nr_threads.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::clone(self);
        let begun =
            std::thread::Builder::new().name("question".into()).stack_size(256 << 10).spawn(move || {
                let (answer, fd) = match shared.answer(question, fds.next()) {
                    Ok((answer, fd)) => (Ok(answer), fd),
                    Err(why) => (Err(why), None),
                };
                if let Err(error) = say(UnixStream::from(answer_to), &answer, fd) {
                    log::debug!("the helper process: {error}");
                }
                shared.nr_threads.fetch_sub(1, Ordering::Relaxed);
            });
        if begun.is_err() {
            self.nr_threads.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn answer(&self, question: Question, fd: Option<OwnedFd>) -> Result<(Answer, Option<OwnedFd>), String> {
        let begun = || self.begun.get().ok_or("nothing is known of the disk yet");
        match question {
            Question::Begin(bounds, sockets) => {
                let set = self.begun.set((Proof::new(*bounds), sockets));
                set.map_err(|_| "the disk is known already")
                    .map(|()| (Answer::Begun, None))
                    .map_err(Into::into)
            }
            Question::Open { name, options, size_bytes, reference } => {
                let path = begun()?.0.open(name, options, size_bytes, reference.as_deref())?;
                let opened = path.into_opened();
                Ok((Answer::Opened(opened.facts), Some(opened.file.into())))
            }
            Question::Reopen => {
                let area = File::from(fd.ok_or("no area came along")?);
                let file = fence::open_anew(&area).map_err(|error| error.to_string())?;
                Ok((Answer::Reopened, Some(file.into())))
            }
            Question::Configuration => {
                let (options, spec) = self.launch.resolve().map_err(|error| format!("{error:#}"))?;
                Ok((Answer::Configuration(Box::new(options), spec.to_toml()), None))
            }
            Question::RemoveSockets => {
                begun()?.1.iter().for_each(SocketFile::remove);
                Ok((Answer::Removed, None))
            }
            Question::Event { .. } => Err("an event has no answer".to_owned()),
        }
    }
}

fn say(mut to: UnixStream, answer: &Result<Answer, String>, fd: Option<OwnedFd>) -> io::Result<()> {
    let bytes = serde_json::to_vec(answer)?;
    // The descriptor goes with the first part.
    let fds: Vec<_> = fd.iter().map(OwnedFd::as_fd).collect();
    let nr_bytes = wire::send(&to, &bytes, &fds, SendFlags::empty())?;
    to.write_all(bytes.get(nr_bytes..).unwrap_or_default())
}
