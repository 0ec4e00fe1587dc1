//! The control loop: one thread that accepts front-ends and obeys signals. It never does I/O that can hang.

use std::collections::HashSet;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps as _};
use polypath_paths::{FileKind, OpenOptions, Path, Table, TableCell};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::cli::{Options, Switch};
use crate::disk::{Disk, DiskOptions, ID_BYTES};
use crate::engine::UringEngine;
use crate::listen::Listener;
use crate::session;
use crate::vring::RING_SIZE_MAX;

/// How long a stop waits for requests in flight. A path that gives no answer for so long gives none in time for a
/// service manager either (systemd kills after 90 s).
const STOP_WAIT_MAX: Duration = Duration::from_secs(30);

/// Makes the disk and serves it until a signal says stop.
pub fn serve(options: Options) -> anyhow::Result<ExitCode> {
    let disk = Arc::new(make_disk(&options)?);
    UringEngine::probe(u32::from(RING_SIZE_MAX)).context(
        "io_uring is not available (kernel.io_uring_disabled, a seccomp profile, or the memlock limit stand against it)",
    )?;
    // Signals are watched before the socket exists: from then on, stopping cleans up.
    let (signals, sender) = UnixStream::pair().context("signals")?;
    signals.set_nonblocking(true).context("signals")?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, sender.try_clone()?).context("signals")?;
    }
    // By default these would end the process without a word.
    let ignored = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("signals")?;
    }
    let listener = listen(&options)?;
    log_start(&disk, &listener);

    let control = Arc::new(Mutex::new(Control::new(disk, listener.socket().try_clone()?, signals)?));
    let mut events: EventManager<Arc<Mutex<dyn MutEventSubscriber>>> =
        EventManager::new().map_err(|e| anyhow!("event loop: {e}"))?;
    events.add_subscriber(Arc::clone(&control) as _);
    let is_stopped = || control.lock().map_or(true, |control| control.stopped());
    while !is_stopped() {
        events.run_with_timeout(1000).map_err(|e| anyhow!("event loop: {e}"))?;
        if control.lock().is_ok_and(|control| control.is_overdue()) {
            log::error!("stopped with requests in flight: no path answered within {STOP_WAIT_MAX:?}");
            drop(listener);
            return Ok(ExitCode::FAILURE);
        }
    }
    drop(listener);
    log::info!("stopped");
    Ok(ExitCode::SUCCESS)
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

fn make_disk(options: &Options) -> anyhow::Result<Disk> {
    let names = options.all_paths();
    if names.is_empty() {
        bail!("--path PATH is needed at least once");
    }
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
        bail!("--path {}: given twice", twice.display());
    }
    let direct = options.direct == Switch::On;
    if !direct && names.len() > 1 {
        bail!(
            "--direct off: two page caches over one disk cannot be kept the same, so it is for a single path"
        );
    }
    let open = OpenOptions { read_only: options.read_only, direct };
    let paths =
        names.iter().map(|name| open_path(name, open, options.num_queues)).collect::<Result<_, _>>()?;
    let table = Table::new(paths).context("--path")?;
    if !direct && table.limits().kind != FileKind::Regular {
        bail!("--direct off: only a regular file is served through the page cache");
    }
    warn_of_same_names(&names);
    let serial = match &options.serial {
        Some(serial) => serial.clone(),
        None => table.paths()[0].identity().serial(),
    };
    let mut id = [0; ID_BYTES];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    let disk_options = DiskOptions {
        nr_queues: options.num_queues,
        queue_size: options.queue_size,
        id,
        selector: options.selector,
    };
    Ok(Disk::new(TableCell::new(table), disk_options))
}

fn open_path(name: &std::path::Path, open: OpenOptions, nr_queues: u16) -> anyhow::Result<Arc<Path>> {
    let path = Path::open(name.to_owned(), open, usize::from(nr_queues));
    path.map(Arc::new).with_context(|| format!("--path {}", name.display()))
}

