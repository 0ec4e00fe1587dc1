//! Discrete-event simulation of workers, each with its own selector, over paths of known speed. Deterministic: the
//! only randomness is a seeded generator for service times.
#![allow(dead_code)] // each test binary uses a part

use polypath_selector::{
    Direction, GroupArgs, Kind, Load, Outcome, PathArgs, PathSet, Request, Selector, Ticket,
};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// 1 ms in ns.
pub const MS: u64 = 1_000_000;

/// A path that serves `lanes` requests at a time, in order of arrival.
#[derive(Clone, Debug)]
pub struct Path {
    /// Mean service time in ns.
    pub service_ns: u64,
    /// Service times are even over mean +- this many percent.
    pub jitter_percent: u64,
    /// 1: a serial server; large: a fixed delay that load does not change.
    pub lanes: usize,
    /// Every request fails after its service time.
    pub fails: bool,
    /// From-to in ns, and how many times slower it is in between.
    pub slow: Option<(u64, u64, u64)>,
}

impl Path {
    pub fn serial(service_ns: u64) -> Self {
        Self { service_ns, jitter_percent: 20, lanes: 1, fails: false, slow: None }
    }

    pub fn delay(service_ns: u64) -> Self {
        Self { lanes: 4096, ..Self::serial(service_ns) }
    }
}

/// A load: each worker keeps `depth` requests under way.
#[derive(Clone, Debug)]
pub struct Run {
    pub kind: Kind,
    pub group: GroupArgs,
    pub paths: Vec<Path>,
    pub workers: usize,
    pub depth: usize,
    /// Pause of the submitter between a completion and the next request.
    pub think_ns: u64,
    /// Requests to complete, over all workers.
    pub requests: u64,
    pub seed: u64,
}

/// What a run did.
#[derive(Clone, Debug)]
pub struct Report {
    /// Dispatches per path.
    pub sent: Vec<u64>,
    /// (time, path) of each dispatch, in order.
    pub log: Vec<(u64, usize)>,
    pub elapsed_ns: u64,
    pub mean_ns: f64,
    pub requests: u64,
}

impl Report {
    /// Part of the dispatches that went to a path.
    pub fn share(&self, path: usize) -> f64 {
        self.sent[path] as f64 / self.sent.iter().sum::<u64>() as f64
    }

    /// The same for dispatches in a span of time.
    pub fn share_between(&self, path: usize, from_ns: u64, to_ns: u64) -> f64 {
        let span = || self.log.iter().filter(|(time, _)| (from_ns..to_ns).contains(time));
        span().filter(|(_, sent)| *sent == path).count() as f64 / span().count().max(1) as f64
    }

    /// Completions per ms.
    pub fn per_ms(&self) -> f64 {
        self.requests as f64 / (self.elapsed_ns as f64 / MS as f64)
    }
}

impl Run {
    pub fn new(kind: Kind, paths: &[Path]) -> Self {
        Self {
            kind,
            group: GroupArgs::default(),
            paths: paths.to_vec(),
            workers: 1,
            depth: 1,
            think_ns: 0,
            requests: 30_000,
            seed: 1,
        }
    }

    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    pub fn depth(self, depth: usize) -> Self {
        Self { depth, ..self }
    }

    pub fn requests(self, requests: u64) -> Self {
        Self { requests, ..self }
    }

    pub fn run(&self) -> Report {
        Simulation::new(self).run()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The submitter has a request.
    Arrival { first_ns: u64 },
    /// The path has an answer.
    Answer { first_ns: u64, slot: usize },
}

struct Simulation<'a> {
    config: &'a Run,
    selectors: Vec<Selector>,
    usable: PathSet,
    /// In flight per worker and path.
    own: Vec<Vec<u32>>,
    /// What each worker last saw of the others: as old as its previous wake, the oldest that is allowed.
    others: Vec<Vec<u32>>,
    lanes: Vec<BinaryHeap<Reverse<u64>>>,
    slots: Vec<Ticket>,
    free_slots: Vec<usize>,
    events: BinaryHeap<Reverse<(u64, u64, usize, Event)>>,
    sequence: u64,
    random: u64,
    report: Report,
    latency_ns: u64,
}

struct View<'a> {
    own: &'a [u32],
    others: &'a [u32],
}

