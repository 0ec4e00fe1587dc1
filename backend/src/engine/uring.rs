//! io_uring: the only place where the kernel is handed addresses.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode, squeue};

use super::at_once::{self, moved_by_null};
use super::buffers::{self, Buffers};
use super::files::Files;
use super::{Engine, Event, GATHER_TIME, Wanted, restrict, ring};
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

/// An io_uring of one worker thread.
pub struct UringEngine {
    ring: IoUring,
    /// Whether a thread of the kernel's takes what is queued, at any time: `ring.rs` says what that means for the others.
    is_polled: bool,
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
    /// it has I/O under way. With `sqpoll_idle_ms` above 0 a thread of the kernel's sends, if there can be one, and sleeps
    /// when there was nothing for so long. To be made by the thread that uses it.
    pub fn new(
        nr_slots: u32,
        wake: OwnedFd,
        fence: Option<Arc<Fence>>,
        sqpoll_idle_ms: u32,
    ) -> io::Result<Self> {
        let is_restricted = sandbox::is_on();
        let ring = ring::build(nr_slots, is_restricted, sqpoll_idle_ms)?;
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
        let is_polled = ring.params().is_setup_sqpoll();
        let can_gather = is_polled || ring.params().is_feature_min_timeout();
        let mut slots = Vec::new();
        slots.resize_with(nr_slots as usize, || None);
        Ok(Self {
            ring,
            is_polled,
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
        ring::build(nr_slots, false, 0).map(drop)
    }

    /// Whether they can be had with a thread of the kernel's that sends.
    pub fn probe_polled(nr_slots: u32, sqpoll_idle_ms: u32) -> io::Result<()> {
        ring::build_polled(nr_slots, false, sqpoll_idle_ms).map(drop)
    }

    /// Says in the log, once, that there is no such thread where one was asked for.
    pub fn say_that_calls_send(why: &io::Error) {
        ring::say_that_calls_send(why);
    }

    /// # Safety
    /// Everything that `entry` points to stays valid until its completion was taken from the ring.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's promise is this call's condition.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Full.
            self.hand_over();
        }
    }

    /// Has the kernel take what is queued. What it does not take now (EAGAIN, EBUSY, EINTR), and what its thread has not
    /// come to, it takes a moment later: whoever needs it gone looks, and asks again.
    fn hand_over(&mut self) {
        let sent = self.ring.submit();
        if let Err(error) = &sent {
            log::debug!("submit: {error}");
        }
        if sent.is_err() || self.is_polled {
            std::thread::yield_now();
        }
    }

    /// Whether it takes a call to send what is queued.
    fn must_send(&mut self) -> bool {
        let queue = self.ring.submission();
        // The kernel's thread takes it by itself, unless it sleeps. It looks at the queue after it has said that it will,
        // and `need_wakeup` at what it says after the entries are there.
        !queue.is_empty() && (!self.is_polled || queue.need_wakeup())
    }

    /// Sends what is queued, takes in what has come back, and waits for so many events as `args` say, if there are any.
    fn enter(&mut self, nr_wanted: u32, args: Option<&SubmitArgs<'_, '_>>) -> io::Result<()> {
        let must_send = self.must_send();
        let mut flags = EnterFlags::GETEVENTS;
        flags.set(EnterFlags::SQ_WAKEUP, must_send && self.is_polled);
        flags.set(EnterFlags::EXT_ARG, args.is_some());
        // How many there are is nothing that the kernel's thread is told.
        let nr = if self.is_polled { 0 } else { self.ring.submission().len() };
        let nr = u32::try_from(nr).unwrap_or(u32::MAX);
        // SAFETY: the flags say what the argument is, if there is one; it lives as long as the call; and everything that
        // the entries point to is in its slot (see `start`).
        match unsafe { self.ring.submitter().enter(nr, nr_wanted, flags.bits(), args) } {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // Interrupted or timed out; or too many completions wait to be taken, which comes next.
                Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY) => Ok(()),
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
        let may_block = limits.may_block;
        let mut flags = squeue::Flags::empty();
        flags.set(squeue::Flags::ASYNC, may_block);
        let place = self.files.place(&self.ring, lane).and_then(|place| i32::try_from(place).ok());
        flags.set(squeue::Flags::FIXED_FILE, place.is_some());
        let fd = Fd(place.unwrap_or_else(|| lane.path().raw_fd()));
        // Chains are bounded (CHAIN_LEN_MAX), and a count above the kernel's own bound comes back as an error.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let len = |v: &IoVec| u32::try_from(v.iov_len).unwrap_or(u32::MAX);
        // Such a thread looks for a buffer later, when another may be in its place.
        let buffer = |iovecs: &[IoVec]| if may_block { None } else { self.buffers.place(iovecs) };
        let entry = match transfer.action() {
            // One piece needs no list for the kernel to copy.
            Action::Read { iovecs: [one], offset } => {
                let ptr = one.iov_base.cast();
                match buffer(std::slice::from_ref(one)) {
                    Some(buffer) => opcode::ReadFixed::new(fd, ptr, len(one), buffer).offset(offset).build(),
                    None => opcode::Read::new(fd, ptr, len(one)).offset(offset).build(),
                }
            }
            Action::Write { iovecs: [one], offset } => {
                let ptr = one.iov_base.cast();
                match buffer(std::slice::from_ref(one)) {
                    Some(buffer) => opcode::WriteFixed::new(fd, ptr, len(one), buffer).offset(offset).build(),
                    None => opcode::Write::new(fd, ptr, len(one)).offset(offset).build(),
                }
            }
            Action::Read { iovecs, offset } => {
                let entry =
                    opcode::Readv::new(fd, iovecs.as_ptr(), count(iovecs.len())).offset(offset).build();
                buffers::in_place(entry, buffers::READV_FIXED, buffer(iovecs))
            }
            Action::Write { iovecs, offset } => {
                let entry =
                    opcode::Writev::new(fd, iovecs.as_ptr(), count(iovecs.len())).offset(offset).build();
                buffers::in_place(entry, buffers::WRITEV_FIXED, buffer(iovecs))
            }
            Action::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Action::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        entry.flags(flags)
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
            let has_more = self.ring.submission().taskrun() || self.ring.submission().cq_overflow();
            return if has_more || self.must_send() { self.enter(0, None) } else { Ok(()) };
        }
        let gathers = wanted.nr > 1 && self.can_gather;
        let nr = if gathers { wanted.nr } else { 1 };
        // When the time for more is over, the kernel lowers the number of events for rings whose worker runs their work
        // (`io_cqring_min_timer_wakeup`). For others the wait ends then, which holds whatever the kernel does.
        let is_short = wanted.within <= GATHER_TIME && !self.is_polled;
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
        self.enter(nr, Some(&args))
    }

    fn submit(&mut self) -> io::Result<()> {
        self.arm_watches();
        self.files.let_go(&self.ring)?;
        if self.must_send() { self.enter(0, None) } else { Ok(()) }
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
                self.enter(0, None).ok()?;
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
            self.hand_over();
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
