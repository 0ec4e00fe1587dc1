//! The `faulty-fs` program: mounts, then obeys one line of stdin after the other.

use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use fuser::{Config, MountOption, SessionACL};

use super::fs::Fs;
use super::rule::{Answer, Command};
use super::serve::Shared;

/// Two threads take requests in and never block on a fault; held and delayed ones wait without a thread.
const NR_THREADS: usize = 2;

/// `faulty-fs async|sync MOUNTPOINT BACKING NAME...`; ends when stdin does.
pub fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let async_io = args.next().context("async or sync?")? == "async";
    let mountpoint: PathBuf = args.next().context("no mount point given")?.into();
    let backing: PathBuf = args.next().context("no backing file given")?.into();
    let names: Vec<String> = args.map(|name| name.to_string_lossy().into_owned()).collect();
    let shared = Shared::new(backing, names).context("open the backing file")?;
    let fs = Fs { shared: std::sync::Arc::clone(&shared), async_io };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("faulty".into())];
    config.acl = SessionACL::All;
    config.n_threads = Some(NR_THREADS);
    config.clone_fd = true;
    let session = fuser::Session::new(fs, &mountpoint, &config).context("mount")?;
    let _session = session.spawn().context("start the session")?;

    let (stdin, mut stdout) = (std::io::stdin().lock(), std::io::stdout().lock());
    writeln!(stdout, "{}", serde_json::to_string(&Answer::Done)?)?;
    for line in stdin.lines() {
        let answer = match serde_json::from_str::<Command>(&line?) {
            Ok(command) => shared.command(command),
            Err(e) => Answer::Failed(e.to_string()),
        };
        writeln!(stdout, "{}", serde_json::to_string(&answer)?)?;
    }
    super::unmount(&mountpoint);
    // Not by return: that would wait for requests that are held.
    std::process::exit(0);
}
