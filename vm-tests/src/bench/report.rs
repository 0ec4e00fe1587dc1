//! Medians, ratios, a table for people and JSON for programs.

use std::fmt::Write as _;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::client::Sample;
use super::disk::DiskKind;
use super::host::{self, Cores, Usage};
use super::options::Options;
use super::server::Program;
use super::workload::Workload;

/// One run.
pub(super) struct Measured {
    pub(super) disk: DiskKind,
    pub(super) workload: &'static Workload,
    pub(super) program: Program,
    pub(super) round: usize,
    pub(super) sample: Sample,
    pub(super) usage: Usage,
    /// I/Os and bytes at the device.
    pub(super) device: Option<(u64, u64)>,
}

impl Measured {
    fn iops(&self) -> f64 {
        self.sample.iops()
    }

    fn cpu_us(&self) -> f64 {
        self.usage.cpu.as_secs_f64() * 1e6 / self.requests()
    }

    fn switches(&self) -> f64 {
        self.usage.voluntary_switches as f64 / self.requests()
    }

    /// Average size of an I/O at the device, in KiB.
    fn device_kib(&self) -> f64 {
        self.device.map_or(f64::NAN, |(nr, bytes)| bytes as f64 / nr.max(1) as f64 / 1024.0)
    }

    fn requests(&self) -> f64 {
        self.sample.requests.max(1) as f64
    }
}

/// All runs, and what is known of the machine.
pub(super) struct Report<'a> {
    options: &'a Options,
    facts: Vec<(&'static str, String)>,
    runs: Vec<Measured>,
}

/// A line of the table: one program under one load.
struct Line<'a> {
    program: Program,
    runs: Vec<&'a Measured>,
}

impl Line<'_> {
    fn median(&self, value: impl Fn(&Measured) -> f64) -> f64 {
        let mut values: Vec<_> = self.runs.iter().map(|run| value(run)).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.len() % 2 {
            _ if values.is_empty() => f64::NAN,
            1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        }
    }

    /// IOPS of the best round: the one that the rest of the machine disturbed least.
    fn best(&self) -> f64 {
        self.runs.iter().map(|run| run.iops()).fold(0.0, f64::max)
    }

    /// Half the distance between best and worst round, in per cent of the median.
    fn spread(&self) -> f64 {
        let least = self.runs.iter().map(|run| run.iops()).fold(f64::MAX, f64::min);
        (self.best() - least) / 2.0 / self.median(Measured::iops) * 100.0
    }
}

impl<'a> Report<'a> {
    pub(super) fn new(options: &'a Options, cores: Cores) -> Result<Self> {
        let mut facts = host::describe();
        facts.push(("cores", format!("client on {}, server on {}", cores.client, cores.server)));
        facts.push(("rounds", format!("{} of {:?}, interleaved", options.rounds, options.time)));
        facts.push(("disk", format!("{} MiB", options.disk_bytes >> 20)));
        fs::create_dir_all(&options.out).with_context(|| format!("make {}", options.out.display()))?;
        Ok(Self { options, facts, runs: Vec::new() })
    }

    pub(super) fn add(&mut self, measured: Measured) {
        self.runs.push(measured);
    }

    /// Prints the tables and writes both files.
    pub(super) fn finish(&self) -> Result<()> {
        let text = self.text()?;
        print!("{text}");
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let base = self.options.out.join(format!("bench-{seconds}"));
        let json = serde_json::to_string_pretty(&self.json())?;
        for (suffix, contents) in [("md", &text), ("json", &json)] {
            let file = base.with_extension(suffix);
            fs::write(&file, contents).with_context(|| format!("write {}", file.display()))?;
            println!("{}", file.display());
        }
        Ok(())
    }

    fn lines(&self, disk: DiskKind, workload: &Workload) -> Vec<Line<'_>> {
        let runs = |program| {
            let belongs = |run: &&Measured| {
                run.disk == disk && run.workload.name == workload.name && run.program == program
            };
            self.runs.iter().filter(belongs).collect()
        };
        self.options.programs.iter().map(|&program| Line { program, runs: runs(program) }).collect()
    }

    fn text(&self) -> Result<String> {
        let mut text = String::new();
        for (name, fact) in &self.facts {
            writeln!(text, "- {name}: {fact}")?;
        }
        for &disk in &self.options.disks {
            writeln!(text, "\n## {}\n", disk.name())?;
            writeln!(
                text,
                "| load | program | IOPS | +- % | best | of io_uring | of qsd | mean us | p50 us | p99 us | CPU us/IO | \
                 switches/IO | device KiB |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
            )?;
            for workload in &self.options.workloads {
                let lines = self.lines(disk, workload);
                for line in &lines {
                    let ratio = |program| {
                        let other = lines.iter().find(|other| other.program == program);
                        other.map_or_else(
                            || "-".into(),
                            |other| {
                                format!("{:.2}", line.median(Measured::iops) / other.median(Measured::iops))
                            },
                        )
                    };
                    writeln!(
                        text,
                        "| {} | {} | {:.0} | {:.0} | {:.0} | {} | {} | {:.1} | {:.1} | {:.1} | {:.2} | {:.3} | {:.0} |",
                        workload.name,
                        line.program,
                        line.median(Measured::iops),
                        line.spread(),
                        line.best(),
                        ratio(Program::IoUring),
                        ratio(Program::Qsd),
                        line.median(|run| run.sample.latency.mean_us()),
                        line.median(|run| run.sample.latency.quantile_us(0.5)),
                        line.median(|run| run.sample.latency.quantile_us(0.99)),
                        line.median(Measured::cpu_us),
                        line.median(Measured::switches),
                        line.median(Measured::device_kib),
                    )?;
                }
            }
        }
        writeln!(
            text,
            "\nMedians over the rounds (best: the best round). CPU time and voluntary switches are the server's (io_uring: the client's own)."
        )?;
        Ok(text)
    }

    fn json(&self) -> Value {
        let facts: serde_json::Map<_, _> =
            self.facts.iter().map(|(name, fact)| ((*name).to_owned(), json!(fact))).collect();
        let runs: Vec<_> = self
            .runs
            .iter()
            .map(|run| {
                json!({
                    "disk": run.disk.name(),
                    "workload": run.workload.name,
                    "program": run.program.name(),
                    "round": run.round,
                    "requests": run.sample.requests,
                    "iops": run.iops(),
                    "latency_mean_us": run.sample.latency.mean_us(),
                    "latency_p50_us": run.sample.latency.quantile_us(0.5),
                    "latency_p99_us": run.sample.latency.quantile_us(0.99),
                    "cpu_us_per_io": run.cpu_us(),
                    "voluntary_switches_per_io": run.switches(),
                    "device_ios": run.device.map(|(nr, _)| nr),
                    "device_bytes": run.device.map(|(_, bytes)| bytes),
                })
            })
            .collect();
        json!({ "facts": facts, "runs": runs })
    }
}
