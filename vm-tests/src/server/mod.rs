//! The back-end under test as a process: `polypath`, or `qemu-storage-daemon` to keep the harness honest.
//!
//! ```no_run
//! # use polypath_vm_tests::server::Server;
//! # use std::time::Duration;
//! let mut server = Server::polypath().path("/tmp/disk").num_queues(4).start().unwrap();
//! // ... a front-end connects to server.socket() ...
//! assert_eq!(server.terminate(Duration::from_secs(1)).unwrap(), 0);
//! ```

mod process;
mod wait;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

pub use process::{Process, Stats, exit_code, spawn_tied, spawn_with_death_signal};
pub use wait::{wait_for, wait_until};

/// How long a start may take before a test gives up; generous, the machine may be busy.
const START_TIMEOUT: Duration = Duration::from_secs(15);

/// Which back-end is spawned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The program of this project.
    Polypath,
    /// QEMU's storage daemon.
    Qsd,
}

/// The program to test: `$POLYPATH_BIN`, else the workspace's release build, else its debug build.
pub fn polypath_bin() -> Result<PathBuf> {
    if let Some(bin) = std::env::var_os("POLYPATH_BIN") {
        return Ok(bin.into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    ["release", "debug"]
        .iter()
        .map(|profile| target.join(profile).join("polypath"))
        .find(|bin| bin.exists())
        .context("no polypath program: build it or set POLYPATH_BIN")
}

/// Options of a start.
#[derive(Debug)]
pub struct Builder {
    program: Program,
    paths: Vec<PathBuf>,
    socket: Option<PathBuf>,
    num_queues: Option<u32>,
    read_only: bool,
    log_level: Option<String>,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    umask: Option<u32>,
    pass_fds: Vec<(i32, i32)>,
    cached: bool,
}

impl Builder {
    fn new(program: Program) -> Self {
        Self {
            program,
            paths: Vec::new(),
            socket: None,
            num_queues: None,
            read_only: false,
            log_level: Some("info".into()),
            args: Vec::new(),
            envs: Vec::new(),
            umask: None,
            pass_fds: Vec::new(),
            cached: false,
        }
    }

    /// Adds a path. The storage daemon takes exactly one.
    pub fn path(mut self, path: impl Into<PathBuf>) -> Self {
        self.paths.push(path.into());
        self
    }

    /// Adds several paths.
    pub fn paths<P: Into<PathBuf>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.paths.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Another socket than the one in the server's own directory.
    pub fn socket(mut self, socket: impl Into<PathBuf>) -> Self {
        self.socket = Some(socket.into());
        self
    }

    /// Number of virtqueues.
    pub fn num_queues(mut self, num: u32) -> Self {
        self.num_queues = Some(num);
        self
    }

    /// Serves the disk read-only.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// polypath: largest queue size.
    pub fn queue_size(self, size: u32) -> Self {
        self.arg("--queue-size").arg(size.to_string())
    }

    /// polypath: the disk's serial.
    pub fn serial(self, serial: impl AsRef<OsStr>) -> Self {
        self.arg("--serial").arg(serial)
    }

    /// polypath: path selector by name.
    pub fn selector(self, name: impl AsRef<OsStr>) -> Self {
        self.arg("--selector").arg(name)
    }

    /// polypath: log level; `info` unless said otherwise, `None` leaves the program's own default.
    pub fn log_level(mut self, level: Option<&str>) -> Self {
        self.log_level = level.map(Into::into);
        self
    }

    /// The storage daemon: through the page cache, no direct I/O (for files that refuse it).
    pub fn cached(mut self) -> Self {
        self.cached = true;
        self
    }

    /// Adds any further argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Sets an environment variable for the program.
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Starts the program under this umask.
    pub fn umask(mut self, umask: u32) -> Self {
        self.umask = Some(umask);
        self
    }

    /// Passes descriptor `ours` on as number `theirs` (for `--fd`).
    pub fn pass_fd(mut self, ours: i32, theirs: i32) -> Self {
        self.pass_fds.push((ours, theirs));
        self
    }

    fn command(&self, socket: Option<&Path>) -> Result<Command> {
        let mut command = match self.program {
            Program::Polypath => self.polypath_command(socket)?,
            Program::Qsd => self.qsd_command(socket)?,
        };
        command.args(&self.args).envs(self.envs.iter().map(|(k, v)| (k, v)));
        let (umask, pass_fds) = (self.umask, self.pass_fds.clone());
        // SAFETY: umask, dup2 and fcntl are async-signal-safe; the closure owns what it reads and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                if let Some(umask) = umask {
                    libc::umask(umask);
                }
                for &(ours, theirs) in &pass_fds {
                    let done = if ours == theirs {
                        libc::fcntl(ours, libc::F_SETFD, 0)
                    } else {
                        libc::dup2(ours, theirs)
                    };
                    if done == -1 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Ok(command)
    }

    fn polypath_command(&self, socket: Option<&Path>) -> Result<Command> {
        let mut command = Command::new(polypath_bin()?);
        if let Some(socket) = socket {
            command.arg("--socket-path").arg(socket);
        }
        for path in &self.paths {
            command.arg("--path").arg(path);
        }
        if let Some(num) = self.num_queues {
            command.arg("--num-queues").arg(num.to_string());
        }
        if self.read_only {
            command.arg("--read-only");
        }
        if let Some(level) = &self.log_level {
            command.arg("--log-level").arg(level);
        }
        Ok(command)
    }

    fn qsd_command(&self, socket: Option<&Path>) -> Result<Command> {
        let [path] = self.paths.as_slice() else { bail!("the storage daemon serves exactly one path") };
        let path = path.to_str().context("path is not UTF-8")?;
        let socket = socket.and_then(Path::to_str).context("socket is not UTF-8")?;
        // A comma inside a value is doubled in QEMU's option syntax.
        let (path, socket) = (path.replace(',', ",,"), socket.replace(',', ",,"));
        let block = fs::metadata(&path).is_ok_and(|meta| {
            use std::os::unix::fs::FileTypeExt as _;
            meta.file_type().is_block_device()
        });
        let driver = if block { "host_device" } else { "file" };
        let cache = if self.cached { "cache.direct=off" } else { "cache.direct=on,aio=io_uring" };
        let read_only = if self.read_only { "on" } else { "off" };
        let writable = if self.read_only { "off" } else { "on" };
        let num_queues = self.num_queues.unwrap_or(4);
        let mut command = Command::new("qemu-storage-daemon");
        command
            .arg("--blockdev")
            .arg(format!("driver={driver},node-name=f,filename={path},discard=unmap,read-only={read_only},{cache}"))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={socket},num-queues={num_queues},\
                 writable={writable}"
            ));
        Ok(command)
    }

    /// Starts the program and waits until its socket listens.
    pub fn start(self) -> Result<Server> {
        let dir = tempfile::Builder::new().prefix("pp-").tempdir().context("make a directory")?;
        let socket = self.socket.clone().unwrap_or_else(|| dir.path().join("sock"));
        let command = self.command(Some(&socket))?;
        let mut process = Process::spawn(command, dir.path(), "server")?;
        let up = wait_for("listening socket", START_TIMEOUT, || {
            if !process.is_alive() {
                return Some(false);
            }
            is_listening(&socket).then_some(true)
        })?;
        if !up {
            bail!("the server ended at start: {:?}\n{}", process.exited(), process.stderr());
        }
        // It confines itself between listening and saying so; whoever counts threads or lines wants that to be over.
        let says_so = matches!(self.log_level.as_deref(), Some("info" | "debug" | "trace"));
        if self.program == Program::Polypath && says_so {
            let said = process.wait_for_log("listening: socket=", START_TIMEOUT);
            said.with_context(|| format!("the server's last words:\n{}", process.stderr()))?;
        }
        Ok(Server { process, program: self.program, socket, _dir: dir })
    }

    /// Starts the program without waiting for anything (for starts with `--fd` or tests of the start itself).
    ///
    /// No socket argument is added unless [`Builder::socket`] was used.
    pub fn spawn(self) -> Result<Server> {
        let dir = tempfile::Builder::new().prefix("pp-").tempdir().context("make a directory")?;
        let command = self.command(self.socket.as_deref())?;
        let process = Process::spawn(command, dir.path(), "server")?;
        let socket = self.socket.clone().unwrap_or_default();
        Ok(Server { process, program: self.program, socket, _dir: dir })
    }

    /// Runs the program to its end, which must come within `timeout`: for starts that are refused.
    pub fn run_to_exit(mut self, timeout: Duration) -> Result<Exited> {
        let dir = tempfile::Builder::new().prefix("pp-").tempdir().context("make a directory")?;
        if self.socket.is_none() && self.pass_fds.is_empty() {
            self.socket = Some(dir.path().join("sock"));
        }
        let socket = self.socket.clone();
        let mut process = Process::spawn(self.command(socket.as_deref())?, dir.path(), "server")?;
        let status = process.wait_exit(timeout).with_context(|| format!("stderr: {}", process.stderr()))?;
        Ok(Exited {
            code: exit_code(status),
            stderr: process.stderr(),
            stdout: process.stdout(),
            socket_left: socket.is_some_and(|socket| socket.exists()),
        })
    }
}

