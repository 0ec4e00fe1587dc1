//! The programs, spawned on the server's core.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use tempfile::TempDir;

use super::disk::Disk;
use super::host;
use super::program::Program;
use crate::control::Control;
use crate::server::{Process, is_listening, polypath_bin, wait_until};

const START_TIMEOUT: Duration = Duration::from_secs(15);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What polypath itself has counted, all paths together, reads and writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OwnCounts {
    /// I/Os that went to paths.
    pub(super) ios: u64,
    /// Requests that went with another.
    pub(super) merged: u64,
}

impl OwnCounts {
    pub(super) fn since(self, before: Self) -> Self {
        Self { ios: self.ios - before.ios, merged: self.merged - before.merged }
    }
}

/// A running server; stopped on drop.
pub(super) struct BenchServer {
    process: Process,
    socket: PathBuf,
    dir: TempDir,
}

impl BenchServer {
    /// Serves the disk with `nr_queues`; `more` are further options for polypath.
    pub(super) fn start(
        program: Program,
        disk: &Disk,
        nr_queues: usize,
        more: &[OsString],
        core: usize,
    ) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-").tempdir()?;
        let socket = dir.path().join("sock");
        let mut command = if program.is_qsd() {
            let aio = if program == Program::QsdNative { "native" } else { "io_uring" };
            qsd(&disk.names()[0], &socket, nr_queues, aio, program != Program::QsdNoPoll)?
        } else {
            let paths = &disk.names()[..program.nr_paths()];
            let mut command = polypath(paths, &socket, nr_queues)?;
            command.arg("--control").arg(dir.path().join("control"));
            command.args(more).args(program.polypath_options());
            command
        };
        // SAFETY: sched_setaffinity is a plain system call; the closure allocates nothing.
        unsafe { command.pre_exec(move || host::pin(core)) };
        let process = Process::spawn(command, dir.path(), program.name())?;
        let mut server = Self { process, socket, dir };
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

    /// Polypath's control socket.
    pub(super) fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    /// None of a program that does not count.
    pub(super) fn counts(&self) -> Option<OwnCounts> {
        let counters =
            Control::connect(&self.control()).ok()?.result(json!({ "command": "counters" })).ok()?;
        let mut counts = OwnCounts::default();
        for path in counters["paths"].as_array()? {
            for kind in ["read", "write"] {
                counts.ios += path[kind]["nr_ios"].as_u64()?;
                counts.merged += path[kind]["nr_merged"].as_u64()?;
            }
        }
        Some(counts)
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        // A server that does not stop is killed with its process.
        let _ = self.process.terminate(STOP_TIMEOUT);
    }
}

fn polypath(paths: &[PathBuf], socket: &Path, nr_queues: usize) -> Result<Command> {
    let mut command = Command::new(polypath_bin()?);
    command.arg("--socket-path").arg(socket).args(["--num-queues", &nr_queues.to_string()]);
    for path in paths {
        command.arg("--path").arg(path);
    }
    // Two names of one file are what is wanted, and no reason for a warning.
    command.args(["--log-level", "error"]);
    Ok(command)
}

fn qsd(disk: &Path, socket: &Path, nr_queues: usize, aio: &str, polls: bool) -> Result<Command> {
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
                "driver={driver},node-name=disk,filename={disk_text},cache.direct=on,aio={aio},locking=off"
            )
        }
    };
    let mut command = Command::new("qemu-storage-daemon");
    let iothread = if polls { "iothread,id=io0" } else { "iothread,id=io0,poll-max-ns=0" };
    command.args(["--object", iothread]).arg("--blockdev").arg(node);
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},num-queues={nr_queues},\
         writable=on,iothread=io0"
    ));
    Ok(command)
}
