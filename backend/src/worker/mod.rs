//! One worker per virtqueue: pops, dispatches, completes and answers, all on one thread.
//!
//! Each turn of its loop handles everything that has happened, takes everything that is available, and calls
//! the guest at most once; what is to be sent goes out with the call that waits. Where much is under way at once, answers
//! are shown and requests sent in parts, so that guest and path have something to do meanwhile.

mod batch;
mod command;
mod complete;
mod hold;
mod poll;
mod send;
mod take;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use polypath_paths::MapState;
use polypath_selector::NewError;

use batch::Batch;
pub use command::{Command, WorkerHandle};
use poll::{GLANCE_NS, Glance, Window};
use take::IdleKicks;

use crate::disk::Disk;
use crate::dispatch::Dispatcher;
use crate::engine::{Engine, Event, Wanted};
use crate::fence::Fence;
use crate::gather::{self, IoVec};
use crate::memory::MapLease;
use crate::merge::MergeQueue;
use crate::notifier::Notifier;
use crate::stats::QueueStats;
use crate::transfer::Transfer;
use crate::vring::{Descriptor, Vring};

/// How often a ring without a kick descriptor is looked at, while its guest polls as well.
const POLLED_RING_INTERVAL: Duration = Duration::from_micros(100);

/// Most requests at a time of a load so shallow that its next request is looked for.
const POLLED_DEPTH_MAX: usize = 2;

/// Answers after which the guest is shown them within a turn.
const SHOWN_AT_ONCE: u32 = 32;

/// Most events of one turn: more than a ring can bring, and not without end.
const EVENTS_AT_ONCE: u32 = 4096;

/// How often a worker looks how many others are busy, in ns.
const SHARE_INTERVAL_NS: u64 = 1_000_000;

/// How long a request that every active path has refused waits before it asks them again, while a path is missing.
const REFUSED_WAIT_NS: u64 = 500_000_000;

/// For how long it goes on asking, unless it would wait for less if there were no path at all: what is missing is more likely to be what the request needs than the request to be at fault.
const REFUSED_NS_MAX: u64 = 5_000_000_000;

/// What a worker starts with.
#[derive(Debug)]
pub struct WorkerConfig {
    /// Index of the virtqueue.
    pub index: usize,
    /// The ring.
    pub vring: Vring,
    /// Guest memory.
    pub map: MapLease,
    /// The guest's kicks; None: it gives none, the ring is to be polled.
    pub kick: Option<OwnedFd>,
    /// Where to call the guest; None: it polls.
    pub call: Option<OwnedFd>,
    /// Where to report a broken ring.
    pub error: Option<OwnedFd>,
    /// Whether the ring may be served at once.
    pub enabled: bool,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Features that the front-end accepted.
    pub features: u64,
    /// The lock that tells the next process of I/O under way.
    pub fence: Option<Arc<Fence>>,
    /// How many workers have ever run.
    pub nr_workers: Arc<AtomicUsize>,
}

