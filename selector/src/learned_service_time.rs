//! learned-service-time: shares by measured speed. Ours; the default.
//!
//! # Idea
//! - **Time per request is learned** per path, direction and size class, as a moving average. No arguments needed.
//! - **Each path is given the same time, not the same requests.** Every choice books its expected time on its path,
//!   and the path that is booked least far comes next: a path four times slower gets a quarter of the requests, and
//!   equal paths take turns. This is fair queueing turned round, with paths for flows.
//! - **What is in flight corrects it.** The expected wait behind the requests on a path is added, so a path that is
//!   behind its average right now is passed over, and at depth a path that serves many requests at once is used for
//!   what it can do. A path that is silent for longer than usual is expected to stay so: a hung path draws no more.
//! - **Far slower paths are left for overflow** (`share_ratio`, 6): in proportion they would cost more latency than
//!   they add throughput. So are failing ones: an error makes the path's time count 16 times, the next 32 times, ...
//!   and its duration is not learned, so failing fast is no way to look fast.
//! - **They are probed** with one request in 32 and for 1/32 of the time at most, and a probe that finds the path
//!   faster counts for more than the old average, so a path that was slow once gets its share back.
//!
//! # Measured
//! `tests/unequal_paths.rs` simulates the case published with the kernel's historical-service-time
//! (`https://lkml.iu.edu/hypermail/linux/kernel/2004.2/02085.html`: four paths, one of them four times slower, depth
//! 1: 25 % of the requests on the slow one with service-time, 11.2 % with historical-service-time, best 7.6 %). With
//! 125 us from an answer to the next request, which makes historical-service-time do what was published:
//!
//! | share of the slow path, mean latency | depth 1 | depth 4 | depth 64 |
//! |---|---|---|---|
//! | round-robin | 25.0 %, 175 us | 25.0 %, 275 us | 25.0 %, 6209 us |
//! | queue-length, service-time | 25.0 %, 175 us | 14.4 %, 143 us | 7.7 %, 1844 us |
//! | historical-service-time | 11.2 %, 134 us | 3.2 %, 125 us | 7.7 %, 1844 us |
//! | learned-service-time | 7.7 %, 123 us | 7.7 %, 123 us | 7.7 %, 1844 us |
//!
//! The least regret: over seven sets of paths, 1 to 8 workers and depths 1 to 64, mean latency is at worst 1.4 times
//! that of the best selector for the case (historical-service-time 1.6, service-time and queue-length 25,
//! round-robin 27).
//!
//! | paths | round-robin | queue-length, service-time | historical-service-time | learned-service-time |
//! |---|---|---|---|---|
//! | one of three fails each request in 5 us, 100 us on the others, depth 8: requests on it | 33 % | 91 % | 98 % | below 0.1 % |
//! | one of two hangs at depth 32: requests stuck on it | 32 | 16 | 16 | 17 |
//!
//! A path that was 10 (1000) times slower for 2 s has its third of the load back 20 ms (1.2 s) after it is fast again
//! at depth 1, and had 0.4 % (0.03 %) of it in between.
//!
//! The price: at depth 1 the slow path's share costs 23 % of latency against never using it (two paths, one four times
//! slower: 60 %). `share_ratio` 1 buys that back, and gives up equal shares of nearly equal paths.

use crate::request::Direction;
use crate::{Load, Outcome, PathInfo, PathSet, Request, Ticket};

/// Sizes are learned apart: up to 8 KiB, 64 KiB, 256 KiB and larger.
const NR_SIZES: usize = 4;
const NR_CELLS: usize = 3 * NR_SIZES;
/// Assumed while no path has finished anything. Equal for all paths, and short: what is booked in excess would be
/// made up for later.
const UNKNOWN_NS: u64 = 1000;
/// A slow or failing path is probed after so many requests on other paths and so many times its own time.
const PROBE_INTERVAL: u64 = 32;
/// An average moves by 1/8 of the difference to a sample.
const SAMPLE_BITS: u32 = 3;
/// No sample counts for more than 8 times the average, so one hiccup at most doubles it; a second one in a row counts
/// for up to 64 times, a third for up to 512 times: that is no hiccup.
const OUTLIER_BITS: u32 = 3;
const OUTLIERS_MAX: u32 = 6;
/// An average without a sample for 16 times its length gives way to a faster sample.
const STALE_BITS: u32 = 4;
/// Path errors shift a path's time by this and one more each; successes halve the shift.
const PENALTY_FIRST: u32 = 4;
const PENALTY_MAX: u32 = 12;

