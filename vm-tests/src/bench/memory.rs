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

/// Queues, and descriptors of each ring.
const CASES: [(usize, usize); 4] = [(1, 128), (1, 256), (4, 256), (64, 1024)];
/// Descriptors of a request; as many requests as fit are under way.
const DESCRIPTORS: usize = 3;

/// What polypath may use at most in any case, in KiB: twice what it was seen to use, so that only a leak or a table per
/// path and ring entry would break it.
const LIMIT_KIB: u64 = 96 << 10;

/// Prints a table; with `--check`, what polypath uses is held to a limit.
pub(super) fn measure(options: &Options, cores: Cores) -> Result<()> {
    let disk = Disk::new(DiskKind::Tmpfs, options.disk_bytes)?;
    println!("Anonymous memory in KiB, of the tmpfs file's server:\n");
    println!("| program | queues | ring | no front-end | rings run | after full rings of random writes |");
    println!("|---|--:|--:|--:|--:|--:|");
    for program in [Program::Polypath, Program::Qsd] {
        for (nr_queues, size) in CASES {
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
            let is_within = program != Program::Polypath || end <= LIMIT_KIB;
            ensure!(!options.check || is_within, "{end} KiB, at most {LIMIT_KIB} were expected");
        }
    }
    Ok(())
}
