//! A front-end on the `virtio-driver` crate: polls the used ring, asks for no calls.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use virtio_driver::{
    QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use super::client::Client;
use super::tracking::{Tracking, connect_with};
use crate::front_end::Region;

/// Descriptors of a request as the crate builds it: header, data, status.
const DESCRIPTORS: usize = 3;

pub(super) struct VhostUserClient {
    queue: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    slot_bytes: usize,
    // Behind the queue in the order of drops: its memory belongs to the transport.
    buffers: Region,
    _transport: Box<VirtioBlkTransport>,
    _tracking: Option<Tracking>,
}

impl VhostUserClient {
    /// Connects with one queue for `depth` requests of at most `slot_bytes`; what is in flight is written down if `tracked`.
    pub(super) fn connect(socket: &Path, depth: usize, slot_bytes: usize, tracked: bool) -> Result<Self> {
        let mask = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::MQ.bits();
        let socket = socket.to_str().context("socket is not UTF-8")?;
        let size = u16::try_from((depth * DESCRIPTORS).next_power_of_two())?;
        let (transport, tracking) =
            connect_with(tracked, size, || VhostUser::new(socket, mask).context("connect"))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let bytes = depth * slot_bytes;
        let buffers = Region::new(0, bytes as u64, 0)?;
        let address = usize::try_from(buffers.user())?;
        transport.map_mem_region(address, bytes, buffers.as_raw_fd(), 0).context("map the buffers")?;
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, size).context("set the queue up")?;
        let mut queue = queues.into_iter().next().context("no queue")?;
        queue.set_used_notif_enabled(false);
        let kick = transport.get_submission_notifier(0);
        Ok(Self { queue, kick, slot_bytes, buffers, _transport: transport, _tracking: tracking })
    }
}

impl Client for VhostUserClient {
    fn queue(&mut self, slot: usize, offset: u64, bytes: usize, write: bool) -> Result<()> {
        let buffer = usize::try_from(self.buffers.user())? + slot * self.slot_bytes;
        if write {
            // SAFETY: the buffer is mapped as long as `self`, and a slot is used again only after its answer.
            unsafe { self.queue.write_raw(offset, buffer as *const u8, bytes, slot) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.queue.read_raw(offset, buffer as *mut u8, bytes, slot) }?;
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        if self.queue.avail_notif_needed() {
            self.kick.notify()?;
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        for answer in self.queue.completions() {
            ensure!(answer.ret == 0, "I/O error {}", std::io::Error::from_raw_os_error(-answer.ret));
            done.push(answer.context);
        }
        Ok(())
    }
}
