//! Random load that knows what each sector must hold, and what it may hold after the power went.
//!
//! Each write of a sector is a generation of it. Four numbers are kept per sector: the generation that was answered last
//! (what a read must find), the one that is known to be durable (a flush that was sent after its answer was answered OK), the
//! last one that was sent, and the first one since the last power cut. After a cut a sector holds the durable generation or
//! a later one of those that were sent since: never an older one, and nothing else.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::blk::{BlkQueue, Done};
use super::request::{Cut, Framing, OK, Op, SECTOR, Segment, UNMAP};
use super::verify::{Places, Rng, are_apart, pattern};

/// How often the flags are looked at while nothing is answered.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Entries about zeroed sectors after which those that no longer matter are thrown away.
const NR_ZEROED_MAX: usize = 200_000;

#[derive(Debug, Default)]
struct Sector {
    answered: AtomicU32,
    durable: AtomicU32,
    sent: AtomicU32,
    first: AtomicU32,
}

/// What is known of all sectors; shared by all queues, since a flush on one covers what the others wrote.
#[derive(Debug)]
pub struct Book {
    sectors: Box<[Sector]>,
}

impl Book {
    /// All zero, and durable.
    pub fn new(sectors: u64) -> Arc<Self> {
        Arc::new(Self { sectors: (0..sectors).map(|_| Sector::default()).collect() })
    }

    fn of(&self, sector: u64) -> &Sector {
        &self.sectors[usize::try_from(sector).expect("a disk of sane size")]
    }

    /// What a flush that is sent from now on covers.
    fn answered(&self) -> Vec<u32> {
        self.sectors.iter().map(|sector| sector.answered.load(Ordering::SeqCst)).collect()
    }

    fn flushed(&self, covered: &[u32]) {
        for (sector, &generation) in self.sectors.iter().zip(covered) {
            sector.durable.fetch_max(generation, Ordering::SeqCst);
        }
    }

    /// Takes everything that was answered as durable, after a look that showed it.
    pub fn all_durable(&self) {
        self.flushed(&self.answered());
    }
}

/// What a load consists of; shares in percent, the rest are reads.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Requests outstanding.
    pub depth: usize,
    /// Requests staged before a kick.
    pub batch: usize,
    /// Largest request.
    pub sectors_max: u64,
    /// Share of writes.
    pub write_percent: u64,
    /// Share of write-zeroes requests.
    pub zero_percent: u64,
    /// Share of discards.
    pub discard_percent: u64,
    /// Share of flushes.
    pub flush_percent: u64,
    /// Share of requests that go on where the last one ended.
    pub sequential_percent: u64,
    /// Share of requests whose buffers are odd: in pieces, off their boundaries, in indirect tables.
    pub odd_percent: u64,
    /// Every write is durable when it is answered.
    pub write_through: bool,
    /// How long an answer may take.
    pub timeout: Duration,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            depth: 24,
            batch: 8,
            sectors_max: 48,
            write_percent: 45,
            zero_percent: 2,
            discard_percent: 2,
            flush_percent: 3,
            sequential_percent: 30,
            odd_percent: 15,
            write_through: false,
            timeout: Duration::from_secs(30),
        }
    }
}

/// When a load ends.
#[derive(Debug, Default)]
pub struct Ends {
    /// Nothing new is sent; the load ends when all is answered.
    pub stop: AtomicBool,
    /// The storage is losing its power: errors are what is to be expected.
    pub dying: AtomicBool,
    /// What is under way is given up at once.
    pub cut: AtomicBool,
}

/// What came of a load.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests answered, each exactly once and as it should be, by kind.
    pub answered: BTreeMap<&'static str, u64>,
    /// Sectors that were read and held what they should.
    pub sectors_checked: u64,
    /// Times to answers, in us.
    pub latencies_us: Vec<u32>,
    /// Requests given up by a cut.
    pub given_up: u64,
}

impl Tally {
    /// All requests.
    pub fn total(&self) -> u64 {
        self.answered.values().sum()
    }

    /// Adds another one.
    pub fn add(&mut self, other: Self) {
        for (kind, number) in other.answered {
            *self.answered.entry(kind).or_default() += number;
        }
        self.sectors_checked += other.sectors_checked;
        self.given_up += other.given_up;
        self.latencies_us.extend(other.latencies_us);
    }
}

/// What sectors held after a cut, of those that had something to lose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Survived {
    /// The last generation that was sent.
    pub last: u64,
    /// Other ones that were not known to be durable.
    pub between: u64,
    /// The durable one, with later ones lost.
    pub durable: u64,
}

/// Writes its own part of the disk.
#[derive(Debug)]
pub struct Writer {
    book: Arc<Book>,
    region: Range<u64>,
    rng: Rng,
    places: Places,
    /// Generations that are zeros.
    zeroed: HashSet<(u64, u32)>,
}

