//! Random load that knows what each sector must hold.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::blk::{BlkQueue, Done};
use super::disk::Disk;
use super::request::{OK, Op, SECTOR};

/// A small generator; the same seed gives the same load.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number (splitmix64).
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// True in so many of a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What `sector` holds after its `generation`th write; generation 0 is the empty image.
pub fn pattern(sector: u64, generation: u32) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if generation == 0 {
        return bytes;
    }
    let mut word = mix(sector ^ (u64::from(generation) << 40));
    for chunk in bytes.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    }
    // Readable in a dump of what went wrong.
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&generation.to_le_bytes());
    bytes
}

/// Content no longer known, after a write that failed.
const UNKNOWN: u32 = u32::MAX;

/// What a load does.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Requests to make; with `stop` an upper limit.
    pub requests: u64,
    /// Ends the load early.
    pub stop: Option<&'a AtomicBool>,
    /// Requests outstanding.
    pub depth: usize,
    /// Requests staged before a kick.
    pub batch: usize,
    /// Largest request.
    pub sectors_max: u64,
    /// Share of writes.
    pub write_percent: u64,
    /// Share of requests that go on where the last one ended.
    pub sequential_percent: u64,
    /// Share of flushes.
    pub flush_percent: u64,
    /// Whether answers other than OK are counted instead of ending the load.
    pub errors_allowed: bool,
}

impl Default for Plan<'_> {
    fn default() -> Self {
        Self {
            requests: 2000,
            stop: None,
            depth: 32,
            batch: 8,
            sectors_max: 32,
            write_percent: 50,
            sequential_percent: 30,
            flush_percent: 1,
            errors_allowed: false,
        }
    }
}

/// What came of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Requests answered, each exactly once.
    pub answered: u64,
    /// Of these, writes.
    pub writes: u64,
    /// Answers other than OK.
    pub errors: u64,
    /// Longest time to an answer.
    pub latency_max: Duration,
}

/// A part of the disk that one queue has for itself, and what each sector of it holds.
#[derive(Clone, Debug)]
pub struct Verifier {
    region: Range<u64>,
    generations: Vec<u32>,
    rng: Rng,
    places: Places,
}

/// Where requests go: in a region of sectors, at random or one behind the other.
#[derive(Clone, Debug)]
pub(super) struct Places {
    region: Range<u64>,
    next_sequential: u64,
}

impl Places {
    pub(super) fn new(region: Range<u64>) -> Self {
        let next_sequential = region.start;
        Self { region, next_sequential }
    }

    /// Sectors that nothing outstanding touches: a change must not race with anything, or nobody could say what they hold.
    pub(super) fn pick(
        &mut self,
        rng: &mut Rng,
        sectors_max: u64,
        sequential_percent: u64,
        is_free: impl Fn(&Range<u64>) -> bool,
    ) -> Option<Range<u64>> {
        for _ in 0..20 {
            let len = 1 + rng.below(sectors_max);
            let start = if rng.percent(sequential_percent) {
                self.next_sequential
            } else {
                self.region.start + rng.below(self.region.end - self.region.start)
            };
            let range = start..(start + len).min(self.region.end);
            if range.is_empty() {
                self.next_sequential = self.region.start;
            } else if is_free(&range) {
                self.next_sequential = range.end;
                return Some(range);
            }
        }
        None
    }
}

/// Whether two ranges have nothing in common.
pub(super) fn are_apart(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.end <= b.start || b.end <= a.start
}

#[derive(Debug)]
struct Outstanding {
    tag: u64,
    range: Range<u64>,
    /// Generations that a write leaves, or that a read must find.
    generations: Vec<u32>,
    write: bool,
}

impl Verifier {
    /// The sectors `region`, all zero as yet.
    pub fn new(region: Range<u64>, seed: u64) -> Self {
        let len = usize::try_from(region.end - region.start).expect("a region of sane size");
        let places = Places::new(region.clone());
        Self { region, generations: vec![0; len], rng: Rng::new(seed), places }
    }

    /// One for each of `nr` queues, over the whole of a disk of `sectors`.
    pub fn share(sectors: u64, nr: usize, seed: u64) -> Vec<Self> {
        let part = sectors / nr as u64;
        (0..nr as u64).map(|i| Self::new(i * part..(i + 1) * part, seed.wrapping_add(i << 32))).collect()
    }

    /// Takes it that every sector holds this generation.
    pub fn set_all(&mut self, generation: u32) {
        self.generations.fill(generation);
    }

    fn slot(&self, sector: u64) -> usize {
        usize::try_from(sector - self.region.start).expect("a region of sane size")
    }

    fn stage_one(&mut self, q: &mut BlkQueue, plan: &Plan, outstanding: &mut Vec<Outstanding>) -> bool {
        if self.rng.percent(plan.flush_percent) {
            let Some(tag) = q.stage(&Op::Flush) else { return false };
            outstanding.push(Outstanding { tag, range: 0..0, generations: Vec::new(), write: false });
            return true;
        }
        let is_free = |range: &Range<u64>| outstanding.iter().all(|o| are_apart(&o.range, range));
        let picked = self.places.pick(&mut self.rng, plan.sectors_max, plan.sequential_percent, is_free);
        let Some(range) = picked else { return false };
        let (from, to) = (self.slot(range.start), self.slot(range.end));
        let write = self.rng.percent(plan.write_percent);
        let mut generations = self.generations[from..to].to_vec();
        let op = if write {
            for generation in &mut generations {
                *generation = generation.wrapping_add(1).max(1) % UNKNOWN;
            }
            let sectors = range.clone().zip(&generations);
            Op::write(range.start, sectors.flat_map(|(s, &g)| pattern(s, g)).collect::<Vec<u8>>())
        } else {
            Op::read(range.start, to - from)
        };
        let Some(tag) = q.stage(&op) else { return false };
        outstanding.push(Outstanding { tag, range, generations, write });
        true
    }