/// A worker.
#[derive(Debug)]
pub struct Worker<E> {
    config: Config,
    engine: E,
    commands: mpsc::Receiver<Command>,
    vring: Vring,
    map: Rc<MapLease>,
    /// Whether the ring lies in guest memory.
    in_memory: bool,
    enabled: bool,
    stopping: bool,
    /// Whether what waits when the ring stops stays in flight, for the next start.
    keeps_waiting: bool,
    dispatcher: Dispatcher,
    /// Requests that have not been sent yet, and may merge.
    queue: MergeQueue<Box<Transfer>>,
    /// Room for the iovecs of merged requests, to be used again.
    rooms: Vec<Vec<IoVec>>,
    /// The time at which this turn began, in ns.
    now_ns: u64,
    /// When to look again how many workers are busy.
    share_due_ns: u64,
    window: Window,
    glance: Glance,
    batch: Batch,
    /// Answers that the last sleep was for (0: there was none), and how long it took.
    nr_wanted: u32,
    slept_ns: u64,
    /// Answers that the last turn had.
    nr_done: u32,
    /// Whether the last turn left something that can be sent, and how much goes out at a time.
    has_more: bool,
    chunk: usize,
    /// Most requests that were there in one turn lately.
    depth: usize,
    /// Transfers without a request, to be used again.
    #[allow(clippy::vec_box, reason = "the boxes are what is kept: the engine takes them as they are")]
    pool: Vec<Box<Transfer>>,
    /// Transfers that wait for their time (in ns) to be sent again.
    delayed: Vec<(u64, Box<Transfer>)>,
    /// Transfers for which there is no path, in the order in which they are to go out.
    #[allow(clippy::vec_box, reason = "as above")]
    held: VecDeque<Box<Transfer>>,
    /// Writes that overlap one which has not come back from a failed path.
    #[allow(clippy::vec_box, reason = "as above")]
    blocked: Vec<Box<Transfer>>,
    /// When to look at the held ones again, in ns, even if nothing happens.
    held_until_ns: Option<u64>,
    /// How many held ones the others were last shown.
    nr_held_shown: u32,
    /// The map's state at the last look at what is held and blocked.
    waiting_epoch: u64,
    /// How often the control loop had asked at the last look at what is in flight.
    nr_looks: u64,
    chain: Vec<Descriptor>,
    /// Call the guest at the end of this turn, whatever it asked for.
    call_owed: bool,
    nr_guest_faults: u64,
    idle_kicks: IdleKicks,
    /// Requests in a row that were refused as they stood.
    nr_refused: u32,
    gives_way: bool,
}

#[derive(Debug)]
struct Config {
    index: usize,
    disk: Arc<Disk>,
    features: u64,
    nr_workers: Arc<AtomicUsize>,
    call: Option<Notifier>,
    error: Option<Notifier>,
    /// The ring has no kick descriptor.
    polled: bool,
}

impl<E: Engine> Worker<E> {
    /// Everything that the worker needs in steady state is allocated here.
    pub fn new(
        config: WorkerConfig,
        mut engine: E,
        commands: mpsc::Receiver<Command>,
    ) -> Result<Self, NewError> {
        let ring_size = config.vring.size();
        let size = usize::from(ring_size);
        config.nr_workers.fetch_max(config.index + 1, Ordering::Relaxed);
        let polled = config.kick.is_none();
        let tuning = *config.disk.tuning();
        engine.watch_kick(config.kick);
        engine.use_memory(config.map.map());
        let dispatcher = Dispatcher::new(config.disk.table(), config.index, tuning.path_depth)?;
        // The guest may come from another host, where it wrote what it has not flushed yet.
        dispatcher.note_foreign_write();
        Ok(Self {
            now_ns: engine.now_ns(),
            engine,
            commands,
            vring: config.vring,
            map: Rc::new(config.map),
            in_memory: true,
            enabled: config.enabled,
            stopping: false,
            keeps_waiting: false,
            dispatcher,
            share_due_ns: 0,
            queue: MergeQueue::new(ring_size, tuning.merge),
            rooms: Vec::with_capacity(size),
            window: Window::new(tuning.poll_ns),
            glance: Glance::default(),
            batch: Batch::new(),
            nr_wanted: 0,
            slept_ns: 0,
            nr_done: 0,
            has_more: false,
            chunk: 0,
            depth: 0,
            pool: Vec::with_capacity(size),
            delayed: Vec::with_capacity(size),
            held: VecDeque::with_capacity(size),
            blocked: Vec::with_capacity(size),
            held_until_ns: None,
            nr_held_shown: 0,
            waiting_epoch: 0,
            nr_looks: 0,
            chain: Vec::with_capacity(size),
            // Used entries may have been published for which the guest was never called.
            call_owed: true,
            nr_guest_faults: 0,
            idle_kicks: IdleKicks::default(),
            nr_refused: 0,
            gives_way: false,
            config: Config {
                index: config.index,
                disk: config.disk,
                features: config.features,
                nr_workers: config.nr_workers,
                call: config.call.map(Notifier::new),
                error: config.error.map(Notifier::new),
                polled,
            },
        })
    }

