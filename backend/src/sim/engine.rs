//! An engine that is the world: each wait lets a few things happen.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::lun::{Last, Record, Step};
use super::plan::What;
use super::ports::port_of;
use super::world::{Op, World};
use crate::engine::{Engine, Event, Wanted};
use crate::gather::Alignment;
use crate::transfer::Transfer;

/// Turns of one worker after which it is taken to be stuck, and turns in a row without anything to do.
const TURNS_MAX: u32 = 50_000;
const IDLE_TURNS_MAX: u32 = 8;

/// The worker's end of the world.
#[derive(Debug)]
pub(crate) struct SimEngine(pub(crate) Rc<RefCell<World>>);

impl Engine for SimEngine {
    fn start(&mut self, transfer: Box<Transfer>) {
        let mut world = self.0.borrow_mut();
        world.start(transfer);
        world.poke();
    }

    fn wait(&mut self, timeout: Option<Duration>, _wanted: Wanted) -> io::Result<()> {
        let mut world = self.0.borrow_mut();
        world.wait(timeout);
        world.control.active_before = world.active_ports();
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut world = self.0.borrow_mut();
        if world.control.nr_turns != 0 {
            world.end_of_turn(Some(Some(Duration::ZERO)));
        }
        Ok(())
    }

    fn has_event(&mut self) -> bool {
        let mut world = self.0.borrow_mut();
        world.polled();
        world.control.active_before = world.active_ports();
        !world.events.is_empty() || !world.answered.is_empty()
    }

    fn next_event(&mut self) -> Option<Event> {
        let mut world = self.0.borrow_mut();
        world.poke();
        world.next_event()
    }

    fn note_new_view(&mut self) {}

    fn watch_kick(&mut self, kick: Option<OwnedFd>) {
        // None is also what a broken ring gets.
        assert!(kick.is_none() || !self.0.borrow().profile.polled);
    }

    fn visit(&self, each: &mut dyn FnMut(&Transfer)) {
        let world = self.0.borrow();
        world.ops.iter().chain(&world.answered).for_each(|op| each(&op.transfer));
    }

    fn nr_in_flight(&self) -> usize {
        let world = self.0.borrow();
        world.ops.len() + world.answered.len()
    }

    fn now_ns(&self) -> u64 {
        self.0.borrow().now_ns
    }
}

impl World {
    fn start(&mut self, mut transfer: Box<Transfer>) {
        self.clock += 1;
        self.control.nr_idle_turns = 0;
        let heads: Vec<u16> = transfer
            .members()
            .filter_map(|member| member.buffers.segments.first())
            .map(|s| self.head_at(s.addr.0).expect("data of a request that is outstanding"))
            .collect();
        let path = Arc::clone(transfer.lane().expect("a path").path());
        let port = port_of(&path);
        // Whatever the guest was told, a table asks for the alignment of its paths.
        let mem_bytes = transfer.alignment().mem_bytes;
        assert!(mem_bytes >= self.profile.align.mem_bytes);
        let step = Step::of(&transfer.action(), Alignment { mem_bytes, ..self.profile.align });
        self.say(format_args!("start: heads {heads:?} path {port} {step:?}"));
        assert!(self.nr_in_flight() < usize::from(self.profile.ring_size), "no slot left");
        for head in &heads {
            let twice = self.ops.iter().chain(&self.answered).any(|op| op.heads.contains(head));
            assert!(!twice, "head {head} is sent while it is on its way (F02)");
            let record = &self.outstanding[head].record;
            assert!(!matches!(record.last, Last::Final(_)), "head {head} goes on after its end");
            let may_be_taken =
                self.control.enabled || self.outstanding[head].since.clock < self.control.disabled_since;
            assert!(record.is_started || may_be_taken, "head {head} was taken while disabled");
            if matches!(record.last, Last::Nothing | Last::PathError | Last::NotAllowed(_)) {
                assert!(path.is_active(), "head {head} is sent down a failed path");
                assert!(self.is_in_table(&path), "head {head} is sent down a path that was removed");
            }
            if let Some(request) = self.outstanding.get_mut(head) {
                request.record.is_started = true;
            }
        }
        self.check_run(&heads, step);
        let since = self.clock;
        self.ops.push(Op { transfer, step, path, port, heads, since, result: 0 });
    }

