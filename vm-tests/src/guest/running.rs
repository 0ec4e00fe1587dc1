//! A machine that runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::agent::{Agent, Answer};
use super::images::Qemu;
use super::qmp::Qmp;
use super::vm::NR_SPARE_PORTS;
use super::{BOOT_TIMEOUT, SCRIPT_TIMEOUT};
use crate::server::{Process, wait_for, wait_until};

/// QEMU itself starts within a second, except on a machine that is very busy.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A running guest; killed on drop.
#[derive(Debug)]
pub struct Guest {
    process: Mutex<Process>,
    qmp: Mutex<Qmp>,
    agent: Agent,
    /// Which ports have a disk.
    pub(super) ports: Mutex<Vec<bool>>,
    /// Where the back-ends of the disks may have their logs.
    logs: Vec<PathBuf>,
    dir: TempDir,
}

impl Guest {
    pub(super) fn start(
        qemu: Qemu,
        logs: Vec<PathBuf>,
        command: impl FnOnce(&Path) -> Result<Command>,
    ) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("vm-").tempdir().context("make a directory")?;
        let mut process = Process::spawn(command(dir.path())?, dir.path(), "qemu")?;
        let started = (|| {
            let socket = dir.path().join("qmp");
            // Also a QEMU that refuses its options or its disk ends here, and says why on stderr.
            wait_for("QEMU's sockets", START_TIMEOUT, || {
                (socket.exists() || !process.is_alive()).then_some(())
            })?;
            let agent = Agent::connect(&dir.path().join("agent"), Duration::from_secs(1))?;
            Ok((Qmp::connect(&socket, START_TIMEOUT)?, agent))
        })();
        match started {
            Ok((qmp, agent)) => Ok(Self {
                process: Mutex::new(process),
                qmp: Mutex::new(qmp),
                agent,
                ports: Mutex::new((0..logs.len() + NR_SPARE_PORTS).map(|port| port < logs.len()).collect()),
                logs,
                dir,
            }),
            Err(e) => {
                let e: anyhow::Error = e;
                let _ = process.wait_exit(Duration::from_secs(1));
                Err(e.context(format!("{qemu:?} QEMU does not start: {}", process.stderr().trim())))
            }
        }
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().expect("no thread panics with the lock")
    }

    pub(super) fn qmp_lock(&self) -> MutexGuard<'_, Qmp> {
        self.qmp.lock().expect("no thread panics with the lock")
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// What QEMU wrote to stderr.
    pub fn qemu_log(&self) -> String {
        self.process().stderr()
    }

    /// What came out of the serial port so far.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.path().join("console")).unwrap_or_default()).into_owned()
    }

    /// Waits until the serial port has printed `text`.
    pub fn wait_console(&self, text: &str, timeout: Duration) -> Result<()> {
        wait_until(&format!("{text:?} on the console"), timeout, || self.console().contains(text))
            .map_err(|e| self.explain(e))
    }

    /// What QEMU says of the machine: whether it runs, and where its processors are.
    pub fn state(&self) -> String {
        let ask = |line: &str| match self.qmp("human-monitor-command", json!({ "command-line": line })) {
            Ok(answer) => answer.as_str().unwrap_or_default().to_owned(),
            Err(error) => format!("{line}: {error:#}"),
        };
        ["info status", "info registers -a"].map(ask).join("")
    }

    /// Fails when there is no use in waiting for the guest any longer.
    fn check_alive(&self) -> Result<()> {
        if let Some(status) = self.process().exited() {
            bail!("QEMU ended: {status}");
        }
        if self.console().contains("Kernel panic") {
            bail!("the guest's kernel panicked");
        }
        Ok(())
    }

    /// Adds what all sides said last.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let mut said = format!("console: {}\nqemu: {}", tail(&self.console()), tail(&self.qemu_log()));
        for log in self.logs.iter().filter_map(|log| fs::read_to_string(log).ok()) {
            said += "\nback-end: ";
            said += tail(&log);
        }
        error.context(said)
    }

    /// Whether QEMU died because an emulated processor used a place in the memory map from before the map was changed: a race of
    /// QEMU's own (seen with 10.0.2) while devices are set up. Only before the guest has said anything.
    pub(super) fn has_lost_its_place(&self) -> bool {
        is_lost_place(&self.console(), &self.qemu_log())
    }

    /// Waits for the first boot.
    pub(super) fn wait_ready(&self, timeout: Duration) -> Result<()> {
        self.agent.wait_boot(0, timeout, || self.check_alive()).map_err(|e| self.explain(e))
    }

    /// Runs a shell script in the guest and gives its output; an exit code other than 0 is an error.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.spawn(script)?.wait()
    }

    /// [`Guest::sh`] with a deadline of its own.
    pub fn sh_within(&self, script: &str, timeout: Duration) -> Result<String> {
        self.spawn(script)?.wait_within(timeout)
    }

    /// Starts a shell script in the guest and goes on.
    pub fn spawn(&self, script: &str) -> Result<Job<'_>> {
        let ticket = self.agent.start(script)?;
        Ok(Job { guest: self, ticket, script: script.into() })
    }

    /// Runs a command of QEMU's control protocol.
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp_lock().execute(command, arguments)
    }

    /// Presses the reset button and waits until the guest is up again; scripts that ran are lost.
    pub fn reset(&self) -> Result<()> {
        let boots = self.agent.boots();
        self.qmp("system_reset", json!({}))?;
        self.agent.wait_boot(boots, BOOT_TIMEOUT, || self.check_alive()).map_err(|e| self.explain(e))
    }

    /// Reboots by the guest's own command and waits until it is up again.
    pub fn reboot(&self) -> Result<()> {
        let boots = self.agent.boots();
        self.agent.start("sync; reboot -f")?;
        self.agent.wait_boot(boots, BOOT_TIMEOUT, || self.check_alive()).map_err(|e| self.explain(e))
    }

    /// Reboots at once and without a word to any device, as a kernel does that has crashed.
    pub fn crash_reboot(&self) -> Result<()> {
        let boots = self.agent.boots();
        self.agent.start("echo b >/proc/sysrq-trigger")?;
        self.agent.wait_boot(boots, BOOT_TIMEOUT, || self.check_alive()).map_err(|e| self.explain(e))
    }

    /// Shuts the guest down by its own command and waits for the end of QEMU.
    pub fn power_off(self) -> Result<()> {
        self.shut_down()
    }

    /// [`Guest::power_off`], where what all sides said is still to be looked at.
    pub fn shut_down(&self) -> Result<()> {
        self.agent.start("sync; poweroff -f")?;
        self.process().wait_exit(BOOT_TIMEOUT).map_err(|e| self.explain(e))?;
        Ok(())
    }

    /// What the guest's kernel says of its disks, apart from their size; nothing, as long as all is well.
    pub fn disk_complaints(&self) -> Result<String> {
        let words =
            "grep -iE 'vd[a-z]|I/O error|blocked for' | grep -vE 'logical blocks|detected capacity change'";
        Ok(self.sh(&format!("dmesg | {words} || true"))?.trim().to_owned())
    }

    /// Kills QEMU at once, as a crash would.
    pub fn kill(self) {
        self.process().kill();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- guest console:\n{}", tail(&self.console()));
        }
    }
}