    /// Serves the ring until it is told to stop. Gives the index at which the next start goes on.
    pub fn run(mut self) -> u16 {
        loop {
            if let Err(error) = self.wait() {
                // Without its ring a worker can neither go on nor give the guest's requests back.
                log::error!("io_uring is broken: queue={} error={error}", self.config.index);
                std::process::abort();
            }
            self.turn();
            if self.stopping && self.engine.nr_in_flight() == 0 && self.nr_waiting() == 0 {
                return self.vring.next_avail();
            }
        }
    }

    /// Sends what is queued, and waits until something has happened.
    fn wait(&mut self) -> io::Result<()> {
        if self.dispatcher.take_new_view() {
            self.engine.note_new_view();
        }
        if self.has_more {
            return self.engine.wait(Some(Duration::ZERO), Wanted::ONE);
        }
        // While something is under way, the path's answer wakes the worker; the core is better left to what makes it. And
        // where requests come in numbers, a wake is shared by many, and looking early only makes the next batch smaller.
        let is_idle = self.engine.nr_in_flight() == 0 && self.depth <= POLLED_DEPTH_MAX;
        if is_idle && self.look_for_more()? {
            return Ok(());
        }
        if self.must_look_again() {
            return self.engine.wait(Some(Duration::ZERO), Wanted::ONE);
        }
        let timeout = self.timeout();
        let begun_ns = self.engine.now_ns();
        self.stats().nr_sleeps.add_one();
        let wanted = self.batch.wanted(self.engine.nr_in_flight());
        self.nr_wanted = wanted.nr;
        self.engine.wait(timeout, wanted)?;
        self.slept_ns = self.engine.now_ns().saturating_sub(begun_ns);
        if is_idle {
            self.window.slept(self.slept_ns);
        }
        Ok(())
    }

    /// Looks for work for as long as it may be worth it. True if there is some.
    fn look_for_more(&mut self) -> io::Result<bool> {
        if self.nr_done == 0 {
            return Ok(self.window.ns() != 0 && self.poll(self.window.ns())?);
        }
        let glance_ns = if self.glance.is_due() { GLANCE_NS } else { 0 };
        let window_ns = self.window.ns().max(glance_ns);
        let found = window_ns != 0 && self.poll(window_ns)?;
        self.glance.note(found);
        Ok(found)
    }

    /// Looks for work for so long. True if there is some.
    fn poll(&mut self, window_ns: u64) -> io::Result<bool> {
        self.engine.submit()?;
        let mut until_ns = self.engine.now_ns() + window_ns;
        if let Some(timeout) = self.timeout() {
            until_ns = until_ns.min(self.now_ns + u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        }
        let found = loop {
            if self.engine.has_event() || (self.is_served() && self.vring.has_next(self.map.map())) {
                break true;
            }
            if self.engine.now_ns() >= until_ns {
                break false;
            }
            std::hint::spin_loop();
        };
        let stats = self.stats();
        if found {
            stats.nr_polls_found.add_one()
        } else {
            stats.nr_polls_missed.add_one()
        }
        Ok(found)
    }

    /// Whether sleeping would miss something. Asks for kicks if not.
    fn must_look_again(&mut self) -> bool {
        if self.is_served() && self.vring.arm_kicks(self.map.map()) {
            return true;
        }
        // What is delayed has its own time: it does not look at the paths' state.
        let is_waiting = !self.held.is_empty() || !self.blocked.is_empty();
        is_waiting && self.map_state().epoch() != self.waiting_epoch
    }

    fn stats(&self) -> &QueueStats {
        self.config.disk.stats().of(self.config.index)
    }

    /// How long nothing has to be done.
    fn timeout(&self) -> Option<Duration> {
        let delayed = self.delayed.iter().map(|(due_ns, _)| *due_ns);
        let due = delayed.chain(self.held_until_ns).chain(self.queue.due_ns()).min();
        let delay = due.map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(self.engine.now_ns())));
        let poll = (self.config.polled && self.is_served()).then_some(POLLED_RING_INTERVAL);
        match (delay, poll) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn nr_waiting(&self) -> usize {
        self.delayed.len() + self.held.len() + self.blocked.len() + self.queue.len()
    }

    fn map_state(&self) -> &Arc<MapState> {
        self.config.disk.map()
    }

    fn is_served(&self) -> bool {
        self.enabled
            && self.in_memory
            && !self.stopping
            && !self.vring.is_broken()
            && self.config.disk.gate().is_open()
            && !self.is_crowded()
    }

