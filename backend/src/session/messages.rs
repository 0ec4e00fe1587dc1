//! What each vhost-user message changes in the session.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as ProtocolError, GpuBackend, Result as ProtocolResult, VhostUserBackendReqHandlerMut,
};
use vm_memory::FileOffset;

use super::{Queue, Session};
use crate::dirty_log::DirtyLog;
use crate::fence::Fence;
use crate::inflight::{self, InflightArea};
use crate::memory::{MEM_SLOTS_MAX, Memory, RegionAddress};
use crate::vring::{RING_SIZE_MAX, Vring};
use crate::worker::Command;

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
        if self.disk.write_config(offset, bytes, self.features)
            && let Some(area) = &self.inflight
        {
            area.note_write_through(self.disk.is_cache_off());
        }
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
        if area.is_write_through() {
            self.disk.choose_write_through();
        }
        // A new area, of a guest that was started again: it found the choice of before.
        area.note_write_through(self.disk.is_cache_off());
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
