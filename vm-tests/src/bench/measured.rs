//! What a run gave, and what is worked out of it.

use super::client::Sample;
use super::disk::{DeviceCounts, DiskKind};
use super::host::Usage;
use super::program::Program;
use super::server::OwnCounts;
use super::workload::Workload;

/// One run.
pub(super) struct Measured {
    pub(super) disk: DiskKind,
    pub(super) workload: &'static Workload,
    pub(super) program: Program,
    pub(super) round: usize,
    pub(super) sample: Sample,
    /// Of the process that does the I/O.
    pub(super) usage: Usage,
    /// System calls per request, from the warm-up; None if they could not be counted.
    pub(super) syscalls: Option<f64>,
    pub(super) device: Option<DeviceCounts>,
    pub(super) own: Option<OwnCounts>,
}

/// One number of a run, and how the tables show it. What does not exist is not a number.
pub(super) struct Measure {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) digits: usize,
    pub(super) of: fn(&Measured) -> f64,
}

pub(super) const KIOPS: Measure =
    Measure { name: "IOPS", unit: "thousands", digits: 1, of: |run| run.sample.iops() / 1000.0 };
pub(super) const CPU: Measure = Measure {
    name: "CPU",
    unit: "s per million I/Os",
    digits: 2,
    of: |run| per_request(run, run.usage.cpu.as_secs_f64() * 1e6),
};
pub(super) const MERGED: Measure = Measure {
    name: "merged at the device",
    unit: "% of the requests",
    digits: 0,
    of: |run| {
        run.device.map_or(f64::NAN, |device| (1.0 - per_request(run, device.ios as f64)).max(0.0) * 100.0)
    },
};
pub(super) const KERNEL_MERGED: Measure = Measure {
    name: "merged by the kernel",
    unit: "% of the requests",
    digits: 0,
    of: |run| run.device.map_or(f64::NAN, |device| per_request(run, device.merges as f64) * 100.0),
};
pub(super) const OWN_MERGED: Measure = Measure {
    name: "merged by polypath's own count",
    unit: "% of the requests",
    digits: 0,
    of: |run| {
        let percent = |own: OwnCounts| own.merged as f64 / (own.ios + own.merged).max(1) as f64 * 100.0;
        run.own.map_or(f64::NAN, percent)
    },
};
pub(super) const DEVICE_KIB: Measure = Measure {
    name: "size of an I/O at the device",
    unit: "KiB",
    digits: 0,
    of: |run| run.device.map_or(f64::NAN, |device| device.bytes as f64 / device.ios.max(1) as f64 / 1024.0),
};
pub(super) const SWITCHES: Measure = Measure {
    name: "voluntary context switches",
    unit: "per I/O",
    digits: 3,
    of: |run| per_request(run, run.usage.voluntary_switches as f64),
};
pub(super) const INVOLUNTARY: Measure = Measure {
    name: "involuntary context switches",
    unit: "per I/O",
    digits: 3,
    of: |run| per_request(run, run.usage.involuntary_switches as f64),
};
pub(super) const SYSCALLS: Measure =
    Measure { name: "system calls", unit: "per I/O", digits: 3, of: |run| run.syscalls.unwrap_or(f64::NAN) };
pub(super) const MEAN: Measure =
    Measure { name: "mean", unit: "us", digits: 1, of: |run| run.sample.latency.mean_us() };
pub(super) const P50: Measure =
    Measure { name: "p50", unit: "us", digits: 1, of: |run| run.sample.latency.quantile_us(0.5) };
pub(super) const P99: Measure =
    Measure { name: "p99", unit: "us", digits: 1, of: |run| run.sample.latency.quantile_us(0.99) };
pub(super) const CLIENT_IDLE: Measure =
    Measure { name: "client idle", unit: "%", digits: 0, of: |run| run.sample.idle_percent() };

/// All of them: the long table and the JSON file have them.
pub(super) const ALL: [Measure; 13] = [
    KIOPS,
    MEAN,
    P50,
    P99,
    CPU,
    SWITCHES,
    INVOLUNTARY,
    SYSCALLS,
    MERGED,
    KERNEL_MERGED,
    OWN_MERGED,
    DEVICE_KIB,
    CLIENT_IDLE,
];

fn per_request(run: &Measured, number: f64) -> f64 {
    number / run.sample.requests.max(1) as f64
}

/// One program under one load on one disk, in all rounds.
pub(super) struct Line<'a> {
    pub(super) program: Program,
    runs: Vec<&'a Measured>,
}

impl<'a> Line<'a> {
    pub(super) fn new(program: Program, runs: Vec<&'a Measured>) -> Self {
        Self { program, runs }
    }

    /// Over the rounds; not a number without any.
    pub(super) fn median(&self, measure: &Measure) -> f64 {
        let mut values: Vec<_> =
            self.runs.iter().map(|run| (measure.of)(run)).filter(|v| !v.is_nan()).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.len() % 2 {
            _ if values.is_empty() => f64::NAN,
            1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        }
    }

    /// Thousands of IOPS of the best round: the one that the rest of the machine disturbed least.
    pub(super) fn best(&self) -> f64 {
        self.runs.iter().map(|run| (KIOPS.of)(run)).fold(0.0, f64::max)
    }

    /// Half the distance between best and worst round, in per cent of the median.
    pub(super) fn spread(&self) -> f64 {
        let least = self.runs.iter().map(|run| (KIOPS.of)(run)).fold(f64::MAX, f64::min);
        (self.best() - least) / 2.0 / self.median(&KIOPS) * 100.0
    }
}

/// All programs under one load on one disk.
pub(super) struct Row<'a> {
    pub(super) disk: DiskKind,
    pub(super) workload: &'static Workload,
    pub(super) lines: Vec<Line<'a>>,
}

impl Row<'_> {
    pub(super) fn line(&self, program: Program) -> Option<&Line<'_>> {
        self.lines.iter().find(|line| line.program == program)
    }

    pub(super) fn median(&self, program: Program, measure: &Measure) -> f64 {
        self.line(program).map_or(f64::NAN, |line| line.median(measure))
    }

    /// Thousands of IOPS of the better one of these; not a number without any.
    pub(super) fn better(&self, is_one: impl Fn(Program) -> bool) -> f64 {
        let lines = self.lines.iter().filter(|line| is_one(line.program));
        lines.map(|line| line.median(&KIOPS)).fold(f64::NAN, f64::max)
    }
}

/// Puts runs into rows, in the order in which they came first.
pub(super) fn rows(runs: &[Measured]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for run in runs {
        let same = |row: &Row<'_>| row.disk == run.disk && row.workload.name == run.workload.name;
        if rows.iter().any(same) {
            continue;
        }
        let of_row =
            || runs.iter().filter(|other| other.disk == run.disk && other.workload.name == run.workload.name);
        let line = |program| {
            let runs: Vec<_> = of_row().filter(|other| other.program == program).collect();
            (!runs.is_empty()).then(|| Line::new(program, runs))
        };
        let lines = Program::ALL.into_iter().filter_map(line).collect();
        rows.push(Row { disk: run.disk, workload: run.workload, lines });
    }
    rows
}
