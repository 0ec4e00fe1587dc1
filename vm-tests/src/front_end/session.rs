//! A vhost-user session: the proper messages in the proper form, each set message acknowledged.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::memory::{Memory, Region};
use super::queue::Queue;
use super::wire::{Channel, Message, NEED_REPLY, VERSION, proto, req};

/// The bit that says that the protocol features are there.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Protocol features that this front-end can use.
pub const PROTOCOL_MASK: u64 = proto::MQ
    | proto::REPLY_ACK
    | proto::BACKEND_REQ
    | proto::CONFIG
    | proto::INFLIGHT_SHMFD
    | proto::LOG_SHMFD
    | proto::RESET_DEVICE
    | proto::CONFIGURE_MEM_SLOTS;

/// One connection after negotiation (or before, when made by [`Session::raw`]).
#[derive(Debug)]
pub struct Session {
    /// The connection, for odd messages.
    pub channel: Channel,
    /// Virtio features that the back-end offers.
    pub offered: u64,
    /// Virtio features agreed on.
    pub features: u64,
    /// Protocol features agreed on.
    pub protocol: u64,
}

impl Session {
    /// Connects and says nothing yet.
    pub fn raw(socket: &Path) -> Result<Self> {
        Ok(Self { channel: Channel::connect(socket)?, offered: 0, features: 0, protocol: 0 })
    }

    /// Connects and agrees on all that both sides know, of virtio features those in `mask`.
    pub fn negotiate(socket: &Path, mask: u64) -> Result<Self> {
        let mut session = Self::raw(socket)?;
        session.set_owner()?;
        session.agree(mask, PROTOCOL_MASK)?;
        Ok(session)
    }

    /// The feature part of the handshake.
    pub fn agree(&mut self, mask: u64, protocol_mask: u64) -> Result<()> {
        self.offered = self.get_u64(req::GET_FEATURES)?;
        ensure!(self.offered & F_PROTOCOL_FEATURES != 0, "no protocol features: {:#x}", self.offered);
        let protocol = self.get_u64(req::GET_PROTOCOL_FEATURES)? & protocol_mask;
        self.set_u64(req::SET_PROTOCOL_FEATURES, protocol)?;
        self.protocol = protocol;
        self.set_features(self.offered & (mask | F_PROTOCOL_FEATURES))
    }

