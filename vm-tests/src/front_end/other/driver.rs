//! The `virtio-driver` crate, with its own protocol code and its own rings.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use crate::front_end::memory::Region;
use crate::front_end::request::SECTOR;
use crate::front_end::verify::{Rng, pattern};
use crate::front_end::wire::poll_in;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of each request.
const REQUEST: usize = 4096;

/// What the crate saw of the disk.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Queues that the back-end has.
    pub queues: usize,
    /// Agreed virtio features.
    pub features: u64,
    /// Capacity in sectors.
    pub capacity: u64,
    /// Requests answered.
    pub answered: u64,
}

/// Connects with the crate, writes `rounds` blocks of random place on each of `nr_queues` queues, reads all back and compares.
pub fn verify(socket: &Path, nr_queues: usize, rounds: u64) -> Result<Seen> {
    let mask = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioFeatureFlags::RING_INDIRECT_DESC.bits()
        | VirtioBlkFeatureFlags::all().bits();
    let socket = socket.to_str().context("socket is not UTF-8")?;
    let vhost = VhostUser::new(socket, mask).context("connect")?;
    let mut transport: Box<VirtioBlkTransport> = Box::new(vhost);
    let config: VirtioBlkConfig = transport.get_config().context("read the config")?;
    let capacity = u64::from(config.capacity);
    let max_queues = transport.max_queues().unwrap_or(1);
    ensure!(max_queues >= nr_queues, "{nr_queues} queues wanted, {max_queues} there");

    let buffers = Region::new(0, (nr_queues * REQUEST) as u64, 0)?;
    let base = usize::try_from(buffers.user())?;
    transport.map_mem_region(base, nr_queues * REQUEST, buffers.as_raw_fd(), 0).context("map the buffers")?;
    let features = transport.get_features();
    let queues = VirtioBlkQueue::<u64>::setup_queues(&mut *transport, nr_queues, 128);
    let queues = queues.context("set the queues up")?;

    let mut answered = 0;
    let share = capacity / (REQUEST / SECTOR) as u64 / nr_queues as u64;
    for (index, mut queue) in queues.into_iter().enumerate() {
        let mut driver =
            Driver { buffer: base + index * REQUEST, index, queue: &mut queue, transport: &*transport };
        let first = index as u64 * share;
        let mut rng = Rng::new(index as u64);
        let blocks: Vec<u64> = (0..rounds).map(|_| first + rng.below(share)).collect();
        for &block in &blocks {
            driver.write(block)?;
        }
        driver.flush()?;
        for &block in &blocks {
            driver.read(block)?;
        }
        answered += 2 * rounds + 1;
    }
    Ok(Seen { queues: max_queues, features, capacity, answered })
}

struct Driver<'a, 'q> {
    buffer: usize,
    index: usize,
    queue: &'a mut VirtioBlkQueue<'q, u64>,
    transport: &'a VirtioBlkTransport,
}

fn contents(block: u64) -> Vec<u8> {
    let per_block = (REQUEST / SECTOR) as u64;
    (0..per_block).flat_map(|i| pattern(block * per_block + i, 1)).collect()
}

impl Driver<'_, '_> {
    fn write(&mut self, block: u64) -> Result<()> {
        let data = contents(block);
        // SAFETY: the buffer is mapped, as long as a request, and no request uses it now.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.buffer as *mut u8, REQUEST) };
        // SAFETY: the buffer stays mapped and untouched until the request is answered.
        unsafe { self.queue.write_raw(block * REQUEST as u64, self.buffer as *const u8, REQUEST, block) }?;
        self.wait(block)
    }

    fn read(&mut self, block: u64) -> Result<()> {
        // SAFETY: as for `write`.
        unsafe { self.queue.read_raw(block * REQUEST as u64, self.buffer as *mut u8, REQUEST, block) }?;
        self.wait(block)?;
        let mut got = vec![0; REQUEST];
        // SAFETY: the buffer is mapped and the request is answered.
        unsafe { std::ptr::copy_nonoverlapping(self.buffer as *const u8, got.as_mut_ptr(), REQUEST) };
        ensure!(got == contents(block), "block {block} on queue {} is not what was written", self.index);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.queue.flush(u64::MAX)?;
        self.wait(u64::MAX)
    }

    fn wait(&mut self, tag: u64) -> Result<()> {
        let call = self.transport.get_completion_fd(self.index);
        if self.queue.avail_notif_needed() {
            self.transport.get_submission_notifier(self.index).notify()?;
        }
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(done) = self.queue.completions().next() {
                ensure!(done.context == tag, "answer to {} instead of {tag}", done.context);
                ensure!(done.ret == 0, "request {tag} on queue {}: {}", self.index, done.ret);
                return Ok(());
            }
            self.queue.set_used_notif_enabled(true);
            if self.queue.completions().has_next() {
                continue;
            }
            if !poll_in(call.as_raw_fd(), deadline)? {
                bail!("no answer to request {tag} on queue {}", self.index);
            }
            call.read()?;
        }
    }
}
