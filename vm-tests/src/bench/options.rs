//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::disk::DiskKind;
use super::program::Program;
use super::workload::{Run, Workload};

/// Text of `--help`.
pub const HELP: &str = "\
Compares plain io_uring, qemu-storage-daemon and polypath on the same disk in memory. With the word `traffic` in front,
measures what commands and scrapes cost the guest instead (`traffic --help`); with `hostile`, what a queue full of nonsense
costs another one (`hostile --help`).

  --quick              few loads, on loop and tmpfs, three short rounds (under 30 s)
  --check              fails unless loose ratios hold; never goes by a time
  --publish            shows the run in README.md and docs/benchmark as well
  --disks LIST         of: loop, tmpfs, null, null-inline   [default: all]
  --programs LIST      of: io_uring, io_uring-poll, qsd, qsd-native, qsd-no-poll, no-merge, polypath, two-paths,
                       depth8, depth8-no-merge, no-poll, sqpoll, no-inflight, no-sandbox
                       [default: each where it says something, and sqpoll only by name]
  --workloads LIST     names of the table's loads           [default: each where it says something]
  --rounds N           rounds, interleaved                  [default: 5]
  --seconds S          seconds per run                      [default: 0.4]
  --size-mib N         size of the disk                     [default: 256]
  --polypath-arg WORD  one more argument for polypath; repeatable
  --out DIR            where the results go                 [default: vm-tests/results]
  -h, --help

  --memory             measures anonymous memory in place of speed
  --instructions       counts instructions per request by paths and queues (valgrind) in place of speed

Lists are words between commas. Prints tables and writes them, a JSON file and plots to the results. The defaults take some 6 minutes.
";

const DISKS: [DiskKind; 4] = [DiskKind::Loop, DiskKind::Tmpfs, DiskKind::Null, DiskKind::NullInline];

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Speed,
    Memory,
    Instructions,
}

/// What to run.
#[derive(Debug)]
pub struct Options {
    pub(super) subject: Subject,
    pub(super) check: bool,
    pub(super) publish: bool,
    pub(super) disks: Vec<DiskKind>,
    /// None: each where it says something.
    pub(super) programs: Option<Vec<Program>>,
    pub(super) workloads: Vec<&'static Workload>,
    /// Whether the loads were named, and are run on every disk.
    pub(super) are_loads_named: bool,
    pub(super) rounds: usize,
    pub(super) time: Duration,
    pub(super) disk_bytes: u64,
    pub(super) polypath_args: Vec<OsString>,
    pub(super) out: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            subject: Subject::Speed,
            check: false,
            publish: false,
            disks: DISKS.to_vec(),
            programs: None,
            workloads: Workload::TABLE.iter().filter(|workload| workload.run != Run::Named).collect(),
            are_loads_named: false,
            rounds: 5,
            time: Duration::from_millis(400),
            disk_bytes: 256 << 20,
            polypath_args: Vec::new(),
            out: concat!(env!("CARGO_MANIFEST_DIR"), "/results").into(),
        }
    }
}

impl Options {
    /// Reads the arguments of the program, without its name; `None` if help is asked for.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Option<Self>> {
        let mut options = Self::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "-h" | "--help" => return Ok(None),
                "--quick" => {
                    options.workloads.retain(|workload| workload.run == Run::Quick);
                    options.disks = vec![DiskKind::Loop, DiskKind::Tmpfs];
                    options.rounds = 3;
                    options.time = Duration::from_millis(150);
                    options.disk_bytes = 64 << 20;
                }
                "--check" => options.check = true,
                "--publish" => options.publish = true,
                "--memory" => options.subject = Subject::Memory,
                "--instructions" => options.subject = Subject::Instructions,
                "--disks" => options.disks = list(&arg, &value()?, &DISKS, |d| d.name())?,
                "--programs" => {
                    options.programs = Some(list(&arg, &value()?, &Program::ALL, |program| program.name())?);
                }
                "--workloads" => {
                    let names = value()?;
                    let names: Vec<_> = names.split(',').collect();
                    options.workloads = Workload::by_names(&names).map_err(anyhow::Error::msg)?;
                    options.are_loads_named = true;
                }
                "--rounds" => options.rounds = number(&arg, &value()?)?,
                "--seconds" => {
                    let seconds: f64 = number(&arg, &value()?)?;
                    options.time = Duration::try_from_secs_f64(seconds).with_context(|| arg.clone())?;
                }
                "--size-mib" => options.disk_bytes = number::<u64>(&arg, &value()?)? << 20,
                "--polypath-arg" => options.polypath_args.push(value()?.into()),
                "--out" => options.out = value()?.into(),
                _ => bail!("unknown option {arg}\n\n{HELP}"),
            }
        }
        ensure!(options.rounds > 0, "--rounds: at least one");
        Ok(Some(options))
    }

    /// Whether this program is measured there under this load.
    pub(super) fn includes(&self, program: Program, disk: DiskKind, load: &Workload) -> bool {
        let is_wanted = match &self.programs {
            Some(programs) => programs.contains(&program),
            None => program.is_usual(disk, load),
        };
        is_wanted && program.can_use(disk) && (self.are_loads_named || load.is_usual(disk))
    }
}

pub(super) fn number<T: std::str::FromStr>(option: &str, word: &str) -> Result<T> {
    word.parse().ok().with_context(|| format!("{option}: `{word}` is not a number that fits"))
}

pub(super) fn list<T: Copy>(
    option: &str,
    words: &str,
    all: &[T],
    name: impl Fn(&T) -> &'static str,
) -> Result<Vec<T>> {
    let find = |word: &str| {
        let names = || all.iter().map(&name).collect::<Vec<_>>().join(", ");
        let found = all.iter().find(|item| name(item) == word).copied();
        found.with_context(|| format!("{option}: `{word}` is not one of {}", names()))
    };
    words.split(',').map(find).collect()
}
