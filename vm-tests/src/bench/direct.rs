//! Plain io_uring on the disk: what a path costs without anything in between.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use io_uring::{IoUring, opcode, types};

use super::client::Client;
use crate::front_end::Region;

pub(super) struct Direct {
    ring: IoUring,
    buffers: Region,
    slot_bytes: usize,
    _disk: File,
}

impl Direct {
    /// Opens the disk around the page cache, for `depth` requests of at most `slot_bytes`.
    pub(super) fn open(path: &Path, depth: usize, slot_bytes: usize) -> Result<Self> {
        let mut options = File::options();
        let disk = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let disk = disk.with_context(|| format!("open {}", path.display()))?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .build(u32::try_from(depth.next_power_of_two())?)
            .context("make a ring")?;
        ring.submitter().register_files(&[disk.as_raw_fd()]).context("register the disk")?;
        let buffers = Region::new(0, (depth * slot_bytes) as u64, 0)?;
        Ok(Self { ring, buffers, slot_bytes, _disk: disk })
    }
}

impl Client for Direct {
    fn queue(&mut self, slot: usize, offset: u64, bytes: usize, write: bool) -> Result<()> {
        let buffer = usize::try_from(self.buffers.user())? + slot * self.slot_bytes;
        let bytes = u32::try_from(bytes)?;
        let entry = if write {
            opcode::Write::new(types::Fixed(0), buffer as *const u8, bytes).offset(offset).build()
        } else {
            opcode::Read::new(types::Fixed(0), buffer as *mut u8, bytes).offset(offset).build()
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the buffer is mapped as long as `self`, and a slot is used again only after its completion.
        unsafe { self.ring.submission().push(&entry) }.context("the ring is full")
    }

    fn submit(&mut self) -> Result<()> {
        self.ring.submit().context("submit")?;
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        if self.ring.completion().is_empty() {
            // Waits where the front-end polls: a loop device's kernel thread runs on the core of the submitter, and
            // behind a polling one it gets that core every few ms.
            self.ring.submit_and_wait(1).context("wait")?;
        }
        for entry in self.ring.completion() {
            ensure!(entry.result() > 0, "I/O error {}", std::io::Error::from_raw_os_error(-entry.result()));
            done.push(usize::try_from(entry.user_data())?);
        }
        Ok(())
    }
}
