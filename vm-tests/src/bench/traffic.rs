//! What operating costs the guest: the same load with and without commands and scrapes, in many short slots by turns.
//!
//! The worst case: all of polypath has one core, which the load keeps busy, and who asks has it as well, so that what asking
//! and answering take is missing there. In every other slot a client asks so many times a second. Neighbouring slots
//! make a pair, whose order changes from pair to pair: what else the machine does hits both sides alike. The results are the
//! median of the pairs' differences with an interval that rests on their order alone, and, without that noise, the time that
//! polypath's threads beside the workers were on the processor, which is what the load can lose at most.

mod ask;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::buffers::Buffers;
use super::client;
use super::disk::{Disk, DiskKind};
use super::host::{self, Cores};
use super::options::{list, number};
use super::program::Program;
use super::server::BenchServer;
use super::vhost_user::VhostUserClient;
use super::workload::Workload;
use ask::{ALL, Asker, What, looking};

/// Text of `--help`.
pub const HELP: &str = "\
Measures what commands and scrapes cost the guest: slots of the same load with and without them, by turns.

  --rate N          commands and scrapes per second     [default: 100]
  --ask LIST        of: hello, show, counters, events, dump, set, message, scrape; by turns
                    [default: show,counters,events,dump, and a scrape in twenty]
  --pairs N         pairs of slots                      [default: 250]
  --slot-ms MS      length of a slot                    [default: 200]
  --workload NAME   the load                            [default: randread-4k-qd32]
  -h, --help
";

/// The difference that has to be shown not to be reached, in percent.
const MOST_PERCENT: f64 = 1.0;

/// What to run.
#[derive(Debug)]
pub struct Options {
    rate: u32,
    turns: Vec<What>,
    nr_pairs: usize,
    slot: Duration,
    workload: &'static Workload,
}

impl Options {
    /// Reads the arguments behind `traffic`; `None` if help is asked for.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Option<Self>> {
        let default = Workload::by_names(&["randread-4k-qd32"]).map_err(anyhow::Error::msg)?[0];
        let mut options = Self {
            rate: 100,
            turns: looking(),
            nr_pairs: 250,
            slot: Duration::from_millis(200),
            workload: default,
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "-h" | "--help" => return Ok(None),
                "--rate" => options.rate = number(&arg, &value()?)?,
                "--ask" => options.turns = list(&arg, &value()?, &ALL, |what| what.name())?,
                "--pairs" => options.nr_pairs = number(&arg, &value()?)?,
                "--slot-ms" => options.slot = Duration::from_millis(number(&arg, &value()?)?),
                "--workload" => {
                    options.workload = Workload::by_names(&[&value()?]).map_err(anyhow::Error::msg)?[0];
                }
                _ => bail!("unknown option {arg}\n\n{HELP}"),
            }
        }
        ensure!(options.rate > 0 && options.nr_pairs >= 10, "at least one command a second, and ten pairs");
        Ok(Some(options))
    }
}

/// Time on a processor so far, of the threads that do the guest's requests and of all others.
#[derive(Clone, Copy, Debug, Default)]
struct Cpu {
    workers: Duration,
    others: Duration,
}

impl Cpu {
    /// Of a process. Threads that have ended count with the others: those that answer a scrape do not live long.
    fn of(pid: u32) -> Self {
        let mut workers = Duration::ZERO;
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let name = read("comm");
            if name.starts_with("vq") || name.starts_with("iou-") {
                let ns = read("schedstat").split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
                workers += Duration::from_nanos(ns);
            }
        }
        Self { workers, others: process_time(pid).saturating_sub(workers) }
    }
}

/// Time on a processor of all threads that a process has and had.
fn process_time(pid: u32) -> Duration {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    let pid = libc::pid_t::try_from(pid).unwrap_or(0);
    // SAFETY: both calls write to what they are given, and to nothing else.
    let done = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut time) == 0
    };
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    if done {
        Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
    } else {
        Duration::ZERO
    }
}

/// All slots of one side.
#[derive(Debug, Default)]
struct Side {
    iops: Vec<f64>,
    requests: u64,
    time: Duration,
    cpu: Cpu,
    nr_asked: u64,
}