#[derive(Clone, Debug)]
pub(crate) struct LearnedServiceTime {
    paths: Box<[PathState]>,
    /// Least known time of a usable path at the last choice, in ns; 0: none known yet.
    best_ns: [u64; NR_CELLS],
    /// How far time has been dealt out: where the furthest booking of a sharing path begins.
    dealt_ns: u64,
    nr_started: u64,
    share_ratio: u64,
}

#[derive(Clone, Debug, Default)]
struct PathState {
    /// Average time from start to end, by direction and size; 0: no sample yet.
    time_ns: [u32; NR_CELLS],
    /// Average of that time divided by the requests on the path (itself and those ahead), over everything: what each
    /// request in flight adds to the wait.
    step_ns: u32,
    /// Binary places by which the path's time counts more because of path errors.
    penalty: u32,
    /// In flight of this worker alone.
    own: u32,
    /// Time dealt to this path so far, on a scale common to all paths.
    booked_ns: u64,
    /// Last sign of life: an end of an I/O, or the start of the first one.
    heard_ns: u64,
    /// Last sample.
    sampled_ns: u64,
    /// End of the last outlier.
    outlier_ns: u64,
    /// Outliers in a row.
    nr_outliers: u32,
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
        let share_ratio = u64::from(share_ratio);
        Self { paths, best_ns: [0; NR_CELLS], dealt_ns: 0, nr_started: 0, share_ratio }
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
        let mut least: Option<(usize, u64)> = None;
        let mut best_ns = None;
        let mut probe = None;
        for index in usable.iter() {
            let path = &self.paths[index];
            let time_ns = path.time_ns(cell, self.best_ns[cell]);
            if path.time_ns[cell] > 0 && best_ns.is_none_or(|best_ns| time_ns < best_ns) {
                best_ns = Some(time_ns);
            }
            let in_flight = load.in_flight(index);
            let wait_ns = path.wait_ns(in_flight, time_ns, request.now_ns);
            let cost = if time_ns <= share_max_ns {
                (self.booked_until(path, time_ns) - self.dealt_ns).saturating_add(wait_ns)
            } else {
                if in_flight == 0 && self.is_probe_due(path, time_ns, request.now_ns) {
                    probe = Some(index);
                }
                time_ns.saturating_add(wait_ns)
            };
            if least.is_none_or(|(_, least)| cost < least) {
                least = Some((index, cost));
            }
        }
        let (index, _) = least?;
        if let Some(best_ns) = best_ns {
            self.best_ns[cell] = best_ns;
        }
        probe.or(Some(index))
    }

    pub(crate) fn start_io(&mut self, index: usize, cell: usize, now_ns: u64) {
        let time_ns = self.paths[index].time_ns(cell, self.best_ns[cell]);
        if time_ns <= self.share_max_ns(cell) {
            let until_ns = self.booked_until(&self.paths[index], time_ns);
            self.paths[index].booked_ns = until_ns;
            self.dealt_ns = self.dealt_ns.max(until_ns - time_ns);
        }
        self.nr_started += 1;
        let path = &mut self.paths[index];
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

    /// Whoever reinstates a path has seen it work.
    pub(crate) fn reinstate_path(&mut self, index: usize) {
        self.paths[index].penalty = 0;
    }

    pub(crate) fn inherit(&mut self, index: usize, old: &Self, old_index: usize) {
        let old = &old.paths[old_index];
        let path = &mut self.paths[index];
        *path = PathState {
            own: path.own,
            booked_ns: path.booked_ns,
            started_at: path.started_at,
            ..old.clone()
        };
    }

    pub(crate) fn info(&self, index: usize, in_flight: u32) -> PathInfo {
        let path = &self.paths[index];
        PathInfo::LearnedServiceTime {
            in_flight,
            read_ns: path.time_ns[cell(Direction::Read, 0)].into(),
            write_ns: path.time_ns[cell(Direction::Write, 0)].into(),
            penalty: path.penalty,
        }
    }

    /// The largest time with which a path still takes a share.
    #[inline]
    fn share_max_ns(&self, cell: usize) -> u64 {
        match self.best_ns[cell] {
            0 => u64::MAX,
            best_ns => best_ns.saturating_mul(self.share_ratio),
        }
    }

    /// How far the path would be booked with one more request. A path that was not used does not save up: it is
    /// behind by one request at most, or it would be flooded when it comes back.
    #[inline]
    fn booked_until(&self, path: &PathState, time_ns: u64) -> u64 {
        path.booked_ns.max(self.dealt_ns.saturating_sub(time_ns)) + time_ns
    }

    /// Both limits: time alone would send every request of a nearly idle disk to a slow path, requests alone would
    /// keep a busy one waiting for it.
    #[inline]
    fn is_probe_due(&self, path: &PathState, time_ns: u64, now_ns: u64) -> bool {
        self.nr_started - path.started_at >= PROBE_INTERVAL
            && now_ns.saturating_sub(path.heard_ns) >= PROBE_INTERVAL * time_ns
    }
}