    /// Whether what is under way is to end before more is taken: it is bounced, and too much is.
    fn is_crowded(&self) -> bool {
        gather::is_crowded() && self.engine.nr_in_flight() + self.nr_waiting() != 0
    }

    /// Does everything that can be done now.
    fn turn(&mut self) {
        self.now_ns = self.engine.now_ns();
        self.stats().nr_turns.add_one();
        let nr_workers = self.config.nr_workers.load(Ordering::Relaxed);
        self.dispatcher.begin_batch(nr_workers);
        self.share(nr_workers);
        let (mut woken, mut kicked) = (false, false);
        let mut nr_events = 0;
        self.nr_done = 0;
        // Kicks may come as fast as they are taken: what comes behind so many is the next turn's.
        while nr_events < EVENTS_AT_ONCE
            && let Some(event) = self.engine.next_event()
        {
            nr_events += 1;
            match event {
                Event::Done(transfer, result) => {
                    self.nr_done += 1;
                    self.completed(transfer, result);
                    if self.nr_done.is_multiple_of(SHOWN_AT_ONCE) {
                        self.show();
                    }
                }
                Event::Kick => kicked = true,
                Event::Wake => {
                    woken = true;
                    self.take_commands();
                    self.guard_stuck_writes();
                }
            }
        }
        if self.nr_wanted != 0 {
            self.batch.came(nr_events, self.nr_wanted, self.slept_ns);
            self.nr_wanted = 0;
        }
        if woken {
            self.look();
        }
        self.send_delayed();
        self.send_waiting();
        self.show();
        if self.is_served() {
            let next = self.vring.next_avail();
            self.take_requests();
            let has_worked = self.vring.next_avail() != next || self.nr_done != 0;
            if self.idle_kicks.note(kicked, has_worked) {
                self.give_way("kicks for nothing");
            }
        }
        self.send_queued();
        let depth = self.nr_done as usize + self.engine.nr_in_flight();
        self.depth = depth.max(self.depth - self.depth.div_ceil(8));
        if self.nr_held() != self.nr_held_shown {
            self.show_held();
        }
        self.show();
        self.stats().nr_in_flight.set(self.vring.nr_in_flight().into());
        if self.call_owed {
            self.call_owed = false;
            self.call();
        }
    }

    /// Looks now and then how many workers have something to do: a device has room for so many I/Os of all of them.
    fn share(&mut self, nr_workers: usize) {
        if nr_workers < 2 || self.now_ns < self.share_due_ns {
            return;
        }
        self.share_due_ns = self.now_ns + SHARE_INTERVAL_NS;
        let stats = self.config.disk.stats();
        let is_busy = |index: &usize| *index == self.config.index || stats.of(*index).nr_in_flight.get() != 0;
        let nr_busy = (0..nr_workers).filter(is_busy).count();
        self.dispatcher.share_with(u32::try_from(nr_busy).unwrap_or(u32::MAX));
    }

    /// Lets the guest see what is answered: it can go on while the turn does.
    fn show(&mut self) {
        if self.in_memory && self.vring.publish(self.map.map()) {
            self.call_owed = true;
        }
    }

    fn call(&self) {
        if let Some(call) = &self.config.call {
            self.stats().nr_calls.add_one();
            call.notify();
        }
    }

    fn take_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Enable(enabled, done) => {
                    self.enabled = enabled;
                    let _ = done.send(());
                }
                Command::SetCall(call) => {
                    self.config.call = call.map(Notifier::new);
                    self.call_owed = true;
                }
                Command::SetError(error) => self.config.error = error.map(Notifier::new),
                Command::SetMemory(map, at) => {
                    self.map = Rc::new(map);
                    self.engine.use_memory(self.map.map());
                    self.in_memory = at.is_some();
                    if let Some(at) = at {
                        self.vring.move_to(at);
                    }
                    self.remap_waiting();
                }
                Command::SetLog(log, done) => {
                    self.vring.set_log(log);
                    let _ = done.send(());
                }
                Command::Stop(keeps) => (self.stopping, self.keeps_waiting) = (true, keeps),
            }
        }
    }
}
