//! io_uring: the only place where the kernel is handed addresses.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::at_once::{self, moved_by_null};
use super::buffers::{self, Buffers};
use super::files::Files;
use super::{Engine, Event, GATHER_TIME, Wanted, restrict};
use crate::fence::Fence;
use crate::gather::IoVec;
use crate::memory::GuestMap;
use crate::sandbox;
use crate::transfer::{Action, Transfer};

/// `user_data` of what is not a transfer; slots are small numbers.
const TAG_WAKE: u64 = 1 << 63;
const TAG_CANCEL: u64 = TAG_WAKE | 1;
/// Kick watches carry a generation in the low bits, so that an answer to an old watch is not taken for a kick.
const TAG_KICK: u64 = 1 << 62;

/// Room in the ring beside the transfers: the two watches and the cancelling of an old one.
const NR_EXTRA_ENTRIES: u32 = 8;

/// An io_uring of one worker thread.
pub struct UringEngine {
    ring: IoUring,
    /// Transfers with the kernel, by `user_data`.
    slots: Vec<Option<Box<Transfer>>>,
    free: Vec<u32>,
    /// Whether the kernel can wait for several completions for a limited time (since 6.12).
    can_gather: bool,
    /// Transfers of paths that answer at once, when they are asked for.
    instant: VecDeque<Box<Transfer>>,
    wake: OwnedFd,
    wake_armed: bool,
    kick: Option<OwnedFd>,
    kick_generation: u64,
    kick_armed: bool,
    /// Registered with the ring, so that it is kept for as long as the ring has I/O under way.
    files: Files,
    buffers: Buffers,
    _fence: Option<Arc<Fence>>,
}

impl std::fmt::Debug for UringEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringEngine").field("nr_in_flight", &self.nr_in_flight()).finish_non_exhaustive()
    }
}