impl PathState {
    /// Expected time of a request in this cell. Without a sample it is as good as the best path, so that it is tried.
    #[inline]
    fn time_ns(&self, cell: usize, best_ns: u64) -> u64 {
        let learned_ns = match (self.time_ns[cell], best_ns, self.step_ns) {
            (0, 0, 0) => UNKNOWN_NS,
            (0, 0, step_ns) => step_ns.into(),
            (0, best_ns, _) => best_ns,
            (time_ns, _, _) => time_ns.into(),
        };
        learned_ns << self.penalty
    }

    /// Expected wait behind what is in flight.
    #[inline]
    fn wait_ns(&self, in_flight: u32, time_ns: u64, now_ns: u64) -> u64 {
        // Twice: with once, a busy fast path is preferred to an idle slow one so often that four serial paths
        // at depth 4 lose 12 % of their throughput.
        let wait_ns = (u64::from(in_flight) * u64::from(self.step_ns)).saturating_mul(2);
        if self.own == 0 {
            // All of it is other workers': seen late, and weighed by a step that this worker may have learned long
            // ago. Unlimited, each worker stays with the paths it began with.
            wait_ns.min(time_ns)
        } else {
            wait_ns.max(u64::from(self.own).saturating_mul(now_ns.saturating_sub(self.heard_ns)))
        }
    }

    fn learn(&mut self, ticket: Ticket, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(ticket.start_ns);
        let sample = u32::try_from(took_ns).unwrap_or(u32::MAX).max(1);
        self.penalty /= 2;
        let time_ns = &mut self.time_ns[usize::from(ticket.cell)];
        let mut most = u32::MAX;
        if *time_ns > 0 {
            if sample <= time_ns.saturating_mul(1 << OUTLIER_BITS) {
                self.nr_outliers = 0;
            } else if ticket.start_ns < self.outlier_ns {
                // All that was held up by one hiccup is one outlier.
                return;
            } else {
                self.outlier_ns = now_ns;
                self.nr_outliers = OUTLIERS_MAX.min(self.nr_outliers + 1);
                most = time_ns.saturating_mul(1 << (OUTLIER_BITS * self.nr_outliers));
            }
        }
        let sample = sample.min(most);
        let silence_ns = ticket.start_ns.saturating_sub(self.sampled_ns);
        let is_stale = silence_ns >> STALE_BITS > u64::from(*time_ns);
        self.sampled_ns = now_ns;
        update(time_ns, sample, is_stale);
        update(&mut self.step_ns, (sample / (u32::from(ticket.ahead) + 1)).max(1), is_stale);
    }
}

fn update(average: &mut u32, sample: u32, is_stale: bool) {
    if *average == 0 {
        *average = sample;
    } else if sample >= *average {
        *average += (sample - *average) >> SAMPLE_BITS;
    } else if is_stale {
        *average = sample.max(*average >> OUTLIER_BITS);
    } else {
        *average -= (*average - sample) >> SAMPLE_BITS;
    }
}

#[cfg(test)]
mod tests;
