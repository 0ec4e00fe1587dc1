//! Requests that wait to be sent, and which of them go out as one.
//!
//! Above the choice of a path: everything that waits can merge, however it came in. A request joins a waiting run of its
//! direction that ends where it begins, or begins where it ends, or closes the gap between two. Runs go out in the order
//! in which their oldest members came, which bounds how long any of them waits. A run whose predecessors on the disk are
//! under way is parked for a moment, so that what follows can join it: that is what makes one large I/O of a sequential
//! stream that comes in small pieces, and costs others nothing.
//!
//! Nothing here does I/O or allocates after construction: requests are known by what they are found under, a [`RunId`].

mod index;
mod list;

use index::Index;
use list::{Links, List};

use crate::transfer::{Span, SpanKind};

/// How many I/Os of a sequential stream are under way before the next part of it waits to grow.
const STREAM_DEPTH: u32 = 2;

/// How long a run is parked at most, in ns.
const PARKED_NS_MAX: u64 = 3_000_000;

/// Marks the end of a chain of indices.
const NONE: u16 = u16::MAX;

/// Number of a run, valid until it is taken (waiting) or has landed (under way).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunId(u16);

/// How far requests are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeLimits {
    /// Most bytes in one run of reads or writes; 0: nothing is merged.
    pub bytes_max: u64,
    /// Most bytes in one run of discards or write-zeroes, which carry no data.
    pub ranges_bytes_max: u64,
    /// Most iovecs in one run.
    pub iovecs_max: u32,
}

impl Default for MergeLimits {
    /// What one call takes: 1024 iovecs (`UIO_MAXIOV`), and 512 KiB, which block devices take without a split. Of ranges
    /// as much as one write-zeroes may have: where the path cannot zero, it is written by hand.
    fn default() -> Self {
        Self { bytes_max: 512 << 10, ranges_bytes_max: 32 << 20, iovecs_max: 1024 }
    }
}

impl MergeLimits {
    fn bytes_of(&self, kind: SpanKind) -> u64 {
        match kind {
            SpanKind::Read | SpanKind::Write => self.bytes_max,
            _ if self.bytes_max == 0 => 0,
            _ => self.ranges_bytes_max,
        }
    }
}

/// A run as it waits.
#[derive(Debug, Clone, Copy)]
struct Run {
    start: u64,
    end: u64,
    kind: SpanKind,
    /// Flushes that came before it: what came before and after one is kept apart.
    era: u32,
    nr_iovecs: u32,
    /// First and last request of the chain.
    first: u16,
    last: u16,
    /// When the oldest member came, in ns.
    since_ns: u64,
    is_parked: bool,
}

#[derive(Debug)]
struct Entry<T> {
    item: Option<T>,
    next: u16,
}

/// The requests that wait, and the runs that are under way.
#[derive(Debug)]
pub struct MergeQueue<T> {
    limits: MergeLimits,
    entries: Vec<Entry<T>>,
    free_entries: Vec<u16>,
    runs: Vec<Run>,
    free_runs: Vec<u16>,
    links: Links,
    /// Runs that may go out, oldest first.
    ready: List,
    /// Runs that wait for a predecessor.
    parked: List,
    by_start: Index,
    by_end: Index,
    /// Runs that are under way.
    flying_by_start: Index,
    flying_by_end: Index,
    era: u32,
}

/// Offsets are of whole sectors, so the kind has room below.
fn key(offset: u64, kind: SpanKind) -> u64 {
    offset | kind as u64
}

impl Span {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

impl Run {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

impl<T> MergeQueue<T> {
    /// Room for `nr` requests, waiting and under way together.
    pub fn new(nr: u16, limits: MergeLimits) -> Self {
        let none = Run {
            start: 0,
            end: 0,
            kind: SpanKind::Read,
            era: 0,
            nr_iovecs: 0,
            first: NONE,
            last: NONE,
            since_ns: 0,
            is_parked: false,
        };
        Self {
            limits,
            entries: (0..nr).map(|_| Entry { item: None, next: NONE }).collect(),
            free_entries: (0..nr).rev().collect(),
            runs: vec![none; usize::from(nr)],
            free_runs: (0..nr).rev().collect(),
            links: Links::new(nr),
            ready: List::default(),
            parked: List::default(),
            by_start: Index::new(nr),
            by_end: Index::new(nr),
            flying_by_start: Index::new(nr),
            flying_by_end: Index::new(nr),
            era: 0,
        }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free_entries.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.parked.is_empty()
    }

    /// What comes from now on is not merged with what waits: a flush has been taken.
    pub fn seal(&mut self) {
        self.era = self.era.wrapping_add(1);
    }

    /// Takes a request in.
    pub fn add(&mut self, item: T, span: Span, now_ns: u64) {
        let Some(entry) = self.free_entries.pop() else {
            // As many as ring entries, and a head is taken once.
            unreachable!("more requests than the ring has");
        };
        self.entries[usize::from(entry)] = Entry { item: Some(item), next: NONE };
        match self.join(entry, span) {
            Some(run) => self.settle(run),
            None => self.found(entry, span, now_ns),
        }
    }

