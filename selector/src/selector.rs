//! The one type that workers use: a closed set of selectors, dispatched without a virtual call.

use crate::historical_service_time::HistoricalServiceTime;
use crate::io_affinity::IoAffinity;
use crate::learned_service_time::{LearnedServiceTime, cell};
use crate::queue_length::QueueLength;
use crate::round_robin::RoundRobin;
use crate::service_time::ServiceTime;
use crate::{GroupArgs, Kind, Load, Outcome, PathArgs, PathInfo, PathSet, Request, Ticket};

/// Most paths in a group, as in dm.
pub const PATHS_MAX: usize = 1024;

/// Chooses among the paths of one priority group for one worker.
#[derive(Clone, Debug)]
pub struct Selector {
    nr_paths: usize,
    policy: Policy,
}

#[derive(Clone, Debug)]
enum Policy {
    RoundRobin(RoundRobin),
    QueueLength(QueueLength),
    ServiceTime(ServiceTime),
    // Boxed: its table of weights alone is ten times the others.
    HistoricalServiceTime(Box<HistoricalServiceTime>),
    IoAffinity(IoAffinity),
    LearnedServiceTime(LearnedServiceTime),
}

/// Arguments that no selector can be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NewError {
    /// More paths than [`PATHS_MAX`].
    #[error("{nr_paths} paths in a group, at most {PATHS_MAX} are possible")]
    TooManyPaths {
        /// Paths given.
        nr_paths: usize,
    },
    /// io-affinity without a mask.
    #[error("io-affinity: path {path} of its group has no mask")]
    NoQueueMask {
        /// Index in the group.
        path: usize,
    },
    /// io-affinity with a mask that is empty or claimed by earlier paths.
    #[error("io-affinity: the mask of path {path} of its group names no queue that is not taken")]
    NoQueueLeft {
        /// Index in the group.
        path: usize,
    },
}

impl Selector {
    /// Makes the selector of a group with these paths, for the worker with this index (which staggers the first
    /// choices, so that workers at depth 1 do not walk the paths in step). The only allocations.
    ///
    /// # Errors
    /// io-affinity: a path without a queue of its own. Any: more than [`PATHS_MAX`] paths.
    pub fn new(kind: Kind, group: &GroupArgs, paths: &[PathArgs], worker: usize) -> Result<Self, NewError> {
        let too_many = NewError::TooManyPaths { nr_paths: paths.len() };
        let count = u16::try_from(paths.len()).map_err(|_| too_many)?;
        if paths.len() > PATHS_MAX {
            return Err(too_many);
        }
        let policy = match kind {
            Kind::RoundRobin => Policy::RoundRobin(RoundRobin::new(paths.len(), worker)),
            Kind::QueueLength => Policy::QueueLength(QueueLength::new(count, worker)),
            Kind::ServiceTime => {
                let throughput = paths.iter().map(|path| path.relative_throughput).collect();
                Policy::ServiceTime(ServiceTime::new(throughput, count, worker))
            }
            Kind::HistoricalServiceTime => {
                let selector = HistoricalServiceTime::new(group.base_weight, group.threshold, count, worker);
                Policy::HistoricalServiceTime(Box::new(selector))
            }
            Kind::IoAffinity => {
                Policy::IoAffinity(IoAffinity::new(paths.iter().map(|path| path.queue_mask.as_ref()))?)
            }
            Kind::LearnedServiceTime => {
                Policy::LearnedServiceTime(LearnedServiceTime::new(group.share_ratio, paths.len(), worker))
            }
        };
        Ok(Self { nr_paths: paths.len(), policy })
    }

