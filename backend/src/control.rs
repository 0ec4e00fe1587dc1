//! The program from its start to its end: makes the disk and what serves it, then turns the control loop.

mod event_loop;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod teller;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps as _};
use polypath_paths::CheckerConfig;
use polypath_paths::text::TableSpec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cli::{Options, Sandbox};
use crate::clock;
use crate::command_socket::CommandSocket;
use crate::config::Launch;
use crate::disk::Disk;
use crate::engine::UringEngine;
use crate::helper::{self, Bounds};
use crate::listen::{Access, Listener};
use crate::metrics::{Metrics, Source};
use crate::monitor::{Monitor, MonitorOptions};
use crate::running::Running;
use crate::sandbox;
use crate::setup;
use crate::signals;
use crate::vring::RING_SIZE_MAX;
use event_loop::{Bell, CLIENTS, Control};
use teller::Teller;

/// How long a stop waits for requests in flight. A path that gives no answer for so long gives none in time for a
/// service manager either (systemd kills after 90 s).
const STOP_WAIT_MAX: Duration = Duration::from_secs(30);

/// Descriptors that are more than enough for all queues, paths, regions and clients.
const NR_DESCRIPTORS: u64 = 1 << 16;

/// Makes the disk and serves it until a signal says stop.
pub fn serve(launch: Launch, options: Options, spec: TableSpec) -> anyhow::Result<ExitCode> {
    let helper = match options.sandbox {
        Sandbox::Off => None,
        Sandbox::On | Sandbox::Strict => Some(helper::start(launch.clone(), options.event_command.clone())?),
    };
    raise_descriptor_limit();
    let bell = Bell::new().context("eventfd")?;
    let disk = {
        let bell = bell.clone();
        Arc::new(setup::make_disk(&options, &spec, move || bell.ring())?)
    };
    UringEngine::probe(u32::from(RING_SIZE_MAX)).context(
        "io_uring is not available (kernel.io_uring_disabled, a seccomp profile, or the memlock limit, `ulimit -l`, stand against it)",
    )?;
    // Signals are watched before the socket exists: from then on, stopping cleans up.
    let signals = signals::watch().context("signals")?;
    let access = Access { owner: options.control_owner, group: options.control_group };
    let bind = |path| CommandSocket::bind(path, access, CLIENTS);
    let mut commands = options.control.as_deref().map(bind).transpose()?;
    let mut metrics = options.metrics.as_ref().map(Metrics::bind).transpose()?;
    log_disk(&disk, &options);
    let mut listener = listen(&options)?;
    if let Some(helper) = helper {
        // From here on they are removed by the helper.
        let sockets = [
            listener.take_file(),
            commands.as_mut().and_then(CommandSocket::take_file),
            metrics.as_mut().and_then(Metrics::take_file),
        ];
        helper.begin(bounds(&options, &disk)?, sockets.into_iter().flatten().collect())?;
    }
    if let Err(error) = sandbox::enter(options.sandbox) {
        remove_sockets();
        return Err(error);
    }
    // Threads only from here on, the kernel's for a ring too: they are confined as the one is that begins them.
    if options.sqpoll_idle_ms != 0
        && let Err(error) = UringEngine::probe_polled(u32::from(RING_SIZE_MAX), options.sqpoll_idle_ms)
    {
        UringEngine::say_that_calls_send(&error);
    }
    let event_command =
        options.event_command.clone().map(Teller::start).transpose().context("--event-command")?;
    let mut monitor = {
        let bell = bell.clone();
        let bell = Arc::new(move || bell.ring());
        Monitor::new(Arc::clone(&disk), spec, monitor_options(&options), bell, clock::now_ns())
    };
    let source = Source {
        disk: Arc::clone(&disk),
        events: monitor.events().counts(),
        started_s: jiff::Timestamp::now().as_second(),
    };
    if let Some(metrics) = &metrics {
        metrics.serve(source).context("--metrics")?;
    }
    log::info!("listening: socket={}", listener.name());

    let running = {
        let bell = bell.clone();
        Running::new(launch, options, listener.name(), Arc::new(move || bell.ring()))
    };
    let listening = listener.socket().try_clone()?;
    let mut control = Control::new(disk, listening, signals, monitor, running, commands, bell)?;
    control.event_command = event_command;
    let control = Arc::new(Mutex::new(control));
    let mut events: EventManager<Arc<Mutex<dyn MutEventSubscriber>>> =
        EventManager::new().map_err(|e| anyhow!("event loop: {e}"))?;
    events.add_subscriber(Arc::clone(&control) as _);
    let mut wait_ms = 0;
    loop {
        events.run_with_timeout(wait_ms).map_err(|e| anyhow!("event loop: {e}"))?;
        let Ok(mut control) = control.lock() else { bail!("the control loop panicked") };
        if control.stopped() {
            control.say_goodbye();
            break;
        }
        if control.is_overdue() {
            log::error!("stopped with requests in flight: no path answered within {STOP_WAIT_MAX:?}");
            control.say_goodbye();
            drop(listener);
            remove_sockets();
            return Ok(ExitCode::FAILURE);
        }
        wait_ms = control.tick();
    }
    drop(listener);
    remove_sockets();
    log::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Raises the number of descriptors that may be open, which by default (1024) is that of programs that use select(2): many
/// queues, each with a ring and eventfds, and memory in many regions need more. The helper, and what it runs, keep theirs.
fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = maximum.unwrap_or(NR_DESCRIPTORS).min(NR_DESCRIPTORS);
    if current.is_some_and(|current| current < raised)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum })
    {
        log::warn!("the limit on descriptors stays as it is: error={error}");
    }
}

