//! Which requests are taken and not answered, written down where a crash of this process does not reach: in memory that
//! the front-end keeps (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`, split rings; docs/interop/vhost-user.rst, "Inflight I/O tracking").
//!
//! The order of the stores makes every crash recoverable:
//!
//! 1. A head is marked, with its number in the order of taking, before anything is done for it.
//! 2. Each used entry links its head into the batch (`next`, `last_batch_head`). The mark stays: the guest sees nothing yet.
//! 3. The ring's used index moves. From here on the batch is answered.
//! 4. The batch's marks are cleared; then `used_idx` follows the ring's index.
//!
//! Where the ring's index and `used_idx` differ, the crash came in step 4, and the batch that the links lead through is
//! answered. What is marked then was taken and not answered; it is done again, in the order of taking. So many entries behind
//! the used index were taken, whatever index the front-end thinks.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::shared_area::{AreaError, SharedArea};
use crate::vring::RING_SIZE_MAX;

/// Queues follow one another at multiples of this.
const ALIGN_BYTES: usize = 64;

/// Version of the layout.
const VERSION: u16 = 1;

/// Bytes of a queue's head, and where its fields lie.
const HEAD_BYTES: usize = 16;
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;

/// Bytes of a descriptor's entry, and where its fields lie.
const ENTRY_BYTES: usize = 16;
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// Where the guest's choice of write through is kept for the next process, since no front-end says it again: in the first
/// queue's padding, which everybody else passes over. 1: it was chosen.
const WRITE_THROUGH: usize = HEAD_BYTES + INFLIGHT + 1;

/// Why an area is refused.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// More queues than there are, or none.
    #[error("{0} queues")]
    Queues(u16),
    /// Not a size for rings.
    #[error("a queue size of {0}")]
    QueueSize(u16),
    /// The queues do not fit.
    #[error("{size_bytes} bytes are too few for {nr_queues} queues of {queue_size}")]
    Small {
        /// Length of the area.
        size_bytes: u64,
        /// Queues in it.
        nr_queues: u16,
        /// Entries of each.
        queue_size: u16,
    },
    /// It cannot be mapped.
    #[error(transparent)]
    Area(#[from] AreaError),
}

/// Bytes of one queue.
fn queue_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(ALIGN_BYTES)
}

fn check(nr_queues: u16, queue_size: u16, nr_queues_max: u16) -> Result<(), InflightError> {
    if nr_queues == 0 || nr_queues > nr_queues_max {
        return Err(InflightError::Queues(nr_queues));
    }
    if queue_size == 0 || queue_size > RING_SIZE_MAX {
        return Err(InflightError::QueueSize(queue_size));
    }
    Ok(())
}

