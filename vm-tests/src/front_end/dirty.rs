//! The log in which a back-end marks the pages that it writes while the guest moves to another host.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use anyhow::{Result, ensure};

use super::disk::Disk;
use super::memory::{Memory, anonymous_file};
use super::session::Session;
use super::wire::{VERSION, proto, req};

/// The feature that says that everything is to be marked.
pub const F_LOG_ALL: u64 = 1 << 26;

/// Unit of the log.
pub const PAGE: u64 = 4096;

/// A log over all guest memory.
#[derive(Debug)]
pub struct DirtyBits {
    file: File,
    bytes: u64,
}

impl DirtyBits {
    /// An empty log that reaches to guest address `end`.
    pub fn new(end: u64) -> Result<Self> {
        let bytes = end.div_ceil(PAGE * 8).next_multiple_of(PAGE);
        Ok(Self { file: anonymous_file(bytes)?, bytes })
    }

    /// Hands the log over (SET_LOG_BASE).
    pub fn set(&self, session: &Session) -> Result<()> {
        ensure!(session.protocol & proto::LOG_SHMFD != 0, "no LOG_SHMFD");
        let payload = [self.bytes.to_le_bytes(), 0_u64.to_le_bytes()].concat();
        session.channel.send(req::SET_LOG_BASE, VERSION, &payload, &[self.file.as_raw_fd()])?;
        let answer = session.channel.recv()?;
        ensure!(answer.request == req::SET_LOG_BASE, "answer to {}", answer.request);
        Ok(())
    }

    /// The pages marked so far, by number; the marks are taken away.
    pub fn take(&self) -> Result<BTreeSet<u64>> {
        let mut bits = vec![0; usize::try_from(self.bytes)?];
        self.file.read_exact_at(&mut bits, 0)?;
        let mut pages = BTreeSet::new();
        for (at, byte) in (0..).zip(&mut bits) {
            if *byte != 0 {
                pages.extend((0..8).filter(|bit| *byte & 1 << bit != 0).map(|bit| at * 8 + bit));
                self.file.write_all_at(&[0], at)?;
            }
        }
        Ok(pages)
    }
}

/// All guest memory as it is now, page by page.
pub fn pages(memory: &Memory) -> Vec<(u64, Vec<u8>)> {
    let mut pages = Vec::new();
    for region in memory.regions() {
        let bytes =
            memory.read_vec(region.guest, usize::try_from(region.len).expect("a region of sane size"));
        let chunks = bytes.chunks(usize::try_from(PAGE).expect("small"));
        pages.extend((region.guest / PAGE..).zip(chunks.map(<[u8]>::to_vec)));
    }
    pages
}

impl Disk {
    /// Begins to log, as a front-end does when the guest is about to move: log, feature, used rings.
    pub fn start_logging(&mut self) -> Result<DirtyBits> {
        let log = DirtyBits::new(self.memory.end())?;
        log.set(&self.session)?;
        self.session.set_features(self.session.features | F_LOG_ALL)?;
        self.log_rings(true)?;
        Ok(log)
    }

    /// Ends it, as when the move was cancelled.
    pub fn stop_logging(&mut self) -> Result<()> {
        self.session.set_features(self.session.features & !F_LOG_ALL)?;
        self.log_rings(false)
    }

    fn log_rings(&self, on: bool) -> Result<()> {
        for q in &self.queues {
            let log = on.then(|| q.queue.ring_addresses()[1]);
            self.session.set_vring_addr_logged(&q.queue, log)?;
        }
        Ok(())
    }
}
