//! A program with its client, ready to be measured.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::buffers::Buffers;
use super::client::{self, Client};
use super::direct::{Direct, Idle};
use super::disk::{Disk, DiskKind};
use super::host::{Cores, Usage};
use super::measured::Measured;
use super::options::Options;
use super::program::Program;
use super::server::BenchServer;
use super::syscalls::Syscalls;
use super::vhost_user::VhostUserClient;
use super::workload::Workload;

/// Part of a run's time that goes by before it counts.
const WARM_UP: f64 = 0.15;

/// What is measured: the client of one program, and where to look for the program's own costs.
pub(super) struct Target {
    program: Program,
    nr_queues: usize,
    // In front of the server in the order of drops: the front-end leaves first.
    client: Box<dyn Client>,
    server: Option<BenchServer>,
}

impl Target {
    /// For all loads of so many queues.
    pub(super) fn new(
        program: Program,
        nr_queues: usize,
        disk: &Disk,
        options: &Options,
        cores: Cores,
    ) -> Result<Self> {
        let loads = || options.workloads.iter().copied().filter(|load| load.nr_queues == nr_queues);
        let depth = loads().map(|workload| workload.depth).max().unwrap_or(1);
        let buffers = Buffers::new(loads())?;
        if program.is_direct() {
            let idle = if program == Program::IoUringPoll { Idle::Poll } else { Idle::Wait };
            let client = Box::new(Direct::open(&disk.names()[0], depth, buffers, idle)?);
            return Ok(Self { program, nr_queues, client, server: None });
        }
        let server = BenchServer::start(program, disk, nr_queues, &options.polypath_args, cores.server)?;
        let client =
            VhostUserClient::connect(server.socket(), nr_queues, depth, buffers, program.is_tracked())
                .with_context(|| format!("{program}: {}", server.stderr()))?;
        Ok(Self { program, nr_queues, client: Box::new(client), server: Some(server) })
    }

    pub(super) fn fits(&self, program: Program, workload: &Workload) -> bool {
        self.program == program && self.nr_queues == workload.nr_queues
    }

    pub(super) fn run(
        &mut self,
        kind: DiskKind,
        workload: &'static Workload,
        round: usize,
        disk: &Disk,
        time: Duration,
    ) -> Result<Measured> {
        let what = || format!("{}, {}", self.program, workload.name);
        // The process that does the I/O: the server, or without one this process.
        let pid = self.server.as_ref().map_or_else(std::process::id, BenchServer::pid);
        let client = self.client.as_mut();
        let syscalls = Syscalls::of(pid).ok();
        let warm_up =
            client::run(client, workload, disk.bytes(), time.mul_f64(WARM_UP)).with_context(what)?;
        let syscalls = syscalls.map(Syscalls::count).transpose()?;
        let own_before = self.server.as_ref().and_then(BenchServer::counts);
        let device_before = disk.counts();
        let usage_before = Usage::of(pid);
        let sample = client::run(client, workload, disk.bytes(), time).with_context(what)?;
        let usage = Usage::of(pid).since(usage_before);
        let device = disk.counts().zip(device_before);
        let own = self.server.as_ref().and_then(BenchServer::counts).zip(own_before);
        Ok(Measured {
            disk: kind,
            workload,
            program: self.program,
            round,
            syscalls: syscalls.map(|nr| nr as f64 / warm_up.requests.max(1) as f64),
            sample,
            usage,
            device: device.map(|(now, then)| now.since(then)),
            own: own.map(|(now, then)| now.since(then)),
        })
    }
}
