//! The front-end's side: starting and stopping the worker, and the commands in between.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};

use rustix::event::{EventfdFlags, eventfd};

use super::world::World;
use crate::memory::{GuestMap, Lessor};
use crate::vring::{RingAddresses, Vring};
use crate::worker::{Command, WorkerConfig};

/// What a command changes once the worker has heard of it.
#[derive(Debug, Clone, Copy)]
enum Effect {
    Enabled(bool),
    Call(bool),
    /// Whether the first region, with the ring, is part of it, and whether the second is.
    Memory(bool, bool),
    Stopping,
}

/// What has been commanded, and what of it the worker knows.
#[derive(Debug, Default)]
pub(crate) struct Control {
    commands: Option<mpsc::Sender<Command>>,
    on_the_way: Vec<Effect>,
    /// Answers to come, and those that must be there at the end of this turn.
    acks: Vec<mpsc::Receiver<()>>,
    acks_due: Vec<mpsc::Receiver<()>>,
    /// Events that the engine has still to deliver.
    pub(crate) kick: bool,
    pub(crate) wake: bool,
    /// As the worker knows it.
    pub(crate) enabled: bool,
    /// When it was last disabled.
    pub(crate) disabled_since: u64,
    pub(crate) has_call: bool,
    pub(crate) in_memory: bool,
    pub(crate) stopping: bool,
    /// As it was last commanded.
    wants_enabled: bool,
    wants_in_memory: bool,
    wants_stop: bool,
    wants_second: bool,
    /// When the worker could last not reach the ring.
    pub(crate) unreachable_until: u64,
    /// Whether the second region is part of the memory, and everybody knows it.
    pub(crate) has_second: bool,
    /// Whether the guest has made the ring impossible, and the worker's eventfd for saying so.
    pub(crate) is_wrecked: bool,
    pub(crate) error: Option<OwnedFd>,
    /// Calls that the guest has not reacted to; how many there were since it armed; whether one is owed without a wish.
    pub(crate) nr_calls: u64,
    pub(crate) nr_calls_since_armed: u64,
    pub(crate) call_owed: bool,
    /// Whether the guest, before it looked, waited for a call.
    pub(crate) was_call_due: bool,
    calls: Vec<OwnedFd>,
    pub(crate) write_through_since: u64,
    /// How far the available ring went when the worker heard of the stop.
    published_at_stop: u16,
    pub(crate) nr_turns: u32,
    /// Ports with an active path when the turn began.
    pub(crate) active_before: u64,
    /// Turns in a row in which the worker did not sleep and nothing happened.
    pub(crate) nr_idle_turns: u32,
    /// Waits of a polled ring in which nothing happened.
    pub(crate) nr_idle: u32,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("eventfd")
}

/// Takes the count of an eventfd.
pub(crate) fn drain(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    if rustix::io::read(fd, &mut count).is_ok() { u64::from_ne_bytes(count) } else { 0 }
}

impl Control {
    /// Whether the worker is to take requests.
    pub(crate) fn is_served(&self) -> bool {
        self.enabled && self.in_memory && !self.stopping && !self.is_wrecked
    }

    /// Calls made since the last look here, by whatever descriptor.
    pub(crate) fn drain_calls(&mut self) -> u64 {
        self.calls.iter().map(drain).sum()
    }

    fn send(&mut self, command: Command, effect: Option<Effect>) {
        self.commands.as_ref().expect("a worker").send(command).expect("a worker that listens");
        self.on_the_way.extend(effect);
        self.wake = true;
    }

    /// Enable commands that were not answered in the turn that heard of them.
    pub(crate) fn assert_answered(&mut self) {
        for ack in self.acks_due.drain(..) {
            assert_eq!(ack.try_recv(), Ok(()), "enabling is answered at once");
        }
    }
}