/// Outcome of [`Builder::run_to_exit`].
#[derive(Clone, Debug)]
pub struct Exited {
    /// Exit code, or the negative signal number.
    pub code: i32,
    /// All of stderr.
    pub stderr: String,
    /// All of stdout.
    pub stdout: String,
    /// Whether something is there under the socket's name afterwards.
    pub socket_left: bool,
}

/// A running back-end; killed on drop.
#[derive(Debug)]
pub struct Server {
    process: Process,
    program: Program,
    socket: PathBuf,
    _dir: TempDir,
}

impl Server {
    /// Options for `polypath`.
    pub fn polypath() -> Builder {
        Builder::new(Program::Polypath)
    }

    /// Options for `qemu-storage-daemon`.
    pub fn qsd() -> Builder {
        Builder::new(Program::Qsd)
    }

    /// Options for the program named by `$POLYPATH_TEST_PROGRAM` (`qsd`, or anything else for polypath): tests that hold
    /// for any back-end use this, so that the harness itself can be checked against the storage daemon.
    pub fn any() -> Builder {
        match std::env::var("POLYPATH_TEST_PROGRAM").as_deref() {
            Ok("qsd") => Self::qsd(),
            _ => Self::polypath(),
        }
    }

    /// Which program this is.
    pub fn program(&self) -> Program {
        self.program
    }

    /// Where front-ends connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl std::ops::Deref for Server {
    type Target = Process;
    fn deref(&self) -> &Process {
        &self.process
    }
}

impl std::ops::DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// Whether some process listens on the Unix socket `path`.
///
/// Asked of the kernel's table: a probe by `connect` would be a front-end session for the server.
pub fn is_listening(path: &Path) -> bool {
    /// `__SO_ACCEPTCON`, as `/proc/net/unix` prints it.
    const ACCEPTING: &str = "00010000";
    let Some(path) = path.to_str() else { return false };
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTING) && fields.get(7..).is_some_and(|name| name.join(" ") == path)
    })
}