    /// Which algorithm it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self.policy {
            Policy::RoundRobin(_) => Kind::RoundRobin,
            Policy::QueueLength(_) => Kind::QueueLength,
            Policy::ServiceTime(_) => Kind::ServiceTime,
            Policy::HistoricalServiceTime(_) => Kind::HistoricalServiceTime,
            Policy::IoAffinity(_) => Kind::IoAffinity,
            Policy::LearnedServiceTime(_) => Kind::LearnedServiceTime,
        }
    }

    /// Number of paths in the group.
    #[must_use]
    pub fn nr_paths(&self) -> usize {
        self.nr_paths
    }

    /// The path for a request, out of the usable ones; `None` if no path is usable.
    ///
    /// `usable` must be of this group: a set of another size is a bug of the caller.
    #[inline]
    pub fn select(
        &mut self,
        request: &Request,
        usable: &PathSet,
        load: &(impl Load + ?Sized),
    ) -> Option<usize> {
        debug_assert_eq!(usable.nr_paths(), self.nr_paths, "the set of another group");
        match &mut self.policy {
            Policy::RoundRobin(policy) => policy.select(usable),
            Policy::QueueLength(policy) => policy.select(usable, load),
            Policy::ServiceTime(policy) => policy.select(request.bytes, usable, load),
            Policy::HistoricalServiceTime(policy) => policy.select(request.now_ns, usable),
            Policy::IoAffinity(policy) => policy.select(request.queue, usable),
            Policy::LearnedServiceTime(policy) => policy.select(request, usable, load),
        }
    }

    /// The request goes out on this path; `load` is the one that was chosen by, without the request itself.
    ///
    /// # Panics
    /// If the group has no such path.
    #[inline]
    pub fn start_io(&mut self, path: usize, request: &Request, load: &(impl Load + ?Sized)) -> Ticket {
        assert!(path < self.nr_paths, "path {path} of {}", self.nr_paths);
        let cell = cell(request.direction, request.bytes);
        let ahead = load.in_flight(path);
        match &mut self.policy {
            Policy::HistoricalServiceTime(policy) => policy.start_io(path),
            Policy::LearnedServiceTime(policy) => policy.start_io(path, cell, request.now_ns),
            _ => {}
        }
        Ticket {
            start_ns: request.now_ns,
            path: u16::try_from(path).unwrap_or(u16::MAX),
            ahead: u16::try_from(ahead).unwrap_or(u16::MAX),
            cell: u8::try_from(cell).unwrap_or(0),
        }
    }

    /// An I/O ended. A ticket of another selector must not be given back here, unless the path has the same index.
    #[inline]
    pub fn end_io(&mut self, ticket: Ticket, now_ns: u64, outcome: Outcome) {
        if ticket.path() >= self.nr_paths {
            return;
        }
        match &mut self.policy {
            // The kernel's selector hears of every end and does not ask how it came.
            Policy::HistoricalServiceTime(policy) => policy.end_io(ticket.path(), ticket.start_ns, now_ns),
            Policy::LearnedServiceTime(policy) => policy.end_io(ticket, now_ns, outcome),
            _ => {}
        }
    }

    /// The path failed (and is no longer in the usable set).
    pub fn fail_path(&mut self, path: usize) {
        if path >= self.nr_paths {
            return;
        }
        match &mut self.policy {
            Policy::RoundRobin(policy) => policy.fail_path(path),
            Policy::HistoricalServiceTime(policy) => policy.fail_path(path),
            _ => {}
        }
    }

    /// The path is good again (and may be in the usable set).
    pub fn reinstate_path(&mut self, path: usize) {
        if path >= self.nr_paths {
            return;
        }
        match &mut self.policy {
            Policy::RoundRobin(policy) => policy.reinstate_path(path),
            Policy::QueueLength(policy) => policy.reinstate_path(path),
            Policy::ServiceTime(policy) => policy.reinstate_path(path),
            Policy::HistoricalServiceTime(policy) => policy.reinstate_path(path),
            Policy::IoAffinity(_) => {}
            Policy::LearnedServiceTime(policy) => policy.reinstate_path(path),
        }
    }

    /// Takes over what the selector of an older table has learned about a path, so that a new table does not begin
    /// with guesses. Nothing happens between different kinds.
    pub fn inherit(&mut self, path: usize, old: &Self, old_path: usize) {
        if path >= self.nr_paths || old_path >= old.nr_paths {
            return;
        }
        match (&mut self.policy, &old.policy) {
            (Policy::HistoricalServiceTime(new), Policy::HistoricalServiceTime(old)) => {
                new.inherit(path, old.history(old_path));
            }
            (Policy::LearnedServiceTime(new), Policy::LearnedServiceTime(old)) => {
                new.inherit(path, old, old_path);
            }
            _ => {}
        }
    }

    /// What to show of a path.
    ///
    /// # Panics
    /// If the group has no such path.
    #[must_use]
    pub fn info(&self, path: usize, load: &(impl Load + ?Sized)) -> PathInfo {
        assert!(path < self.nr_paths, "path {path} of {}", self.nr_paths);
        match &self.policy {
            Policy::RoundRobin(_) => PathInfo::RoundRobin,
            Policy::QueueLength(_) => PathInfo::QueueLength { in_flight: load.in_flight(path) },
            Policy::ServiceTime(policy) => PathInfo::ServiceTime {
                in_flight_bytes: load.in_flight_bytes(path),
                relative_throughput: policy.throughput(path),
            },
            Policy::HistoricalServiceTime(policy) => {
                let history = policy.history(path);
                PathInfo::HistoricalServiceTime {
                    average: history.average,
                    in_flight: load.in_flight(path),
                    stale_after_ns: history.stale_after_ns,
                }
            }
            Policy::IoAffinity(policy) => PathInfo::IoAffinity { misses: policy.misses() },
            Policy::LearnedServiceTime(policy) => policy.info(path, load.in_flight(path)),
        }
    }
}
