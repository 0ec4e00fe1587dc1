//! The driver's side of a split virtqueue, with every step in the caller's hand.

use std::collections::HashMap;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::chain::{Chain, Desc};
use super::memory::{Buf, Memory};
use super::wire::poll_in;

/// Descriptor flag: another one follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes here.
pub const WRITE: u16 = 2;
/// Descriptor flag: a table of descriptors is here.
pub const INDIRECT: u16 = 4;

const DESC_BYTES: usize = 16;
const USED_BYTES: u64 = 8;

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub head: u16,
    /// Bytes written, as the device says.
    pub len: u32,
}

/// An eventfd.
pub fn eventfd() -> Result<OwnedFd> {
    // SAFETY: no pointers; the result is a new descriptor that nobody else owns.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    ensure!(fd >= 0, "eventfd: {}", std::io::Error::last_os_error());
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an eventfd.
pub fn signal(fd: &OwnedFd) {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: eight live bytes.
    let n = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    assert_eq!(n, 8, "write an eventfd");
}

/// Takes the count of an eventfd; 0 when it was not signalled.
pub fn drain(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    // SAFETY: eight live bytes.
    let n = unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    if n == 8 { u64::from_ne_bytes(count) } else { 0 }
}

/// A virtqueue as the driver has it.
#[derive(Debug)]
pub struct Queue {
    mem: Arc<Memory>,
    index: u16,
    size: u16,
    event_idx: bool,
    desc: Buf,
    avail: Buf,
    used: Buf,
    kick: OwnedFd,
    call: OwnedFd,
    /// Index of the next entry of the available ring, published or not.
    next_avail: u16,
    /// What the device has been told.
    published: u16,
    next_used: u16,
    free: Vec<u16>,
    /// Descriptors by head of what the device has.
    pending: HashMap<u16, Vec<u16>>,
    /// Calls taken from the call descriptor.
    pub nr_calls: u64,
    /// Kicks sent.
    pub nr_kicks: u64,
}

impl Queue {
    /// A queue of `size` descriptors in `mem`; not known to any back-end yet.
    pub fn new(mem: &Arc<Memory>, index: u16, size: u16, event_idx: bool) -> Result<Self> {
        let n = usize::from(size);
        Ok(Self {
            mem: Arc::clone(mem),
            index,
            size,
            event_idx,
            desc: mem.alloc(n * DESC_BYTES),
            avail: mem.alloc(6 + 2 * n),
            used: mem.alloc(6 + 8 * n),
            kick: eventfd()?,
            call: eventfd()?,
            next_avail: 0,
            published: 0,
            next_used: 0,
            free: (0..size).rev().collect(),
            pending: HashMap::new(),
            nr_calls: 0,
            nr_kicks: 0,
        })
    }

    /// Number of the queue.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The kick descriptor.
    pub fn kick_fd(&self) -> &OwnedFd {
        &self.kick
    }

    /// The call descriptor.
    pub fn call_fd(&self) -> &OwnedFd {
        &self.call
    }

    /// Replaces the call descriptor here; the back-end must be told by the caller.
    pub fn replace_call(&mut self) -> Result<()> {
        self.call = eventfd()?;
        Ok(())
    }

    /// Guest memory of this queue's buffers.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.mem
    }

    /// Addresses of the table and the two rings in this process.
    pub fn user_addresses(&self) -> [u64; 3] {
        [&self.desc, &self.avail, &self.used].map(|part| self.mem.user_of(part.addr))
    }

    /// Guest addresses of the available and the used ring.
    pub fn ring_addresses(&self) -> [u64; 2] {
        [self.avail.addr, self.used.addr]
    }

    /// Index that the next published chain gets.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Index of the next used entry that this side looks at.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Heads that the device has.
    pub fn nr_pending(&self) -> usize {
        self.pending.len()
    }

    /// Descriptors that are free.
    pub fn nr_free(&self) -> usize {
        self.free.len()
    }

    /// Forgets everything, as a driver does that resets the device: rings zeroed, indices 0.
    pub fn reset(&mut self) {
        for part in [&self.desc, &self.avail, &self.used] {
            part.fill(0);
        }
        (self.next_avail, self.published, self.next_used) = (0, 0, 0);
        self.free = (0..self.size).rev().collect();
        self.pending.clear();
        drain(&self.call);
        drain(&self.kick);
    }

    /// [`Queue::reset`] to rings whose indices all stand at `base`.
    pub fn reset_to(&mut self, base: u16) {
        self.reset();
        (self.next_avail, self.published, self.next_used) = (base, base, base);
        self.mem.store_u16(self.avail.addr + 2, base);
        self.mem.store_u16(self.used.addr + 2, base);
        // As the device would have left it: it wants to hear of the next one.
        self.mem.store_u16(self.used.addr + 4 + USED_BYTES * u64::from(self.size), base);
    }

    /// Shows the device any available index, also one that no driver would.
    pub fn put_avail_index(&self, index: u16) {
        self.mem.store_u16(self.avail.addr + 2, index);
    }

    /// Takes a descriptor, for chains made by hand. It comes back with the head that [`Queue::stage_head`] names.
    pub fn take_desc(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Writes entry `at` of the descriptor table.
    pub fn put_desc(&self, at: u16, desc: Desc) {
        self.mem.write(self.desc.addr + u64::from(at) * DESC_BYTES as u64, &desc.bytes());
    }

    /// Puts `head` in the available ring, not yet published. `descs` are the descriptors that are free again once it is used.
    pub fn stage_head(&mut self, head: u16, descs: Vec<u16>) {
        let slot = u64::from(self.next_avail % self.size);
        self.mem.store_u16(self.avail.addr + 4 + 2 * slot, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        let old = self.pending.insert(head, descs);
        assert!(old.is_none(), "head {head} is with the device already");
    }

    /// Puts `chain` in the table and the available ring, not yet published: its head, or `None` when the table is full.
    pub fn stage(&mut self, chain: &Chain) -> Option<u16> {
        let (descs, table) = chain.layout();
        if self.free.len() < descs.len() || descs.is_empty() {
            return None;
        }
        if let Some((addr, entries)) = table {
            let bytes: Vec<u8> = entries.iter().flat_map(Desc::bytes).collect();
            self.mem.write(addr, &bytes);
        }
        let places = self.free.split_off(self.free.len() - descs.len());
        for (i, mut desc) in descs.into_iter().enumerate() {
            if let Some(&next) = places.get(i + 1) {
                desc.flags |= NEXT;
                desc.next = next;
            }
            self.put_desc(places[i], desc);
        }
        let head = places[0];
        self.stage_head(head, places);
        Some(head)
    }

    /// Shows the device what was staged.
    pub fn publish(&mut self) {
        self.mem.store_u16(self.avail.addr + 2, self.next_avail);
    }

    /// Publishes and kicks if the device wants it.
    pub fn kick(&mut self) {
        let old = self.published;
        self.publish();
        self.published = self.next_avail;
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = self.mem.load_u16(self.used.addr + 4 + USED_BYTES * u64::from(self.size));
            self.next_avail.wrapping_sub(event).wrapping_sub(1) < self.next_avail.wrapping_sub(old)
        } else {
            self.mem.load_u16(self.used.addr) & 1 == 0
        };
        if wanted {
            self.kick_always();
        }
    }

    /// Signals the kick descriptor whatever the device wants.
    pub fn kick_always(&mut self) {
        self.nr_kicks += 1;
        signal(&self.kick);
    }

    /// Stages, publishes and kicks.
    pub fn send(&mut self, chain: &Chain) -> Result<u16> {
        let head = self.stage(chain).context("the queue is full")?;
        self.kick();
        Ok(head)
    }

    /// The device's used index, as it stands.
    pub fn used_index(&self) -> u16 {
        self.mem.load_u16(self.used.addr + 2)
    }

    /// Takes the next used entry if there is one. An entry for a head that the device did not have is an error.
    pub fn pop(&mut self) -> Result<Option<Used>> {
        if self.used_index() == self.next_used {
            return Ok(None);
        }
        let slot = u64::from(self.next_used % self.size);
        let entry = self.mem.read_vec(self.used.addr + 4 + USED_BYTES * slot, 8);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
        let (id, len) = (word(0), word(4));
        self.next_used = self.next_used.wrapping_add(1);
        let head = u16::try_from(id).context("used id is no head")?;
        let Some(descs) = self.pending.remove(&head) else {
            bail!("used entry for head {head}, which the device did not have (twice answered?)")
        };
        self.free.extend(descs);
        Ok(Some(Used { head, len }))
    }

    /// Asks for calls, or for none. With EVENT_IDX there is no such flag and "none" only means that the event is not moved.
    pub fn want_calls(&mut self, on: bool) {
        if self.event_idx {
            if on {
                self.mem.store_u16(self.avail.addr + 4 + 2 * u64::from(self.size), self.next_used);
            }
        } else {
            self.mem.store_u16(self.avail.addr, u16::from(!on));
        }
        fence(Ordering::SeqCst);
    }

    /// Waits for the next used entry as a driver does: arms calls, looks, sleeps until called. A used entry whose call does
    /// not come in time is an error of its own.
    pub fn wait(&mut self, timeout: Duration) -> Result<Used> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(used) = self.pop()? {
                return Ok(used);
            }
            self.want_calls(true);
            if let Some(used) = self.pop()? {
                return Ok(used);
            }
            if !poll_in(self.call.as_raw_fd(), deadline).context("poll the call descriptor")? {
                if let Some(used) = self.pop()? {
                    bail!("queue {}: {used:?} came without a call", self.index);
                }
                bail!("queue {}: no answer within {timeout:?}, {} pending", self.index, self.pending.len());
            }
            self.nr_calls += drain(&self.call);
        }
    }

    /// Asks for a call at the next used entry: true if one is there already.
    pub fn arm_calls(&mut self) -> bool {
        if self.used_index() == self.next_used {
            self.want_calls(true);
        }
        self.used_index() != self.next_used
    }

    /// Waits for so long for a call, and does not look at the ring without one: a call that is missing is missed.
    pub fn called_within(&mut self, timeout: Duration) -> Result<bool> {
        let called =
            poll_in(self.call.as_raw_fd(), Instant::now() + timeout).context("poll the call descriptor")?;
        if called {
            self.nr_calls += drain(&self.call);
        }
        Ok(called && self.used_index() != self.next_used)
    }

    /// Waits for the next used entry by looking at the ring alone.
    pub fn wait_polling(&mut self, timeout: Duration) -> Result<Used> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(used) = self.pop()? {
                return Ok(used);
            }
            ensure!(
                Instant::now() < deadline,
                "queue {}: nothing on the used ring within {timeout:?}",
                self.index
            );
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits for the used entry of `head`, which must be the next one.
    pub fn wait_head(&mut self, head: u16, timeout: Duration) -> Result<Used> {
        let used = self.wait(timeout)?;
        ensure!(used.head == head, "{used:?} came instead of head {head}");
        Ok(used)
    }
}