/// Runs it and prints what came out.
pub fn main(options: &Options) -> Result<()> {
    let cores = Cores::choose()?;
    host::pin_this_thread(cores.client)?;
    host::stop_in_order();
    let disk = Disk::new(DiskKind::Tmpfs, 64 << 20)?;
    let dir = tempfile::Builder::new().prefix("traffic-").tempdir()?;
    let metrics = dir.path().join("metrics");
    let args = ["--metrics".into(), metrics.clone().into()];
    let (nr_queues, depth) = (options.workload.nr_queues, options.workload.depth);
    let server = BenchServer::start(Program::Polypath, &disk, nr_queues, &args, cores.server)?;
    let buffers = Buffers::new(std::iter::once(options.workload))?;
    let mut front_end = VhostUserClient::connect(server.socket(), nr_queues, depth, buffers, true)
        .with_context(|| format!("polypath: {}", server.stderr()))?;
    let asker = Asker::start(server.control(), metrics, options.rate, options.turns.clone(), cores.server);

    println!(
        "{} pairs of slots of {} ms, commands and scrapes at {}/s in one of each; {}",
        options.nr_pairs,
        options.slot.as_millis(),
        options.rate,
        options.workload.name
    );
    client::run(&mut front_end, options.workload, disk.bytes(), Duration::from_secs(1))?;
    let (mut without, mut with) = (Side::default(), Side::default());
    for pair in 0..options.nr_pairs {
        for turn in 0..2 {
            let asks = (pair + turn) % 2 == 0;
            let before = Cpu::of(server.pid());
            if asks {
                asker.begin(options.slot)?;
            }
            let sample = client::run(&mut front_end, options.workload, disk.bytes(), options.slot)?;
            let nr_asked = if asks { asker.end()? } else { 0 };
            let now = Cpu::of(server.pid());
            let side = if asks { &mut with } else { &mut without };
            side.iops.push(sample.iops());
            side.requests += sample.requests;
            side.time += sample.elapsed;
            side.nr_asked += nr_asked;
            side.cpu.workers += now.workers.saturating_sub(before.workers);
            side.cpu.others += now.others.saturating_sub(before.others);
        }
        progress(pair + 1, options.nr_pairs);
    }
    report(&without, &with);
    Ok(())
}

/// A line that is written over, where somebody looks.
fn progress(done: usize, all: usize) {
    use std::io::IsTerminal as _;
    if std::io::stderr().is_terminal() && (done.is_multiple_of(10) || done == all) {
        eprint!("\r{done} of {all} pairs{}", if done == all { "\n" } else { "" });
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52, for people")]
fn report(without: &Side, with: &Side) {
    let mut lost: Vec<f64> = without
        .iops
        .iter()
        .zip(&with.iops)
        .map(|(without, with)| 100.0 * (without - with) / without)
        .collect();
    lost.sort_by(f64::total_cmp);
    let (low, high) = interval(lost.len());
    let median = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    println!("without    {:.0} IOPS (median of {} slots)", median(&without.iops), without.iops.len());
    println!("with       {:.0} IOPS, {} commands and scrapes answered", median(&with.iops), with.nr_asked);
    println!(
        "lost       {:.2} % (median of the pairs; its 95 % interval: {:.2} to {:.2} %)",
        lost[lost.len() / 2],
        lost[low],
        lost[high]
    );
    let us = |time: Duration, nr: u64| time.as_secs_f64() * 1e6 / nr.max(1) as f64;
    let share = |side: &Side| 100.0 * side.cpu.others.as_secs_f64() / side.time.as_secs_f64();
    println!(
        "worker     {:.3} us on the processor per request without, {:.3} us with",
        us(without.cpu.workers, without.requests),
        us(with.cpu.workers, with.requests)
    );
    println!(
        "answering  {:.1} us on the processor per command: {:.2} % of it at this rate ({:.2} % when nobody asks)",
        us(with.cpu.others.saturating_sub(without.cpu.others), with.nr_asked),
        share(with),
        share(without)
    );
    let verdict = |value: f64| if value < MOST_PERCENT { "less" } else { "NOT shown to be less" };
    println!(
        "result     {} than {MOST_PERCENT} % by the processor's time, {} by the pairs' interval",
        verdict(share(with)),
        verdict(lost[high])
    );
}

/// Places in a sorted list of `nr` values between which the median lies with 95 % certainty, whatever their distribution
/// (the number of values below it is binomial).
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of slots"
)]
fn interval(nr: usize) -> (usize, usize) {
    let (middle, reach) = (nr as f64 / 2.0, 0.98 * (nr as f64).sqrt());
    let low = (middle - reach).floor().max(0.0) as usize;
    (low, nr - 1 - low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For 100 values: below the 40th or above the 61st with less than 5 %.
    #[test]
    fn the_interval_is_that_of_the_binomial_distribution() {
        assert_eq!(interval(100), (40, 59));
        assert_eq!(interval(10), (1, 8));
    }

    #[test]
    fn options_are_read_and_wrong_ones_refused() {
        let parse = |words: &[&str]| Options::parse(words.iter().map(|word| (*word).to_owned()));
        let options = parse(&["--rate", "50", "--pairs", "20", "--slot-ms", "40"]).unwrap().unwrap();
        assert_eq!((options.rate, options.nr_pairs, options.slot.as_millis()), (50, 20, 40));
        assert!(parse(&["--help"]).unwrap().is_none());
        for words in [&["--rate", "0"][..], &["--pairs", "x"], &["--workload", "dance"], &["--speed"]] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
