//! What the protocol thread asks of a worker, and how it reaches it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

use super::{Worker, WorkerConfig};
use crate::cpus;
use crate::dirty_log::DirtyLog;
use crate::disk::Disk;
use crate::engine::UringEngine;
use crate::memory::MapLease;
use crate::sandbox::{self, Kind};
use crate::vring::RingAddresses;

/// What a worker can be asked.
#[derive(Debug)]
pub enum Command {
    /// Serve the ring, or leave it alone for now. Answered when it is so.
    Enable(bool, mpsc::Sender<()>),
    /// The guest is told by this eventfd from now on.
    SetCall(Option<OwnedFd>),
    /// A broken ring is reported by this eventfd.
    SetError(Option<OwnedFd>),
    /// Guest memory has changed. None as the ring's place: it is not in memory any more.
    SetMemory(MapLease, Option<RingAddresses>),
    /// Writes to guest memory are marked in this log from now on, the used ring under this guest address; or they are not
    /// any more. Answered when it is so.
    SetLog(Option<(Arc<DirtyLog>, Option<u64>)>, mpsc::Sender<()>),
    /// Finish what was taken, take nothing more, and end. What waits for a path fails, or, with true, stays written down as
    /// in flight, if that is done at all.
    Stop(bool),
}

/// The protocol thread's end of a running worker.
#[derive(Debug)]
pub struct WorkerHandle {
    commands: mpsc::Sender<Command>,
    wake: OwnedFd,
    thread: JoinHandle<u16>,
    index: usize,
    disk: Arc<Disk>,
}

impl WorkerHandle {
    /// Starts a worker of its own thread and ring.
    pub fn spawn(config: WorkerConfig) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // All that may be refused comes before the thread: one that runs and belongs to nobody would serve the ring for ever.
        let (workers_end, wakers_end) = (wake.try_clone()?, wake.try_clone()?);
        let (commands, receiver) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let nr_slots = u32::from(config.vring.size());
        let (index, disk) = (config.index, Arc::clone(&config.disk));
        let thread = std::thread::Builder::new().name(format!("vq{}", config.index)).spawn(move || {
            let next_avail = config.vring.next_avail();
            if let Some(cpu) = config.disk.cpus().and_then(|list| list.of(config.index))
                && let Err(error) = cpus::pin(cpu)
            {
                log::warn!("the worker runs anywhere: queue={} cpu={cpu} error={error}", config.index);
            }
            // The ring belongs to the thread that submits (single issuer), so it is made here.
            let tuning = *config.disk.tuning();
            let fence = config.fence.clone();
            let engine = match UringEngine::new(nr_slots, workers_end, fence, tuning.sqpoll_idle_ms) {
                Ok(mut engine) => {
                    if tuning.register_memory {
                        engine.register_memory();
                    }
                    engine
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return next_avail;
                }
            };
            let worker = match Worker::new(config, engine, receiver) {
                Ok(worker) => worker,
                Err(error) => {
                    let _ = ready.send(Err(io::Error::other(error)));
                    return next_avail;
                }
            };
            // Its ring is made, its processor chosen: what is left to do is little.
            sandbox::confine(Kind::Worker);
            let _ = ready.send(Ok(()));
            worker.run()
        })?;
        match started.recv() {
            Ok(Ok(())) => {
                disk.wakers().add(index, wakers_end);
                // What it was to be woken for may have come before it could be.
                let _ = rustix::io::write(&wake, &1u64.to_ne_bytes());
                Ok(Self { commands, wake, thread, index, disk })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("the worker's thread ended at once")),
        }
    }

    /// Sends a command and wakes the worker.
    pub fn send(&self, command: Command) {
        // A worker ends only when it is told to, so there is somebody to hear it; writing to the eventfd cannot block.
        let _ = self.commands.send(command);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Enables or disables the ring; back when the worker has taken it in.
    pub fn enable(&self, enabled: bool) {
        let (done, wait) = mpsc::channel();
        self.send(Command::Enable(enabled, done));
        let _ = wait.recv();
    }

    /// Marks writes in a log, or no more; back when the worker has taken it in.
    pub fn set_log(&self, log: Option<(Arc<DirtyLog>, Option<u64>)>) {
        let (done, wait) = mpsc::channel();
        self.send(Command::SetLog(log, done));
        let _ = wait.recv();
    }

    /// Waits for the end after [`Command::Stop`], however long the requests in flight take. Gives the index at which
    /// the next start goes on.
    pub fn join(self) -> u16 {
        let ended = self.thread.join();
        self.disk.wakers().remove(self.index);
        match ended {
            Ok(next_avail) => next_avail,
            // A worker's panic is a broken invariant; going on would mean guessing about the guest's requests.
            Err(_) => std::process::abort(),
        }
    }
}