/// A script that runs in the guest.
#[derive(Debug)]
#[must_use = "a script's outcome must be looked at"]
pub struct Job<'a> {
    guest: &'a Guest,
    ticket: (u64, u64),
    script: String,
}

impl Job<'_> {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.guest.agent.is_done(self.ticket.0)
    }

    /// Waits for its end and gives its output; an exit code other than 0 is an error.
    pub fn wait(self) -> Result<String> {
        self.wait_within(SCRIPT_TIMEOUT)
    }

    /// [`Job::wait`] with a deadline of its own.
    pub fn wait_within(self, timeout: Duration) -> Result<String> {
        let Answer { code, output } = self
            .guest
            .agent
            .wait_answer(self.ticket, timeout, || self.guest.check_alive())
            .with_context(|| format!("script: {}", self.script))
            .map_err(|e| self.guest.explain(e))?;
        if code != 0 {
            let failed = anyhow::anyhow!("exit code {code} of script: {}\n{}", self.script, tail(&output));
            return Err(self.guest.explain(failed));
        }
        Ok(output)
    }
}

/// The last part of a log.
fn tail(text: &str) -> &str {
    let from = text.char_indices().rev().nth(3000).map_or(0, |(at, _)| at);
    text[from..].trim_end()
}

fn is_lost_place(console: &str, qemu: &str) -> bool {
    console.is_empty() && qemu.contains("iotlb_to_section: Assertion")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_fault_of_qemus_own_is_forgiven_and_only_at_the_start() {
        let seen = "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion `section_index < d->map.sections_nb' failed.";
        assert!(is_lost_place("", seen));
        assert!(!is_lost_place("Linux version 6.1", seen));
        assert!(!is_lost_place("", "qemu-system-x86_64: hw/virtio/vhost-user.c: Assertion `dev' failed."));
        assert!(!is_lost_place("", ""));
    }
}
