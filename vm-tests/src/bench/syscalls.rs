//! Number of system calls of a process, by the kernel's tracepoint at their beginning.
//!
//! The tracepoint makes the calls themselves slower, so they are counted while a run warms up and not while it is timed.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use perf_event::events::Tracepoint;
use perf_event::{Builder, Counter};

use crate::loopdev::Mount;

/// Counts from its making on, for the threads that there were then. io_uring's kernel threads make no system calls.
pub(super) struct Syscalls {
    counters: Vec<Counter>,
}

impl Syscalls {
    /// Counts for process `pid`. An error if the kernel has no tracepoints, or this user may not use them.
    pub(super) fn of(pid: u32) -> Result<Self> {
        let id = tracepoint_id()?;
        let mut counters = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let thread = task?.file_name().to_str().and_then(|name| name.parse().ok());
            let mut builder = Builder::new(Tracepoint::with_id(id));
            builder.observe_pid(thread.context("a thread without a number")?).any_cpu().include_kernel();
            let mut counter = builder.enabled(true).build().context("count system calls")?;
            counter.enable().context("count system calls")?;
            counters.push(counter);
        }
        Ok(Self { counters })
    }

    pub(super) fn count(mut self) -> Result<u64> {
        let mut sum = 0;
        for counter in &mut self.counters {
            sum += counter.read().context("read a counter of system calls")?;
        }
        Ok(sum)
    }
}

fn tracepoint_id() -> Result<u64> {
    let read = |root: &Path| fs::read_to_string(root.join("events/raw_syscalls/sys_enter/id")).ok();
    // The second one is where older systems mount it; containers have it nowhere.
    let places = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    let here = places.iter().find_map(|place| read(Path::new(place)));
    let id = here.or_else(|| read(Mount::tracefs().ok()?.path()));
    id.context("no tracepoint raw_syscalls:sys_enter to be read")?
        .trim()
        .parse()
        .context("the number of the tracepoint")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted() {
        // Where it is not permitted the tables say so.
        let Ok(calls) = Syscalls::of(std::process::id()) else { return };
        for _ in 0..1000 {
            // SAFETY: no argument.
            unsafe { libc::syscall(libc::SYS_getppid) };
        }
        let count = calls.count().unwrap();
        // Other tests run in other threads.
        assert!(count >= 1000, "{count}");
    }
}