#[derive(Debug)]
struct Outstanding {
    tag: u64,
    kind: &'static str,
    range: Range<u64>,
    /// Of a change: what it leaves. Of a read: what it must find.
    generations: Vec<u32>,
    /// Of a flush.
    covers: Vec<u32>,
}

impl Outstanding {
    fn is_change(&self) -> bool {
        !matches!(self.kind, "read" | "flush")
    }
}

impl Writer {
    /// One for each of `nr` queues.
    pub fn share(book: &Arc<Book>, nr: u64, seed: u64) -> Vec<Self> {
        let part = book.sectors.len() as u64 / nr;
        let of = |i: u64| Self {
            book: Arc::clone(book),
            region: i * part..(i + 1) * part,
            rng: Rng::new(seed.wrapping_add(i << 32)),
            places: Places::new(i * part..(i + 1) * part),
            zeroed: HashSet::new(),
        };
        (0..nr).map(of).collect()
    }

    fn pick(&mut self, mix: &Mix, outstanding: &[Outstanding]) -> Option<Range<u64>> {
        let is_free = |range: &Range<u64>| outstanding.iter().all(|o| are_apart(&o.range, range));
        self.places.pick(&mut self.rng, mix.sectors_max, mix.sequential_percent, is_free)
    }

    fn expected(&self, sector: u64, generation: u32) -> [u8; SECTOR] {
        if self.zeroed.contains(&(sector, generation)) { [0; SECTOR] } else { pattern(sector, generation) }
    }

    /// The next request.
    fn next(&mut self, mix: &Mix, outstanding: &[Outstanding]) -> Option<(Op, Outstanding)> {
        let dice = self.rng.below(100);
        let kinds = [
            ("flush", mix.flush_percent),
            ("write", mix.write_percent),
            ("write-zeroes", mix.zero_percent),
            ("discard", mix.discard_percent),
        ];
        let mut until = 0;
        let kind = kinds.into_iter().find_map(|(kind, percent)| {
            until += percent;
            (dice < until).then_some(kind)
        });
        let kind = kind.unwrap_or("read");
        let mut request =
            Outstanding { tag: 0, kind, range: 0..0, generations: Vec::new(), covers: Vec::new() };
        if kind == "flush" {
            request.covers = self.book.answered();
            return Some((Op::Flush, request));
        }
        let range = self.pick(mix, outstanding)?;
        let nr = usize::try_from(range.end - range.start).expect("small");
        let segment = Segment::new(range.start, u32::try_from(nr).expect("small"));
        if !request.is_change() {
            let answered = |sector| self.book.of(sector).answered.load(Ordering::SeqCst);
            request.generations = range.clone().map(answered).collect();
            request.range = range.clone();
            return Some((Op::read(range.start, nr), request));
        }
        for sector in range.clone() {
            let generation = self.book.of(sector).sent.fetch_add(1, Ordering::SeqCst) + 1;
            request.generations.push(generation);
            if kind != "write" {
                self.zeroed.insert((sector, generation));
            }
        }
        let op = match kind {
            "write" => {
                let sectors = range.clone().zip(&request.generations);
                Op::write(range.start, sectors.flat_map(|(s, &g)| pattern(s, g)).collect::<Vec<u8>>())
            }
            "discard" => Op::Discard(vec![segment]),
            _ => Op::WriteZeroes(vec![segment.flags(if self.rng.percent(50) { UNMAP } else { 0 })]),
        };
        request.range = range;
        Some((op, request))
    }

    fn framing(&mut self, mix: &Mix) -> Framing {
        if !self.rng.percent(mix.odd_percent) {
            return Framing::Plain;
        }
        if self.rng.percent(30) {
            return Framing::Indirect;
        }
        let pieces = |rng: &mut Rng| (0..rng.below(4)).map(|_| odd_len(rng)).collect();
        let (out, into) = (pieces(&mut self.rng), pieces(&mut self.rng));
        let misalign = odd_len(&mut self.rng) % 64;
        Framing::Cut(Cut { out, into, misalign, indirect: self.rng.percent(50), direct_pieces: 0 })
    }