    /// Requests that are sent as one lie side by side, and the I/O is within them.
    fn check_run(&self, heads: &[u16], step: Step) {
        let plan = |head: &u16| &self.outstanding[head].plan;
        match (heads, step) {
            ([], _) => assert_eq!(step, Step::Sync, "a flush"),
            ([_], _) => {}
            ([first, ..], Step::Write { offset, len }) if plan(first).what == What::Zeroes => {
                // Of the whole, or what a short write has left of it.
                let block = self.profile.align.block_bytes as u64;
                let start = plan(first).only_range(block).map_or(offset, |range| range.start);
                assert!(start <= offset, "zeros at {offset} for what begins at {start}");
                let len = offset + len - start;
                self.check_run(heads, Step::Allocate { offset: start, len, is_punch: false });
            }
            ([first, .., last], Step::Read { offset, len } | Step::Write { offset, len }) => {
                assert!(heads.windows(2).all(|pair| {
                    let [a, b] = [plan(&pair[0]), plan(&pair[1])];
                    a.what == b.what && a.sectors[0].end == b.sectors[0].start
                }));
                let (start, end) = (plan(first).sectors[0].start * 512, plan(last).sectors[0].end * 512);
                assert!(start <= offset && offset + len == end, "{len} bytes at {offset} of {start}..{end}");
            }
            // Written through: what follows the write of all.
            (_, Step::Sync) => {}
            ([first, ..], Step::Allocate { offset, len, is_punch }) => {
                let block = self.profile.align.block_bytes as u64;
                let ranges: Vec<_> = heads.iter().filter_map(|head| plan(head).only_range(block)).collect();
                assert_eq!(ranges.len(), heads.len(), "each has one range");
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
                assert_eq!(offset..offset + len, ranges[0].start..ranges[ranges.len() - 1].end);
                let kind = plan(first).range_kind();
                assert!(heads.iter().all(|head| plan(head).range_kind() == kind), "of different kinds");
                assert!(!is_punch || kind != (What::Zeroes, false), "the space was to be kept");
            }
        }
    }

    /// Requests that are with the kernel.
    pub(crate) fn nr_in_flight(&self) -> usize {
        self.ops.iter().chain(&self.answered).map(|op| op.heads.len().max(1)).sum()
    }

    /// The kernel has an answer for one of the steps.
    fn answer(&mut self) {
        let index = self.rng.index(self.ops.len());
        if self.lun.hung[self.ops[index].port] {
            return;
        }
        let mut op = self.ops.swap_remove(index);
        let (port, step) = (op.port, op.step);
        op.result = self.lun.answer(&mut self.rng, port, step, &op.transfer.action());
        self.answered.push_back(op);
    }

    fn next_event(&mut self) -> Option<Event> {
        self.clock += 1;
        if let Some(event) = self.events.pop_front() {
            self.control.nr_idle_turns = 0;
            if matches!(event, Event::Wake) {
                self.commands_heard();
                self.note_stuck();
            }
            return Some(event);
        }
        let op = self.answered.pop_front()?;
        self.control.nr_idle_turns = 0;
        let Op { transfer, step, path, port, heads, since, result } = op;
        self.say(format_args!("done: heads {heads:?} path {port} result {result}"));
        let (now, block) = (self.now(), self.profile.align.block_bytes as u64);
        let mut last = Last::Nothing;
        for head in &heads {
            let Some(request) = self.outstanding.get_mut(head) else { continue };
            let what = request.plan.what;
            match (heads.len(), request.plan.only_range(block)) {
                (2.., Some(span)) => {
                    request.record.note_member(what, port, step, span, result, now);
                }
                _ => request.record.note(what, port, step, result, now, block),
            }
            request.is_stuck |= what.is_change() && request.record.last == Last::PathError;
            if request.record.last == Last::PathError {
                last = Last::PathError;
            }
        }
        if heads.is_empty() {
            let mut record = Record::default();
            record.note(What::Flush, port, step, result, now, block);
            if result < 0 {
                self.flushes.push((now.clock, record.last));
            }
            last = record.last;
        }
        if last == Last::PathError {
            // The second EIO of a request may be its own: that path is probed and not taken out.
            if -result != libc::EIO || transfer.troubled_since_ns == 0 {
                self.must_be_out.push(path);
                self.may_be_out[port] = true;
            }
        }
        if step == Step::Sync && result == 0 {
            self.synced[port] = self.synced[port].max(since);
        }
        Some(Event::Done(transfer, result))
    }