impl Load for View<'_> {
    fn in_flight(&self, path: usize) -> u32 {
        self.own[path] + self.others[path]
    }

    fn in_flight_bytes(&self, path: usize) -> u64 {
        u64::from(self.in_flight(path)) * 4096
    }
}

impl<'a> Simulation<'a> {
    fn new(config: &'a Run) -> Self {
        let nr_paths = config.paths.len();
        let args: Vec<_> =
            (0..nr_paths).map(|path| PathArgs::for_path(config.kind, path, nr_paths)).collect();
        let selector =
            |worker| Selector::new(config.kind, &config.group, &args, worker).expect("valid arguments");
        let mut simulation = Self {
            selectors: (0..config.workers).map(selector).collect(),
            usable: PathSet::full(nr_paths),
            own: vec![vec![0; nr_paths]; config.workers],
            others: vec![vec![0; nr_paths]; config.workers],
            lanes: config.paths.iter().map(|path| (0..path.lanes).map(|_| Reverse(0)).collect()).collect(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            random: config.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            report: Report {
                sent: vec![0; nr_paths],
                log: Vec::new(),
                elapsed_ns: 0,
                mean_ns: 0.0,
                requests: config.requests,
            },
            latency_ns: 0,
            config,
        };
        // Time 0 means "never" to some selectors; a real clock is past it as well.
        for worker in 0..config.workers {
            for _ in 0..config.depth {
                simulation.push(MS, worker, Event::Arrival { first_ns: MS });
            }
        }
        simulation
    }

    fn run(mut self) -> Report {
        let mut done = 0;
        while done < self.config.requests {
            let Reverse((now_ns, _, worker, event)) =
                self.events.pop().expect("a closed loop never runs dry");
            self.report.elapsed_ns = now_ns - MS;
            match event {
                Event::Arrival { first_ns } => self.dispatch(now_ns, worker, first_ns),
                Event::Answer { first_ns, slot } => {
                    let ticket = self.slots[slot];
                    self.free_slots.push(slot);
                    self.own[worker][ticket.path()] -= 1;
                    let failed = self.config.paths[ticket.path()].fails;
                    let outcome = if failed { Outcome::PathError } else { Outcome::Success };
                    self.selectors[worker].end_io(ticket, now_ns, outcome);
                    if failed {
                        self.dispatch(now_ns, worker, first_ns);
                    } else {
                        done += 1;
                        self.latency_ns += now_ns - first_ns;
                        let next_ns = now_ns + self.config.think_ns;
                        self.push(next_ns, worker, Event::Arrival { first_ns: next_ns });
                    }
                }
            }
            for path in 0..self.config.paths.len() {
                let total: u32 = self.own.iter().map(|own| own[path]).sum();
                self.others[worker][path] = total - self.own[worker][path];
            }
        }
        self.report.mean_ns = self.latency_ns as f64 / done as f64;
        self.report
    }

    fn dispatch(&mut self, now_ns: u64, worker: usize, first_ns: u64) {
        let request = Request { bytes: 4096, direction: Direction::Read, queue: worker, now_ns };
        let view = View { own: &self.own[worker], others: &self.others[worker] };
        let path = self.selectors[worker].select(&request, &self.usable, &view).expect("a usable path");
        let ticket = self.selectors[worker].start_io(path, &request, &view);
        self.own[worker][path] += 1;
        self.report.sent[path] += 1;
        self.report.log.push((now_ns, path));
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(ticket);
            self.slots.len() - 1
        });
        self.slots[slot] = ticket;
        let service_ns = self.service_ns(path, now_ns);
        let Reverse(free_ns) = self.lanes[path].pop().expect("a lane");
        let end_ns = free_ns.max(now_ns) + service_ns;
        self.lanes[path].push(Reverse(end_ns));
        self.push(end_ns, worker, Event::Answer { first_ns, slot });
    }

    fn service_ns(&mut self, path: usize, now_ns: u64) -> u64 {
        let model = &self.config.paths[path];
        let slower =
            model.slow.filter(|(from, to, _)| (*from..*to).contains(&now_ns)).map_or(1, |(_, _, by)| by);
        let spread = model.service_ns * model.jitter_percent / 100;
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (model.service_ns - spread + (self.random >> 16) % (2 * spread + 1)) * slower
    }

    fn push(&mut self, time_ns: u64, worker: usize, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time_ns, self.sequence, worker, event)));
    }
}
