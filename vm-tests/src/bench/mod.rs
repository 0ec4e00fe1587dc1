//! Benchmarks: the same small client against plain io_uring, `qemu-storage-daemon` and polypath on the same disk.
//!
//! The client keeps a number of requests under way and starts the next one when one is answered. It runs on a core of
//! its own and the server on another. Rounds are interleaved (A B C, C B A, A B C ...), so that what else the machine does
//! hits all alike, and nobody always runs behind the same other; the medians over the rounds and their ratios are the
//! result. All run at the ordinary priority: one that is raised keeps the kernel's threads, which do a loop device's work,
//! from the processor.

mod buffers;
mod check;
mod client;
mod direct;
mod disk;
mod histogram;
mod host;
mod instructions;
mod measured;
mod memory;
pub mod neighbour;
mod options;
mod plots;
mod program;
mod publish;
mod report;
mod server;
mod syscalls;
mod tables;
mod target;
mod tracking;
pub mod traffic;
mod vhost_user;
mod workload;

pub use options::{HELP, Options};

use anyhow::Result;

use disk::{Disk, DiskKind};
use host::Cores;
use options::Subject;
use program::Program;
use report::Report;
use target::Target;

/// Does what the options ask for.
pub fn main(options: &Options) -> Result<()> {
    let cores = Cores::choose()?;
    host::stop_in_order();
    match options.subject {
        Subject::Speed => speed(options, cores),
        Subject::Memory => {
            host::pin_this_thread(cores.client)?;
            memory::measure(options, cores)
        }
        Subject::Instructions => instructions::measure(options),
    }
}

/// Measures, prints the tables and writes them to the results.
fn speed(options: &Options, cores: Cores) -> Result<()> {
    host::pin_this_thread(cores.client)?;
    let mut report = Report::new(options, cores)?;
    for kind in &options.disks {
        of_disk(options, cores, *kind, &mut report)?;
    }
    report.finish()?;
    if options.check { check::check(&report.rows()) } else { Ok(()) }
}

fn of_disk(options: &Options, cores: Cores, kind: DiskKind, report: &mut Report<'_>) -> Result<()> {
    let disk = Disk::new(kind, options.disk_bytes)?;
    let mut targets: Vec<Target> = Vec::new();
    for round in 0..options.rounds {
        for &workload in &options.workloads {
            let mut programs = Program::ALL;
            if round % 2 == 1 {
                programs.reverse();
            }
            for program in programs {
                if !options.includes(program, kind, workload) {
                    continue;
                }
                let found = targets.iter().position(|target| target.fits(program, workload));
                let index = match found {
                    Some(index) => index,
                    None => {
                        targets.push(Target::new(program, workload.nr_queues, &disk, options, cores)?);
                        targets.len() - 1
                    }
                };
                report.add(targets[index].run(kind, workload, round, &disk, options.time)?);
            }
        }
    }
    Ok(())
}
