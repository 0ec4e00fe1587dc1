//! The control loop without a process around it: the fuzz target turns it and is its client.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, anyhow};
use clap::Parser as _;
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps as _};

use super::event_loop::{Bell, CLIENTS, Control};
use crate::cli::Options;
use crate::clock;
use crate::command_socket::CommandSocket;
use crate::config::Launch;
use crate::listen::{Access, Listener};
use crate::monitor::Monitor;
use crate::running::Running;
use crate::setup;
use crate::signals::Signals;

/// The loop of one disk, with a control socket.
pub struct ControlLoop {
    control: Arc<Mutex<Control>>,
    events: EventManager<Arc<Mutex<dyn MutEventSubscriber>>>,
    wait_ms: i32,
    _listener: Listener,
    /// Where signals would come from.
    _signals: [UnixStream; 2],
}

impl std::fmt::Debug for ControlLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlLoop").field("wait_ms", &self.wait_ms).finish_non_exhaustive()
    }
}

impl ControlLoop {
    /// Serves a disk by what the command line says, its sockets in `dir`: `front` for front-ends, `control` for clients.
    ///
    /// # Errors
    /// As the program at its start.
    pub fn new(dir: &Path, args: &[&str]) -> anyhow::Result<Self> {
        let options = Options::try_parse_from([&["polypath"], args].concat())?;
        let launch = Launch { options, given: Default::default() };
        let (options, spec) = launch.resolve()?;
        let bell = Bell::new()?;
        let ring = |bell: &Bell| {
            let bell = bell.clone();
            move || bell.ring()
        };
        let disk = Arc::new(setup::make_disk(&options, &spec, ring(&bell))?);
        let (stop, stopper) = UnixStream::pair()?;
        let (reload, reloader) = UnixStream::pair()?;
        let signals = Signals { stop, reload };
        for signal in [&signals.stop, &signals.reload] {
            signal.set_nonblocking(true)?;
        }
        let commands = CommandSocket::bind(&dir.join("control"), Access::default(), CLIENTS)?;
        let listener = Listener::bind(&dir.join("front"), None)?;
        let monitor = Monitor::new(
            Arc::clone(&disk),
            spec,
            super::monitor_options(&options),
            Arc::new(ring(&bell)),
            clock::now_ns(),
        );
        let running = Running::new(launch, options, listener.name(), Arc::new(ring(&bell)));
        let listening = listener.socket().try_clone()?;
        let control = Control::new(disk, listening, signals, monitor, running, Some(commands), bell)?;
        let control = Arc::new(Mutex::new(control));
        let mut events: EventManager<Arc<Mutex<dyn MutEventSubscriber>>> =
            EventManager::new().map_err(|e| anyhow!("event loop: {e}"))?;
        events.add_subscriber(Arc::clone(&control) as _);
        Ok(Self { control, events, wait_ms: 0, _listener: listener, _signals: [stopper, reloader] })
    }

    /// One turn, with a sleep of at most so many milliseconds. False when the program would end.
    ///
    /// # Errors
    /// As the program's loop.
    pub fn turn(&mut self, wait_ms_max: i32) -> anyhow::Result<bool> {
        let wait_ms = self.wait_ms.min(wait_ms_max);
        self.events.run_with_timeout(wait_ms).map_err(|e| anyhow!("event loop: {e}"))?;
        let mut control = self.control.lock().ok().context("the control loop panicked")?;
        if control.stopped() {
            control.say_goodbye();
            return Ok(false);
        }
        self.wait_ms = control.tick();
        Ok(true)
    }
}