    /// SET_FEATURES.
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.set_u64(req::SET_FEATURES, features)?;
        self.features = features;
        Ok(())
    }

    /// SET_OWNER.
    pub fn set_owner(&self) -> Result<()> {
        self.set(req::SET_OWNER, &[], &[])
    }

    /// Sends a set message; with REPLY_ACK agreed, its outcome is asked for and must be success.
    pub fn set(&self, request: u32, payload: &[u8], fds: &[RawFd]) -> Result<()> {
        match self.try_set(request, payload, fds)? {
            0 => Ok(()),
            refused => bail!("message {request} was refused: {refused}"),
        }
    }

    /// Like [`Session::set`], giving the number that came back; 0 when no answer was agreed on.
    pub fn try_set(&self, request: u32, payload: &[u8], fds: &[RawFd]) -> Result<u64> {
        if self.protocol & proto::REPLY_ACK == 0 {
            self.channel.send(request, VERSION, payload, fds)?;
            return Ok(0);
        }
        self.channel.send(request, VERSION | NEED_REPLY, payload, fds)?;
        self.answer(request)?.u64()
    }

    fn set_u64(&self, request: u32, value: u64) -> Result<()> {
        self.set(request, &value.to_le_bytes(), &[])
    }

    fn answer(&self, request: u32) -> Result<Message> {
        let message = self.channel.recv().with_context(|| format!("answer to message {request}"))?;
        ensure!(message.request == request, "answer to {} instead of {request}", message.request);
        ensure!(message.flags & 4 != 0, "answer to {request} is not marked as one");
        Ok(message)
    }

    /// Sends a get message and gives the answer.
    pub fn get(&self, request: u32, payload: &[u8]) -> Result<Message> {
        self.channel.send(request, VERSION, payload, &[])?;
        self.answer(request)
    }

    /// A get message whose answer is a number.
    pub fn get_u64(&self, request: u32) -> Result<u64> {
        self.get(request, &[])?.u64()
    }

    /// GET_CONFIG as it is: the payload after the 12 bytes of offset, size and flags, and the size stated there. A refusal
    /// is an empty payload.
    pub fn get_config_raw(&self, offset: u32, size: u32, carried: usize) -> Result<Vec<u8>> {
        let mut payload = config_head(offset, size, 0);
        payload.resize(12 + carried, 0);
        let message = self.get(req::GET_CONFIG, &payload)?;
        Ok(message.payload.get(12..).unwrap_or_default().to_vec())
    }

    /// Reads `size` bytes of the config space.
    pub fn get_config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let bytes = self.get_config_raw(offset, size, size as usize)?;
        ensure!(bytes.len() == size as usize, "asked for {size} bytes of config, got {}", bytes.len());
        Ok(bytes)
    }

    /// Writes to the config space; the number that came back.
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<u64> {
        let mut payload = config_head(offset, u32::try_from(bytes.len())?, 0);
        payload.extend(bytes);
        self.try_set(req::SET_CONFIG, &payload, &[])
    }

    /// SET_MEM_TABLE with all regions of `memory`.
    pub fn set_mem_table(&self, memory: &Memory) -> Result<()> {
        let regions = memory.regions();
        let mut payload = Vec::new();
        payload.extend(u32::try_from(regions.len())?.to_le_bytes());
        payload.extend([0; 4]);
        for region in &regions {
            payload.extend(region_bytes(region));
        }
        let fds: Vec<_> = regions.iter().map(|region| region.as_raw_fd()).collect();
        self.set(req::SET_MEM_TABLE, &payload, &fds)
    }

    /// ADD_MEM_REG.
    pub fn add_region(&self, region: &Region) -> Result<()> {
        let mut payload = vec![0; 8];
        payload.extend(region_bytes(region));
        self.set(req::ADD_MEM_REG, &payload, &[region.as_raw_fd()])
    }

    /// REM_MEM_REG.
    pub fn remove_region(&self, region: &Region) -> Result<()> {
        let mut payload = vec![0; 8];
        payload.extend(region_bytes(region));
        self.set(req::REM_MEM_REG, &payload, &[])
    }

    /// A message of the form (queue, number).
    pub fn set_vring_state(&self, request: u32, index: u32, num: u32) -> Result<()> {
        self.set(request, &state_bytes(index, num), &[])
    }

    /// SET_VRING_ADDR for `queue`.
    pub fn set_vring_addr(&self, queue: &Queue) -> Result<()> {
        self.set_vring_addr_logged(queue, None)
    }

    /// The same with the guest address under which writes to the used ring are to be logged.
    pub fn set_vring_addr_logged(&self, queue: &Queue, log: Option<u64>) -> Result<()> {
        let mut payload = state_bytes(queue.index().into(), log.is_some().into());
        let [desc, avail, used] = queue.user_addresses();
        for addr in [desc, used, avail, log.unwrap_or(0)] {
            payload.extend(addr.to_le_bytes());
        }
        self.set(req::SET_VRING_ADDR, &payload, &[])
    }

    /// SET_VRING_KICK, SET_VRING_CALL or SET_VRING_ERR with a descriptor.
    pub fn set_vring_fd(&self, request: u32, index: u16, fd: &OwnedFd) -> Result<()> {
        self.set(request, &u64::from(index).to_le_bytes(), &[fd.as_raw_fd()])
    }

    /// All that starts `queue` from index `base`, except the enabling.
    pub fn set_up(&self, queue: &Queue, base: u16) -> Result<()> {
        let index = u32::from(queue.index());
        self.set_vring_state(req::SET_VRING_NUM, index, queue.size().into())?;
        self.set_vring_state(req::SET_VRING_BASE, index, base.into())?;
        self.set_vring_addr(queue)?;
        self.set_vring_fd(req::SET_VRING_CALL, queue.index(), queue.call_fd())?;
        self.set_vring_fd(req::SET_VRING_KICK, queue.index(), queue.kick_fd())
    }

    /// SET_VRING_ENABLE.
    pub fn enable(&self, index: u16, on: bool) -> Result<()> {
        self.set_vring_state(req::SET_VRING_ENABLE, index.into(), on.into())
    }

    /// Sets `queue` up from `base` and enables it.
    pub fn start(&self, queue: &Queue, base: u16) -> Result<()> {
        self.set_up(queue, base)?;
        self.enable(queue.index(), true)
    }

    /// GET_VRING_BASE, which stops the queue: the index that it stopped at.
    pub fn stop(&self, index: u16) -> Result<u16> {
        self.send_stop(index)?;
        self.recv_stop(self.channel.timeout)
    }

    /// Only the question of [`Session::stop`].
    pub fn send_stop(&self, index: u16) -> Result<()> {
        self.channel.send(req::GET_VRING_BASE, VERSION, &state_bytes(index.into(), 0), &[])
    }

    /// Only the answer of [`Session::stop`].
    pub fn recv_stop(&self, timeout: Duration) -> Result<u16> {
        let message = self.channel.recv_within(timeout).context("answer to GET_VRING_BASE")?;
        ensure!(message.request == req::GET_VRING_BASE, "answer to {}", message.request);
        let base = message.payload.get(4..8).context("short answer to GET_VRING_BASE")?;
        Ok(u16::try_from(u32::from_le_bytes(base.try_into()?))?)
    }
}

/// The (queue, number) form of many messages.
pub fn state_bytes(index: u32, num: u32) -> Vec<u8> {
    [index.to_le_bytes(), num.to_le_bytes()].concat()
}

/// The head of GET_CONFIG and SET_CONFIG.
pub fn config_head(offset: u32, size: u32, flags: u32) -> Vec<u8> {
    [offset, size, flags].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A region in the memory messages.
pub fn region_bytes(region: &Region) -> Vec<u8> {
    [region.guest, region.len, region.user(), region.mmap_offset]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}