impl UringEngine {
    /// A ring for `nr_slots` transfers at a time, that also looks at the eventfd `wake`, and keeps `fence` for as long as
    /// it has I/O under way. To be made by the thread that uses it.
    pub fn new(nr_slots: u32, wake: OwnedFd, fence: Option<Arc<Fence>>) -> io::Result<Self> {
        let is_restricted = sandbox::is_on();
        let ring = build(nr_slots, is_restricted)?;
        let files = Files::new(&ring, fence.as_ref().map(|fence| fence.raw_fd()));
        // What may sleep (a flush, a discard, anything on a FUSE file) takes a kernel thread until it is answered, and by
        // default there are 4 per processor for files and block devices: a few flushes of a path that hangs would keep all
        // others from their paths. A thread for each transfer, should it come to that; idle ones end by themselves.
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut [nr_slots, nr_slots]) {
            log::warn!("the kernel's threads for a queue stay few: error={error}");
        }
        if is_restricted {
            restrict::switch_on(&ring)?;
        }
        let can_gather = ring.params().is_feature_min_timeout();
        let mut slots = Vec::new();
        slots.resize_with(nr_slots as usize, || None);
        Ok(Self {
            ring,
            slots,
            free: (0..nr_slots).rev().collect(),
            can_gather,
            instant: VecDeque::with_capacity(nr_slots as usize),
            wake,
            wake_armed: false,
            kick: None,
            kick_generation: 0,
            kick_armed: false,
            files,
            buffers: Buffers::default(),
            _fence: fence,
        })
    }

    /// Registers guest memory with the ring, from the next [`Engine::use_memory`] on. All of it is pinned.
    pub fn register_memory(&mut self) {
        self.buffers.turn_on(&self.ring);
    }

    /// Whether rings of this size can be had here: found out before the first guest connects.
    pub fn probe(nr_slots: u32) -> io::Result<()> {
        build(nr_slots, false).map(drop)
    }

    /// # Safety
    /// Everything that `entry` points to stays valid until its completion was taken from the ring.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's promise is this call's condition.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Full: send what is there. What cannot be sent now (EAGAIN, EBUSY, EINTR) is sent a moment later.
            if let Err(error) = self.ring.submit() {
                log::debug!("submit: {error}");
                std::thread::yield_now();
            }
        }
    }

    /// Sends what is queued and takes in what has come back, without waiting.
    fn enter(&mut self) -> io::Result<()> {
        const GETEVENTS: u32 = 1; // IORING_ENTER_GETEVENTS
        let nr = u32::try_from(self.ring.submission().len()).unwrap_or(u32::MAX);
        // SAFETY: no argument is passed, and everything that the entries point to is in its slot (see `start`).
        match unsafe { self.ring.submitter().enter::<libc::sigset_t>(nr, 0, GETEVENTS, None) } {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn arm_watches(&mut self) {
        let poll_in = libc::POLLIN as u32;
        if !self.wake_armed {
            self.wake_armed = true;
            let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), poll_in).multi(true);
            // SAFETY: the entry points to no memory, and the kernel holds the file by itself.
            unsafe { self.push(&poll.build().user_data(TAG_WAKE)) };
        }
        if let (false, Some(kick)) = (self.kick_armed, &self.kick) {
            let poll = opcode::PollAdd::new(Fd(kick.as_raw_fd()), poll_in).multi(true);
            let tag = TAG_KICK | self.kick_generation;
            self.kick_armed = true;
            // SAFETY: as above.
            unsafe { self.push(&poll.build().user_data(tag)) };
        }
    }

    fn entry(&mut self, transfer: &mut Transfer) -> squeue::Entry {
        let Some(lane) = transfer.lane() else {
            return opcode::Read::new(Fd(-1), std::ptr::null_mut(), 0).build();
        };
        let limits = lane.path().limits();
        if limits.kind.is_null() {
            return opcode::Nop::new().build();
        }
        // A thread of the kernel's own does what could hold up the submission of everything else.
        let mut flags = squeue::Flags::empty();
        flags.set(squeue::Flags::ASYNC, limits.may_block);
        let place = self.files.place(&self.ring, lane).and_then(|place| i32::try_from(place).ok());
        flags.set(squeue::Flags::FIXED_FILE, place.is_some());
        let fd = Fd(place.unwrap_or_else(|| lane.path().raw_fd()));
        // Chains are bounded (CHAIN_LEN_MAX), and a count above the kernel's own bound comes back as an error.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let len = |v: &IoVec| u32::try_from(v.iov_len).unwrap_or(u32::MAX);
        let entry = match transfer.action() {
            // One piece needs no list for the kernel to copy.
            Action::Read { iovecs: [one], offset } => {
                let ptr = one.iov_base.cast();
                match self.buffers.place(std::slice::from_ref(one)) {
                    Some(buffer) => opcode::ReadFixed::new(fd, ptr, len(one), buffer).offset(offset).build(),
                    None => opcode::Read::new(fd, ptr, len(one)).offset(offset).build(),
                }
            }
            Action::Write { iovecs: [one], offset } => {
                let ptr = one.iov_base.cast();
                match self.buffers.place(std::slice::from_ref(one)) {
                    Some(buffer) => opcode::WriteFixed::new(fd, ptr, len(one), buffer).offset(offset).build(),
                    None => opcode::Write::new(fd, ptr, len(one)).offset(offset).build(),
                }
            }
            Action::Read { iovecs, offset } => {
                let entry =
                    opcode::Readv::new(fd, iovecs.as_ptr(), count(iovecs.len())).offset(offset).build();
                in_buffer(entry, buffers::READV_FIXED, self.buffers.place(iovecs))
            }
            Action::Write { iovecs, offset } => {
                let entry =
                    opcode::Writev::new(fd, iovecs.as_ptr(), count(iovecs.len())).offset(offset).build();
                in_buffer(entry, buffers::WRITEV_FIXED, self.buffers.place(iovecs))
            }
            Action::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Action::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        entry.flags(flags)
    }
}

