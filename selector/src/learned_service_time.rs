//! learned-service-time: TODO
use crate::request::Direction;
use crate::{Load, Outcome, PathInfo, PathSet, Request, Ticket};

/// Sizes are learned apart: up to 8 KiB, 64 KiB, 256 KiB and larger.
const NR_SIZES: usize = 4;
const NR_CELLS: usize = 3 * NR_SIZES;
/// Assumed while no path has finished anything; only its being equal for all paths matters.
const UNKNOWN_NS: u64 = 100_000;
/// A slow or failing path is tried at most once in so many requests, and in so many times its own service time.
const PROBE_INTERVAL: u64 = 32;
/// An average moves by 1/8 of the difference, and no sample counts for more than 8 times the average.
const EMA_BITS: u32 = 3;
const OUTLIER_BITS: u32 = 3;
/// Each path error counts the path's times one more binary place higher, from the first error on beyond any sharing.
const PENALTY_FIRST: u32 = 4;
const PENALTY_MAX: u32 = 12;

#[derive(Clone, Debug)]
pub(crate) struct LearnedServiceTime {
    paths: Box<[PathState]>,
    /// Least service time of a usable path at the last choice, in ns; 0: unknown.
    best_ns: [u64; NR_CELLS],
    /// How far the shares have been dealt out: the `booked_ns` at which the last request of a sharing path began.
    dealt_ns: u64,
    /// Requests started so far.
    nr_started: u64,
    share_ratio: u64,
}

#[derive(Clone, Debug, Default)]
struct PathState {
    /// Average time per request, by direction and size; 0: no sample yet.
    service_ns: [u32; NR_CELLS],
    /// The same over everything.
    mean_ns: u32,
    penalty: u32,
    /// In flight of this worker alone.
    own: u32,
    /// Work dealt to this path so far, on a scale common to all paths.
    booked_ns: u64,
    /// Last sign of life: an end of an I/O, or the start of the first one.
    heard_ns: u64,
    /// Last sample.
    sampled_ns: u64,
    /// End of the last outlier.
    outlier_ns: u64,
    /// `nr_started` at the last start on this path.
    started_at: u64,
}

/// Index of the average for a request like this.
#[inline]
pub(crate) fn cell(direction: Direction, bytes: u64) -> usize {
    let row = match direction {
        Direction::Read => 0,
        Direction::Write => NR_SIZES,
        Direction::Other => 2 * NR_SIZES,
    };
    row + usize::from(bytes > 8 << 10) + usize::from(bytes > 64 << 10) + usize::from(bytes > 256 << 10)
}

impl LearnedServiceTime {
    pub(crate) fn new(share_ratio: u16, nr_paths: usize, first: usize) -> Self {
        let mut paths: Box<[PathState]> = vec![PathState::default(); nr_paths].into();
        // Steps of 1 ns decide the order of the first requests and nothing else.
        for (offset, booked_ns) in (0..nr_paths).zip(0..) {
            paths[(first + offset) % nr_paths].booked_ns = booked_ns;
        }
        Self {
            paths,
            best_ns: [0; NR_CELLS],
            dealt_ns: 0,
            nr_started: 0,
            share_ratio: u64::from(share_ratio),
        }
    }

    #[inline]
    pub(crate) fn select(
        &mut self,
        request: &Request,
        usable: &PathSet,
        load: &(impl Load + ?Sized),
    ) -> Option<usize> {
        let cell = cell(request.direction, request.bytes);
        let share_max_ns = self.share_max_ns(cell);
        let mut best: Option<(usize, u64)> = None;
        let mut best_ns = u64::MAX;
        let mut probe = None;
        for index in usable.iter() {
            let path = &self.paths[index];
            let in_flight = u64::from(load.in_flight(index));
            let service_ns = path.service_ns(cell, self.best_ns[cell]);
            best_ns = best_ns.min(service_ns);
            let mut wait_ns = in_flight * u64::from(path.mean_ns);
            if path.own > 0 {
                wait_ns = wait_ns.max(request.now_ns.saturating_sub(path.heard_ns));
            }
            let cost = if service_ns <= share_max_ns {
                self.dealt_until(path, service_ns) - self.dealt_ns + wait_ns
            } else {
                if in_flight == 0 && self.is_due(path, service_ns, request.now_ns) {
                    probe = Some(index);
                }
                service_ns + wait_ns
            };
            if best.is_none_or(|(_, least)| cost < least) {
                best = Some((index, cost));
            }
        }
        self.best_ns[cell] = best_ns;
        probe.or(best.map(|(index, _)| index))
    }

