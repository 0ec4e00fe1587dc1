//! One front-end: the state that its vhost-user messages build, and what they make the workers do.
//!
//! The `vhost` crate reads and checks the messages and calls `Session`; rings, memory and threads are ours (why not
//! the crate's daemon: ARCHITECTURE.md). A session ends with its connection; what the workers took is finished first.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as ProtocolError, GpuBackend, Result as ProtocolResult,
    VhostUserBackendReqHandlerMut,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::FileOffset;

use crate::dirty_log::DirtyLog;
use crate::disk::Disk;
use crate::fence::{Fence, FenceError};
use crate::inflight::{self, InflightArea};
use crate::memory::{Lessor, MEM_SLOTS_MAX, Memory, RegionAddress};
use crate::protocol;
use crate::vring::{RING_SIZE_MAX, RingAddresses, Vring};
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

fn region_address(region: &VhostUserMemoryRegion) -> RegionAddress {
    RegionAddress { guest: region.guest_phys_addr, user: region.user_addr, size_bytes: region.memory_size }
}

fn refused(error: impl std::fmt::Display) -> ProtocolError {
    log::warn!("front-end's memory refused: {error}");
    ProtocolError::InvalidParam
}

fn area_refused(error: inflight::InflightError) -> ProtocolError {
    log::warn!("in-flight area refused: {error}");
    ProtocolError::InvalidParam
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> ProtocolResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> ProtocolResult<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> ProtocolResult<()> {
        self.stop_all();
        for queue in &mut self.queues {
            *queue = Queue::default();
        }
        // Whoever waited for those requests is gone.
        if let Some(area) = self.inflight.take() {
            area.clear();
        }
        self.fence = None;
        self.features = 0;
        self.log = None;
        Ok(())
    }

    fn get_features(&mut self) -> ProtocolResult<u64> {
        Ok(self.offered_features())
    }

    fn set_features(&mut self, features: u64) -> ProtocolResult<()> {
        if features & !self.offered_features() != 0 {
            return Err(ProtocolError::InvalidParam);
        }
        let log_all = VhostUserVirtioFeatures::LOG_ALL.bits();
        let changed = (features ^ self.features) & !log_all != 0;
        if features & !self.features & log_all != 0 && self.disk.has_chosen_write_through(features) {
            log::warn!("guest moves: it chose write through, which no front-end tells the other host");
        }
        self.features = features;
        self.show_log();
        // Without the protocol feature there is no message to enable a ring: all are.
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            for queue in &mut self.queues {
                queue.enabled = true;
                if let Some(worker) = &queue.worker {
                    worker.enable(true);
                }
            }
        }
        if changed {
            for index in 0..self.queues.len() {
                self.restart(index)?;
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<Vec<VhostUserMemoryRegionBase>>> {
        let regions = regions
            .iter()
            .zip(files)
            .map(|(region, file)| (region_address(region), FileOffset::new(file, region.mmap_offset)));
        self.set_memory(Memory::new(regions).map_err(refused)?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> ProtocolResult<()> {
        let size = u16::try_from(size).map_err(|_| ProtocolError::InvalidParam)?;
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(ProtocolError::InvalidParam);
        }
        let queue = self.queue(index)?;
        if queue.worker.is_some() && queue.size != size {
            return Err(ProtocolError::InvalidOperation("the ring is running"));
        }
        queue.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> ProtocolResult<()> {
        let addresses = Some([descriptors, available, used]);
        let queue = self.queue(index)?;
        let changed = queue.addresses != addresses;
        queue.addresses = addresses;
        queue.log_at = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let (is_running, size) = (queue.worker.is_some(), queue.size);
        let queue = &self.queues[index as usize];
        let at = self.ring_addresses(queue).ok_or(ProtocolError::InvalidParam)?;
        if size != 0 && !Vring::lies_in(self.memory.map(), size, at) {
            return Err(ProtocolError::InvalidParam);
        }
        if is_running && !changed {
            self.show_log();
        }
        if is_running && changed { self.restart(index as usize) } else { self.start(index as usize) }
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        let base = u16::try_from(base).map_err(|_| ProtocolError::InvalidParam)?;
        let queue = self.queue(index)?;
        if queue.worker.is_some() {
            return Err(ProtocolError::InvalidOperation("the ring is running"));
        }
        queue.stopped_here &= queue.next_avail == base;
        queue.next_avail = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        self.queue(index)?;
        self.stop(index as usize);
        let queue = self.queue(index)?;
        // The ring stops, and with it ends what its messages set up (docs/interop/vhost-user.rst, "Ring states").
        (queue.kick, queue.kicked, queue.call, queue.error) = (None, false, None, None);
        Ok(VhostUserVringState::new(index, u32::from(queue.next_avail)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        let queue = self.queue(u32::from(index))?;
        (queue.kick, queue.kicked) = (fd.map(OwnedFd::from), true);
        self.restart(usize::from(index))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        let queue = self.queue(u32::from(index))?;
        queue.call = fd.map(OwnedFd::from);
        if let Some(worker) = &queue.worker {
            let call = queue.call.as_ref().map(OwnedFd::try_clone).transpose();
            worker.send(Command::SetCall(call.map_err(ProtocolError::ReqHandlerError)?));
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        let queue = self.queue(u32::from(index))?;
        queue.error = fd.map(OwnedFd::from);
        if let Some(worker) = &queue.worker {
            let error = queue.error.as_ref().map(OwnedFd::try_clone).transpose();
            worker.send(Command::SetError(error.map_err(ProtocolError::ReqHandlerError)?));
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> ProtocolResult<VhostUserProtocolFeatures> {
        let log = match self.disk.tuning().migration {
            true => VhostUserProtocolFeatures::LOG_SHMFD,
            false => VhostUserProtocolFeatures::empty(),
        };
        Ok(log
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> ProtocolResult<()> {
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> ProtocolResult<u64> {
        Ok(u64::from(self.disk.nr_queues()))
    }

    fn set_vring_enable(&mut self, index: u32, enabled: bool) -> ProtocolResult<()> {
        let queue = self.queue(index)?;
        queue.enabled = enabled;
        if let Some(worker) = &queue.worker {
            worker.enable(enabled);
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> ProtocolResult<Vec<u8>> {
        self.knows_config = true;
        self.disk.read_config(offset, size).ok_or(ProtocolError::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> ProtocolResult<()> {
        // What cannot be written is ignored, as a device ignores writes to read-only fields.
        self.disk.write_config(offset, bytes, self.features);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> ProtocolResult<u64> {
        Ok(MEM_SLOTS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<VhostUserMemoryRegionBase>> {
        let memory = self.memory.with(region_address(region), file, region.mmap_offset).map_err(refused)?;
        self.set_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> ProtocolResult<()> {
        let memory = self.memory.without(region_address(region)).map_err(refused)?;
        self.set_memory(memory)
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> ProtocolResult<(VhostUserInflight, File)> {
        let (nr_queues, queue_size) = (asked.num_queues, asked.queue_size);
        let (file, size_bytes) =
            inflight::create(nr_queues, queue_size, self.disk.nr_queues()).map_err(area_refused)?;
        Ok((VhostUserInflight::new(size_bytes, 0, nr_queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, area: &VhostUserInflight, file: File) -> ProtocolResult<()> {
        let (offset, size_bytes) = (area.mmap_offset, area.mmap_size);
        let (nr_queues, queue_size) = (area.num_queues, area.queue_size);
        let lock = match &self.fence {
            // Given again: this process has the lock already, or waits for it.
            Some(fence) if fence.is_over(&file) => Ok(Arc::clone(fence)),
            _ => Fence::over(&file),
        };
        let area = InflightArea::open(file, offset, size_bytes, nr_queues, queue_size, self.disk.nr_queues())
            .map_err(area_refused)?;
        // Rings that run go on with what they have.
        self.inflight = Some(area);
        self.take_lock(lock);
        Ok(())
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> ProtocolResult<()> {
        let log = DirtyLog::map(file, log.mmap_offset, log.mmap_size).map_err(|error| {
            log::warn!("dirty log refused: {error}");
            ProtocolError::InvalidParam
        })?;
        self.log = Some(Arc::new(log));
        self.show_log();
        Ok(())
    }

    // What follows belongs to protocol features that are not offered.

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> ProtocolResult<()> {
        Err(ProtocolError::InvalidOperation("not a GPU"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> ProtocolResult<File> {
        Err(ProtocolError::InvalidOperation("no shared objects"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> ProtocolResult<Option<File>> {
        Err(ProtocolError::InvalidOperation("no device state"))
    }

    fn check_device_state(&mut self) -> ProtocolResult<()> {
        Err(ProtocolError::InvalidOperation("no device state"))
    }

    fn get_shmem_config(&mut self) -> ProtocolResult<VhostUserShMemConfig> {
        Err(ProtocolError::InvalidOperation("no shared memory"))
    }
}
