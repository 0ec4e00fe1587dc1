//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::disk::DiskKind;
use super::server::Program;
use super::workload::Workload;

/// Text of `--help`.
pub const HELP: &str = "\
Compares plain io_uring, qemu-storage-daemon and polypath on the same disk in memory.

  --quick              4 KiB random reads at depth 1 and 32, three short rounds (under 30 s)
  --disks LIST         of: tmpfs, loop, null, null-inline   [default: tmpfs,loop]
  --programs LIST      of: io_uring, qsd, polypath, no-merge, no-poll,
                       no-inflight                        [default: the first three]
  --workloads LIST     names of the table's loads           [default: all]
  --rounds N           rounds, interleaved                  [default: 5]
  --seconds S          seconds per run                      [default: 1]
  --size-mib N         size of the disk                     [default: 256]
  --polypath-arg WORD  one more argument for polypath; repeatable
  --out DIR            where the results go                 [default: vm-tests/results]
  -h, --help

Lists are words between commas. Prints a table and writes it and a JSON file to the results.
";

const DISKS: [DiskKind; 4] = [DiskKind::Tmpfs, DiskKind::Loop, DiskKind::Null, DiskKind::NullInline];

const PROGRAMS: [Program; 6] = [
    Program::IoUring,
    Program::Qsd,
    Program::Polypath,
    Program::NoMerge,
    Program::NoPoll,
    Program::NoInflight,
];

/// What to run.
#[derive(Debug)]
pub struct Options {
    pub(super) disks: Vec<DiskKind>,
    pub(super) programs: Vec<Program>,
    pub(super) workloads: Vec<&'static Workload>,
    pub(super) rounds: usize,
    pub(super) time: Duration,
    pub(super) disk_bytes: u64,
    pub(super) polypath_args: Vec<OsString>,
    pub(super) out: PathBuf,
}

impl Options {
    /// Reads the arguments of the program, without its name; `None` if help is asked for.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Option<Self>> {
        let mut options = Self {
            disks: vec![DiskKind::Tmpfs, DiskKind::Loop],
            programs: vec![Program::IoUring, Program::Qsd, Program::Polypath],
            workloads: Workload::TABLE.iter().collect(),
            rounds: 5,
            time: Duration::from_secs(1),
            disk_bytes: 256 << 20,
            polypath_args: Vec::new(),
            out: concat!(env!("CARGO_MANIFEST_DIR"), "/results").into(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "-h" | "--help" => return Ok(None),
                "--quick" => {
                    options.workloads.retain(|workload| workload.quick);
                    options.rounds = 3;
                    options.time = Duration::from_millis(300);
                    options.disk_bytes = 64 << 20;
                }
                "--disks" => options.disks = list(&arg, &value()?, &DISKS, |d| d.name())?,
                "--programs" => {
                    options.programs = list(&arg, &value()?, &PROGRAMS, |program| program.name())?;
                }
                "--workloads" => {
                    let names = value()?;
                    let names: Vec<_> = names.split(',').collect();
                    options.workloads = Workload::by_names(&names).map_err(anyhow::Error::msg)?;
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
        if options.rounds == 0 {
            bail!("--rounds: at least one");
        }
        Ok(Some(options))
    }
}

fn number<T: std::str::FromStr>(option: &str, word: &str) -> Result<T> {
    word.parse().ok().with_context(|| format!("{option}: `{word}` is not a number that fits"))
}

fn list<T: Copy>(option: &str, words: &str, all: &[T], name: impl Fn(&T) -> &'static str) -> Result<Vec<T>> {
    let find = |word: &str| {
        let names = || all.iter().map(&name).collect::<Vec<_>>().join(", ");
        let found = all.iter().find(|item| name(item) == word).copied();
        found.with_context(|| format!("{option}: `{word}` is not one of {}", names()))
    };
    words.split(',').map(find).collect()
}