    pub(crate) fn start_io(&mut self, index: usize, cell: usize, now_ns: u64) {
        let service_ns = self.paths[index].service_ns(cell, self.best_ns[cell]);
        let until_ns = self.dealt_until(&self.paths[index], service_ns);
        self.nr_started += 1;
        let share_max_ns = self.share_max_ns(cell);
        let path = &mut self.paths[index];
        if service_ns <= share_max_ns {
            path.booked_ns = until_ns;
            self.dealt_ns = self.dealt_ns.max(until_ns - service_ns);
        }
        if path.own == 0 {
            path.heard_ns = now_ns;
        }
        path.own += 1;
        path.started_at = self.nr_started;
    }

    pub(crate) fn end_io(&mut self, ticket: Ticket, now_ns: u64, outcome: Outcome) {
        let path = &mut self.paths[ticket.path()];
        path.own = path.own.saturating_sub(1);
        path.heard_ns = now_ns;
        match outcome {
            Outcome::Success => path.learn(ticket, now_ns),
            Outcome::TargetError => {}
            Outcome::PathError => path.penalty = (path.penalty + 1).clamp(PENALTY_FIRST, PENALTY_MAX),
        }
    }

    pub(crate) fn reinstate_path(&mut self, index: usize) {
        self.paths[index].penalty = 0;
    }

    pub(crate) fn inherit(&mut self, index: usize, old: &Self, old_index: usize) {
        let old = &old.paths[old_index];
        let path = &mut self.paths[index];
        *path = PathState { own: 0, booked_ns: path.booked_ns, started_at: 0, ..old.clone() };
    }

    pub(crate) fn info(&self, index: usize, in_flight: u32) -> PathInfo {
        let path = &self.paths[index];
        PathInfo::LearnedServiceTime {
            in_flight,
            read_ns: path.service_ns[cell(Direction::Read, 0)].into(),
            write_ns: path.service_ns[cell(Direction::Write, 0)].into(),
            penalty: path.penalty,
        }
    }

    #[inline]
    fn share_max_ns(&self, cell: usize) -> u64 {
        match self.best_ns[cell] {
            0 => u64::MAX,
            best_ns => best_ns * self.share_ratio,
        }
    }

    #[inline]
    fn dealt_until(&self, path: &PathState, service_ns: u64) -> u64 {
        path.booked_ns.max(self.dealt_ns.saturating_sub(service_ns)) + service_ns
    }

    #[inline]
    fn is_due(&self, path: &PathState, service_ns: u64, now_ns: u64) -> bool {
        self.nr_started - path.started_at >= PROBE_INTERVAL
            && now_ns.saturating_sub(path.heard_ns) >= PROBE_INTERVAL * service_ns
    }
}

impl PathState {
    #[inline]
    fn service_ns(&self, cell: usize, best_ns: u64) -> u64 {
        let learned = match (self.service_ns[cell], self.mean_ns) {
            (0, 0) if best_ns == 0 => UNKNOWN_NS,
            (0, 0) => best_ns,
            (0, mean_ns) => mean_ns.into(),
            (service_ns, _) => service_ns.into(),
        };
        learned << self.penalty
    }

    fn learn(&mut self, ticket: Ticket, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(ticket.start_ns);
        let sample = u32::try_from(took_ns).unwrap_or(u32::MAX) / (u32::from(ticket.ahead) + 1);
        let sample = sample.max(1);
        self.penalty /= 2;
        let service_ns = &mut self.service_ns[usize::from(ticket.cell)];
        if *service_ns > 0 && sample > service_ns.saturating_mul(1 << OUTLIER_BITS) {
            if ticket.start_ns < self.outlier_ns {
                return;
            }
            self.outlier_ns = now_ns;
        }
        let stale = ticket.start_ns.saturating_sub(self.sampled_ns) / 16 > u64::from(*service_ns);
        self.sampled_ns = now_ns;
        average(service_ns, sample, stale);
        average(&mut self.mean_ns, sample, stale);
    }
}

fn average(average: &mut u32, sample: u32, stale: bool) {
    if *average == 0 {
        *average = sample;
    } else if stale && sample < *average {
        *average = sample.max(*average >> OUTLIER_BITS);
    } else {
        let sample = sample.min(average.saturating_mul(1 << OUTLIER_BITS));
        if sample >= *average {
            *average += (sample - *average) >> EMA_BITS;
        } else {
            *average -= (*average - sample) >> EMA_BITS;
        }
    }
}
