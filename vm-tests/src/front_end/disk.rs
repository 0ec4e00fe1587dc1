//! A disk as a driver has it: a session, its queues, its config.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};

use super::blk::BlkQueue;
use super::config::{CONFIG_BYTES, Config, feature};
use super::memory::Memory;
use super::queue::Queue;
use super::session::Session;
use super::wire::{proto, req};

/// How to open a disk.
#[derive(Clone, Debug)]
pub struct Options {
    socket: PathBuf,
    queues: u16,
    queue_size: u16,
    mask: u64,
    memory_bytes: u64,
}

impl Options {
    /// So many queues; 1 unless said otherwise.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// Size of each queue; 128 unless said otherwise.
    pub fn queue_size(mut self, size: u16) -> Self {
        self.queue_size = size;
        self
    }

    /// Does not agree to these virtio features.
    pub fn without(mut self, features: u64) -> Self {
        self.mask &= !features;
        self
    }

    /// Guest memory; 512 MiB unless said otherwise.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Connects, negotiates, sets all queues up and enables them.
    pub fn open(&self) -> Result<Disk> {
        let disk = self.connect()?;
        for queue in &disk.queues {
            disk.session
                .start(&queue.queue, 0)
                .with_context(|| format!("start queue {}", queue.queue.index()))?;
        }
        Ok(disk)
    }

    /// Like [`Options::open`], up to and with the memory table; no queue is set up.
    pub fn connect(&self) -> Result<Disk> {
        self.connect_with(&Memory::new(self.memory_bytes)?)
    }

    /// [`Options::connect`] with memory that is there already.
    pub fn connect_with(&self, memory: &Arc<Memory>) -> Result<Disk> {
        let session = Session::negotiate(&self.socket, self.mask)?;
        if session.protocol & proto::MQ != 0 {
            let queues = session.get_u64(req::GET_QUEUE_NUM)?;
            ensure!(queues >= self.queues.into(), "{} queues wanted, {queues} there", self.queues);
        }
        let config = Config::parse(&session.get_config(0, CONFIG_BYTES)?)?;
        session.set_mem_table(memory)?;
        let event_idx = session.features & feature::EVENT_IDX != 0;
        let queues = (0..self.queues)
            .map(|index| Ok(BlkQueue::new(Queue::new(memory, index, self.queue_size, event_idx)?)))
            .collect::<Result<_>>()?;
        Ok(Disk { session, memory: Arc::clone(memory), queues, config })
    }
}

/// An open disk. The fields are apart, so that queues can be under load in threads while messages are sent.
#[derive(Debug)]
pub struct Disk {
    /// The connection.
    pub session: Session,
    /// Guest memory.
    pub memory: Arc<Memory>,
    /// The queues.
    pub queues: Vec<BlkQueue>,
    /// The config space at connection.
    pub config: Config,
}

impl Disk {
    /// Options for the disk behind `socket`.
    pub fn at(socket: impl AsRef<Path>) -> Options {
        Options {
            socket: socket.as_ref().into(),
            queues: 1,
            queue_size: 128,
            mask: feature::ALL,
            memory_bytes: 512 << 20,
        }
    }

    /// One queue of 128, all features.
    pub fn open(socket: impl AsRef<Path>) -> Result<Self> {
        Self::at(socket).open()
    }

    /// The first queue.
    pub fn q(&mut self) -> &mut BlkQueue {
        &mut self.queues[0]
    }

    /// Whether a virtio feature was agreed on.
    pub fn has(&self, feature: u64) -> bool {
        self.session.features & feature == feature
    }

    /// Reads the config space anew.
    pub fn reload_config(&mut self) -> Result<Config> {
        self.config = Config::parse(&self.session.get_config(0, CONFIG_BYTES)?)?;
        Ok(self.config)
    }

    /// Stops all queues: the indices that they stopped at.
    pub fn stop(&self) -> Result<Vec<u16>> {
        self.queues.iter().map(|queue| self.session.stop(queue.queue.index())).collect()
    }
}