    fn check(&mut self, done: &Done, request: Outstanding, mix: &Mix, tally: &mut Tally) -> Result<()> {
        *tally.answered.entry(request.kind).or_default() += 1;
        tally.latencies_us.push(u32::try_from(done.latency.as_micros()).unwrap_or(u32::MAX));
        if request.kind == "flush" {
            self.book.flushed(&request.covers);
            return Ok(());
        }
        let sectors = request.range.clone().zip(&request.generations);
        if request.is_change() {
            ensure!(done.used_len == 1, "used length {} for a {}", done.used_len, request.kind);
            for (sector, &generation) in sectors {
                let known = self.book.of(sector);
                known.answered.store(generation, Ordering::SeqCst);
                if mix.write_through {
                    known.durable.fetch_max(generation, Ordering::SeqCst);
                }
            }
            return Ok(());
        }
        for ((sector, &generation), got) in sectors.zip(done.data.chunks(SECTOR)) {
            let known = got == self.expected(sector, generation);
            ensure!(known, "sector {sector} should hold generation {generation}: {}", shown(got));
            tally.sectors_checked += 1;
        }
        Ok(())
    }

    /// Loads `q` until it is to end, and checks all answers.
    pub fn run(&mut self, q: &mut BlkQueue, mix: &Mix, ends: &Ends) -> Result<Tally> {
        let mut tally = Tally::default();
        let mut outstanding: Vec<Outstanding> = Vec::new();
        self.forget_old_zeroes();
        loop {
            let stopped = ends.stop.load(Ordering::SeqCst);
            let mut staged = 0;
            while !stopped && staged < mix.batch && outstanding.len() < mix.depth {
                let Some((op, mut request)) = self.next(mix, &outstanding) else { break };
                let framing = self.framing(mix);
                // A chain that does not fit is not sent: the generation is passed over.
                let Some(tag) = q.stage_framed(&op, &framing) else { break };
                request.tag = tag;
                outstanding.push(request);
                staged += 1;
            }
            if staged > 0 {
                q.kick();
            }
            if outstanding.is_empty() && stopped {
                return Ok(tally);
            }
            let deadline = Instant::now() + mix.timeout;
            let mut is_there = q.queue.arm_calls();
            while !is_there {
                is_there = q.queue.called_within(LOOK_AGAIN)?;
                if ends.cut.load(Ordering::SeqCst) {
                    tally.given_up = outstanding.len() as u64;
                    return Ok(tally);
                }
                if !is_there && Instant::now() > deadline {
                    let kinds: Vec<_> = outstanding.iter().map(|o| (o.kind, &o.range)).collect();
                    bail!("no answer within {:?} to {kinds:?}", mix.timeout);
                }
            }
            while let Some(done) = q.done_now()? {
                let at = outstanding.iter().position(|o| o.tag == done.tag);
                let request = outstanding.swap_remove(at.context("an answer out of nowhere")?);
                if done.status == OK {
                    self.check(&done, request, mix, &mut tally)?;
                } else if !ends.dying.load(Ordering::SeqCst) {
                    bail!("status {} for a {} of sectors {:?}", done.status, request.kind, request.range);
                }
            }
        }
    }

    /// Reads the whole part and checks it.
    pub fn check_all(&self, q: &mut BlkQueue) -> Result<u64> {
        self.read_all(q, |sector, got| {
            let generation = self.book.of(sector).answered.load(Ordering::SeqCst);
            let known = got == self.expected(sector, generation);
            ensure!(known, "sector {sector} should hold generation {generation}: {}", shown(got));
            Ok(())
        })
    }