/// Makes an area for so many queues, nothing in flight in any of them. Gives the file and the length.
pub fn create(nr_queues: u16, queue_size: u16, nr_queues_max: u16) -> Result<(File, u64), InflightError> {
    check(nr_queues, queue_size, nr_queues_max)?;
    let size_bytes = (usize::from(nr_queues) * queue_bytes(queue_size)) as u64;
    let make = || -> rustix::io::Result<OwnedFd> {
        let fd = memfd_create("polypath-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, size_bytes)?;
        // Nobody can make it shorter under whoever has mapped it.
        fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(fd)
    };
    let file = File::from(make().map_err(std::io::Error::from).map_err(AreaError::File)?);
    let area = SharedArea::map(file.try_clone().map_err(AreaError::File)?, 0, size_bytes)?;
    for queue in 0..usize::from(nr_queues) {
        let base = queue * queue_bytes(queue_size);
        area.store(base + DESC_NUM, queue_size.to_le());
        area.store(base + VERSION_AT, VERSION.to_le());
    }
    Ok((file, size_bytes))
}

/// An area that the front-end keeps.
#[derive(Debug)]
pub struct InflightArea {
    area: SharedArea,
    nr_queues: u16,
    queue_size: u16,
}

impl InflightArea {
    /// Takes an area of so many queues, made by this process or by one before it.
    pub fn open(
        file: File,
        offset: u64,
        size_bytes: u64,
        nr_queues: u16,
        queue_size: u16,
        nr_queues_max: u16,
    ) -> Result<Arc<Self>, InflightError> {
        check(nr_queues, queue_size, nr_queues_max)?;
        if size_bytes < (usize::from(nr_queues) * queue_bytes(queue_size)) as u64 {
            return Err(InflightError::Small { size_bytes, nr_queues, queue_size });
        }
        let area = SharedArea::map(file, offset, size_bytes)?;
        Ok(Arc::new(Self { area, nr_queues, queue_size }))
    }

    /// Notes whether the guest has chosen that a write must be durable when it is answered.
    pub fn note_write_through(&self, is_chosen: bool) {
        self.area.store(WRITE_THROUGH, u8::from(is_chosen));
    }

    /// What the last process noted.
    pub fn is_write_through(&self) -> bool {
        self.area.load::<u8>(WRITE_THROUGH) == 1
    }

    /// Forgets all: the requests' guest is gone.
    pub fn clear(&self) {
        self.note_write_through(false);
        for queue in 0..usize::from(self.nr_queues) {
            let base = queue * queue_bytes(self.queue_size);
            for entry in 0..usize::from(self.queue_size) {
                self.area.store(base + HEAD_BYTES + ENTRY_BYTES * entry + INFLIGHT, 0_u8);
            }
            self.area.store(base + USED_IDX, 0_u16);
        }
    }

    /// The part of queue `index`, a ring of `ring_size`; None if it has none, or one that is too small.
    pub fn queue(self: &Arc<Self>, index: usize, ring_size: u16) -> Option<InflightQueue> {
        let fits = index < usize::from(self.nr_queues) && ring_size <= self.queue_size;
        fits.then(|| InflightQueue {
            area: Arc::clone(self),
            base: index * queue_bytes(self.queue_size),
            ring_size,
            counter: 0,
            last_batch_head: 0,
            batch: Vec::with_capacity(usize::from(ring_size)),
        })
    }
}

/// One queue's part of the area. What it has to know while it runs it knows by itself: it never reads the area then.
#[derive(Debug)]
pub struct InflightQueue {
    area: Arc<InflightArea>,
    base: usize,
    ring_size: u16,
    counter: u64,
    last_batch_head: u16,
    /// Heads that have used entries which the guest has not been shown.
    batch: Vec<u16>,
}

/// Why the content of a part cannot be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Garbage {
    /// Another layout.
    #[error("its version is {0}")]
    Version(u16),
    /// Features that nobody knows.
    #[error("its features are {0:#x}")]
    Features(u64),
    /// It is about another ring.
    #[error("it is about {0} descriptors")]
    Size(u16),
    /// The last batch cannot have been so long, or leads out of the ring.
    #[error("its last batch is broken")]
    Batch,
    /// It names more than the guest has made available.
    #[error("it names {marked} requests, the ring has {outstanding}")]
    TooMany {
        /// Heads marked.
        marked: usize,
        /// Entries that the guest made available and has not got back.
        outstanding: u16,
    },
    /// It names one that was not taken.
    #[error("it names head {0}, which was not taken")]
    NotTaken(u16),
}