impl World {
    /// A worker's beginning at this index of the ring.
    pub(crate) fn start_worker(&mut self, next_avail: u16) -> (WorkerConfig, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel();
        let enabled = self.rng.chance(80);
        let before = std::mem::take(&mut self.control);
        let is_first = before.commands.is_none();
        self.control = Control {
            commands: Some(commands),
            enabled,
            wants_enabled: enabled,
            has_call: self.profile.with_call,
            in_memory: true,
            wants_in_memory: true,
            has_second: is_first || before.wants_second,
            wants_second: is_first || before.wants_second,
            call_owed: true,
            was_call_due: false,
            error: Some(event()),
            write_through_since: before.write_through_since,
            unreachable_until: before.unreachable_until,
            ..Control::default()
        };
        let call = self.profile.with_call.then(|| self.new_call());
        let map = self.lessor.lease();
        let (size, at) = (self.profile.ring_size, self.driver.ring().at());
        let (event_idx, indirect) = (self.profile.event_idx, self.profile.indirect);
        let vring = Vring::new(map.map(), size, at, next_avail, event_idx, indirect).expect("ring");
        let error = self.control.error.as_ref().map(|fd| fd.try_clone().expect("descriptor"));
        self.say(format_args!("worker starts at {next_avail}, enabled: {enabled}"));
        let config = WorkerConfig {
            index: 0,
            vring,
            map,
            kick: (!self.profile.polled).then(event),
            call,
            error,
            enabled,
            disk: Arc::clone(&self.disk),
            features: self.profile.features,
            fence: None,
            nr_workers: Arc::new(AtomicUsize::new(0)),
        };
        (config, receiver)
    }

    /// A new call descriptor; gives the worker's end.
    fn new_call(&mut self) -> OwnedFd {
        let call = event();
        let workers_end = call.try_clone().expect("descriptor");
        self.control.calls.push(call);
        workers_end
    }

    /// The worker has ended and says where the next one is to begin.
    pub(crate) fn worker_ended(&mut self, next_avail: u16) {
        self.say(format_args!("worker ended at {next_avail}"));
        assert!(self.control.stopping, "it was not told to");
        assert!(
            self.ops.is_empty() && self.answered.is_empty() && self.events.is_empty(),
            "something is left"
        );
        self.end_of_turn(None);
        let nr_after = self.control.published_at_stop.wrapping_sub(next_avail);
        assert!(nr_after <= self.profile.ring_size || self.control.is_wrecked, "taken after the stop");
        let nr_taken = next_avail.wrapping_sub(self.profile.index);
        self.driver.assert_all_returned(self.profile.index, nr_taken);
    }

    /// Some command or other.
    pub(crate) fn command(&mut self) {
        if self.control.wants_stop {
            return;
        }
        match self.rng.below(7) {
            0 | 1 => self.enable(!self.control.wants_enabled),
            2 if self.profile.with_call => {
                let call = self.rng.chance(70).then(|| self.new_call());
                self.say(format_args!("command: call descriptor: {}", call.is_some()));
                let effect = Effect::Call(call.is_some());
                self.control.send(Command::SetCall(call), Some(effect));
            }
            3 if !self.control.is_wrecked => {
                let error = event();
                let workers_end = error.try_clone().expect("descriptor");
                self.control.error = Some(error);
                self.control.send(Command::SetError(Some(workers_end)), None);
            }
            4 if self.profile.memory_changes => self.change_memory(),
            5 => self.toggle_write_cache(),
            6 if self.rng.chance(30) => self.stop(),
            _ => {}
        }
    }

    pub(crate) fn enable(&mut self, enabled: bool) {
        if self.control.wants_enabled == enabled {
            return;
        }
        self.say(format_args!("command: enabled: {enabled}"));
        self.control.wants_enabled = enabled;
        let (ack, acked) = mpsc::channel();
        self.control.acks.push(acked);
        self.control.send(Command::Enable(enabled, ack), Some(Effect::Enabled(enabled)));
    }

    /// Tells the worker to stop; possible once, and while it can reach the ring.
    pub(crate) fn stop(&mut self) {
        if self.control.wants_stop || !self.control.wants_in_memory {
            return;
        }
        self.say(format_args!("command: stop"));
        self.control.wants_stop = true;
        self.control.send(Command::Stop(false), Some(Effect::Stopping));
    }

