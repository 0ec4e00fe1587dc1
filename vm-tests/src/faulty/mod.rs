//! A file with scripted faults: one backing file served by FUSE under several names, each of which can fail by itself.
//!
//! The names have the same `st_dev` and `st_ino`, so a multipath program takes them for paths to the same file, while each
//! request shows by which name it came. Every request reaches the server (direct I/O, nothing cached). The server is a
//! process of its own, so that `SIGSTOP` makes all its names hang and `SIGKILL` makes them fail with `ENOTCONN`.
//!
//! ```no_run
//! # use polypath_vm_tests::faulty::{FaultyFs, Rule};
//! # use std::{path::Path, time::Duration};
//! let fs = FaultyFs::mount(Path::new("/tmp/disk"), &["a", "b"]).unwrap();
//! fs.rule("a", Rule::errno(libc::EIO).reads().sectors(20..21).next(3));
//! fs.rule("b", Rule::hold().writes());
//! // ... I/O on fs.path("a") and fs.path("b") ...
//! fs.wait_held("b", 4, Duration::from_secs(5)).unwrap();
//! fs.release("b");
//! ```

mod cache;
mod fs;
mod names;
mod power;
pub mod program;
mod rule;
mod serve;

use std::ffi::CString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command as Program, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

pub use cache::CacheModel;
pub use rule::{Action, Counts, Kind, Op, Rule, Times};
use rule::{Answer, Command};

use crate::server::{spawn_with_death_signal, wait_for, wait_until};

/// Why FUSE files cannot be had here, if so.
pub fn available() -> Result<(), String> {
    match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("/dev/fuse: {e}")),
    }
}

/// The server program: `$FAULTY_FS_BIN`, else beside the running test.
fn program() -> Result<PathBuf> {
    if let Some(bin) = std::env::var_os("FAULTY_FS_BIN") {
        return Ok(bin.into());
    }
    let exe = std::env::current_exe().context("find the running program")?;
    exe.ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join("faulty-fs"))
        .find(|bin| bin.is_file())
        .context("no faulty-fs program: cargo build -p polypath-vm-tests --bins")
}

/// Lazy unmount; not mounted is no error.
pub(crate) fn unmount(mountpoint: &Path) {
    let path = CString::new(mountpoint.as_os_str().as_bytes()).expect("no NUL in a path");
    // SAFETY: a valid C string, only read.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
}

/// A mounted server; unmounted and killed on drop. All calls panic when the server does not answer.
#[derive(Debug)]
pub struct FaultyFs {
    child: Mutex<Child>,
    control: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    pid: libc::pid_t,
    dir: TempDir,
}

impl FaultyFs {
    /// Serves `backing` under `names` on a new mount point.
    pub fn mount(backing: &Path, names: &[&str]) -> Result<Self> {
        Self::mount_with(backing, names, true)
    }

    /// Like [`FaultyFs::mount`], but the kernel does not take direct I/O asynchronously. Neither is perfect under io_uring:
    ///
    /// | | asynchronous | synchronous |
    /// |---|---|---|
    /// | held requests | any number | the submitting thread is held too |
    /// | `EAGAIN`, `EOPNOTSUPP` | repeated by the kernel without end | repeated a hundred times, then given on |
    /// | a short read | given on | finished by the kernel from the wrong offset |
    /// | a short write | becomes `EIO` | likewise; given on if what follows is an error |
    ///
    /// (Seen on Linux 6.18: io_uring finishes short transfers of regular files itself, and FUSE's direct I/O does not move
    /// the file position that it goes on from.)
    pub fn mount_sync(backing: &Path, names: &[&str]) -> Result<Self> {
        Self::mount_with(backing, names, false)
    }

