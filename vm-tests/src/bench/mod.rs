//! Benchmarks: the same small client against plain io_uring, `qemu-storage-daemon` and polypath on the same disk.
//!
//! The client keeps a number of requests under way and starts the next one when one is answered. It runs on a core of
//! its own and the server on another. Rounds are interleaved (A B C A B C ...), so that what else the machine does
//! hits all alike; the medians over the rounds and their ratios are the result. Nothing is asserted. All run at the ordinary
//! priority: one that is raised keeps the kernel's threads, which do a loop device's work, from the processor.

mod client;
mod direct;
mod disk;
mod histogram;
mod host;
mod options;
mod report;
mod server;
mod tracking;
mod vhost_user;
mod workload;

pub use options::{HELP, Options};

use std::time::Duration;

use anyhow::{Context as _, Result};

use client::{Client, Sample};
use direct::Direct;
use disk::{Disk, DiskKind};
use host::{Cores, Usage};
use report::{Measured, Report};
use server::{BenchServer, Program};
use vhost_user::VhostUserClient;
use workload::Workload;

/// Part of a run's time that goes by before it counts.
const WARM_UP: f64 = 0.15;

/// I/Os and bytes at the device, where they are counted.
type DeviceCounts = Option<(u64, u64)>;

/// What is measured: the client of one program, and where to look for the program's own costs.
struct Target {
    program: Program,
    // In front of the server in the order of drops: the front-end leaves first.
    client: Box<dyn Client>,
    server: Option<BenchServer>,
}

impl Target {
    fn new(program: Program, disk: &Disk, options: &Options, cores: Cores) -> Result<Self> {
        let depth = Workload::TABLE.iter().map(|workload| workload.depth).max().unwrap_or(1);
        let bytes = Workload::TABLE.iter().map(|workload| workload.bytes).max().unwrap_or(1);
        if program == Program::IoUring {
            let client = Box::new(Direct::open(disk.path(), depth, bytes)?);
            return Ok(Self { program, client, server: None });
        }
        let server = BenchServer::start(program, disk.path(), &options.polypath_args, cores.server)?;
        let client = VhostUserClient::connect(server.socket(), depth, bytes, program.is_tracked())
            .with_context(|| format!("{program}: {}", server.stderr()))?;
        Ok(Self { program, client: Box::new(client), server: Some(server) })
    }

    fn run(
        &mut self,
        workload: &Workload,
        disk: &Disk,
        time: Duration,
    ) -> Result<(Sample, Usage, DeviceCounts)> {
        let what = || format!("{}, {}", self.program, workload.name);
        let client = self.client.as_mut();
        client::run(client, workload, disk.bytes(), time.mul_f64(WARM_UP)).with_context(what)?;
        let before = usage(self.server.as_ref());
        let device_before = disk.counters();
        let sample = client::run(client, workload, disk.bytes(), time).with_context(what)?;
        let device = disk.counters().zip(device_before);
        let device = device.map(|(now, then)| (now.0 - then.0, now.1 - then.1));
        Ok((sample, usage(self.server.as_ref()).since(before), device))
    }
}

/// What the process that does the I/O has used so far: the server, or without one this process.
fn usage(server: Option<&BenchServer>) -> Usage {
    Usage::of(server.map_or_else(std::process::id, BenchServer::pid))
}

/// Runs what the options ask for, prints the tables and writes them to the results.
pub fn main(options: &Options) -> Result<()> {
    let cores = Cores::choose()?;
    host::pin_this_thread(cores.client)?;
    host::stop_in_order();
    let mut report = Report::new(options, cores)?;
    for kind in &options.disks {
        let disk = Disk::new(*kind, options.disk_bytes)?;
        let mut targets = Vec::new();
        let has_device = !matches!(kind, DiskKind::Null | DiskKind::NullInline);
        for &program in &options.programs {
            // Without a device there is nothing to compare with for those that have no server.
            if program == Program::IoUring && !has_device {
                continue;
            }
            targets.push(Target::new(program, &disk, options, cores)?);
        }
        for round in 0..options.rounds {
            for workload in &options.workloads {
                for target in &mut targets {
                    let (sample, usage, device) = target.run(workload, &disk, options.time)?;
                    report.add(Measured {
                        disk: *kind,
                        workload,
                        program: target.program,
                        round,
                        sample,
                        usage,
                        device,
                    });
                }
            }
        }
    }
    report.finish()
}