    /// The worker's turn is over; it sleeps until something happens.
    fn wait(&mut self, timeout: Option<Duration>) {
        if self.control.nr_turns != 0 {
            self.end_of_turn(Some(timeout));
        }
        self.control.nr_turns += 1;
        assert!(self.control.nr_turns < TURNS_MAX, "the worker finds no end");
        self.clock += 1;
        let deadline = timeout.map(|t| self.now_ns + u64::try_from(t.as_nanos()).expect("short"));
        if timeout == Some(Duration::ZERO) {
            self.control.nr_idle_turns += 1;
            let is_spinning = self.control.nr_idle_turns > IDLE_TURNS_MAX;
            assert!(!is_spinning || self.profile.gaps.spinning, "the worker spins");
            for _ in 0..self.rng.below(3) {
                self.step();
            }
            if self.profile.gaps.spinning {
                self.now_ns += self.rng.below(500_000);
            }
            return;
        }
        self.control.nr_idle_turns = 0;
        loop {
            self.step();
            let is_woken = !self.events.is_empty() || !self.answered.is_empty();
            if deadline.is_some_and(|deadline| deadline <= self.now_ns) || (is_woken && self.rng.chance(60)) {
                return;
            }
            let nothing_in_flight = self.ops.iter().all(|op| self.lun.hung[op.port]);
            let is_idle = !is_woken && nothing_in_flight && !self.control.kick && !self.control.wake;
            match deadline {
                Some(deadline) if is_idle => {
                    self.now_ns = deadline;
                    return self.time_passes();
                }
                None if is_idle => self.nothing_happens(),
                _ => {}
            }
        }
    }

    /// Something that may happen at any time while the worker sleeps.
    fn step(&mut self) {
        let weights = [
            if self.can_send() { 30 } else { 0 },
            if self.driver.has_unpublished() { 20 } else { 0 },
            if self.ops.is_empty() { 0 } else { 30 },
            if self.control.kick { 25 } else { 0 },
            if self.control.wake { 25 } else { 0 },
            if self.control.nr_calls != 0 { 20 } else { 0 },
            if self.driver.is_armed() { 1 } else { 8 },
            self.profile.commands,
            self.profile.breaks,
            self.profile.changes,
            if self.is_monitor_due() { 10 } else { 0 },
            5,
            1,
        ];
        match self.rng.weighted(&weights) {
            0 => {
                if self.send() && self.rng.chance(60) {
                    self.publish();
                }
            }
            1 => self.publish(),
            2 => self.answer(),
            3 => {
                self.control.kick = false;
                self.events.push_back(Event::Kick);
            }
            4 => {
                self.control.wake = false;
                self.events.push_back(Event::Wake);
            }
            5 | 6 => self.look(),
            7 => self.command(),
            8 => self.disturb(),
            9 => self.change(),
            10 => self.monitor(),
            11 => self.now_ns += self.rng.below(50_000),
            _ => self.events.push_back(Event::Kick),
        }
        self.note_no_path();
    }

    /// The worker looks for work: time passes, and sometimes something happens.
    fn polled(&mut self) {
        self.now_ns += self.rng.below(1_000);
        if self.rng.chance(20) {
            self.step();
        }
    }

    /// Something that the guest does while the worker works.
    fn poke(&mut self) {
        if !self.rng.chance(15) {
            return;
        }
        match self.rng.below(4) {
            0 | 1 => self.send_and_publish(),
            2 => self.look(),
            3 => self.now_ns += self.rng.below(5_000),
            _ => {}
        }
    }

    /// The worker's time is over. If it polls its ring, that is all that ever happens, and the guest must go on.
    fn time_passes(&mut self) {
        if !self.profile.polled {
            return;
        }
        self.control.nr_idle += 1;
        self.now_ns += self.rng.below(10_000_000);
        if self.control.nr_idle.is_multiple_of(4) {
            self.nothing_happens();
        }
    }

    /// The worker would sleep for ever: the guest goes on, or the end has come.
    fn nothing_happens(&mut self) {
        if self.is_monitor_due() {
            return self.monitor();
        }
        if self.driver.has_unpublished() {
            return self.publish();
        }
        if self.driver.has_used() {
            return self.look();
        }
        if !self.settle() {
            return;
        }
        if self.can_send() && self.rng.chance(70) {
            return self.send_and_publish();
        }
        if !self.outstanding.is_empty() {
            // They wait for a path, or for an answer that does not come: only now is everything put right.
            let is_hung = !self.ops.is_empty();
            let repaired = self.repair();
            assert!(
                repaired || is_hung || self.profile.polled,
                "never returned: {:?}",
                self.outstanding.keys()
            );
            return;
        }
        if self.can_send() {
            return self.send_and_publish();
        }
        if self.profile.wreck && !self.control.is_wrecked {
            return self.wreck();
        }
        assert!(!self.control.is_wrecked || self.is_error_told(), "the ring is broken and nobody is told");
        self.stop();
    }
}
