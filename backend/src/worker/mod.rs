//! One worker per virtqueue: pops, dispatches, completes and answers, all on one thread.
//!
//! Each turn of its loop handles everything that has happened, takes everything that is available, publishes the used
//! ring once and calls the guest at most once; what is to be sent goes out with the call that waits.

mod batch;
mod command;
mod poll;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use polypath_paths::stats::IoKind;
use polypath_paths::{Held, MapState, WithoutPath};
use polypath_selector::{NewError, Outcome};
use vm_memory::Bytes as _;

use batch::Batch;
pub use command::{Command, WorkerHandle};
use poll::Window;

use crate::disk::Disk;
use crate::dispatch::{Choice, Dispatcher};
use crate::engine::{Engine, Event};
use crate::gather::IoVec;
use crate::memory::{GuestAccess as _, MapLease};
use crate::merge::{MergeQueue, RunId};
use crate::request::{self, Operation, Request, Segment, Status};
use crate::stats::QueueStats;
use crate::transfer::{Next, Transfer};
use crate::vring::{Descriptor, Pop, Vring};

/// How often a ring without a kick descriptor is looked at, while its guest polls as well.
const POLLED_RING_INTERVAL: Duration = Duration::from_micros(100);

/// Most answers in one turn of a load so shallow that its next request is looked for.
const POLLED_DEPTH_MAX: u32 = 2;

/// How long a request that every active path has refused waits before it asks them again, while a path is missing.
const REFUSED_WAIT_NS: u64 = 500_000_000;

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
    window: Window,
    batch: Batch,
    /// Answers that the last sleep was for (0: there was none), and how long it took.
    nr_wanted: u32,
    slept_ns: u64,
    /// Answers that the last turn had.
    nr_done: u32,
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
    nr_held_shown: usize,
    /// The map's state at the last look at what is held and blocked.
    waiting_epoch: u64,
    /// How often the control loop had asked at the last look at what is in flight.
    nr_looks: u64,
    chain: Vec<Descriptor>,
    /// Call the guest at the end of this turn, whatever it asked for.
    call_owed: bool,
    nr_guest_faults: u64,
}

#[derive(Debug)]
struct Config {
    index: usize,
    disk: Arc<Disk>,
    features: u64,
    nr_workers: Arc<AtomicUsize>,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
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
            dispatcher: Dispatcher::new(config.disk.table(), config.index, tuning.path_depth)?,
            queue: MergeQueue::new(ring_size, tuning.merge),
            rooms: Vec::with_capacity(size),
            window: Window::new(tuning.poll_ns),
            batch: Batch::new(),
            nr_wanted: 0,
            slept_ns: 0,
            nr_done: 0,
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
            config: Config {
                index: config.index,
                disk: config.disk,
                features: config.features,
                nr_workers: config.nr_workers,
                call: config.call,
                error: config.error,
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
        // While something is under way, the path's answer wakes the worker; the core is better left to what makes it. And
        // where answers come in numbers, a wake is shared by many, and looking early only makes the next batch smaller.
        let is_idle = self.engine.nr_in_flight() == 0 && self.nr_done <= POLLED_DEPTH_MAX;
        if is_idle && self.window.ns() != 0 && self.poll()? {
            return Ok(());
        }
        if self.must_look_again() {
            return self.engine.wait(Some(Duration::ZERO), 1);
        }
        let timeout = self.timeout();
        let begun_ns = self.engine.now_ns();
        self.stats().nr_sleeps.add_one();
        self.nr_wanted = self.batch.wanted(self.engine.nr_in_flight());
        self.engine.wait(timeout, self.nr_wanted)?;
        self.slept_ns = self.engine.now_ns().saturating_sub(begun_ns);
        if is_idle {
            self.window.slept(self.slept_ns);
        }
        Ok(())
    }

    /// Looks for work for a while. True if there is some.
    fn poll(&mut self) -> io::Result<bool> {
        self.engine.submit()?;
        let mut until_ns = self.engine.now_ns() + self.window.ns();
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
        self.enabled && self.in_memory && !self.stopping && !self.vring.is_broken()
    }

