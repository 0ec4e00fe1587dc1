//! The world of the worker: a disk in memory, and a guest that goes on whenever the worker waits.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use polypath::engine::{Engine, Event, Wanted};
use polypath::gather::IoVec;
use polypath::transfer::{Action, Transfer};
use polypath::worker::Command;

use super::world::World;
use crate::input::Input;

/// Waits after which the worker is taken to be stuck.
const WAITS_MAX: u32 = 20_000;

/// Errors that a path may give.
const ERRNOS: [i32; 10] = [
    libc::EIO,
    libc::EAGAIN,
    libc::EINTR,
    libc::EOPNOTSUPP,
    libc::ENOSPC,
    libc::EINVAL,
    libc::ETIMEDOUT,
    libc::ENODATA,
    libc::ENODEV,
    libc::EROFS,
];

pub struct TestEngine<'a> {
    pub world: Rc<RefCell<World>>,
    pub input: Input<'a>,
    commands: mpsc::Sender<Command>,
    under_way: VecDeque<Box<Transfer>>,
    events: VecDeque<Event>,
    nr_done: usize,
    nr_waits: u32,
    stop_sent: bool,
    now_ns: Cell<u64>,
}

impl<'a> TestEngine<'a> {
    pub fn new(world: Rc<RefCell<World>>, input: Input<'a>, commands: mpsc::Sender<Command>) -> Self {
        Self {
            world,
            input,
            commands,
            under_way: VecDeque::new(),
            events: VecDeque::new(),
            nr_done: 0,
            nr_waits: 0,
            stop_sent: false,
            now_ns: Cell::new(1),
        }
    }

    /// One transfer comes back.
    fn answer(&mut self) {
        let at = if self.input.rarely(4) { self.input.index(self.under_way.len()) } else { 0 };
        let Some(mut transfer) = self.under_way.remove(at) else { return };
        let result = match self.input.rarely(12) {
            true => {
                self.world.borrow_mut().nr_faults += 1;
                match self.input.below(3) {
                    0 => self.carry_out(&mut transfer, true),
                    _ => -self.input.pick(&ERRNOS),
                }
            }
            false => self.carry_out(&mut transfer, false),
        };
        self.nr_done += 1;
        self.events.push_back(Event::Done(transfer, result));
    }

    fn carry_out(&mut self, transfer: &mut Transfer, is_short: bool) -> i32 {
        let align = transfer.alignment();
        let mut world = self.world.borrow_mut();
        let check = |iovecs: &[IoVec], offset: u64, disk: &[u8]| {
            let len: usize = iovecs.iter().map(|vec| vec.iov_len).sum();
            let offset = usize::try_from(offset).expect("offset");
            assert!(offset + len <= disk.len(), "I/O beyond the end of the disk: {offset} + {len}");
            assert!(iovecs.len() <= 1024, "more iovecs than a call takes");
            assert_eq!((offset | len) % align.block_bytes, 0, "not whole blocks: {offset} + {len}");
            for vec in iovecs {
                let aligned = vec.iov_base.addr() % align.mem_bytes == 0;
                assert!(
                    aligned,
                    "a buffer is not aligned: {align:?} {offset} {iovecs:?} {:?}",
                    world.nr_faults
                );
            }
            (offset, len)
        };
        let moved = match transfer.action() {
            Action::Read { iovecs, offset } => {
                let (mut at, len) = check(iovecs, offset, &world.disk);
                let mut left = if is_short { self.input.index(len + 1) } else { len };
                let moved = left;
                for vec in iovecs {
                    let here = left.min(vec.iov_len);
                    let from = &world.disk[at..at + here];
                    // SAFETY: the worker says that the buffer is there, which is what is tried out.
                    unsafe { from.as_ptr().copy_to(vec.iov_base.cast(), here) };
                    (at, left) = (at + here, left - here);
                }
                moved
            }
            Action::Write { iovecs, offset } => {
                let (mut at, len) = check(iovecs, offset, &world.disk);
                let mut left = if is_short { self.input.index(len + 1) } else { len };
                let moved = left;
                for vec in iovecs {
                    let here = left.min(vec.iov_len);
                    let to = &mut world.disk[at..at + here];
                    // SAFETY: as above.
                    unsafe { to.as_mut_ptr().copy_from(vec.iov_base.cast(), here) };
                    (at, left) = (at + here, left - here);
                }
                moved
            }
            Action::Sync => 0,
            Action::Allocate { offset, len, .. } => {
                let (start, len) = (offset as usize, len as usize);
                assert!(start + len <= world.disk.len(), "zeroing beyond the end of the disk");
                world.disk[start..start + len].fill(0);
                0
            }
        };
        i32::try_from(moved).expect("small")
    }
}

impl Engine for TestEngine<'_> {
    fn start(&mut self, transfer: Box<Transfer>) {
        let nr = transfer.members().count() + self.nr_in_flight();
        assert!(
            nr <= usize::from(self.world.borrow().driver.ring.size),
            "more in flight than the ring holds"
        );
        self.under_way.push_back(transfer);
    }

    fn wait(&mut self, timeout: Option<Duration>, _wanted: Wanted) -> io::Result<()> {
        self.nr_waits += 1;
        assert!(self.nr_waits < WAITS_MAX, "the worker is stuck");
        let now_ns = self.now_ns.get() + 1000;
        self.now_ns.set(now_ns);
        if !self.events.is_empty() {
            return Ok(());
        }
        if !self.under_way.is_empty() {
            for _ in 0..1 + self.input.index(self.under_way.len()) {
                self.answer();
            }
            let early = self.input.rarely(6);
            if early && self.world.borrow_mut().go_on(&mut self.input, false) {
                self.events.push_back(Event::Kick);
            }
            return Ok(());
        }
        // Nothing is under way: what is delayed has its time, and the guest its turn.
        let delay_ns = timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).expect("short"));
        self.now_ns.set(now_ns + delay_ns);
        if self.world.borrow_mut().is_owed(timeout) {
            return Ok(());
        }
        if self.world.borrow_mut().go_on(&mut self.input, true) {
            self.events.push_back(Event::Kick);
        } else if !self.stop_sent {
            self.stop_sent = true;
            let keeps = self.input.rarely(4);
            self.commands.send(Command::Stop(keeps)).expect("the worker listens");
            self.events.push_back(Event::Wake);
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn has_event(&mut self) -> bool {
        !self.events.is_empty()
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if matches!(event, Some(Event::Done(..))) {
            self.nr_done -= 1;
        }
        event
    }

    fn watch_kick(&mut self, _kick: Option<OwnedFd>) {}

    fn note_new_view(&mut self) {}

    fn visit(&self, each: &mut dyn FnMut(&Transfer)) {
        self.under_way.iter().for_each(|transfer| each(transfer));
    }

    fn nr_in_flight(&self) -> usize {
        self.under_way.len() + self.nr_done
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.set(self.now_ns.get() + 500);
        self.now_ns.get()
    }
}