impl InflightQueue {
    fn store<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) {
        self.area.area.store(self.base + at, value);
    }

    fn load<T: vm_memory::AtomicAccess + Default>(&self, at: usize) -> T {
        self.area.area.load(self.base + at)
    }

    fn entry(head: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }

    /// What was taken and not answered when the ring last ran, in the order of taking. `used` is the ring's used index,
    /// `outstanding` how far the available index is ahead of it, and `available` gives the head at an available index.
    ///
    /// # Errors
    /// The content cannot be right; [`Self::begin`] may be called all the same.
    pub fn recover(
        &mut self,
        used: u16,
        outstanding: u16,
        available: impl Fn(u16) -> Option<u16>,
    ) -> Result<Vec<u16>, Garbage> {
        let version = u16::from_le(self.load(VERSION_AT));
        if version == 0 {
            // Made by a front-end, and not used yet.
            return Ok(Vec::new());
        }
        let features = u64::from_le(self.load(FEATURES));
        let desc_num = u16::from_le(self.load(DESC_NUM));
        if version != VERSION {
            return Err(Garbage::Version(version));
        }
        if features != 0 {
            return Err(Garbage::Features(features));
        }
        if desc_num != self.area.queue_size {
            return Err(Garbage::Size(desc_num));
        }
        let is_marked = |head: u16| self.load::<u8>(Self::entry(head) + INFLIGHT) == 1;
        let mut marked: Vec<u16> = (0..self.ring_size).filter(|head| is_marked(*head)).collect();
        if marked.is_empty() {
            // Also where the area was never used and the ring was, by another host.
            return Ok(marked);
        }
        self.take_last_batch(used, &mut marked)?;
        if marked.len() > usize::from(outstanding) {
            return Err(Garbage::TooMany { marked: marked.len(), outstanding });
        }
        // What stands behind them was not taken: a head that is there as well cannot be in flight.
        for ahead in marked.len()..usize::from(outstanding) {
            let index = used.wrapping_add(u16::try_from(ahead).unwrap_or(u16::MAX));
            if let Some(head) = available(index)
                && marked.contains(&head)
            {
                return Err(Garbage::NotTaken(head));
            }
        }
        let counter = |head: &u16| u64::from_le(self.load(Self::entry(*head) + COUNTER));
        marked.sort_by_key(counter);
        self.counter = marked.last().map_or(0, |head| counter(head).wrapping_add(1));
        Ok(marked)
    }

    /// Takes out of `marked` what was answered just before the crash.
    fn take_last_batch(&self, used: u16, marked: &mut Vec<u16>) -> Result<(), Garbage> {
        let nr_answered = used.wrapping_sub(u16::from_le(self.load(USED_IDX)));
        if nr_answered > self.ring_size {
            return Err(Garbage::Batch);
        }
        let mut head = u16::from_le(self.load(LAST_BATCH_HEAD));
        for _ in 0..nr_answered {
            if head >= self.ring_size {
                return Err(Garbage::Batch);
            }
            marked.retain(|marked| *marked != head);
            head = u16::from_le(self.load(Self::entry(head) + NEXT));
        }
        Ok(())
    }

    /// The ring runs from now on, with `marked` in flight and its used index at `used`.
    pub fn begin(&mut self, used: u16, marked: &[u16]) {
        self.last_batch_head = u16::from_le(self.load(LAST_BATCH_HEAD));
        self.batch.clear();
        // In this order: until the index is written, the same marks are found to be answered again.
        for head in 0..self.ring_size {
            let is_marked = self.load::<u8>(Self::entry(head) + INFLIGHT) != 0;
            if is_marked && !marked.contains(&head) {
                self.store(Self::entry(head) + INFLIGHT, 0_u8);
            }
        }
        self.store(USED_IDX, used.to_le());
        self.store(FEATURES, 0_u64);
        self.store(DESC_NUM, self.area.queue_size.to_le());
        self.store(VERSION_AT, VERSION.to_le());
    }

    /// `head` was taken; to be called before anything is done for it.
    #[inline]
    pub fn mark(&mut self, head: u16) {
        let entry = Self::entry(head);
        self.store(entry + COUNTER, self.counter.to_le());
        self.counter = self.counter.wrapping_add(1);
        self.store(entry + INFLIGHT, 1_u8);
    }

    /// `head` has a used entry that the guest has not been shown.
    #[inline]
    pub fn add_used(&mut self, head: u16) {
        self.store(Self::entry(head) + NEXT, self.last_batch_head.to_le());
        self.store(LAST_BATCH_HEAD, head.to_le());
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// The guest has been shown the used index `used`, and with it all of the batch.
    #[inline]
    pub fn published(&mut self, used: u16) {
        while let Some(head) = self.batch.pop() {
            self.store(Self::entry(head) + INFLIGHT, 0_u8);
        }
        self.store(USED_IDX, used.to_le());
    }
}

#[cfg(test)]
mod tests;
