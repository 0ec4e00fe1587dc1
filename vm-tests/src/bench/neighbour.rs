//! What a queue whose driver keeps no rules costs the others.
//!
//! The worst case: the workers of both queues have one core together. The same load runs on the first queue in many short
//! slots, while the second one is in turn silent, full of nonsense at full speed, and busy with lawful reads. Any queue that
//! is busy with lawful requests takes its share of the core; one that is full of nonsense is to get what is left. Both are driven
//! from the loop that polls the first queue; when the second is silent, the same is done to a ring that nobody serves, so
//! that the client's part is the same in all three.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::client::{self, Client};
use super::disk::{Disk as BenchDisk, DiskKind};
use super::host::{self, Cores};
use super::options::{list, number};
use super::program::Program;
use super::server::BenchServer;
use super::workload::Workload;
use crate::front_end::hostile::{Hostile, Nonsense};
use crate::front_end::queue::{NEXT, WRITE};
use crate::front_end::request::{header, kind};
use crate::front_end::{BlkQueue, Buf, Desc, Disk, Queue};

/// Text of `--help`.
pub const HELP: &str = "\
Measures what a queue full of nonsense costs another one, beside what a busy queue costs it.

  --kinds LIST      of: loops, loops-in-tables, indices, same-head, table-lengths, nested-tables, directions, addresses,
                    lengths, empty, requests, noise, index, kicks [default: all]
  --rounds N        slots of each of the three, by turns [default: 7]
  --slot-ms MS      length of a slot                     [default: 400]
  --gap-us US       time between two kicks, at least     [default: 2]
  --workload NAME   the load                             [default: randread-4k-qd32]
  --check           fails if one costs more than 5 %
  -h, --help
";

/// Entries of both rings.
const RING: u16 = 256;
/// Reads that the lawful driver has under way.
const BUSY_DEPTH: u16 = 32;
/// What the nonsense may cost.
const MOST_PERCENT: f64 = 5.0;

/// What to run.
#[derive(Debug)]
pub struct Options {
    kinds: Vec<Nonsense>,
    rounds: usize,
    slot: Duration,
    gap: Duration,
    workload: &'static Workload,
    check: bool,
}

impl Options {
    /// Reads the arguments behind `hostile`; `None` if help is asked for.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Option<Self>> {
        let default = Workload::by_names(&["randread-4k-qd32"]).map_err(anyhow::Error::msg)?[0];
        let mut options = Self {
            kinds: Nonsense::ALL.to_vec(),
            rounds: 7,
            slot: Duration::from_millis(400),
            gap: Duration::from_micros(2),
            workload: default,
            check: false,
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "-h" | "--help" => return Ok(None),
                "--kinds" => options.kinds = list(&arg, &value()?, &Nonsense::ALL, |what| what.name())?,
                "--rounds" => options.rounds = number(&arg, &value()?)?,
                "--slot-ms" => options.slot = Duration::from_millis(number(&arg, &value()?)?),
                "--gap-us" => options.gap = Duration::from_micros(number(&arg, &value()?)?),
                "--check" => options.check = true,
                "--workload" => {
                    options.workload = Workload::by_names(&[&value()?]).map_err(anyhow::Error::msg)?[0];
                }
                _ => bail!("unknown option {arg}\n\n{HELP}"),
            }
        }
        ensure!(options.rounds >= 3, "--rounds: at least 3");
        ensure!(options.workload.nr_queues == 1 && options.workload.depth <= 80, "a load of one small queue");
        Ok(Some(options))
    }
}

/// Lawful requests on a ring, as cheap for the driver as can be: each slot has its three descriptors for good.
struct Ring {
    queue: Queue,
    heads: Vec<Buf>,
    _data: Vec<Buf>,
    next: u16,
    published: u16,
    used: u16,
}

impl Ring {
    fn new(queue: Queue, depth: u16, bytes: usize, write: bool) -> Result<Self> {
        let mem = queue.memory().clone();
        ensure!(usize::from(depth) * 3 <= usize::from(queue.size()), "the ring is too small");
        let (mut heads, mut data) = (Vec::new(), Vec::new());
        for slot in 0..depth {
            let head =
                mem.alloc_with(&header(if write { kind::OUT } else { kind::IN }, u64::from(slot) * 64));
            let buf = mem.alloc(bytes + 64);
            let at = slot * 3;
            let len = u32::try_from(bytes)?;
            let direction = if write { 0 } else { WRITE };
            queue.put_desc(at, Desc { addr: head.addr, len: 16, flags: NEXT, next: at + 1 });
            queue.put_desc(at + 1, Desc { addr: buf.addr, len, flags: NEXT | direction, next: at + 2 });
            queue.put_desc(at + 2, Desc { addr: buf.addr + u64::from(len), len: 1, flags: WRITE, next: 0 });
            heads.push(head);
            data.push(buf);
        }
        Ok(Self { queue, heads, _data: data, next: 0, published: 0, used: 0 })
    }