    /// Puts a request to a waiting run that it is adjacent to.
    fn join(&mut self, entry: u16, span: Span) -> Option<u16> {
        if span.len() >= self.limits.bytes_of(span.kind) {
            return None;
        }
        if let Some(run) = self.ending_at(span.start, span) {
            self.by_end.remove(key(span.start, span.kind), run);
            let last = self.runs[usize::from(run)].last;
            self.entries[usize::from(last)].next = entry;
            let grown = &mut self.runs[usize::from(run)];
            (grown.last, grown.end) = (entry, span.end);
            grown.nr_iovecs += span.nr_iovecs;
            let whole = Span { start: grown.start, nr_iovecs: grown.nr_iovecs, ..span };
            match self.beginning_at(span.end, whole) {
                Some(next) => self.unite(run, next),
                None => self.by_end.insert(key(span.end, span.kind), run),
            }
            return Some(run);
        }
        let run = self.beginning_at(span.end, span)?;
        self.by_start.remove(key(span.end, span.kind), run);
        let grown = &mut self.runs[usize::from(run)];
        self.entries[usize::from(entry)].next = grown.first;
        (grown.first, grown.start) = (entry, span.start);
        grown.nr_iovecs += span.nr_iovecs;
        self.by_start.insert(key(span.start, span.kind), run);
        Some(run)
    }

    /// A waiting run that begins at `offset` and has room for `more`.
    fn beginning_at(&self, offset: u64, more: Span) -> Option<u16> {
        self.by_start.find(key(offset, more.kind), |run| {
            let run = &self.runs[usize::from(run)];
            run.start == offset && self.has_room(run, more)
        })
    }

    /// A waiting run that ends at `offset` and has room for `more`.
    fn ending_at(&self, offset: u64, more: Span) -> Option<u16> {
        self.by_end.find(key(offset, more.kind), |run| {
            let run = &self.runs[usize::from(run)];
            run.end == offset && self.has_room(run, more)
        })
    }

    fn has_room(&self, run: &Run, more: Span) -> bool {
        run.kind == more.kind
            && run.era == self.era
            && run.len() + more.len() <= self.limits.bytes_of(run.kind)
            && run.nr_iovecs + more.nr_iovecs <= self.limits.iovecs_max
    }

    /// `next` begins where `run` ends: one from now on. `run` is not in the index of ends at this time.
    fn unite(&mut self, run: u16, next: u16) {
        let gone = self.runs[usize::from(next)];
        self.by_start.remove(key(gone.start, gone.kind), next);
        self.by_end.remove(key(gone.end, gone.kind), next);
        let it = self.runs[usize::from(run)];
        if gone.since_ns < it.since_ns && (it.is_parked || !gone.is_parked) {
            // The place of the older one is that of both.
            self.unlist(run);
            let list = if gone.is_parked { &mut self.parked } else { &mut self.ready };
            list.replace(&mut self.links, next, run);
            self.runs[usize::from(run)].is_parked = gone.is_parked;
        } else {
            self.unlist(next);
        }
        self.free_runs.push(next);
        let last = self.runs[usize::from(run)].last;
        self.entries[usize::from(last)].next = gone.first;
        let grown = &mut self.runs[usize::from(run)];
        (grown.last, grown.end) = (gone.last, gone.end);
        grown.nr_iovecs += gone.nr_iovecs;
        grown.since_ns = grown.since_ns.min(gone.since_ns);
        self.by_end.insert(key(gone.end, gone.kind), run);
        if !gone.is_parked {
            self.make_ready(run);
        }
    }

    /// A new run of one request.
    fn found(&mut self, entry: u16, span: Span, now_ns: u64) {
        let Some(run) = self.free_runs.pop() else {
            unreachable!("more runs than requests");
        };
        let mut it = Run {
            start: span.start,
            end: span.end,
            kind: span.kind,
            era: self.era,
            nr_iovecs: span.nr_iovecs,
            first: entry,
            last: entry,
            since_ns: now_ns,
            is_parked: false,
        };
        it.is_parked = self.is_to_wait(&it);
        self.runs[usize::from(run)] = it;
        self.by_start.insert(key(span.start, span.kind), run);
        self.by_end.insert(key(span.end, span.kind), run);
        let list = if it.is_parked { &mut self.parked } else { &mut self.ready };
        list.push_back(&mut self.links, run);
    }

    /// A run that has grown may go out.
    fn settle(&mut self, run: u16) {
        let it = &self.runs[usize::from(run)];
        if it.is_parked && !self.is_to_wait(it) {
            self.make_ready(run);
        }
    }

    /// A run goes out if it is full, or if not enough of what comes before it is under way.
    fn is_to_wait(&self, run: &Run) -> bool {
        !self.is_full(run) && self.has_enough_ahead(run)
    }

    fn is_full(&self, run: &Run) -> bool {
        run.len() >= self.limits.bytes_of(run.kind) || run.nr_iovecs >= self.limits.iovecs_max
    }

