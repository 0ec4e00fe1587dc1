//! A front-end on the `virtio-driver` crate: polls the used rings, asks for no calls.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use virtio_driver::{
    QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use super::buffers::Buffers;
use super::client::Client;
use super::tracking::{Tracking, connect_with};
use super::workload::Workload;

/// Descriptors of a request as the crate builds it: header, data, status.
const DESCRIPTORS: usize = 3;
/// Largest ring that all programs serve, in descriptors. The crate knows no indirect ones, so this is room for 341
/// requests; deeper loads use several queues.
const RING_MAX: usize = 1024;

struct Queue {
    ring: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    has_new: bool,
}

pub(super) struct VhostUserClient {
    queues: Vec<Queue>,
    // Behind the queues in the order of drops: their memory belongs to the transport.
    buffers: Buffers,
    _transport: Box<VirtioBlkTransport>,
    _tracking: Option<Tracking>,
}

impl VhostUserClient {
    /// Connects with `nr_queues` for `depth` requests in all; what is in flight is written down if `is_tracked`.
    pub(super) fn connect(
        socket: &Path,
        nr_queues: usize,
        depth: usize,
        buffers: Buffers,
        is_tracked: bool,
    ) -> Result<Self> {
        let size = (depth.div_ceil(nr_queues) * DESCRIPTORS).next_power_of_two();
        ensure!(size <= RING_MAX, "{depth} requests need more than {nr_queues} queues");
        Self::with_rings(socket, nr_queues, size, buffers, is_tracked)
    }

    /// Connects with `nr_queues` rings of `size` descriptors.
    pub(super) fn with_rings(
        socket: &Path,
        nr_queues: usize,
        size: usize,
        buffers: Buffers,
        is_tracked: bool,
    ) -> Result<Self> {
        let mask = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::MQ.bits();
        let socket = socket.to_str().context("socket is not UTF-8")?;
        let size = u16::try_from(size)?;
        let (transport, tracking) = connect_with(is_tracked, u16::try_from(nr_queues)?, size, || {
            VhostUser::new(socket, mask).context("connect")
        })?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        transport
            .map_mem_region(buffers.start()?, buffers.len()?, buffers.fd(), 0)
            .context("map the buffers")?;
        let rings =
            VirtioBlkQueue::setup_queues(&mut *transport, nr_queues, size).context("set the queues up")?;
        let queue = |(index, mut ring): (usize, VirtioBlkQueue<'static, usize>)| {
            ring.set_used_notif_enabled(false);
            Queue { ring, kick: transport.get_submission_notifier(index), has_new: false }
        };
        let queues = rings.into_iter().enumerate().map(queue).collect();
        Ok(Self { queues, buffers, _transport: transport, _tracking: tracking })
    }
}

impl Client for VhostUserClient {
    fn queue(&mut self, workload: &Workload, slot: usize, offset: u64) -> Result<()> {
        let buffer = self.buffers.of(workload, slot)?;
        let index = workload.queue_of(slot);
        let queue = &mut self.queues[index];
        queue.has_new = true;
        if workload.write {
            // SAFETY: the buffer is mapped as long as `self`, and a slot is used again only after its answer.
            unsafe { queue.ring.write_raw(offset, buffer as *const u8, workload.bytes, slot) }?;
        } else {
            // SAFETY: as above.
            unsafe { queue.ring.read_raw(offset, buffer as *mut u8, workload.bytes, slot) }?;
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        for queue in self.queues.iter_mut().filter(|queue| queue.has_new) {
            queue.has_new = false;
            if queue.ring.avail_notif_needed() {
                queue.kick.notify()?;
            }
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        for queue in &mut self.queues {
            for answer in queue.ring.completions() {
                ensure!(answer.ret == 0, "I/O error {}", std::io::Error::from_raw_os_error(-answer.ret));
                done.push(answer.context);
            }
        }
        Ok(())
    }

    fn is_polling(&self) -> bool {
        true
    }
}