/// Makes of vectored I/O the same on a registered buffer, which the `io-uring` crate does not know yet.
fn in_buffer(mut entry: squeue::Entry, opcode: u8, buffer: Option<u16>) -> squeue::Entry {
    /// `struct io_uring_sqe`, as far as it matters.
    #[repr(C)]
    struct Sqe {
        opcode: u8,
        others: [u8; 39],
        buf_index: u16,
        rest: [u8; 22],
    }
    const { assert!(size_of::<Sqe>() == size_of::<squeue::Entry>()) };
    let Some(buffer) = buffer else { return entry };
    // SAFETY: an entry is the kernel's structure of 64 bytes and nothing else (`repr(C)`), every value of these two fields
    // is one, and 64-bit fields align it for them.
    let sqe = unsafe { &mut *(&raw mut entry).cast::<Sqe>() };
    (sqe.opcode, sqe.buf_index) = (opcode, buffer);
    entry
}

/// `is_off`: it does nothing until it is switched on.
fn build(nr_slots: u32, is_off: bool) -> io::Result<IoUring> {
    let nr_entries = (nr_slots + NR_EXTRA_ENTRIES).next_power_of_two();
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp();
    if is_off {
        builder.setup_r_disabled();
    }
    // One thread submits and waits, so completions need no interrupt of it (since 6.1); older kernels do without.
    let plain = builder.clone();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    match builder.build(nr_entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(nr_entries),
        result => result,
    }
}

/// The nice value of a thread that gets what others leave: some 1.5 % where they want all.
const LOWEST_PRIORITY: i32 = 19;

impl Engine for UringEngine {
    fn start(&mut self, mut transfer: Box<Transfer>) {
        if transfer.path().is_some_and(|path| at_once::is_for(path.limits())) {
            return self.instant.push_back(transfer);
        }
        let entry = self.entry(&mut transfer);
        let Some(slot) = self.free.pop() else {
            // There are as many slots as ring entries, and a head is in flight once.
            unreachable!("more transfers than slots");
        };
        self.slots[slot as usize] = Some(transfer);
        // SAFETY: the iovecs and what they point to belong to the transfer (its gather list, its map lease and its
        // bounce buffer), which stays untouched in its slot until the completion; so does the table that keeps the
        // path's descriptor open.
        unsafe { self.push(&entry.user_data(u64::from(slot))) };
    }

    fn wait(&mut self, timeout: Option<Duration>, wanted: Wanted) -> io::Result<()> {
        self.arm_watches();
        self.files.let_go(&self.ring)?;
        if timeout == Some(Duration::ZERO) || !self.instant.is_empty() {
            // The kernel says when it has something for a call to take in.
            let has_cause = !self.ring.submission().is_empty() || self.ring.submission().taskrun();
            return if has_cause { self.enter() } else { Ok(()) };
        }
        let gathers = wanted.nr > 1 && self.can_gather;
        let nr = if gathers { wanted.nr as usize } else { 1 };
        let is_short = wanted.within <= GATHER_TIME;
        let timeout = match gathers && !is_short {
            true => Some(timeout.map_or(wanted.within, |timeout| timeout.min(wanted.within))),
            false => timeout,
        };
        let timespec = timeout.map(Timespec::from);
        let mut args = SubmitArgs::new();
        if let Some(timespec) = &timespec {
            args = args.timespec(timespec);
        }
        if gathers && is_short {
            // After that time one event is enough.
            args = args.min_wait_usec(u32::try_from(wanted.within.as_micros()).unwrap_or(0));
        }
        match self.ring.submitter().submit_with_args(nr, &args) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // Interrupted or timed out; or too many completions wait to be taken, which comes next.
                Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.arm_watches();
        self.files.let_go(&self.ring)?;
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        self.enter()
    }

    fn has_event(&mut self) -> bool {
        !self.instant.is_empty() || !self.ring.completion().is_empty() || self.ring.submission().taskrun()
    }

