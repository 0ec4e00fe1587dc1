//! The machine: its cores, what a process has used, and what the report says of it.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

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
}

impl Usage {
    /// From `/proc/PID/task/*`: `schedstat` counts ns where `stat` counts ticks of 10 ms.
    pub(super) fn of(pid: u32) -> Self {
        let mut usage = Self::default();
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let on_cpu_ns = read("schedstat").split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            usage.cpu += Duration::from_nanos(on_cpu_ns);
            usage.voluntary_switches += read("status")
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
                .and_then(|number| number.trim().parse::<u64>().ok())
                .unwrap_or(0);
        }
        usage
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            voluntary_switches: self.voluntary_switches.saturating_sub(before.voluntary_switches),
        }
    }
}

/// Lines of text about the machine, by name.
pub(super) fn describe() -> Vec<(&'static str, String)> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown");
    let nr_cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    vec![
        ("machine", format!("{nr_cores} x {model}")),
        ("kernel", read("/proc/sys/kernel/osrelease")),
        ("load before", read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")),
        ("command", std::env::args().collect::<Vec<_>>().join(" ")),
    ]
}