    fn check(
        &mut self,
        done: &Done,
        outstanding: &Outstanding,
        plan: &Plan,
        report: &mut Report,
    ) -> Result<()> {
        report.answered += 1;
        report.latency_max = report.latency_max.max(done.latency);
        let Outstanding { range, generations, write, .. } = outstanding;
        report.writes += u64::from(*write);
        if done.status != OK {
            report.errors += 1;
            ensure!(plan.errors_allowed, "status {} for sectors {range:?} (write: {write})", done.status);
            if *write {
                let (from, to) = (self.slot(range.start), self.slot(range.end));
                self.generations[from..to].fill(UNKNOWN);
            }
            return Ok(());
        }
        if *write {
            let (from, to) = (self.slot(range.start), self.slot(range.end));
            self.generations[from..to].copy_from_slice(generations);
            let full = done.used_len == 1;
            ensure!(full, "used length {} for a write", done.used_len);
            return Ok(());
        }
        for ((sector, &generation), got) in range.clone().zip(generations).zip(done.data.chunks(SECTOR)) {
            if generation != UNKNOWN {
                compare(sector, generation, got)?;
            }
        }
        Ok(())
    }

    /// Loads `q` as planned and checks all that is read.
    pub fn run(&mut self, q: &mut BlkQueue, plan: &Plan) -> Result<Report> {
        let mut report = Report::default();
        let mut outstanding: Vec<Outstanding> = Vec::new();
        let mut made = 0;
        loop {
            let stopped = plan.stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
            let more = !stopped && made < plan.requests;
            let mut staged = 0;
            while more && made < plan.requests && staged < plan.batch && outstanding.len() < plan.depth {
                if !self.stage_one(q, plan, &mut outstanding) {
                    break;
                }
                (made, staged) = (made + 1, staged + 1);
            }
            if staged > 0 {
                q.kick();
            }
            if outstanding.is_empty() {
                // Nothing could be staged and nothing is under way: done, or the region is too small for the plan.
                ensure!(!more || staged > 0, "the load found nothing to do");
                return Ok(report);
            }
            let mut answer = Some(q.done().with_context(|| format!("after {} answers", report.answered))?);
            while let Some(done) = answer {
                let at =
                    outstanding.iter().position(|o| o.tag == done.tag).context("an answer out of nowhere")?;
                let outstanding = outstanding.swap_remove(at);
                self.check(&done, &outstanding, plan, &mut report)?;
                answer = q.done_now()?;
            }
        }
    }

    /// Reads the whole region and checks it.
    pub fn check_all(&mut self, q: &mut BlkQueue) -> Result<()> {
        let step = 128;
        let mut sector = self.region.start;
        while sector < self.region.end {
            let num = step.min(self.region.end - sector);
            let data = q.read(sector, usize::try_from(num)?)?;
            self.check_bytes(sector, &data)?;
            sector += num;
        }
        Ok(())
    }

    /// Checks bytes that were read from `sector` on in some other way.
    pub fn check_bytes(&self, sector: u64, data: &[u8]) -> Result<()> {
        for (sector, got) in (sector..).zip(data.chunks(SECTOR)) {
            let generation = self.generations[self.slot(sector)];
            if generation != UNKNOWN {
                compare(sector, generation, got)?;
            }
        }
        Ok(())
    }

    /// Checks the file behind the disk.
    pub fn check_file(&self, file: &std::path::Path) -> Result<()> {
        use std::os::unix::fs::FileExt as _;
        let mut data = vec![0; self.generations.len() * SECTOR];
        std::fs::File::open(file)?.read_exact_at(&mut data, self.region.start * SECTOR as u64)?;
        self.check_bytes(self.region.start, &data).context("in the file itself")
    }
}

fn compare(sector: u64, generation: u32, got: &[u8]) -> Result<()> {
    if got == pattern(sector, generation) {
        return Ok(());
    }
    let seen_sector = u64::from_le_bytes(got[..8].try_into()?);
    let seen_generation = u32::from_le_bytes(got[8..12].try_into()?);
    anyhow::bail!(
        "sector {sector} should hold generation {generation}; it holds {:x?}... (as a pattern: sector {seen_sector}, \
         generation {seen_generation})",
        &got[..16]
    )
}

/// Loads all queues of `disk` at once, each in its own thread on its own part, and reads everything back at the end.
pub fn load(disk: &mut Disk, plan: &Plan, seed: u64) -> Result<Report> {
    let sectors = disk.config.capacity;
    let mut verifiers = Verifier::share(sectors, disk.queues.len(), seed);
    load_with(&mut disk.queues, &mut verifiers, plan)
}

/// [`load`] with verifiers that are kept, to go on later.
pub fn load_with(queues: &mut [BlkQueue], verifiers: &mut [Verifier], plan: &Plan) -> Result<Report> {
    let start = Instant::now();
    let reports: Vec<Result<Report>> = std::thread::scope(|scope| {
        let threads: Vec<_> = queues
            .iter_mut()
            .zip(verifiers.iter_mut())
            .map(|(q, verifier)| {
                scope.spawn(move || {
                    let report = verifier.run(q, plan)?;
                    verifier.check_all(q)?;
                    Ok(report)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a load does not panic")).collect()
    });
    let mut sum = Report::default();
    for report in reports {
        let report = report.with_context(|| format!("{:?} into the load", start.elapsed()))?;
        sum.answered += report.answered;
        sum.writes += report.writes;
        sum.errors += report.errors;
        sum.latency_max = sum.latency_max.max(report.latency_max);
    }
    Ok(sum)
}