    fn read_all(&self, q: &mut BlkQueue, mut look: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<u64> {
        let mut sector = self.region.start;
        while sector < self.region.end {
            let num = (self.region.end - sector).min(128);
            let data = q.read(sector, usize::try_from(num)?)?;
            for (sector, got) in (sector..).zip(data.chunks(SECTOR)) {
                look(sector, got)?;
            }
            sector += num;
        }
        Ok(self.region.end - self.region.start)
    }

    /// Looks at the backing file after everything was flushed.
    pub fn check_file(&self, file: &std::path::Path) -> Result<()> {
        use std::os::unix::fs::FileExt as _;
        let nr = usize::try_from(self.region.end - self.region.start)?;
        let mut data = vec![0; nr * SECTOR];
        std::fs::File::open(file)?.read_exact_at(&mut data, self.region.start * SECTOR as u64)?;
        for (sector, got) in (self.region.start..).zip(data.chunks(SECTOR)) {
            let generation = self.book.of(sector).answered.load(Ordering::SeqCst);
            let known = got == self.expected(sector, generation);
            ensure!(known, "in the file itself: sector {sector}, generation {generation}: {}", shown(got));
        }
        Ok(())
    }

    /// Reads everything after a power cut, checks that it is what may have survived, and goes on from there.
    pub fn check_after_cut(&mut self, q: &mut BlkQueue) -> Result<Survived> {
        let mut survived = Survived::default();
        let mut found = Vec::new();
        self.read_all(q, |sector, got| {
            let generation = self.survivor(sector, got)?;
            let known = self.book.of(sector);
            let [durable, sent] = [&known.durable, &known.sent].map(|number| number.load(Ordering::SeqCst));
            match generation {
                _ if sent == durable || sent < known.first.load(Ordering::SeqCst) => {}
                g if g == sent => survived.last += 1,
                g if g == durable => survived.durable += 1,
                _ => survived.between += 1,
            }
            found.push(generation);
            Ok(())
        })?;
        for (sector, generation) in self.region.clone().zip(found) {
            let known = self.book.of(sector);
            known.answered.store(generation, Ordering::SeqCst);
            known.durable.store(generation, Ordering::SeqCst);
            known.first.store(known.sent.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
        }
        Ok(survived)
    }

    /// The generation that a sector holds after a cut, if it may hold it.
    fn survivor(&self, sector: u64, got: &[u8]) -> Result<u32> {
        let known = self.book.of(sector);
        let [durable, first, sent] =
            [&known.durable, &known.first, &known.sent].map(|number| number.load(Ordering::SeqCst));
        let mut may_be = std::iter::once(durable).chain(durable.max(first.saturating_sub(1)) + 1..=sent);
        // The latest that looks like this: of zeros there may be several.
        let found = may_be.clone().rev().find(|&g| got == self.expected(sector, g));
        found.with_context(|| {
            let answered = known.answered.load(Ordering::SeqCst);
            let range = (may_be.next(), may_be.last());
            format!(
                "after the power cut sector {sector} may hold generations {range:?} (durable {durable}, answered \
                 {answered}, sent {sent}): {}",
                shown(got)
            )
        })
    }

    fn forget_old_zeroes(&mut self) {
        if self.zeroed.len() > NR_ZEROED_MAX {
            let book = Arc::clone(&self.book);
            self.zeroed.retain(|(sector, generation)| {
                let known = book.of(*sector);
                *generation >= known.durable.load(Ordering::SeqCst).min(known.answered.load(Ordering::SeqCst))
            });
        }
    }
}

fn odd_len(rng: &mut Rng) -> usize {
    let lens = [1, 16, 17, 24, 512, 528, 1000, 4096, 5000];
    lens[usize::try_from(rng.below(lens.len() as u64)).expect("small")]
}

fn shown(got: &[u8]) -> String {
    if got.iter().all(|&byte| byte == 0) {
        return "it holds zeros".to_owned();
    }
    let sector = got.get(..8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    let generation = got.get(8..12).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    let is_pattern = got == pattern(sector, generation);
    match is_pattern {
        true => format!("it holds generation {generation} of sector {sector}"),
        false => format!("it holds {:x?}...", got.get(..16).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> Writer {
        Writer::share(&Book::new(4), 1, 1).remove(0)
    }

    fn set(writer: &Writer, sector: u64, [durable, first, sent]: [u32; 3]) {
        let known = writer.book.of(sector);
        known.durable.store(durable, Ordering::SeqCst);
        known.first.store(first, Ordering::SeqCst);
        known.sent.store(sent, Ordering::SeqCst);
    }

    #[test]
    fn what_may_survive_a_cut() {
        let writer = writer();
        let survives = |generation| writer.survivor(0, &pattern(0, generation)).ok();
        // Durable 3, sent up to 5: 3, 4, 5, and nothing else.
        set(&writer, 0, [3, 0, 5]);
        assert_eq!([0, 2, 3, 4, 5, 6].map(survives), [None, None, Some(3), Some(4), Some(5), None]);
        // What an earlier cut has taken (4 to 7) does not come back.
        set(&writer, 0, [3, 8, 9]);
        assert_eq!([3, 4, 7, 8, 9].map(survives), [Some(3), None, None, Some(8), Some(9)]);
        // Nothing was sent since.
        set(&writer, 0, [3, 8, 7]);
        assert_eq!([2, 3, 7].map(survives), [None, Some(3), None]);
        assert!(writer.survivor(0, &pattern(1, 3)).is_err(), "another sector's bytes");
    }

    #[test]
    fn zeros_are_a_generation_of_their_own() {
        let mut writer = writer();
        set(&writer, 0, [2, 0, 4]);
        assert!(writer.survivor(0, &[0; SECTOR]).is_err());
        writer.zeroed.insert((0, 4));
        assert_eq!(writer.survivor(0, &[0; SECTOR]).ok(), Some(4));
        assert!(writer.survivor(0, &pattern(0, 4)).is_err());
    }

    #[test]
    fn a_flush_covers_what_was_answered_when_it_was_sent() {
        let book = Book::new(2);
        book.of(0).answered.store(7, Ordering::SeqCst);
        let covered = book.answered();
        book.of(1).answered.store(3, Ordering::SeqCst);
        book.flushed(&covered);
        assert_eq!([0, 1].map(|s| book.of(s).durable.load(Ordering::SeqCst)), [7, 0]);
    }
}
