//! The programs, spawned on the server's core.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use super::host;
use crate::server::{Process, is_listening, polypath_bin, wait_until};

const START_TIMEOUT: Duration = Duration::from_secs(15);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// No program in between.
    IoUring,
    /// QEMU's storage daemon, with an iothread and io_uring.
    Qsd,
    /// This project's.
    Polypath,
    /// The same with merging off.
    NoMerge,
    /// The same without polling before a sleep.
    NoPoll,
    /// The same by a front-end that has no place for what is in flight.
    NoInflight,
}

impl Program {
    /// As the options and the tables name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Qsd => "qsd",
            Self::Polypath => "polypath",
            Self::NoMerge => "no-merge",
            Self::NoPoll => "no-poll",
            Self::NoInflight => "no-inflight",
        }
    }

    /// Whether the front-end has it write down what is in flight, as QEMU does where it is offered.
    pub(super) fn is_tracked(self) -> bool {
        matches!(self, Self::Polypath | Self::NoMerge | Self::NoPoll)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A running server; stopped on drop.
pub(super) struct BenchServer {
    process: Process,
    socket: PathBuf,
    _dir: TempDir,
}

impl BenchServer {
    pub(super) fn start(program: Program, disk: &Path, args: &[OsString], core: usize) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-").tempdir()?;
        let socket = dir.path().join("sock");
        let mut command = match program {
            Program::Qsd => qsd(disk, &socket)?,
            Program::NoMerge => polypath(disk, &socket, args, &["--merge-max", "0"])?,
            Program::NoPoll => polypath(disk, &socket, args, &["--poll-us", "0"])?,
            _ => polypath(disk, &socket, args, &[])?,
        };
        // SAFETY: sched_setaffinity is a plain system call; the closure allocates nothing.
        unsafe { command.pre_exec(move || host::pin(core)) };
        let process = Process::spawn(command, dir.path(), program.name())?;
        let mut server = Self { process, socket, _dir: dir };
        let (socket, process) = (&server.socket, &mut server.process);
        wait_until("the socket", START_TIMEOUT, || is_listening(socket) || !process.is_alive())?;
        anyhow::ensure!(process.is_alive(), "{program} ended: {}", process.stderr());
        Ok(server)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn stderr(&self) -> String {
        self.process.stderr()
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        // A server that does not stop is killed with its process.
        let _ = self.process.terminate(STOP_TIMEOUT);
    }
}

fn polypath(disk: &Path, socket: &Path, args: &[OsString], more: &[&str]) -> Result<Command> {
    let mut command = Command::new(polypath_bin()?);
    command.arg("--socket-path").arg(socket).arg("--path").arg(disk).args(["--num-queues", "1"]);
    command.args(["--log-level", "warn"]).args(args).args(more);
    Ok(command)
}

fn qsd(disk: &Path, socket: &Path) -> Result<Command> {
    // A comma inside a value is doubled in QEMU's option syntax.
    let text = |path: &Path| path.to_str().map(|path| path.replace(',', ",,")).context("path is not UTF-8");
    let (disk_text, socket) = (text(disk)?, text(socket)?);
    let null = disk_text.strip_prefix("null:").and_then(|rest| rest.split(',').next());
    let node = match null {
        Some(size) => format!("driver=null-co,node-name=disk,size={size},read-zeroes=off"),
        None => {
            let is_device = std::fs::metadata(disk)?.file_type().is_block_device();
            let driver = if is_device { "host_device" } else { "file" };
            format!(
                "driver={driver},node-name=disk,filename={disk_text},cache.direct=on,aio=io_uring,locking=off"
            )
        }
    };
    let mut command = Command::new("qemu-storage-daemon");
    command.args(["--object", "iothread,id=io0"]).arg("--blockdev").arg(node);
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},num-queues=1,writable=on,\
         iothread=io0"
    ));
    Ok(command)
}
