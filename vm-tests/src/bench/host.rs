//! The machine: its cores, what a process has used, and what the report says of it.

use std::fs;
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::server::polypath_bin;

/// A core for each side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    pub(super) client: usize,
    pub(super) server: usize,
}

impl Cores {
    /// The last two cores that this process may use: the first one serves most of a machine's interrupts.
    pub(super) fn choose() -> Result<Self> {
        // SAFETY: an all-zero cpu_set_t is an empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes at most the size given.
        let got = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
        ensure!(got == 0, "sched_getaffinity: {}", io::Error::last_os_error());
        let size = usize::try_from(libc::CPU_SETSIZE)?;
        // SAFETY: the index is inside the set.
        let mut cores = (0..size).rev().filter(|&core| unsafe { libc::CPU_ISSET(core, &set) });
        match (cores.next(), cores.next()) {
            (Some(server), Some(client)) => Ok(Self { client, server }),
            _ => anyhow::bail!("two cores are needed, one for the client and one for the server"),
        }
    }
}

/// Binds the calling thread (in a new process: all of it) to a core. Async-signal-safe.
pub(super) fn pin(core: usize) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the core came out of such a set.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the kernel reads the set.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn pin_this_thread(core: usize) -> Result<()> {
    pin(core).with_context(|| format!("bind to core {core}"))
}

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Lets SIGINT and SIGTERM end the run in order: the disk is a mount and a loop device, which nobody else would free.
pub(super) fn stop_in_order() {
    extern "C" fn stop(_signal: libc::c_int) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, stop as *const () as libc::sighandler_t) };
    }
}

/// An error if the run is to end.
pub(super) fn check_stopped() -> Result<()> {
    ensure!(!STOPPED.load(Ordering::Relaxed), "stopped");
    Ok(())
}

/// What the threads of a process have used, io_uring's kernel threads included.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) cpu: Duration,
    pub(super) voluntary_switches: u64,
    /// Taken off the processor while there was more to do.
    pub(super) involuntary_switches: u64,
}

impl Usage {
    /// From `/proc/PID/task/*`: `schedstat` counts ns where `stat` counts ticks of 10 ms.
    pub(super) fn of(pid: u32) -> Self {
        let mut usage = Self::default();
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let on_cpu_ns = read("schedstat").split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            usage.cpu += Duration::from_nanos(on_cpu_ns);
            let status = read("status");
            let number = |name: &str| {
                let field = status.lines().find_map(|line| line.strip_prefix(name));
                field.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0)
            };
            usage.voluntary_switches += number("voluntary_ctxt_switches:");
            usage.involuntary_switches += number("nonvoluntary_ctxt_switches:");
        }
        usage
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            voluntary_switches: self.voluntary_switches.saturating_sub(before.voluntary_switches),
            involuntary_switches: self.involuntary_switches.saturating_sub(before.involuntary_switches),
        }
    }
}

/// Lines of text about the machine and the programs, by name.
pub(super) fn describe() -> Vec<(&'static str, String)> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown");
    let virtual_machine = if cpuinfo.contains(" hypervisor") { ", a virtual machine" } else { "" };
    let nr_cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let version = |program: &std::ffi::OsStr| {
        let output = Command::new(program).arg("--version").output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().next().unwrap_or("unknown").to_owned()
    };
    let mut command = vec!["vm-tests/bench".to_owned()];
    command.extend(std::env::args().skip(1));
    vec![
        ("machine", format!("{nr_cores} x {model}{virtual_machine}")),
        ("kernel", read("/proc/sys/kernel/osrelease")),
        ("polypath", polypath_bin().map_or_else(|e| e.to_string(), |bin| version(bin.as_os_str()))),
        ("qsd", version("qemu-storage-daemon".as_ref())),
        ("load before", read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")),
        ("command", command.join(" ")),
    ]
}

/// Anonymous memory of a process in KiB.
pub(super) fn anonymous_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("read the status")?;
    let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = field.and_then(|field| field.trim().strip_suffix(" kB")?.parse().ok());
    kib.context("no RssAnon in the status")
}