    fn mount_with(backing: &Path, names: &[&str], async_io: bool) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("faulty-").tempdir().context("make a mount point")?;
        let mut command = Program::new(program()?);
        command.arg(if async_io { "async" } else { "sync" });
        command.arg(dir.path()).arg(backing).args(names).stdin(Stdio::piped()).stdout(Stdio::piped());
        // The server ends by itself, unmounted, when its stdin does; a stopped one must be woken to see that.
        let mut child = spawn_with_death_signal(command, libc::SIGCONT).context("start faulty-fs")?;
        let stdin = child.stdin.take().expect("piped");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let pid = libc::pid_t::try_from(child.id()).expect("pid fits");
        let mut ready = String::new();
        let up = stdout.read_line(&mut ready);
        let fs = Self { child: Mutex::new(child), control: Mutex::new((stdin, stdout)), pid, dir };
        match up {
            Ok(n) if n > 0 => Ok(fs),
            _ => bail!("faulty-fs did not mount {} (its message is on stderr)", backing.display()),
        }
    }

    /// The file of this name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The files of these names.
    pub fn paths(&self, names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(|name| self.path(name)).collect()
    }

    fn call(&self, command: &Command) -> Answer {
        let mut control = self.control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (to, from) = &mut *control;
        let line = serde_json::to_string(command).expect("commands are plain data");
        writeln!(to, "{line}").expect("faulty-fs takes commands");
        let mut answer = String::new();
        from.read_line(&mut answer).expect("faulty-fs answers");
        match serde_json::from_str(&answer).expect("faulty-fs answers in its own words") {
            Answer::Failed(why) => panic!("faulty-fs refused {line}: {why}"),
            answer => answer,
        }
    }

    /// Adds a fault behind those that `name` has.
    pub fn rule(&self, name: &str, rule: Rule) {
        self.call(&Command::Rule { name: name.into(), rule });
    }

    /// Takes all faults of `name` away; what is held stays held.
    pub fn clear(&self, name: &str) {
        self.call(&Command::ClearRules { name: name.into() });
    }

    /// Ends holding on `name`: its hold rules go, what they kept is carried out.
    pub fn release(&self, name: &str) {
        self.call(&Command::Release { name: name.into(), errno: None, nr: None });
    }

    /// Like [`FaultyFs::release`], but what was held fails with `errno`.
    pub fn release_with(&self, name: &str, errno: i32) {
        self.call(&Command::Release { name: name.into(), errno: Some(errno), nr: None });
    }

    /// Carries out the oldest `nr` held operations; holding goes on.
    pub fn release_some(&self, name: &str, nr: usize) {
        self.call(&Command::Release { name: name.into(), errno: None, nr: Some(nr) });
    }

    /// Waits until at least `nr` operations are held on `name`.
    pub fn wait_held(&self, name: &str, nr: u64, timeout: Duration) -> Result<()> {
        wait_until(&format!("{nr} operations held on {name}"), timeout, || self.counts(name).held >= nr)
            .with_context(|| format!("seen: {:?}", self.counts(name)))
    }

    /// The counters of `name`.
    pub fn counts(&self, name: &str) -> Counts {
        match self.call(&Command::Counts { name: name.into() }) {
            Answer::Counts(counts) => counts,
            other => panic!("not counts: {other:?}"),
        }
    }

    /// All operations of all names since the start or [`FaultyFs::clear_log`], in the order of arrival.
    pub fn log(&self) -> Vec<Op> {
        match self.call(&Command::Log) {
            Answer::Log(log) => log,
            other => panic!("not a log: {other:?}"),
        }
    }

    /// The operations of one kind on one name.
    pub fn log_of(&self, name: &str, kind: Kind) -> Vec<Op> {
        self.log().into_iter().filter(|op| op.name == name && op.kind == kind).collect()
    }

    /// Empties the log.
    pub fn clear_log(&self) {
        self.call(&Command::ClearLog);
    }

    /// Turns logging off (for heavy loads) or on; counters count on.
    pub fn logging(&self, on: bool) {
        self.call(&Command::Logging(on));
    }

    /// Write-back mode: writes by `name` stay in a cache of that name until an fsync by that name.
    pub fn write_back(&self, name: &str, on: bool) {
        self.call(&Command::WriteBack { name: name.into(), on });
    }

    /// Loses what `name` has written since its last fsync.
    pub fn forget_unsynced(&self, name: &str) {
        self.call(&Command::ForgetUnsynced { name: name.into() });
    }

    /// Puts a write cache in front of the backing file, one for all names. Not together with [`FaultyFs::write_back`].
    pub fn cache(&self, model: CacheModel) {
        self.call(&Command::Cache { model });
    }

    /// The storage loses its power: of what was not synced, `seed` says what survives. Whatever arrives from now on, or is
    /// held or delayed, fails and does nothing.
    pub fn power_off(&self, seed: u64) {
        self.call(&Command::PowerOff { seed });
    }

    /// The power is back. To be called when nobody has a name open any more ([`Counts::open`]), or requests of before would
    /// come late.
    pub fn power_on(&self) {
        self.call(&Command::PowerOn);
    }

    /// Makes stat on `name` show this size; `None`: the true one.
    pub fn set_size(&self, name: &str, size: Option<u64>) {
        self.call(&Command::Size { name: name.into(), size });
    }

    /// Makes stat on `name` show this inode number.
    pub fn set_inode(&self, name: &str, ino: u64) {
        self.call(&Command::Inode { name: name.into(), ino });
    }

    /// Puts another file behind `name`.
    pub fn set_backing(&self, name: &str, file: &Path) {
        self.call(&Command::Backing { name: name.into(), file: file.into() });
    }

    /// Adds a name, or brings a removed one back.
    pub fn add_name(&self, name: &str) {
        self.call(&Command::Add { name: name.into() });
    }

    /// Removes a name: new opens fail with `ENOENT`, open descriptors go on.
    pub fn remove_name(&self, name: &str) {
        self.call(&Command::Remove { name: name.into() });
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: plain numbers; the child is reaped only on drop, so the pid is still its own.
        unsafe { libc::kill(self.pid, signal) };
    }

    /// Hangs all names: the server is stopped. No other call but [`FaultyFs::cont`] and [`FaultyFs::kill`] returns then.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.pid);
        wait_for("the server to stop", Duration::from_secs(5), || {
            let stat = std::fs::read_to_string(&stat).ok()?;
            stat.rsplit(')').next()?.trim_start().starts_with('T').then_some(())
        })
        .expect("SIGSTOP works");
    }

    /// Ends [`FaultyFs::stop`].
    pub fn cont(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Kills the server: every name fails from now on.
    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
    }
}

impl Drop for FaultyFs {
    fn drop(&mut self) {
        unmount(self.dir.path());
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Killing also answers whatever is still held, so that nobody hangs on it.
        let _ = child.kill();
        let _ = child.wait();
    }
}
