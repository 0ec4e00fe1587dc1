//! The control loop: one thread that accepts front-ends, obeys signals and commands, and lets the monitor work. It never
//! does I/O that can hang.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::STOP_WAIT_MAX;
use super::teller::Teller;
use crate::clock;
use crate::command::Context;
use crate::command_socket::CommandSocket;
use crate::disk::Disk;
use crate::events::What;
use crate::listen::Listener;
use crate::monitor::{Monitor, Outcome};
use crate::running::{RELOAD_TOKEN, Running};
use crate::sandbox::{self, Kind};
use crate::session;
use crate::signals::Signals;

/// Tags of the loop's descriptors.
const LISTENER: u32 = 0;
const SIGNALS: u32 = 1;
const ENDED: u32 = 2;
const BELL: u32 = 3;
const COMMANDS: u32 = 4;
const RELOAD: u32 = 5;
/// Clients of the command socket have the numbers from here on.
pub(super) const CLIENTS: u32 = 1 << 16;

/// Longest wait of the loop.
const WAIT_MS_MAX: u64 = 1000;

/// An eventfd that makes the loop look.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

/// All that the loop works on.
pub(super) struct Control {
    disk: Arc<Disk>,
    listener: UnixListener,
    signals: Signals,
    /// Rung by a session that has ended.
    ended: OwnedFd,
    session: Option<RunningSession>,
    /// A front-end that came while the one before it was still being cleaned up after.
    next: Option<UnixStream>,
    stopping_since: Option<Instant>,
    monitor: Monitor,
    running: Running,
    commands: Option<CommandSocket>,
    pub(super) event_command: Option<Teller>,
    bell: Bell,
}

struct RunningSession {
    /// Shares the connection: to look whether it is alive, and to end it.
    stream: UnixStream,
    thread: JoinHandle<()>,
}