    fn next_event(&mut self) -> Option<Event> {
        if let Some(mut transfer) = self.instant.pop_front() {
            let result = at_once::run(&mut transfer);
            return Some(Event::Done(transfer, result));
        }
        loop {
            let mut entry = self.ring.completion().next();
            if entry.is_none() && self.ring.submission().taskrun() {
                // Completions are ready but for a call that puts them into the ring.
                self.enter().ok()?;
                entry = self.ring.completion().next();
            }
            let entry = entry?;
            let more = io_uring::cqueue::more(entry.flags());
            match entry.user_data() {
                TAG_WAKE => {
                    self.wake_armed = more;
                    return Some(Event::Wake);
                }
                TAG_CANCEL => {}
                tag if tag & TAG_KICK != 0 => {
                    if tag != TAG_KICK | self.kick_generation {
                        continue;
                    }
                    self.kick_armed = more;
                    if entry.result() < 0 {
                        // Not something that can be watched: no kick will ever come from it.
                        log::warn!("kick descriptor cannot be watched: errno={}", -entry.result());
                        (self.kick, self.kick_armed) = (None, false);
                    }
                    return Some(Event::Kick);
                }
                slot => {
                    let index = u32::try_from(slot).ok()?;
                    let transfer = self.slots.get_mut(index as usize).and_then(Option::take);
                    let Some(transfer) = transfer else {
                        unreachable!("completion of a slot that is not in use");
                    };
                    self.free.push(index);
                    let is_null = transfer.path().is_some_and(|path| path.limits().kind.is_null());
                    let result = match entry.result() {
                        0 if is_null => i32::try_from(moved_by_null(&transfer)).unwrap_or(i32::MAX),
                        result => result,
                    };
                    return Some(Event::Done(transfer, result));
                }
            }
        }
    }

    fn watch_kick(&mut self, kick: Option<OwnedFd>) {
        if self.kick_armed {
            // PollRemove finds a poll that kicks come from all the time busy, and leaves it.
            let tag = TAG_KICK | self.kick_generation;
            let cancel = opcode::AsyncCancel::new(tag).build().user_data(TAG_CANCEL);
            // SAFETY: the entry points to no memory.
            unsafe { self.push(&cancel) };
        }
        self.kick_generation = (self.kick_generation + 1) & (TAG_KICK - 1);
        (self.kick, self.kick_armed) = (kick, false);
    }

    fn note_new_view(&mut self) {
        self.files.note_new_view();
    }

    fn use_memory(&mut self, map: &GuestMap) {
        if !self.buffers.is_on() {
            return;
        }
        // An entry names a buffer by its place, which the kernel looks at when it takes the entry.
        while !self.ring.submission().is_empty() {
            if let Err(error) = self.ring.submit() {
                log::debug!("submit: {error}");
                std::thread::yield_now();
            }
        }
        self.buffers.replace(&self.ring, map);
    }

    fn give_way(&mut self) {
        // Of this thread alone, which ends with its ring's next stop.
        if let Err(error) = rustix::process::setpriority_process(None, LOWEST_PRIORITY) {
            log::debug!("the priority stays as it is: error={error}");
        }
    }

    fn visit(&self, each: &mut dyn FnMut(&Transfer)) {
        self.slots.iter().flatten().for_each(|transfer| each(transfer));
    }

    fn nr_in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.instant.len()
    }

    fn now_ns(&self) -> u64 {
        crate::clock::now_ns()
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        // The kernel may still write into what the transfers own: it is not freed before the kernel is done with it.
        while self.nr_in_flight() != 0 {
            if self.wait(None, Wanted::ONE).is_err() {
                for slot in &mut self.slots {
                    std::mem::forget(slot.take());
                }
                return;
            }
            while let Some(event) = self.next_event() {
                if let Event::Done(mut transfer, _) = event
                    && let Some((request, ..)) = transfer.end(crate::request::Status::IoErr)
                {
                    let _ = request.into_head();
                }
            }
        }
        self.files.close(&self.ring);
        self.buffers.close(&self.ring);
    }
}

#[cfg(test)]
mod tests;
