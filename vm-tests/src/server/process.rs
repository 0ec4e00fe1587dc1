//! A child process that cannot outlive the tests, and what `/proc` tells about it.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::wait::wait_for;

type Spawned = io::Result<Child>;
type SpawnJob = (Command, mpsc::Sender<Spawned>);

/// Spawns `command` so that the kernel kills it when the test process ends, however it ends.
pub fn spawn_tied(command: Command) -> io::Result<Child> {
    spawn_with_death_signal(command, libc::SIGKILL)
}

/// Like [`spawn_tied`] with another signal than `SIGKILL`.
///
/// The parent-death signal comes when the *thread* that forked ends, and tests run in short-lived threads. So one thread
/// that never ends does all the forking.
pub fn spawn_with_death_signal(mut command: Command, signal: libc::c_int) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<SpawnJob>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<SpawnJob>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for (mut command, answer) in queue {
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("start the spawner thread");
        Mutex::new(jobs)
    });
    // SAFETY: prctl is async-signal-safe and the closure touches nothing that is shared with the parent.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) == -1 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let (answer, spawned) = mpsc::channel();
    spawner.lock().expect("spawner lock").send((command, answer)).expect("spawner lives");
    spawned.recv().expect("spawner answers")
}

/// A spawned program with its output in files: killed and reaped on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
    status: Option<ExitStatus>,
    stderr: PathBuf,
    stdout: PathBuf,
}

impl Process {
    /// Spawns `command` with stdout and stderr going to files in `dir`, named after `name`.
    pub fn spawn(mut command: Command, dir: &Path, name: &str) -> Result<Self> {
        let stderr = dir.join(format!("{name}.stderr"));
        let stdout = dir.join(format!("{name}.stdout"));
        command
            .stdin(Stdio::null())
            .stderr(File::create(&stderr).context("create the stderr file")?)
            .stdout(File::create(&stdout).context("create the stdout file")?);
        let shown = format!("{command:?}");
        let child = spawn_tied(command).with_context(|| format!("spawn {shown}"))?;
        Ok(Self { child, status: None, stderr, stdout })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything written to stderr so far.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap_or_default()).into_owned()
    }

    /// Everything written to stdout so far.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stdout).unwrap_or_default()).into_owned()
    }

    /// Waits until a line of stderr contains `pattern` and gives that line.
    pub fn wait_for_log(&self, pattern: &str, timeout: Duration) -> Result<String> {
        wait_for(&format!("log line with {pattern:?}"), timeout, || {
            self.stderr().lines().find(|line| line.contains(pattern)).map(str::to_owned)
        })
        .with_context(|| format!("log so far:\n{}", self.stderr()))
    }

    /// Number of stderr lines that contain `pattern`.
    pub fn count_log(&self, pattern: &str) -> usize {
        self.stderr().lines().filter(|line| line.contains(pattern)).count()
    }

    /// Sends a signal; an ended process is no error.
    pub fn signal(&self, signal: libc::c_int) {
        if self.status.is_none() {
            let pid = libc::pid_t::try_from(self.child.id()).expect("pid fits");
            // SAFETY: kill takes plain numbers; the child is not reaped yet, so the pid is still its own.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// The exit status, if the process has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait for the child");
        }
        self.status
    }

    /// Whether the process still runs.
    pub fn is_alive(&mut self) -> bool {
        self.exited().is_none()
    }

    /// Waits for the end of the process.
    pub fn wait_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        wait_for(&format!("end of process {}", self.child.id()), timeout, || self.exited())
    }

    /// `SIGTERM`, then the exit code (or `-signal`), which must come within `timeout`.
    pub fn terminate(&mut self, timeout: Duration) -> Result<i32> {
        self.signal(libc::SIGTERM);
        self.wait_exit(timeout).map(exit_code)
    }

    /// `SIGKILL`, and waits for the end.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }

    /// What `/proc` tells.
    pub fn stats(&self) -> Stats {
        Stats::of(self.child.id())
    }

    /// Threads of the kernel's that send for io_uring.
    pub fn nr_polling_threads(&self) -> usize {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).into_iter().flatten().flatten();
        let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default());
        names.filter(|name| name.starts_with("iou-sqp-")).count()
    }

    /// Targets of the open descriptors, as the links in `/proc/PID/fd` show them.
    pub fn open_files(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(format!("/proc/{}/fd", self.child.id())) else { return Vec::new() };
        let mut names: Vec<_> = entries
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .map(|target| target.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let ended_before = self.exited();
        self.kill();
        if std::thread::panicking() {
            let log = self.stderr();
            let from = log.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
            eprintln!("--- process {} (exit: {ended_before:?}) stderr:\n{}", self.child.id(), &log[from..]);
        }
    }
}

/// Exit code, or the negative number of the signal that ended the process.
pub fn exit_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt as _;
    status.code().unwrap_or_else(|| -status.signal().unwrap_or(0))
}

/// A look at a process through `/proc`; all zero when it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Threads, without those that the kernel keeps for io_uring (they come and go).
    pub threads: usize,
    /// Open descriptors.
    pub fds: usize,
    /// Lines of the memory map.
    pub mappings: usize,
    /// Resident memory.
    pub rss_kib: u64,
    /// What of it is anonymous.
    pub anonymous_kib: u64,
    /// What of it is shared memory, such as a guest's.
    pub shared_kib: u64,
    /// Voluntary context switches, all threads.
    pub voluntary_switches: u64,
    /// User and system time, all threads.
    pub cpu: Duration,
}

impl Stats {
    /// Looks at process `pid`.
    pub fn of(pid: u32) -> Self {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let mut stats = Self {
            fds: fs::read_dir(proc.join("fd")).map_or(0, Iterator::count),
            mappings: fs::read_to_string(proc.join("maps")).map_or(0, |maps| maps.lines().count()),
            rss_kib: status_field(&proc.join("status"), "VmRSS:"),
            anonymous_kib: status_field(&proc.join("status"), "RssAnon:"),
            shared_kib: status_field(&proc.join("status"), "RssShmem:"),
            cpu: cpu_time(&proc.join("stat")),
            ..Self::default()
        };
        for task in fs::read_dir(proc.join("task")).into_iter().flatten().flatten() {
            let comm = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            if !comm.starts_with("iou-") {
                stats.threads += 1;
            }
            stats.voluntary_switches += status_field(&task.path().join("status"), "voluntary_ctxt_switches:");
        }
        stats
    }
}

/// First number after `name` at the start of a line.
fn status_field(file: &Path, name: &str) -> u64 {
    let status = fs::read_to_string(file).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Fields 14 and 15 of `/proc/PID/stat`; the command name in field 2 may hold blanks, so counting starts behind it.
fn cpu_time(file: &Path) -> Duration {
    let stat = fs::read_to_string(file).unwrap_or_default();
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 =
        behind_name.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    // SAFETY: sysconf only reads a number.
    let per_second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100);
    Duration::from_millis(ticks * 1000 / per_second)
}
