//! Loads: fio in the guest.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{Accel, Guest, Job};

/// A load. Unless said otherwise: direct I/O of 4 KiB through io_uring with 16 requests at a time, on one job.
#[derive(Clone, Debug)]
pub struct Fio {
    options: Vec<(String, String)>,
}

impl Fio {
    /// A load of kind `rw` (`randwrite`, `read`, `randrw`, ...) on a device or file.
    pub fn new(file: &str, rw: &str) -> Self {
        Self { options: Vec::new() }
            .with("name", "load")
            .with("filename", file)
            .with("rw", rw)
            .with("ioengine", "io_uring")
            .with("direct", 1)
            .with("bs", "4k")
            .with("iodepth", 16)
            .with("group_reporting", 1)
            // Without clocks and histograms per request an emulated CPU does twice the requests.
            .with("gtod_reduce", 1)
    }

    /// Sets any option; a later value replaces an earlier one.
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.options.retain(|(known, _)| known != name);
        self.options.push((name.into(), value.to_string()));
        self
    }

    /// Block size.
    pub fn bs(self, bs: &str) -> Self {
        self.with("bs", bs)
    }

    /// Bytes per job.
    pub fn size(self, size: &str) -> Self {
        self.with("size", size)
    }

    /// Requests at a time, per job.
    pub fn depth(self, depth: u32) -> Self {
        self.with("iodepth", depth)
    }

    /// So many jobs, each in a part of its own, `size` apart.
    pub fn jobs(self, nr: u32, size: &str) -> Self {
        self.with("numjobs", nr).with("size", size).with("offset_increment", size)
    }

    /// Every block carries a checksum, and is read back and checked at the end; the first wrong one ends the load.
    pub fn verify(self) -> Self {
        self.with("verify", "crc32c")
            .with("do_verify", 1)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
    }

    /// Repeats itself so often that something can happen in its midst, also where the guest is fast.
    pub fn lasting(self) -> Self {
        match Accel::best() {
            Accel::Tcg => self,
            Accel::Kvm => self.with("loops", 40),
        }
    }

    /// Runs for so long, however often it has to start over.
    pub fn seconds(self, seconds: u32) -> Self {
        self.with("time_based", 1).with("runtime", seconds)
    }

    /// The command line.
    pub(super) fn command(&self) -> String {
        let mut command = "fio".to_owned();
        for (name, value) in &self.options {
            write!(command, " --{name}={value}").expect("a string takes all");
        }
        command
    }
}

/// A shell script for fio's command line, which prints the report; fio's own messages only when it fails.
fn with_report(command: String, report: &str) -> String {
    let mut script = command;
    write!(
        script,
        " --eta=never --output-format=json --output={report} >{report}.log 2>&1 || \
         {{ code=$?; cat {report} {report}.log; exit $code; }}; cat {report}"
    )
    .expect("a string takes all");
    script
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FioResult {
    /// Reads, those for verification included.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Reads per second.
    pub read_iops: f64,
    /// Writes per second.
    pub write_iops: f64,
    /// Requests that failed.
    pub errors: u64,
}

impl FioResult {
    /// Adds another one; of rates the later one remains.
    pub(super) fn add(&mut self, other: Self) {
        let (reads, writes, errors) = (self.reads, self.writes, self.errors);
        *self = other;
        self.reads += reads;
        self.writes += writes;
        self.errors += errors;
    }

    pub(super) fn parse(report: &str) -> Result<Self> {
        // Messages may stand around the report.
        let from = report.find('{').context("no report")?;
        let to = report.rfind('}').context("no report")?;
        let report: Value = serde_json::from_str(&report[from..=to])?;
        let mut sum = Self::default();
        for job in report["jobs"].as_array().context("no jobs")? {
            let number = |side: &str, what: &str| job[side][what].as_f64().unwrap_or_default();
            sum.reads += job["read"]["total_ios"].as_u64().unwrap_or_default();
            sum.writes += job["write"]["total_ios"].as_u64().unwrap_or_default();
            sum.read_iops += number("read", "iops");
            sum.write_iops += number("write", "iops");
            sum.errors +=
                job["total_err"].as_u64().unwrap_or_default() + job["error"].as_u64().unwrap_or_default();
        }
        Ok(sum)
    }
}

/// A load that runs.
#[derive(Debug)]
#[must_use = "a load's outcome must be looked at"]
pub struct Load<'a> {
    job: Job<'a>,
}

impl Load<'_> {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.job.is_done()
    }

    /// Waits for its end. Failed requests and wrong data are errors.
    pub fn wait(self) -> Result<FioResult> {
        let report = self.job.wait()?;
        let result = FioResult::parse(&report).with_context(|| format!("fio printed: {report}"))?;
        if result.errors != 0 {
            bail!("the load had errors: {result:?}");
        }
        Ok(result)
    }
}

impl Guest {
    /// Runs a load to its end. Failed requests and wrong data are errors.
    pub fn fio(&self, fio: &Fio) -> Result<FioResult> {
        self.start_fio(fio)?.wait()
    }

    /// Starts a load and goes on.
    pub fn start_fio(&self, fio: &Fio) -> Result<Load<'_>> {
        let report = "/tmp/fio.$$";
        Ok(Load { job: self.spawn(&with_report(fio.command(), report))? })
    }

    /// Runs a file of jobs (`vm-tests/fio/NAME.fio`) on a disk for so long. Failed requests are errors.
    pub fn fio_file(&self, name: &str, disk: &str, seconds: u32) -> Result<FioResult> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fio").join(name);
        let jobs = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        self.sh(&format!("cat >/tmp/{name} <<'END OF JOBS'\n{jobs}\nEND OF JOBS"))?;
        let command = format!("DISK={disk} RUN_SECONDS={seconds} fio /tmp/{name}");
        Load { job: self.spawn(&with_report(command, "/tmp/fio.$$"))? }.wait()
    }

    /// Number of requests that the guest's kernel has finished on a disk.
    pub fn requests_done(&self, disk: &str) -> Result<u64> {
        let stat = self.sh(&format!("cat /sys/block/{disk}/stat"))?;
        let numbers: Vec<u64> = stat.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        // Reads, writes, discards.
        Ok([0, 4, 11].iter().filter_map(|&at| numbers.get(at)).sum())
    }
}