    fn toggle_write_cache(&mut self) {
        let was = self.disk.is_write_through(self.profile.features);
        let (offset, value) = (32, u8::from(was));
        self.disk.write_config(offset, &[value], self.profile.features);
        let is = self.disk.is_write_through(self.profile.features);
        self.say(format_args!("write-through: {is}"));
        if is && !was {
            self.clock += 1;
            self.control.write_through_since = self.clock;
        }
    }

    /// The second region goes or comes, or the one with the ring does.
    fn change_memory(&mut self) {
        // What is in the ring and not taken yet would lose its memory: no front-end does that.
        let is_safe = self.outstanding.values().all(|o| !Self::is_second(o.slot) || o.record.is_started);
        match self.rng.below(3) {
            _ if self.profile.gaps.memory => self.set_memory(true, true),
            0 if self.control.has_second && is_safe => self.set_memory(true, false),
            1 if self.control.has_second => self.set_memory(false, true),
            _ => self.set_memory(true, true),
        }
    }

    /// Puts a memory of these regions in place of the one before. Without the first, the ring is out of reach.
    pub(crate) fn set_memory(&mut self, has_first: bool, has_second: bool) {
        self.say(format_args!("command: memory: first {has_first} second {has_second}"));
        let wanted = [has_first, has_second];
        let regions =
            self.regions.iter().zip(wanted).filter(|(_, w)| *w).map(|(r, _)| Arc::clone(r)).collect();
        let map = Arc::new(GuestMap::from_arc_regions(regions).expect("memory"));
        let current = Arc::downgrade(&map);
        let lessor = Lessor::new(map);
        let at: Option<RingAddresses> = has_first.then(|| self.driver.ring().at());
        self.control.has_second &= has_second;
        self.control.wants_second = has_second;
        self.control.wants_in_memory = has_first;
        let lease = lessor.lease();
        self.control.send(Command::SetMemory(lease, at), Some(Effect::Memory(has_first, has_second)));
        self.lessor = lessor;
        self.old_maps.push(std::mem::replace(&mut self.current_map, current));
    }

    /// Everything is as a guest needs it to go on; false if that needed a command.
    pub(crate) fn settle(&mut self) -> bool {
        let is_settled = self.control.wants_enabled && self.control.wants_in_memory;
        if !self.control.wants_in_memory {
            self.set_memory(true, true);
        }
        self.enable(true);
        is_settled
    }

    /// The worker hears of a wake, and so of all commands.
    pub(crate) fn commands_heard(&mut self) {
        self.control.wake = false;
        self.control.acks_due.append(&mut self.control.acks);
        for effect in std::mem::take(&mut self.control.on_the_way) {
            match effect {
                Effect::Enabled(enabled) => {
                    if self.control.enabled && !enabled {
                        self.control.disabled_since = self.clock;
                    }
                    self.control.enabled = enabled;
                }
                Effect::Call(has_call) => {
                    self.control.has_call = has_call;
                    self.control.call_owed = true;
                    let nr = self.control.drain_calls();
                    self.control.nr_calls += nr;
                    let calls = &mut self.control.calls;
                    calls.drain(..calls.len().saturating_sub(1));
                }
                Effect::Memory(has_first, has_second) => {
                    self.control.in_memory = has_first;
                    self.control.has_second = self.control.wants_second;
                    self.note_lost(has_first, has_second);
                }
                Effect::Stopping => {
                    self.control.stopping = true;
                    self.control.published_at_stop = self.driver.published();
                }
            }
        }
    }

    /// The memory of requests may be gone: those that wait, or that have to wait later, end for it.
    fn note_lost(&mut self, has_first: bool, has_second: bool) {
        for request in self.outstanding.values_mut() {
            let is_there = if Self::is_second(request.slot) { has_second } else { has_first };
            request.may_be_lost |= !is_there;
        }
    }

    /// The guest makes its ring impossible.
    pub(crate) fn wreck(&mut self) {
        self.say(format_args!("the available index is made impossible"));
        self.control.is_wrecked = true;
        if self.driver.wreck() {
            self.control.kick = true;
        }
    }

    /// Whether the worker has said that the ring is broken.
    pub(crate) fn is_error_told(&self) -> bool {
        self.control.error.as_ref().is_some_and(|error| drain(error) != 0)
    }
}
