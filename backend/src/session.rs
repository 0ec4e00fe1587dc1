//! One front-end: the state that its vhost-user messages build, and what they make the workers do.
//!
//! The `vhost` crate reads and checks the messages and calls `Session` (`messages.rs`); rings, memory and threads are ours (why not
//! the crate's daemon: ARCHITECTURE.md). A session ends with its connection; what the workers took is finished first.

mod messages;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{BackendReqHandler, Error as ProtocolError, Result as ProtocolResult};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::dirty_log::DirtyLog;
use crate::disk::Disk;
use crate::fence::{Fence, FenceError};
use crate::inflight::InflightArea;
use crate::memory::{Lessor, Memory};
use crate::protocol;
use crate::vring::{RingAddresses, Vring};
use crate::worker::{Command, WorkerConfig, WorkerHandle};

/// Serves one front-end until it hangs up, breaks the protocol or the stream is shut down. When it returns, every
/// request that was taken is answered and nothing of the connection is left.
pub fn serve(disk: Arc<Disk>, stream: UnixStream) {
    match serve_messages(disk, stream) {
        ProtocolError::Disconnected => log::info!("front-end disconnected"),
        error => log::warn!("front-end dropped: {error}"),
    }
}

fn serve_messages(disk: Arc<Disk>, stream: UnixStream) -> ProtocolError {
    let session = Arc::new(Mutex::new(Session::new(disk)));
    let peeked = match stream.try_clone() {
        Ok(peeked) => peeked,
        Err(error) => return ProtocolError::SocketError(error),
    };
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    let error = loop {
        let reply_ack = with(&session, |s| s.reply_ack());
        let seen_to = protocol::take_back_channel(&peeked, reply_ack).and_then(|channel| match channel {
            Some(channel) => {
                with(&session, |s| s.disk.back_channel().set(Some(channel)));
                Ok(true)
            }
            None => protocol::answer_odd_config(&peeked, reply_ack),
        });
        match seen_to {
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                break ProtocolError::Disconnected;
            }
            Err(error) => break ProtocolError::SocketError(error),
        }
        match handler.handle_request() {
            // With an acknowledgement the front-end knows and decides; without one it must not go on unknowing.
            Ok(()) => {}
            Err(ProtocolError::SocketRetry(_)) => {}
            Err(error) => break error,
        }
    };
    with(&session, |session| {
        session.stop_all();
        session.disk.back_channel().set(None);
    });
    error
}

fn with<T>(session: &Mutex<Session>, act: impl FnOnce(&mut Session) -> T) -> T {
    match session.lock() {
        Ok(mut session) => act(&mut session),
        Err(poisoned) => act(&mut poisoned.into_inner()),
    }
}

/// One virtqueue as the messages describe it.
#[derive(Debug, Default)]
struct Queue {
    size: u16,
    /// In the front-end's address space: descriptors, available, used.
    addresses: Option<[u64; 3]>,
    /// Guest address under which writes to the used ring are logged.
    log_at: Option<u64>,
    next_avail: u16,
    /// Whether `next_avail` is where a worker of this session stopped.
    stopped_here: bool,
    kick: Option<OwnedFd>,
    /// A kick message came: the ring is to run, with or without a descriptor.
    kicked: bool,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    enabled: bool,
    worker: Option<WorkerHandle>,
}

/// The state of one connection.
struct Session {
    disk: Arc<Disk>,
    features: u64,
    protocol_features: u64,
    memory: Memory,
    lessor: Lessor,
    queues: Vec<Queue>,
    nr_workers: Arc<AtomicUsize>,
    /// Where the requests in flight are written down.
    inflight: Option<Arc<InflightArea>>,
    /// The lock on that.
    fence: Option<Arc<Fence>>,
    /// Where writes to guest memory are marked while the guest moves to another host.
    log: Option<Arc<DirtyLog>>,
    /// Whether the front-end has read the config space by this connection.
    knows_config: bool,
}

impl Session {
    fn new(disk: Arc<Disk>) -> Self {
        let memory = Memory::default();
        Self {
            features: 0,
            protocol_features: 0,
            lessor: Lessor::new(Arc::clone(memory.map())),
            memory,
            queues: (0..disk.nr_queues()).map(|_| Queue::default()).collect(),
            nr_workers: Arc::new(AtomicUsize::new(0)),
            inflight: None,
            fence: None,
            log: None,
            knows_config: false,
            disk,
        }
    }

    fn reply_ack(&self) -> bool {
        self.protocol_features & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0
    }

    fn offered_features(&self) -> u64 {
        let log = VhostUserVirtioFeatures::LOG_ALL.bits();
        self.disk.features()
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | if self.disk.tuning().migration { log } else { 0 }
    }

    fn is_logging(&self) -> bool {
        self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0
    }

    /// Where a ring marks what it writes, if it is to.
    fn log_of(&self, queue: &Queue) -> Option<(Arc<DirtyLog>, Option<u64>)> {
        let log = self.log.as_ref().filter(|_| self.is_logging())?;
        Some((Arc::clone(log), queue.log_at))
    }

    /// Rings that run take over what was changed about logging. When this returns, they have.
    fn show_log(&self) {
        for queue in &self.queues {
            if let Some(worker) = &queue.worker {
                worker.set_log(self.log_of(queue));
            }
        }
    }