/// What the helper may open for this process.
fn bounds(options: &Options, disk: &Disk) -> anyhow::Result<Bounds> {
    let table = disk.table().load();
    let paths = table.paths().iter().map(|path| &**path);
    Bounds::new(paths, setup::open_options(options), options.trust_paths).context("no path")
}

/// Has the sockets' files removed, if that is left to the helper.
fn remove_sockets() {
    if let Some(helper) = helper::client() {
        helper.remove_sockets();
    }
}

fn monitor_options(options: &Options) -> MonitorOptions {
    MonitorOptions {
        path_timeout: Duration::from_millis(options.path_timeout),
        failback: options.failback,
        checker: CheckerConfig { probe_timeout_ms: options.path_timeout, ..CheckerConfig::default() },
        open: setup::open_options(options),
        trust_paths: options.trust_paths,
        nr_workers: usize::from(options.num_queues),
    }
}

fn listen(options: &Options) -> anyhow::Result<Listener> {
    match (&options.socket_path, options.fd) {
        (Some(path), _) => Listener::bind(path, options.socket_group),
        (None, Some(fd)) => Listener::from_fd(fd),
        (None, None) => match Listener::from_environment() {
            Some(listener) => listener,
            None => {
                bail!("one of --socket-path PATH, --fd FD or a socket from systemd (LISTEN_FDS) is needed")
            }
        },
    }
}

fn log_disk(disk: &Disk, options: &Options) {
    if options.trust_paths {
        log::warn!("paths are trusted without proof: a path to another disk will be written to");
    }
    let table = disk.table().load();
    for (index, path) in table.paths().iter().enumerate() {
        let group = table.group_of(index) + 1;
        log::info!("path: path={} group={group} identity={}", path.name().display(), path.identity());
    }
    log::info!(
        "disk: size_bytes={} block_bytes={} paths={} selector={} queues={} read_only={} serial={}",
        disk.limits().size_bytes,
        disk.limits().block_bytes,
        table.paths().len(),
        table.groups().first().map(|g| g.selector).unwrap_or_default(),
        disk.nr_queues(),
        disk.limits().read_only,
        String::from_utf8_lossy(disk.id()).trim_end_matches('\0'),
    );
}