    fn add(&mut self, slot: u16) {
        let [avail, _] = self.queue.ring_addresses();
        let at = avail + 4 + 2 * u64::from(self.next % self.queue.size());
        self.queue.memory().store_u16(at, slot * 3);
        self.next = self.next.wrapping_add(1);
    }

    fn publish(&mut self) {
        let [avail, used] = self.queue.ring_addresses();
        let mem = self.queue.memory();
        mem.store_u16(avail + 2, self.next);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let event = mem.load_u16(used + 4 + 8 * u64::from(self.queue.size()));
        let old = std::mem::replace(&mut self.published, self.next);
        if self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(old) {
            crate::front_end::queue::signal(self.queue.kick_fd());
        }
    }

    /// Slots that were answered.
    fn take(&mut self, mut each: impl FnMut(u16)) {
        let index = self.queue.used_index();
        let [_, used] = self.queue.ring_addresses();
        while self.used != index {
            let at = used + 4 + 8 * u64::from(self.used % self.queue.size());
            each(self.queue.memory().load_u16(at) / 3);
            self.used = self.used.wrapping_add(1);
        }
    }
}

/// The driver of the second queue.
enum Neighbour {
    /// A ring of nonsense: served, or by nobody.
    Nonsense(Hostile, Queue),
    Busy(Ring),
}

impl Neighbour {
    fn poke(&mut self) {
        match self {
            Self::Nonsense(hostile, queue) => hostile.poke(queue),
            Self::Busy(ring) => {
                let mut again = Vec::new();
                ring.take(|slot| again.push(slot));
                if !again.is_empty() {
                    again.into_iter().for_each(|slot| ring.add(slot));
                    ring.publish();
                }
            }
        }
    }
}

struct Pair {
    ring: Ring,
    neighbour: Option<Neighbour>,
    gap: Duration,
    last: Instant,
    nr_pokes: u64,
}

impl Client for Pair {
    fn queue(&mut self, _workload: &Workload, slot: usize, offset: u64) -> Result<()> {
        let slot = u16::try_from(slot)?;
        let head = &self.ring.heads[usize::from(slot)];
        self.ring.queue.memory().write(head.addr + 8, &(offset / 512).to_le_bytes());
        self.ring.add(slot);
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        self.ring.publish();
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        self.ring.take(|slot| done.push(slot.into()));
        let now = Instant::now();
        if let Some(neighbour) = &mut self.neighbour
            && now - self.last >= self.gap
        {
            self.last = now;
            self.nr_pokes += 1;
            neighbour.poke();
        }
        Ok(())
    }

    fn is_polling(&self) -> bool {
        true
    }
}

/// Who the neighbour is in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Silent,
    Nonsense,
    Busy,
}