    /// Rings that start from now on are served when this lock is held.
    fn take_lock(&mut self, lock: Result<Arc<Fence>, FenceError>) {
        let fence = match lock {
            Ok(fence) => fence,
            Err(why) => {
                log::warn!("what a killed process has with the kernel will not be waited for: {why}");
                self.fence = None;
                return;
            }
        };
        let is_known = self.fence.as_ref().is_some_and(|known| Arc::ptr_eq(known, &fence));
        if !is_known && !self.disk.gate().pass(&fence) {
            self.disk.map().ring();
        }
        self.fence = Some(fence);
    }

    /// Whether what waits for a path when a ring stops may stay in flight. Not while the guest moves to another host, unless
    /// the front-end takes the in-flight area along.
    fn keeps_waiting(&self) -> bool {
        let moves_along = VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT.bits();
        self.inflight.is_some() && (!self.is_logging() || self.protocol_features & moves_along != 0)
    }

    fn queue(&mut self, index: u32) -> ProtocolResult<&mut Queue> {
        self.queues.get_mut(index as usize).ok_or(ProtocolError::InvalidParam)
    }

    fn ring_addresses(&self, queue: &Queue) -> Option<RingAddresses> {
        let [descriptors, available, used] = queue.addresses?;
        Some(RingAddresses {
            descriptors: self.memory.guest_address(descriptors)?,
            available: self.memory.guest_address(available)?,
            used: self.memory.guest_address(used)?,
        })
    }

    /// Starts the queue's worker if a kick message came and everything else is known.
    fn start(&mut self, index: usize) -> ProtocolResult<()> {
        let Some(queue) = self.queues.get(index) else { return Err(ProtocolError::InvalidParam) };
        if queue.worker.is_some() || !queue.kicked || queue.size == 0 {
            return Ok(());
        }
        let Some(at) = self.ring_addresses(queue) else { return Ok(()) };
        let bit = |bit: u32| self.features & 1 << bit != 0;
        let map = self.memory.map();
        let mut vring = Vring::new(
            map,
            queue.size,
            at,
            queue.next_avail,
            bit(VIRTIO_RING_F_EVENT_IDX),
            bit(VIRTIO_RING_F_INDIRECT_DESC),
        )
        .ok_or(ProtocolError::InvalidParam)?;
        if let Some(area) = &self.inflight {
            match area.queue(index, queue.size) {
                Some(part) => match vring.track(map, part, queue.stopped_here) {
                    Ok(0) => {}
                    Ok(nr) => log::info!("requests taken up again: queue={index} requests={nr}"),
                    Err(why) => log::warn!("in-flight area is not believed: queue={index} reason={why}"),
                },
                None => {
                    log::warn!("in-flight area has no place for a ring: queue={index} size={}", queue.size)
                }
            }
        }
        vring.set_log(self.log_of(queue));
        let clone = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
        let config = WorkerConfig {
            index,
            vring,
            map: self.lessor.lease(),
            kick: clone(&queue.kick).map_err(ProtocolError::ReqHandlerError)?,
            call: clone(&queue.call).map_err(ProtocolError::ReqHandlerError)?,
            error: clone(&queue.error).map_err(ProtocolError::ReqHandlerError)?,
            enabled: queue.enabled,
            disk: Arc::clone(&self.disk),
            features: self.features,
            fence: self.fence.clone(),
            nr_workers: Arc::clone(&self.nr_workers),
        };
        let worker = WorkerHandle::spawn(config).map_err(|error| {
            log::error!("cannot start a worker: queue={index} error={error}");
            ProtocolError::ReqHandlerError(error)
        })?;
        log::debug!("queue started: queue={index} size={}", self.queues[index].size);
        self.queues[index].worker = Some(worker);
        if !self.knows_config {
            // It came back and goes by what it was told before; the size may have changed since.
            self.knows_config = true;
            self.disk.back_channel().config_changed();
        }
        Ok(())
    }

    /// Stops the queue's worker when what it took is answered. Its place in the ring is kept.
    fn stop(&mut self, index: usize) {
        let keeps = self.keeps_waiting();
        if let Some(queue) = self.queues.get_mut(index)
            && let Some(worker) = queue.worker.take()
        {
            worker.send(Command::Stop(keeps));
            queue.next_avail = worker.join();
            queue.stopped_here = true;
        }
    }

    /// Stops all workers, each while the others finish as well.
    fn stop_all(&mut self) {
        let keeps = self.keeps_waiting();
        let workers: Vec<_> = self
            .queues
            .iter_mut()
            .filter_map(|q| q.worker.take().map(|w| ((&mut q.next_avail, &mut q.stopped_here), w)))
            .collect();
        for (_, worker) in &workers {
            worker.send(Command::Stop(keeps));
        }
        for ((next_avail, stopped_here), worker) in workers {
            (*next_avail, *stopped_here) = (worker.join(), true);
        }
    }

    /// Stops and starts a running queue, so that it takes over what was changed.
    fn restart(&mut self, index: usize) -> ProtocolResult<()> {
        if self.queues.get(index).is_some_and(|q| q.worker.is_some()) {
            self.stop(index);
        }
        self.start(index)
    }

    /// Puts a new memory in place of the old one. Returns when no request uses the old one any more.
    fn set_memory(&mut self, memory: Memory) -> ProtocolResult<()> {
        let lessor = Lessor::new(Arc::clone(memory.map()));
        self.memory = memory;
        for queue in &self.queues {
            let Some(worker) = &queue.worker else { continue };
            let at =
                self.ring_addresses(queue).filter(|at| Vring::lies_in(self.memory.map(), queue.size, *at));
            worker.send(Command::SetMemory(lessor.lease(), at));
        }
        std::mem::replace(&mut self.lessor, lessor).wait_for_end();
        for index in 0..self.queues.len() {
            self.start(index)?;
        }
        Ok(())
    }
}