/// Two names of one directory entry are two ways to the same way.
fn warn_of_same_names(names: &[PathBuf]) {
    let mut seen: Vec<(PathBuf, &PathBuf)> = Vec::new();
    for name in names {
        let Ok(real) = name.canonicalize() else { continue };
        match seen.iter().find(|(other, _)| *other == real) {
            Some((_, first)) => {
                log::warn!(
                    "no redundancy: {} and {} are the same file name",
                    first.display(),
                    name.display()
                );
            }
            None => seen.push((real, name)),
        }
    }
}

fn log_start(disk: &Disk, listener: &Listener) {
    let table = disk.table().load();
    for path in table.paths() {
        log::info!("path: path={} identity={}", path.name().display(), path.identity());
    }
    log::info!(
        "disk: size_bytes={} block_bytes={} paths={} selector={} queues={} read_only={} serial={}",
        disk.limits().size_bytes,
        disk.limits().block_bytes,
        table.paths().len(),
        disk.selector(),
        disk.nr_queues(),
        disk.limits().read_only,
        String::from_utf8_lossy(disk.id()).trim_end_matches('\0'),
    );
    log::info!("listening: socket={}", listener.name());
}

/// Tags of the loop's descriptors.
const LISTENER: u32 = 0;
const SIGNALS: u32 = 1;
const ENDED: u32 = 2;

struct Control {
    disk: Arc<Disk>,
    listener: UnixListener,
    signals: UnixStream,
    /// Rung by a session that has ended.
    ended: OwnedFd,
    session: Option<RunningSession>,
    /// A front-end that came while the one before it was still being cleaned up after.
    next: Option<UnixStream>,
    stopping_since: Option<Instant>,
}

struct RunningSession {
    /// Shares the connection: to look whether it is alive, and to end it.
    stream: UnixStream,
    thread: JoinHandle<()>,
}

impl Control {
    fn new(disk: Arc<Disk>, listener: UnixListener, signals: UnixStream) -> anyhow::Result<Self> {
        listener.set_nonblocking(true)?;
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { disk, listener, signals, ended, session: None, next: None, stopping_since: None })
    }

    fn stopped(&self) -> bool {
        self.stopping_since.is_some() && self.session.is_none()
    }

    fn is_overdue(&self) -> bool {
        self.stopping_since.is_some_and(|since| since.elapsed() > STOP_WAIT_MAX)
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.connected(stream),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("cannot accept a front-end: {error}");
                    return;
                }
            }
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
            Ok(session) => self.session = Some(session),
            Err(error) => log::error!("cannot serve a front-end: {error}"),
        }
    }

    fn try_start_session(&self, stream: UnixStream) -> std::io::Result<RunningSession> {
        stream.set_nonblocking(false)?;
        let (shared, ended) = (stream.try_clone()?, self.ended.try_clone()?);
        let disk = Arc::clone(&self.disk);
        let thread = std::thread::Builder::new().name("session".into()).spawn(move || {
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
        if let (Some(stream), None) = (self.next.take(), self.stopping_since) {
            self.start_session(stream);
        }
    }

    fn stop(&mut self) {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.signals, &mut bytes).is_ok_and(|n| n != 0) {}
        if self.stopping_since.is_some() {
            return;
        }
        log::info!("stopping: requests in flight are finished first");
        self.stopping_since = Some(Instant::now());
        self.next = None;
        if let Some(session) = &self.session {
            let _ = session.stream.shutdown(std::net::Shutdown::Both);
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
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(),
            SIGNALS => self.stop(),
            ENDED => self.session_ended(),
            _ => {}
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let watched: [(RawFd, u32); 3] = [
            (self.listener.as_raw_fd(), LISTENER),
            (self.signals.as_raw_fd(), SIGNALS),
            (self.ended.as_raw_fd(), ENDED),
        ];
        for (fd, tag) in watched {
            if let Err(error) = ops.add(Events::with_data_raw(fd, tag, EventSet::IN)) {
                log::error!("event loop: {error}");
            }
        }
    }
}