    fn has_enough_ahead(&self, run: &Run) -> bool {
        let (mut at, mut nr_ahead) = (run.start, 0);
        while nr_ahead < STREAM_DEPTH {
            let before = self.flying_by_end.find(key(at, run.kind), |other| {
                let other = &self.runs[usize::from(other)];
                other.end == at && other.kind == run.kind
            });
            match before {
                Some(before) => at = self.runs[usize::from(before)].start,
                None => return false,
            }
            nr_ahead += 1;
        }
        true
    }

    fn make_ready(&mut self, run: u16) {
        let it = &mut self.runs[usize::from(run)];
        if std::mem::replace(&mut it.is_parked, false) {
            self.parked.remove(&mut self.links, run);
            self.ready.push_back(&mut self.links, run);
        }
    }

    fn unlist(&mut self, run: u16) {
        let list = if self.runs[usize::from(run)].is_parked { &mut self.parked } else { &mut self.ready };
        list.remove(&mut self.links, run);
    }

    /// The run that is to go out next: its number, bytes and kind.
    pub fn first(&self) -> Option<(RunId, u64, SpanKind)> {
        let run = self.ready.first()?;
        let it = &self.runs[usize::from(run)];
        Some((RunId(run), it.len(), it.kind))
    }

    /// Takes a waiting run out, and gives its requests in the order of their offsets.
    pub fn take(&mut self, run: RunId) -> Requests<'_, T> {
        let it = self.runs[usize::from(run.0)];
        self.by_start.remove(key(it.start, it.kind), run.0);
        self.by_end.remove(key(it.end, it.kind), run.0);
        self.unlist(run.0);
        self.free_runs.push(run.0);
        Requests { entries: &mut self.entries, free: &mut self.free_entries, next: it.first }
    }

    /// Takes everything out.
    pub fn drain(&mut self) -> Vec<T> {
        self.expire_all();
        let mut all = Vec::with_capacity(self.len());
        while let Some((run, ..)) = self.first() {
            all.extend(self.take(run));
        }
        all
    }

    /// Notes that a run is under way, so that what follows it on the disk can wait to grow.
    pub fn fly(&mut self, span: Span) -> Option<RunId> {
        if self.limits.bytes_max == 0 {
            return None;
        }
        let run = self.free_runs.pop()?;
        let it = &mut self.runs[usize::from(run)];
        (it.start, it.end, it.kind) = (span.start, span.end, span.kind);
        self.flying_by_start.insert(key(span.start, span.kind), run);
        self.flying_by_end.insert(key(span.end, span.kind), run);
        Some(RunId(run))
    }

    /// It is under way no more. What has waited for it may go.
    pub fn land(&mut self, run: RunId) {
        let it = self.runs[usize::from(run.0)];
        self.flying_by_start.remove(key(it.start, it.kind), run.0);
        self.flying_by_end.remove(key(it.end, it.kind), run.0);
        self.free_runs.push(run.0);
        if self.parked.is_empty() {
            return;
        }
        // Whatever is parked behind it, right away or behind others that are under way.
        let mut at = it.end;
        for _ in 0..=STREAM_DEPTH {
            let follower = self.by_start.find(key(at, it.kind), |other| {
                let other = &self.runs[usize::from(other)];
                other.start == at && other.kind == it.kind && other.is_parked
            });
            if let Some(follower) = follower {
                return self.settle(follower);
            }
            let next = self.flying_by_start.find(key(at, it.kind), |other| {
                let other = &self.runs[usize::from(other)];
                other.start == at && other.kind == it.kind
            });
            let Some(next) = next else { return };
            at = self.runs[usize::from(next)].end;
        }
    }

    /// When the first parked run is to go whatever is under way, in ns.
    pub fn due_ns(&self) -> Option<u64> {
        let first = self.parked.first()?;
        Some(self.runs[usize::from(first)].since_ns + PARKED_NS_MAX)
    }

    /// Lets go what is parked for long enough.
    pub fn expire(&mut self, now_ns: u64) {
        while let (Some(first), Some(due_ns)) = (self.parked.first(), self.due_ns()) {
            if due_ns > now_ns {
                return;
            }
            self.make_ready(first);
        }
    }

    /// Lets everything go that is parked.
    pub fn expire_all(&mut self) {
        while let Some(first) = self.parked.first() {
            self.make_ready(first);
        }
    }
}

/// The requests of a run.
#[derive(Debug)]
pub struct Requests<'a, T> {
    entries: &'a mut Vec<Entry<T>>,
    free: &'a mut Vec<u16>,
    next: u16,
}

impl<T> Requests<'_, T> {
    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.next == NONE
    }
}

impl<T> Iterator for Requests<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let entry = self.entries.get_mut(usize::from(self.next))?;
        let item = entry.item.take();
        self.free.push(self.next);
        self.next = std::mem::replace(&mut entry.next, NONE);
        item
    }
}

impl<T> Drop for Requests<'_, T> {
    fn drop(&mut self) {
        debug_assert!(self.next == NONE || std::thread::panicking(), "requests were left behind");
    }
}

#[cfg(test)]
mod tests;
