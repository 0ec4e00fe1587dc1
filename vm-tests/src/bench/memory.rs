//! Anonymous memory of the servers by number of queues and size of their rings.

use anyhow::{Context as _, Result, ensure};

use super::buffers::Buffers;
use super::client;
use super::disk::{Disk, DiskKind};
use super::host::{self, Cores};
use super::options::Options;
use super::program::Program;
use super::server::BenchServer;
use super::vhost_user::VhostUserClient;
use super::workload::{Order, Run, Workload};

/// Queues, descriptors of each ring, and KiB that polypath may use at most: twice and more what it was seen to use.
const CASES: [(usize, usize, u64); 4] =
    [(1, 128, 2 << 10), (1, 256, 2 << 10), (4, 256, 4 << 10), (64, 1024, 64 << 10)];
/// Descriptors of a request; as many requests as fit are under way.
const DESCRIPTORS: usize = 3;

/// Prints a table; with `--check`, what polypath uses is held to a limit.
pub(super) fn measure(options: &Options, cores: Cores) -> Result<()> {
    let disk = Disk::new(DiskKind::Tmpfs, options.disk_bytes)?;
    println!("Anonymous memory in KiB, of the tmpfs file's server:\n");
    println!("| program | queues | ring | no front-end | rings run | after full rings of random writes |");
    println!("|---|--:|--:|--:|--:|--:|");
    for program in [Program::Polypath, Program::Qsd] {
        for (nr_queues, size, limit) in CASES {
            let workload = Workload {
                name: "full rings",
                write: true,
                order: Order::Random,
                bytes: 4096,
                depth: nr_queues * (size / DESCRIPTORS),
                nr_queues,
                run: Run::Named,
            };
            let buffers = Buffers::new(std::iter::once(&workload))?;
            let server = BenchServer::start(program, &disk, nr_queues, &options.polypath_args, cores.server)?;
            let begin = host::anonymous_kib(server.pid())?;
            let mut client =
                VhostUserClient::with_rings(server.socket(), nr_queues, size, buffers, program.is_tracked())
                    .with_context(|| format!("{program}: {}", server.stderr()))?;
            let idle = host::anonymous_kib(server.pid())?;
            client::run(&mut client, &workload, disk.bytes(), options.time)?;
            let end = host::anonymous_kib(server.pid())?;
            println!("| {program} | {nr_queues} | {size} | {begin} | {idle} | {end} |");
            let is_within = program != Program::Polypath || end <= limit;
            ensure!(
                !options.check || is_within,
                "{nr_queues} rings of {size}: {end} KiB, at most {limit} were expected"
            );
        }
    }
    Ok(())
}
