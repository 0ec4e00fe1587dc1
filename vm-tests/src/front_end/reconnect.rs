//! What a front-end keeps when its back-end goes away, and how it goes on with the next one.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::disk::Disk;
use super::inflight::Inflight;
use super::memory::Memory;
use super::session::{PROTOCOL_MASK, Session, state_bytes};
use super::wire::{proto, req};

/// The index at which a ring is started again after a back-end was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Where the used ring is, as QEMU does.
    Used,
    /// Where the available ring is, as Cloud Hypervisor does.
    Available,
}

/// One ring, apart from the thread that drives it.
#[derive(Debug)]
struct Ring {
    index: u16,
    size: u16,
    /// In this process: descriptors, available, used.
    user: [u64; 3],
    /// In the guest: available, used.
    guest: [u64; 2],
    kick: OwnedFd,
    call: OwnedFd,
}

/// What is needed to go on with another back-end.
#[derive(Debug)]
pub struct Kept {
    memory: Arc<Memory>,
    rings: Vec<Ring>,
    features: u64,
    inflight: Option<Inflight>,
}

impl Kept {
    /// All that `disk` has, with the area that it got.
    pub fn of(disk: &Disk, inflight: Option<Inflight>) -> Result<Self> {
        let ring = |q: &super::BlkQueue| {
            let queue = &q.queue;
            let (kick, call) = (queue.kick_fd().try_clone()?, queue.call_fd().try_clone()?);
            let (user, guest) = (queue.user_addresses(), queue.ring_addresses());
            Ok(Ring { index: queue.index(), size: queue.size(), user, guest, kick, call })
        };
        Ok(Self {
            memory: Arc::clone(&disk.memory),
            rings: disk.queues.iter().map(ring).collect::<Result<_>>()?,
            features: disk.session.features,
            inflight,
        })
    }

    /// The area.
    pub fn inflight(&self) -> Option<&Inflight> {
        self.inflight.as_ref()
    }

    /// Guest addresses of the used rings.
    pub fn used_addresses(&self) -> Vec<u64> {
        self.rings.iter().map(|ring| ring.guest[1]).collect()
    }

    /// Connects, as often as it takes, agrees to what was agreed before, and starts all rings.
    pub fn reconnect(&self, socket: &Path, resume: Resume, timeout: Duration) -> Result<Session> {
        self.reconnect_with(socket, resume, timeout, |_| Ok(()))
    }

    /// The same with further messages before the memory is given.
    pub fn reconnect_with(
        &self,
        socket: &Path,
        resume: Resume,
        timeout: Duration,
        more: impl FnOnce(&Session) -> Result<()>,
    ) -> Result<Session> {
        let deadline = Instant::now() + timeout;
        let mut session = loop {
            match Session::raw(socket) {
                Ok(session) => break session,
                Err(e) if Instant::now() > deadline => return Err(e.context("reconnect")),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        session.set_owner()?;
        session.agree(self.features, PROTOCOL_MASK)?;
        ensure!(session.features == self.features, "features {:#x}", session.features);
        more(&session)?;
        session.set_mem_table(&self.memory)?;
        if let Some(inflight) = &self.inflight {
            ensure!(session.protocol & proto::INFLIGHT_SHMFD != 0, "no in-flight tracking");
            inflight.set(&session)?;
        }
        for ring in &self.rings {
            let base = match resume {
                Resume::Used => self.memory.load_u16(ring.guest[1] + 2),
                Resume::Available => self.memory.load_u16(ring.guest[0] + 2),
            };
            ring.start(&session, base).with_context(|| format!("start queue {}", ring.index))?;
        }
        Ok(session)
    }
}

impl Ring {
    fn start(&self, session: &Session, base: u16) -> Result<()> {
        let index = u32::from(self.index);
        session.set_vring_state(req::SET_VRING_NUM, index, self.size.into())?;
        session.set_vring_state(req::SET_VRING_BASE, index, base.into())?;
        let [desc, avail, used] = self.user;
        let addresses = [desc, used, avail, 0].into_iter().flat_map(u64::to_le_bytes);
        let payload: Vec<u8> = state_bytes(index, 0).into_iter().chain(addresses).collect();
        session.set(req::SET_VRING_ADDR, &payload, &[])?;
        for (request, fd) in [(req::SET_VRING_CALL, &self.call), (req::SET_VRING_KICK, &self.kick)] {
            session.set(request, &u64::from(index).to_le_bytes(), &[fd.as_raw_fd()])?;
        }
        session.enable(self.index, true)
    }
}

impl Disk {
    /// Asks for an in-flight area and hands it over; to be called before a ring is started.
    pub fn track(&self) -> Result<Inflight> {
        let size = self.queues.first().context("no queue")?.queue.size();
        let inflight = Inflight::get(&self.session, u16::try_from(self.queues.len())?, size)?;
        inflight.set(&self.session)?;
        Ok(inflight)
    }

    /// Sets all queues up and enables them.
    pub fn start(&self) -> Result<()> {
        self.queues.iter().try_for_each(|q| self.session.start(&q.queue, 0))
    }
}