    /// Does everything that can be done now.
    fn turn(&mut self) {
        self.now_ns = self.engine.now_ns();
        self.stats().nr_turns.add_one();
        let nr_workers = self.config.nr_workers.load(Ordering::Relaxed);
        self.dispatcher.begin_batch(nr_workers);
        let mut woken = false;
        let mut nr_events = 0;
        self.nr_done = 0;
        while let Some(event) = self.engine.next_event() {
            nr_events += 1;
            match event {
                Event::Done(transfer, result) => {
                    self.nr_done += 1;
                    self.completed(transfer, result);
                }
                Event::Kick => {}
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
        if self.is_served() {
            self.take_requests();
        }
        self.send_queued();
        if self.held.len() != self.nr_held_shown {
            self.nr_held_shown = self.held.len();
            self.show_held();
        }
        if (self.in_memory && self.vring.publish(self.map.map())) || self.call_owed {
            self.call_owed = false;
            self.call();
        }
    }

    fn call(&self) {
        if let Some(call) = &self.config.call {
            self.stats().nr_calls.add_one();
            // An eventfd takes this at once; a full one has calls pending that nobody reads.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
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
                    self.config.call = call;
                    self.call_owed = true;
                }
                Command::SetError(error) => self.config.error = error,
                Command::SetMemory(map, at) => {
                    self.map = Rc::new(map);
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

    /// What waits here must not keep an old map: its end is waited for.
    fn remap_waiting(&mut self) {
        let mut lost = Vec::new();
        let map = &self.map;
        let mut keep = |transfer: &mut Box<Transfer>| {
            let is_there = transfer.remap(map).is_ok();
            if !is_there {
                lost.push(std::mem::take(transfer));
            }
            is_there
        };
        self.held.retain_mut(&mut keep);
        self.blocked.retain_mut(&mut keep);
        self.delayed.retain_mut(|(_, transfer)| keep(transfer));
        for transfer in lost {
            self.finish(transfer, Status::IoErr);
        }
        for mut transfer in self.queue.drain() {
            match transfer.remap(&self.map) {
                Ok(()) => self.enqueue(transfer),
                Err(_) => self.finish(transfer, Status::IoErr),
            }
        }
    }

    /// Takes what is available, at most a ring's worth.
    fn take_requests(&mut self) {
        for nr_taken in 0..self.vring.size() {
            match self.vring.pop(self.map.map()) {
                Pop::Empty => return,
                Pop::Head(head) => {
                    if nr_taken == 0 {
                        self.vring.suppress_kicks(self.map.map());
                    }
                    self.take(head);
                }
                Pop::BadHead(head) => self.guest_fault(format_args!("head {head} cannot be made available")),
                Pop::Broken => {
                    self.guest_fault(format_args!(
                        "the available index is impossible; the queue is left alone"
                    ));
                    if let Some(error) = &self.config.error {
                        let _ = rustix::io::write(error, &1u64.to_ne_bytes());
                    }
                }
            }
        }
    }

    /// Counts a broken rule; only the first is logged, so that a guest cannot fill the log.
    fn guest_fault(&mut self, what: std::fmt::Arguments<'_>) {
        self.nr_guest_faults += 1;
        if self.nr_guest_faults == 1 {
            log::warn!(
                "guest broke a rule (later ones are only counted): queue={} rule={what}",
                self.config.index
            );
        }
    }

    fn take(&mut self, head: u16) {
        let mut transfer = self.pool.pop().unwrap_or_default();
        if let Err(error) = self.vring.read_chain(self.map.map(), head, &mut self.chain) {
            self.guest_fault(format_args!("{error}"));
            self.pool.push(transfer);
            return self.answer(request::unreadable(head), 0, Status::IoErr);
        }
        let limits = self.config.disk.limits();
        let (request, status) =
            request::parse(self.map.map(), head, &self.chain, &limits, &mut transfer.buffers);
        if let Some(status) = status {
            self.pool.push(transfer);
            return self.answer(request, 0, status);
        }
        if request.operation == Operation::GetId {
            let written = self.write_id(&transfer.buffers.segments);
            self.pool.push(transfer);
            return match written {
                Some(nr_bytes) => self.answer(request, nr_bytes, Status::Ok),
                None => self.answer(request, 0, Status::IoErr),
            };
        }
        let write_through = self.config.disk.is_write_through(self.config.features);
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.begun_ns = self.now_ns;
        match transfer.begin(request, &self.map, &snapshot, write_through, self.config.index) {
            Err(_) => self.finish(transfer, Status::IoErr),
            Ok(()) if transfer.is_empty() => self.finish(transfer, Status::Ok),
            Ok(()) => self.enqueue(transfer),
        }
    }

    /// Lets a request wait where it can merge; what cannot merge goes out.
    fn enqueue(&mut self, transfer: Box<Transfer>) {
        match transfer.span() {
            Some(span) => self.queue.add(transfer, span, self.now_ns),
            None => {
                if transfer.is_flush() {
                    self.queue.seal();
                }
                self.dispatch(transfer);
            }
        }
    }

    /// Sends what waits, as far as the paths take it.
    fn send_queued(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        if self.stopping {
            self.queue.expire_all();
        } else {
            self.queue.expire(self.now_ns);
        }
        self.dispatcher.catch_up();
        while let Some((run, bytes, is_write)) = self.queue.first() {
            let choice = self.dispatcher.choose_open(bytes, is_write, self.now_ns);
            // While the ring stops nothing waits for room.
            if choice == Choice::Full && !self.stopping {
                return;
            }
            let Some(leader) = self.assemble(run) else { continue };
            match choice {
                Choice::Path(index) => {
                    if let Some(mut leader) = self.admit(leader) {
                        leader.set_path(index);
                        self.send(leader);
                    }
                }
                Choice::Full | Choice::Nowhere => self.dispatch(leader),
            }
        }
    }

    /// The disk's serial number, as far as the guest's buffer goes.
    fn write_id(&self, segments: &[Segment]) -> Option<u64> {
        let id = self.config.disk.id();
        let mut rest = &id[..];
        for segment in segments {
            let here = rest.len().min(usize::try_from(segment.len).unwrap_or(usize::MAX));
            let (part, left) = rest.split_at(here);
            self.map.map().write_slice(part, segment.addr).ok()?;
            rest = left;
        }
        Some((id.len() - rest.len()) as u64)
    }

    /// Makes one transfer of a run.
    fn assemble(&mut self, run: RunId) -> Option<Box<Transfer>> {
        let mut requests = self.queue.take(run);
        let mut leader = requests.next()?;
        if !requests.is_empty() {
            leader.lead(requests, self.rooms.pop().unwrap_or_default());
        }
        leader.rebase(self.dispatcher.snapshot());
        Some(leader)
    }

    /// Passes on what may be sent now. Its memory may be gone, or it would overtake a write that is stuck.
    fn admit(&mut self, mut transfer: Box<Transfer>) -> Option<Box<Transfer>> {
        // Memory may have changed while it was on a path, and it may have to wait now.
        if !transfer.is_in(&self.map) && transfer.remap(&self.map).is_err() {
            self.finish(transfer, Status::IoErr);
            return None;
        }
        if transfer.trouble.get().is_none()
            && let Some((start, end)) = transfer.changes()
            && self.map_state().must_wait(start, end)
        {
            if self.stopping {
                self.give_up(transfer);
            } else {
                self.land(&mut transfer);
                self.blocked.push(transfer);
            }
            return None;
        }
        Some(transfer)
    }

    /// Sends a transfer down the path that it needs, or that the selector chooses; or lets it wait.
    fn dispatch(&mut self, transfer: Box<Transfer>) {
        let Some(mut transfer) = self.admit(transfer) else { return };
        self.dispatcher.catch_up();
        transfer.rebase(self.dispatcher.snapshot());
        if transfer.is_flush() && transfer.is_empty() {
            // A flush that has nothing to do by the table of now.
            return self.finish(transfer, Status::Ok);
        }
        let path = match transfer.required_path() {
            Some(path) => Some(path),
            None => self.dispatcher.choose(&transfer, self.now_ns),
        };
        match path {
            Some(path) => {
                transfer.held_since_ns = 0;
                transfer.set_path(path);
                self.send(transfer);
            }
            None => self.without_path(transfer),
        }
    }

    /// No path is there, or every active one has refused this request.
    fn without_path(&mut self, mut transfer: Box<Transfer>) {
        let now_ns = self.now_ns;
        if transfer.tried() != 0 && self.dispatcher.has_active_path() {
            // Every active path says no. Each is probed for that; if they prove well and say no again, it is the
            // request. With a path missing, the probes get some time first.
            let is_missing = self.dispatcher.has_failed_path();
            if transfer.nr_rounds >= if is_missing { 2 } else { 1 } || self.stopping {
                return self.finish(transfer, Status::IoErr);
            }
            transfer.next_round();
            if is_missing {
                return self.delayed.push((now_ns + REFUSED_WAIT_NS, transfer));
            }
            return self.dispatch(transfer);
        }
        let verdict = self.map_state().without_path(now_ns, transfer.troubled_since_ns);
        match verdict {
            WithoutPath::Hold(until_ns) if !self.stopping => {
                if transfer.held_since_ns == 0 {
                    transfer.held_since_ns = now_ns;
                }
                self.held_until_ns = self.held_until_ns.into_iter().chain(until_ns).min();
                self.land(&mut transfer);
                self.held.push_back(transfer);
            }
            // Nothing may wait for a path while the ring stops.
            WithoutPath::Hold(_) => self.give_up(transfer),
            WithoutPath::Fail => self.finish(transfer, Status::IoErr),
        }
    }

    /// Looks again at what is held and blocked, in order, if there is a reason to.
    fn send_waiting(&mut self) {
        if self.held.is_empty() && self.blocked.is_empty() {
            return;
        }
        let epoch = self.map_state().epoch();
        let due = self.held_until_ns.is_some_and(|until_ns| until_ns <= self.now_ns);
        if epoch == self.waiting_epoch && !due && !self.stopping {
            return;
        }
        self.waiting_epoch = epoch;
        self.held_until_ns = None;
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        for _ in 0..self.held.len() {
            if let Some(mut transfer) = self.held.pop_front() {
                transfer.rebase(&snapshot);
                self.dispatch(transfer);
            }
        }
        for mut transfer in std::mem::take(&mut self.blocked) {
            transfer.rebase(&snapshot);
            self.dispatch(transfer);
        }
        self.show_held();
    }

    fn show_held(&self) {
        let held = Held {
            nr_requests: self.held.iter().map(|t| 1 + t.nr_members()).sum(),
            bytes: self.held.iter().map(|t| t.data_len()).sum(),
            oldest_ns: self.held.iter().map(|t| t.held_since_ns).min().unwrap_or(0),
        };
        self.map_state().show_held(self.config.index, held);
    }

    /// Writes that are out on a path that has failed: later ones must not overtake them.
    fn guard_stuck_writes(&self) {
        self.engine.visit(&mut |transfer| {
            if transfer.trouble.get().is_none()
                && transfer.path().is_some_and(|path| !path.is_active())
                && let Some((start, end)) = transfer.changes()
            {
                transfer.trouble.set(Some(self.map_state().begin_trouble(start, end)));
            }
        });
    }

    /// Tells the control loop, if it has asked, for how long the paths have owed their answers. What has come back by
    /// now is taken already, so a worker that was late itself blames no path.
    fn look(&mut self) {
        let nr_looks = self.map_state().nr_looks();
        if nr_looks != self.nr_looks {
            self.nr_looks = nr_looks;
            self.dispatcher.show_oldest(self.engine.now_ns(), |each| self.engine.visit(each));
            self.map_state().ring();
        }
    }

    fn send(&mut self, mut transfer: Box<Transfer>) {
        if transfer.flight.is_none()
            && let Some(span) = transfer.span()
        {
            transfer.flight = self.queue.fly(span);
        }
        self.dispatcher.start_io(&mut transfer, self.now_ns);
        self.engine.start(transfer);
    }

    /// The transfer is under way no more.
    fn land(&mut self, transfer: &mut Transfer) {
        if let Some(flight) = transfer.flight.take() {
            self.queue.land(flight);
        }
    }

    fn completed(&mut self, mut transfer: Box<Transfer>, result: i32) {
        let next = transfer.complete(result);
        let outcome = match next {
            Next::Elsewhere(_) => Outcome::PathError,
            _ if result >= 0 => Outcome::Success,
            _ => Outcome::TargetError,
        };
        if result >= 0 && transfer.changes().is_some() && !transfer.is_of(self.dispatcher.snapshot()) {
            // Its path may have left the table, and flushes go by the table.
            self.dispatcher.note_foreign_write();
        }
        self.dispatcher.end_io(&mut transfer, self.now_ns, outcome);
        match next {
            Next::Finished(status) => self.finish(transfer, status),
            Next::Again if transfer.is_flush() => self.go_on_flushing(transfer),
            Next::Again => {
                self.stats().nr_retries.add_one();
                self.send(transfer);
            }
            Next::Later(wait_ms) => {
                self.stats().nr_retries.add_one();
                let due_ns = self.now_ns + wait_ms * 1_000_000;
                self.delayed.push((due_ns, transfer));
            }
            Next::Elsewhere(errno) => self.fail_over(transfer, errno),
            Next::AskOthers(status) => {
                transfer.note_tried();
                // The table may have changed meanwhile, and a choice is a place in the one of now.
                let snapshot = Rc::clone(self.dispatcher.snapshot());
                transfer.rebase(&snapshot);
                match self.dispatcher.choose(&transfer, self.now_ns) {
                    Some(path) => {
                        transfer.set_path(path);
                        self.send(transfer);
                    }
                    None => self.finish(transfer, status),
                }
            }
        }
    }

    /// A flush has a path more to visit, by the table of now: one that was removed meanwhile is none of them.
    fn go_on_flushing(&mut self, mut transfer: Box<Transfer>) {
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.rebase(&snapshot);
        if transfer.is_empty() { self.finish(transfer, Status::Ok) } else { self.dispatch(transfer) }
    }

    fn fail_over(&mut self, mut transfer: Box<Transfer>, errno: i32) {
        let now_ns = self.now_ns;
        self.stats().nr_retries.add_one();
        // An EIO that follows this request from path to path may be its own (a bad sector that the storage reports
        // so): the path is probed before it is taken out. All other path errors speak of the path.
        match transfer.path() {
            Some(path) if errno == libc::EIO && transfer.troubled_since_ns != 0 => {
                path.suspect();
                self.map_state().ring();
            }
            _ => self.dispatcher.fail_path(&transfer, errno, now_ns),
        }
        transfer.note_refusal(now_ns);
        if transfer.trouble.get().is_none()
            && let Some((start, end)) = transfer.changes()
        {
            transfer.trouble.set(Some(self.map_state().begin_trouble(start, end)));
        }
        if transfer.is_flush() && transfer.drop_flush_target() {
            return self.finish(transfer, Status::Ok);
        }
        let snapshot = Rc::clone(self.dispatcher.snapshot());
        transfer.rebase(&snapshot);
        self.dispatch(transfer);
        if !self.held.is_empty() {
            self.show_held();
        }
    }

    fn send_delayed(&mut self) {
        if self.delayed.is_empty() {
            return;
        }
        let now_ns = self.now_ns;
        while let Some(index) = self.delayed.iter().position(|(due_ns, _)| *due_ns <= now_ns) {
            let (_, mut transfer) = self.delayed.swap_remove(index);
            if transfer.troubled_since_ns == 0 && transfer.path().is_some_and(|path| path.is_active()) {
                self.send(transfer);
            } else {
                // The path went while the transfer waited for it.
                let snapshot = Rc::clone(self.dispatcher.snapshot());
                transfer.rebase(&snapshot);
                self.dispatch(transfer);
            }
        }
    }

    /// The ring stops, and this one cannot go on: it fails, or waits for the next start.
    fn give_up(&mut self, mut transfer: Box<Transfer>) {
        if !self.keeps_waiting || !self.vring.is_tracked() {
            return self.finish(transfer, Status::IoErr);
        }
        self.land(&mut transfer);
        if let Some(id) = transfer.trouble.take() {
            self.map_state().end_trouble(id);
        }
        self.leave(&mut transfer);
        while let Some(mut member) = transfer.take_member() {
            self.leave(&mut member);
            self.pool.push(member);
        }
        if let Some(room) = transfer.take_room() {
            self.rooms.push(room);
        }
        self.pool.push(transfer);
    }

    /// Lets go of a request that stays in flight.
    fn leave(&mut self, transfer: &mut Transfer) {
        if let Some((request, ..)) = transfer.end(Status::IoErr) {
            let (head, _) = request.into_head();
            self.vring.leave(self.map.map(), head);
        }
    }

    fn finish(&mut self, mut transfer: Box<Transfer>, status: Status) {
        self.land(&mut transfer);
        // What is lost when a sync fails is nobody's in particular, and another sync would not say so again.
        if transfer.nr_members() != 0 && status != Status::Ok && !transfer.is_all_written() {
            return self.send_apart(transfer);
        }
        if let Some(id) = transfer.trouble.take() {
            self.map_state().end_trouble(id);
        }
        self.end(&mut transfer, status);
        while let Some(mut member) = transfer.take_member() {
            self.end(&mut member, status);
            self.pool.push(member);
        }
        if let Some(room) = transfer.take_room() {
            self.rooms.push(room);
        }
        self.pool.push(transfer);
    }

    /// Ends one request, merged or not, and counts it.
    fn end(&mut self, transfer: &mut Transfer, status: Status) {
        let kind = kind_of(transfer.operation());
        let begun_ns = transfer.begun_ns;
        if let Some((request, nr_bytes, status)) = transfer.end(status) {
            match status {
                Status::Ok => {
                    let ns = self.now_ns.saturating_sub(begun_ns);
                    self.stats().io.record(kind, 1, request.data_len, ns);
                }
                _ => self.stats().io.record_error(kind),
            }
            self.answer(request, nr_bytes, status);
        }
    }

    /// A merged run failed for a reason that may be one member's: each goes out by itself.
    fn send_apart(&mut self, mut leader: Box<Transfer>) {
        let done_until = leader.done_until();
        let mut pieces = Vec::new();
        while let Some(member) = leader.take_member() {
            pieces.push(member);
        }
        leader.begin_alone();
        if let Some(room) = leader.take_room() {
            self.rooms.push(room);
        }
        let (trouble, since_ns) = (leader.trouble.take(), leader.troubled_since_ns);
        pieces.insert(0, leader);
        for piece in &mut pieces {
            piece.begin_alone();
            piece.rebase(self.dispatcher.snapshot());
            piece.troubled_since_ns = since_ns;
            if let (Some(_), Some((start, end))) = (trouble, piece.changes()) {
                piece.trouble.set(Some(self.map_state().begin_trouble(start, end)));
            }
        }
        if let Some(id) = trouble {
            self.map_state().end_trouble(id);
        }
        for piece in pieces {
            match piece.span_end() <= done_until && !piece.owes_sync() {
                true => self.finish(piece, Status::Ok),
                false => self.dispatch(piece),
            }
        }
    }

    /// Returns a request to the guest: status byte, used entry.
    fn answer(&mut self, request: Request, nr_bytes: u64, status: Status) {
        let (head, status_addr) = request.into_head();
        let map = self.map.map();
        let written = status_addr.is_some_and(|addr| map.write_at(status.byte(), addr).is_some());
        let len = if written { u32::try_from(nr_bytes + 1).unwrap_or(u32::MAX) } else { 0 };
        self.vring.push_used(map, head, len);
    }
}

fn kind_of(operation: Option<Operation>) -> IoKind {
    match operation {
        Some(Operation::Write { .. }) => IoKind::Write,
        Some(Operation::Flush) => IoKind::Flush,
        Some(Operation::Discard | Operation::WriteZeroes) => IoKind::Discard,
        Some(Operation::Read { .. } | Operation::GetId) | None => IoKind::Read,
    }
}