#[derive(Debug, Default)]
struct Slots {
    iops: Vec<f64>,
    /// The neighbour's worker's part of both workers' time, in percent.
    share: Vec<f64>,
    pokes_per_s: Vec<f64>,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Time on a processor of the worker with this number, in ns.
fn worker_ns(pid: u32, index: usize) -> u64 {
    let mut ns = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if read("comm").trim() == format!("vq{index}") {
            ns += read("schedstat").split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    ns
}

/// Runs it and prints what came out.
pub fn main(options: &Options) -> Result<()> {
    let cores = Cores::choose()?;
    host::pin_this_thread(cores.client)?;
    host::stop_in_order();
    let disk = BenchDisk::new(DiskKind::Tmpfs, 64 << 20)?;
    println!(
        "{} rounds of three slots of {} ms; {}; both workers on one core\n",
        options.rounds,
        options.slot.as_millis(),
        options.workload.name
    );
    println!(
        "| nonsense | IOPS beside silence | beside nonsense | beside a busy queue | of silence, % | of busy, % | CPU of the nonsense, % | of the busy queue, % | kicks/s |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut worst = (f64::INFINITY, "");
    for &what in &options.kinds {
        let [silent, nonsense, busy] = measure(options, what, &disk, cores)?;
        let ratio = |others: &Slots| {
            let pairs = nonsense.iops.iter().zip(&others.iops);
            100.0 * median(&pairs.map(|(with, without)| with / without).collect::<Vec<_>>())
        };
        let (of_silent, of_busy) = (ratio(&silent), ratio(&busy));
        println!(
            "| {} | {:.0} | {:.0} | {:.0} | {of_silent:.1} | {of_busy:.1} | {:.0} | {:.0} | {:.0} |",
            what.name(),
            median(&silent.iops),
            median(&nonsense.iops),
            median(&busy.iops),
            median(&nonsense.share),
            median(&busy.share),
            median(&nonsense.pokes_per_s),
        );
        if of_silent < worst.0 {
            worst = (of_silent, what.name());
        }
    }
    println!("\nworst: {} leaves the other queue {:.1} % of what silence does", worst.1, worst.0);
    ensure!(!options.check || worst.0 > 100.0 - MOST_PERCENT, "{} costs more than {MOST_PERCENT} %", worst.1);
    Ok(())
}

fn measure(options: &Options, what: Nonsense, bench: &BenchDisk, cores: Cores) -> Result<[Slots; 3]> {
    let server = BenchServer::start(Program::Polypath, bench, 2, &[], cores.server)?;
    let mut disk = Disk::at(server.socket()).queues(2).queue_size(RING).open()?;
    let mem = disk.memory.clone();
    let queue = disk.queues.remove(0).queue;
    let depth = u16::try_from(options.workload.depth)?;
    let ring = Ring::new(queue, depth, options.workload.bytes, options.workload.write)?;
    drop(disk.queues.drain(..).collect::<Vec<BlkQueue>>());
    let mut pair = Pair { ring, neighbour: None, gap: options.gap, last: Instant::now(), nr_pokes: 0 };
    disk.session.stop(1)?;
    let run = |pair: &mut Pair, time| client::run(pair, options.workload, bench.bytes(), time);
    run(&mut pair, Duration::from_millis(300)).with_context(|| server.stderr())?;
    let mut slots: [Slots; 3] = Default::default();
    let sides = [Side::Silent, Side::Nonsense, Side::Busy];
    for round in 0..options.rounds {
        for turn in 0..3 {
            // By turns in any order: what comes behind what must not matter.
            let at = (turn * if round % 2 == 0 { 1 } else { 2 } + round) % 3;
            let mut queue = Queue::new(&mem, 1, RING, true)?;
            if sides[at] != Side::Silent {
                disk.session.start(&queue, 0)?;
            }
            let mut neighbour = match sides[at] {
                Side::Busy => Neighbour::Busy(Ring::new(queue, BUSY_DEPTH, 4096, false)?),
                _ => Neighbour::Nonsense(Hostile::new(&mut queue, what, round as u64), queue),
            };
            if let Neighbour::Busy(ring) = &mut neighbour {
                (0..BUSY_DEPTH).for_each(|slot| ring.add(slot));
                ring.publish();
            }
            pair.neighbour = Some(neighbour);
            pair.nr_pokes = 0;
            let before = [0, 1].map(|index| worker_ns(server.pid(), index));
            let sample = run(&mut pair, options.slot).with_context(|| server.stderr())?;
            let now = [0, 1].map(|index| worker_ns(server.pid(), index));
            let [own, other] = [0, 1].map(|i| now[i].saturating_sub(before[i]) as f64);
            let seconds = sample.elapsed.as_secs_f64();
            let slot = &mut slots[at];
            slot.iops.push(sample.iops());
            slot.share.push(100.0 * other / (own + other).max(1.0));
            slot.pokes_per_s.push(pair.nr_pokes as f64 / seconds);
            pair.neighbour = None;
            if sides[at] != Side::Silent {
                disk.session.stop(1)?;
            }
        }
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_wrong_ones_refused() {
        let parse = |words: &[&str]| Options::parse(words.iter().map(|word| (*word).to_owned()));
        let options = parse(&["--kinds", "loops,kicks", "--rounds", "3", "--check"]).unwrap().unwrap();
        assert_eq!((options.kinds, options.rounds), (vec![Nonsense::Loops, Nonsense::Kicks], 3));
        assert!(options.check && parse(&["--help"]).unwrap().is_none());
        for words in [&["--rounds", "0"][..], &["--kinds", "kindness"], &["--workload", "read-4k-64x16"]] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