impl Control {
    pub(super) fn new(
        disk: Arc<Disk>,
        listener: UnixListener,
        signals: Signals,
        monitor: Monitor,
        running: Running,
        commands: Option<CommandSocket>,
        bell: Bell,
    ) -> anyhow::Result<Self> {
        listener.set_nonblocking(true)?;
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            disk,
            listener,
            signals,
            ended,
            session: None,
            next: None,
            stopping_since: None,
            monitor,
            running,
            commands,
            event_command: None,
            bell,
        })
    }

    /// Does what the monitor has to do. Gives how long the loop may sleep, in ms (rounded up, so that it is not early).
    pub(super) fn tick(&mut self) -> i32 {
        let now_ns = clock::now_ns();
        let next_ns = self.monitor.tick(now_ns);
        let (reloaded, reload_ns) = self.running.tick(&mut self.monitor, now_ns);
        self.pass_on(reloaded);
        if self.running.stop_asked {
            self.stop("by a command");
        }
        if self.commands.as_ref().is_some_and(CommandSocket::is_unsettled) {
            // What to watch for can be told to the event loop only while it passes on an event.
            self.bell.ring();
        }
        let next_ns = next_ns.min(reload_ns);
        let wait_ms = next_ns.saturating_sub(clock::now_ns()).div_ceil(1_000_000).min(WAIT_MS_MAX);
        i32::try_from(wait_ms).unwrap_or(0)
    }

    /// Gives clients their answers, and whoever follows what has happened.
    fn pass_on(&mut self, reloaded: Option<(u64, Outcome)>) {
        let mut answers = self.monitor.take_answers();
        if let Some(at) = answers.iter().position(|(token, _)| *token == RELOAD_TOKEN) {
            let (_, outcome) = answers.swap_remove(at);
            answers.extend(self.running.table_replaced(&mut self.monitor, outcome));
        }
        answers.extend(reloaded);
        let events = self.monitor.events().take_fresh();
        if let Some(commands) = &mut self.commands {
            commands.answer(answers);
            commands.tell(&events);
        }
        if let Some(event_command) = &mut self.event_command {
            event_command.tell(&events);
        }
    }

    /// The last words before the process ends.
    pub(super) fn say_goodbye(&mut self) {
        self.pass_on(None);
        if let Some(commands) = &mut self.commands {
            commands.give_up();
        }
    }

    fn reload(&mut self) {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.signals.reload, &mut bytes).is_ok_and(|n| n != 0) {}
        if let Err(error) = self.running.reload(&mut self.monitor, None, clock::now_ns()) {
            log::warn!("SIGHUP: {error:#}");
        }
    }

    pub(super) fn stopped(&self) -> bool {
        self.stopping_since.is_some() && self.session.is_none()
    }

    pub(super) fn is_overdue(&self) -> bool {
        self.stopping_since.is_some_and(|since| since.elapsed() > STOP_WAIT_MAX)
    }

    fn accept(&mut self) {
        while let Some(stream) = Listener::accept(&self.listener, "front-end") {
            self.connected(stream);
        }
    }

    fn connected(&mut self, stream: UnixStream) {
        match &self.session {
            _ if self.stopping_since.is_some() => {}
            None => self.start_session(stream),
            // The one before has gone, but its requests have not all come back.
            Some(session) if has_hung_up(&session.stream) && self.next.as_ref().is_none_or(has_hung_up) => {
                self.next = Some(stream);
            }
            Some(_) => log::warn!("front-end refused: another one is connected"),
        }
    }

    fn start_session(&mut self, stream: UnixStream) {
        match self.try_start_session(stream) {
            Ok(session) => {
                self.session = Some(session);
                self.running.front_end_came(&mut self.monitor);
            }
            Err(error) => log::error!("cannot serve a front-end: {error}"),
        }
    }

    fn try_start_session(&self, stream: UnixStream) -> std::io::Result<RunningSession> {
        stream.set_nonblocking(false)?;
        let (shared, ended) = (stream.try_clone()?, self.ended.try_clone()?);
        let disk = Arc::clone(&self.disk);
        let thread = std::thread::Builder::new().name("session".into()).spawn(move || {
            sandbox::confine(Kind::Session);
            log::info!("front-end connected");
            session::serve(disk, stream);
            let _ = rustix::io::write(&ended, &1u64.to_ne_bytes());
        })?;
        Ok(RunningSession { stream: shared, thread })
    }

    fn session_ended(&mut self) {
        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
        if let Some(session) = self.session.take()
            && session.thread.join().is_err()
        {
            // What the session's state was is not known; a fresh start is safe, going on is not.
            log::error!("a session's thread panicked");
            std::process::abort();
        }
        self.running.front_end_went(&mut self.monitor);
        if let (Some(stream), None) = (self.next.take(), self.stopping_since) {
            self.start_session(stream);
        }
    }

    fn stop(&mut self, reason: &str) {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.signals.stop, &mut bytes).is_ok_and(|n| n != 0) {}
        if self.stopping_since.is_some() {
            return;
        }
        self.monitor.events().note(What::Stopping { reason: reason.to_owned() });
        log::info!("stopping: requests in flight are finished first");
        self.stopping_since = Some(Instant::now());
        self.next = None;
        if let Some(session) = &self.session {
            // The session reads the end, and closes only when its requests are answered: a front-end that sees the end
            // before takes the used index of that moment for where to go on, and has the rest served twice.
            let _ = session.stream.shutdown(std::net::Shutdown::Read);
        }
    }
}

fn has_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(gone)
}

impl MutEventSubscriber for Control {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(),
            SIGNALS => self.stop("by a signal"),
            RELOAD => self.reload(),
            ENDED => self.session_ended(),
            // What it rings for is done by the tick that follows every event.
            BELL => self.bell.silence(),
            COMMANDS => {
                if let Some(commands) = &mut self.commands {
                    commands.accept(ops);
                }
            }
            client if client >= CLIENTS => {
                if let Some(commands) = &mut self.commands {
                    let (monitor, running, now_ns) = (&mut self.monitor, &mut self.running, clock::now_ns());
                    commands.ready(client, events.event_set(), &mut Context { monitor, running, now_ns });
                }
            }
            _ => {}
        }
        if let Some(commands) = &mut self.commands {
            commands.settle(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let watched: [(RawFd, u32); 5] = [
            (self.listener.as_raw_fd(), LISTENER),
            (self.signals.stop.as_raw_fd(), SIGNALS),
            (self.signals.reload.as_raw_fd(), RELOAD),
            (self.ended.as_raw_fd(), ENDED),
            (self.bell.0.as_raw_fd(), BELL),
        ];
        let commands = self.commands.as_ref().map(|c| (c.listener().as_raw_fd(), COMMANDS));
        for (fd, tag) in watched.into_iter().chain(commands) {
            if let Err(error) = ops.add(Events::with_data_raw(fd, tag, EventSet::IN)) {
                log::error!("event loop: {error}");
            }
        }
    }
}
