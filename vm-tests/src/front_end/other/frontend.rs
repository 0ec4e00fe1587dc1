//! The protocol code of the `vhost` crate, which is what Cloud Hypervisor speaks with; the rings stay ours.

use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::front_end::blk::BlkQueue;
use crate::front_end::config::{CONFIG_BYTES, Config, feature};
use crate::front_end::memory::Memory;
use crate::front_end::queue::Queue;
use crate::front_end::session::F_PROTOCOL_FEATURES;

/// Connects with the crate in the order of Cloud Hypervisor's block device, and starts `nr_queues` queues.
///
/// The connection lasts as long as the front-end in the result.
pub fn open(socket: &Path, nr_queues: u16, memory_bytes: u64) -> Result<(Frontend, Config, Vec<BlkQueue>)> {
    let mut frontend = Frontend::connect(socket, nr_queues.into()).context("connect")?;
    frontend.set_owner()?;
    let offered = frontend.get_features()?;
    ensure!(offered & F_PROTOCOL_FEATURES != 0, "no protocol features");
    let features = offered & (feature::ALL | F_PROTOCOL_FEATURES);
    let wanted = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let protocol = frontend.get_protocol_features()? & wanted;
    frontend.set_protocol_features(protocol)?;
    if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    ensure!(frontend.get_queue_num()? >= nr_queues.into(), "too few queues");
    let bytes = [0; CONFIG_BYTES as usize];
    let (_, config) = frontend.get_config(0, CONFIG_BYTES, VhostUserConfigFlags::WRITABLE, &bytes)?;
    let config = Config::parse(&config)?;

    let memory = Memory::new(memory_bytes)?;
    frontend.set_features(features)?;
    let regions: Vec<_> = memory
        .regions()
        .iter()
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest,
            memory_size: region.len,
            userspace_addr: region.user(),
            mmap_offset: region.mmap_offset,
            mmap_handle: region.as_raw_fd(),
        })
        .collect();
    frontend.set_mem_table(&regions)?;
    let mut queues = Vec::new();
    for index in 0..nr_queues {
        let queue = Queue::new(&memory, index, 128, features & feature::EVENT_IDX != 0)?;
        let [desc_table_addr, avail_ring_addr, used_ring_addr] = queue.user_addresses();
        let index = usize::from(index);
        frontend.set_vring_num(index, queue.size())?;
        let addresses = VringConfigData {
            queue_max_size: queue.size(),
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: None,
        };
        frontend.set_vring_addr(index, &addresses)?;
        frontend.set_vring_base(index, 0)?;
        frontend.set_vring_call(index, &event_fd(queue.call_fd())?)?;
        frontend.set_vring_kick(index, &event_fd(queue.kick_fd())?)?;
        frontend.set_vring_enable(index, true)?;
        queues.push(BlkQueue::new(queue));
    }
    Ok((frontend, config, queues))
}

fn event_fd(fd: &OwnedFd) -> Result<EventFd> {
    let copy = fd.try_clone().context("copy an eventfd")?.into_raw_fd();
    // SAFETY: `copy` was just made and belongs to no one else.
    Ok(unsafe { EventFd::from_raw_fd(copy) })
}
