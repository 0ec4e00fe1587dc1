//! Plain io_uring on the disk: what a path costs without anything in between.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use io_uring::{EnterFlags, IoUring, opcode, types};

use super::buffers::Buffers;
use super::client::Client;
use super::workload::Workload;

/// What is done while nothing has come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    /// Waits in the kernel, which leaves the core to a loop device's kernel thread.
    Wait,
    /// Looks at the completion queue, as the front-end looks at the used ring; a loop device's thread needs another core.
    Poll,
}

pub(super) struct Direct {
    ring: IoUring,
    idle: Idle,
    buffers: Buffers,
    _disk: File,
}

impl Direct {
    /// Opens the disk around the page cache, for `depth` requests.
    pub(super) fn open(path: &Path, depth: usize, buffers: Buffers, idle: Idle) -> Result<Self> {
        let mut options = File::options();
        let disk = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let disk = disk.with_context(|| format!("open {}", path.display()))?;
        // Completions are not pushed into a program that runs: it asks for them, and a flag says when there is a reason to.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(u32::try_from(depth.next_power_of_two())?)
            .context("make a ring")?;
        ring.submitter().register_files(&[disk.as_raw_fd()]).context("register the disk")?;
        Ok(Self { ring, idle, buffers, _disk: disk })
    }
}

impl Client for Direct {
    fn queue(&mut self, workload: &Workload, slot: usize, offset: u64) -> Result<()> {
        let buffer = self.buffers.of(workload, slot)?;
        let bytes = u32::try_from(workload.bytes)?;
        let entry = if workload.write {
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
            if self.idle == Idle::Wait {
                self.ring.submit_and_wait(1).context("wait")?;
            } else if self.ring.submission().taskrun() {
                // SAFETY: no argument is a pointer.
                unsafe {
                    self.ring.submitter().enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None)
                }
                .context("take completions")?;
            }
        }
        for entry in self.ring.completion() {
            ensure!(entry.result() > 0, "I/O error {}", std::io::Error::from_raw_os_error(-entry.result()));
            done.push(usize::try_from(entry.user_data())?);
        }
        Ok(())
    }

    fn is_polling(&self) -> bool {
        self.idle == Idle::Poll
    }
}
