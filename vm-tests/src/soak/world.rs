//! A disk that lives through everything: storage with a write cache, a back-end that comes again, a front-end that goes on.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;

use super::storage::{NAMES, Place, SOON, Setup, Storage};
use crate::faulty::FaultyFs;
use crate::front_end::config::WRITEBACK_OFFSET;
use crate::front_end::durable::{Book, Survived, Writer};
use crate::front_end::{Disk, Kept, Resume, Session};
use crate::server::{Server, wait_until};

/// Queues that are under load; the one behind them is for a guest that keeps no rules.
pub const QUEUES: u16 = 4;
const QUEUES_OFFERED: u16 = QUEUES + 1;

/// The storage, the back-end and the front-end.
#[derive(Debug)]
pub struct World {
    /// What it was made of.
    pub setup: Setup,
    // Before the server in the order of drops: a process cannot end while the kernel waits for what a path holds.
    /// The storage.
    pub fs: FaultyFs,
    /// The back-end.
    pub server: Server,
    /// The front-end.
    pub disk: Disk,
    /// What it keeps when its back-end goes.
    pub kept: Kept,
    /// What the sectors hold.
    pub book: std::sync::Arc<Book>,
    dir: TempDir,
    place: Place,
}

fn connect(socket: &Path, setup: &Setup) -> Result<(Disk, Kept)> {
    let disk = Disk::at(socket).queues(QUEUES_OFFERED).connect()?;
    let inflight = disk.track()?;
    if setup.write_through {
        ensure!(disk.session.set_config(WRITEBACK_OFFSET, &[0])? == 0, "write through was refused");
    }
    disk.start()?;
    let kept = Kept::of(&disk, Some(inflight))?;
    Ok((disk, kept))
}

impl World {
    /// Storage that holds zeros, served, with a front-end that has it.
    pub fn start(setup: Setup) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("soak-").tempdir().context("make a directory")?;
        std::fs::File::create(dir.path().join("disk"))?.set_len(setup.bytes)?;
        let fs = FaultyFs::mount(&dir.path().join("disk"), &NAMES)?;
        fs.logging(false);
        fs.cache(setup.model);
        std::fs::write(dir.path().join("config"), setup.config(&fs))?;
        let place = Place::first(dir.path());
        let server = place.back_end(QUEUES_OFFERED).start()?;
        let (disk, kept) = connect(server.socket(), &setup)?;
        let book = Book::new(setup.bytes / 512);
        Ok(Self { setup, fs, server, disk, kept, book, dir, place })
    }

    /// The file behind everything.
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Another place for a file in the same directory.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A writer for each queue that is under load.
    pub fn writers(&self, seed: u64) -> Vec<Writer> {
        Writer::share(&self.book, QUEUES.into(), seed)
    }

    /// All that the events need, apart from the queues, which the loads have.
    pub fn parts(&mut self) -> (Parts<'_>, &mut [crate::front_end::BlkQueue]) {
        let Self { setup, fs, server, disk, kept, place, .. } = self;
        let Disk { session, memory, queues, .. } = disk;
        (Parts { setup, fs, server, session, memory, kept, place }, queues)
    }

    /// The power has gone and the storage knows it: polypath ends, the guest is forgotten, then everything comes again.
    /// What survived is checked.
    pub fn come_again(&mut self, writers: &mut [Writer]) -> Result<Survived> {
        self.server.kill();
        // What a killed process has with the kernel must be over before the storage takes anything again.
        let is_closed = |name: &&str| self.fs.counts(name).open == 0;
        wait_until("the dead process's files to be closed", SOON, || NAMES.iter().all(is_closed))?;
        self.fs.power_on();
        self.server = self.place.back_end(QUEUES_OFFERED).start()?;
        (self.disk, self.kept) = connect(self.server.socket(), &self.setup)?;
        let mut sum = Survived::default();
        for (q, writer) in self.disk.queues.iter_mut().zip(writers) {
            let survived = writer.check_after_cut(q).with_context(|| format!("{:?}", self.setup))?;
            sum.last += survived.last;
            sum.between += survived.between;
            sum.durable += survived.durable;
        }
        Ok(sum)
    }
}

/// A world under load.
#[derive(Debug)]
pub struct Parts<'a> {
    /// What it was made of.
    pub setup: &'a Setup,
    /// The storage.
    pub fs: &'a FaultyFs,
    /// The back-end.
    pub server: &'a mut Server,
    /// The front-end's connection.
    pub session: &'a mut Session,
    /// The guest's memory.
    pub memory: &'a crate::front_end::Memory,
    kept: &'a Kept,
    place: &'a mut Place,
}

impl<'a> Parts<'a> {
    /// The paths, and whom to tell of them.
    pub fn storage(&self) -> Storage<'a> {
        Storage { fs: self.fs, model: self.setup.model, control: self.place.control() }
    }

    fn reconnect(&mut self, resume: Resume) -> Result<()> {
        *self.session = self.kept.reconnect(&self.place.socket(), resume, SOON)?;
        Ok(())
    }

    /// The back-end is killed, with all that it has under way, and started again.
    pub fn kill(&mut self, resume: Resume) -> Result<()> {
        self.server.kill();
        *self.server = self.place.back_end(QUEUES_OFFERED).start()?;
        self.reconnect(resume)
    }

    /// The back-end ends in order and is started again.
    pub fn restart(&mut self, resume: Resume) -> Result<()> {
        let code = self.server.terminate(SOON)?;
        ensure!(code == 0, "the end by SIGTERM gave code {code}: {}", self.server.stderr());
        *self.server = self.place.back_end(QUEUES_OFFERED).start()?;
        self.reconnect(resume)
    }

    /// The front-end stops all queues, hangs up, and comes again; or it only hangs up.
    pub fn come_anew(&mut self, is_in_order: bool) -> Result<()> {
        if is_in_order {
            self.stop()?;
        }
        self.session.channel.shut_down();
        self.reconnect(Resume::Used)
    }

    fn stop(&mut self) -> Result<()> {
        self.session.channel.timeout = SOON;
        (0..=QUEUES).try_for_each(|index| self.session.stop(index).map(drop))
    }

    /// The front-end moves to another process that serves the same storage, as in a migration; the first one ends.
    pub fn hand_over(&mut self) -> Result<()> {
        let next = self.place.next();
        let other = next.back_end(QUEUES_OFFERED).start()?;
        self.stop()?;
        self.session.channel.shut_down();
        *self.place = next;
        self.reconnect(Resume::Used)?;
        let mut old = std::mem::replace(self.server, other);
        let code = old.terminate(SOON)?;
        if code != 0 {
            bail!("the process that was left gave code {code}: {}", old.stderr());
        }
        Ok(())
    }

    /// Waits until so many more requests were answered on each loaded queue.
    pub fn wait_progress(&self, more: u16, timeout: Duration) -> Result<()> {
        let indices = || -> Vec<u16> {
            let used = self.kept.used_addresses();
            used.iter().take(QUEUES.into()).map(|used| self.memory.load_u16(used + 2)).collect()
        };
        let (before, deadline) = (indices(), Instant::now() + timeout);
        loop {
            let came: Vec<_> = indices().iter().zip(&before).map(|(n, b)| n.wrapping_sub(*b)).collect();
            if came.iter().all(|&n| n >= more) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "answered within {timeout:?}: {came:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
