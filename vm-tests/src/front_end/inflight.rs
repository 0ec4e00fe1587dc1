//! The in-flight area that a front-end keeps for its back-end.

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};

use anyhow::{Context as _, Result, ensure};

use super::session::Session;
use super::wire::{Message, VERSION, req};

/// An area, as GET_INFLIGHT_FD gave it.
#[derive(Debug)]
pub struct Inflight {
    /// Length in bytes.
    pub size: u64,
    /// Where it begins in the file.
    pub offset: u64,
    /// Queues in it.
    pub num_queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// The memory.
    pub file: File,
}

/// The payload of both messages.
pub fn payload(size: u64, offset: u64, num_queues: u16, queue_size: u16) -> Vec<u8> {
    let words = [&size.to_le_bytes()[..], &offset.to_le_bytes()];
    // The structure is padded to eight bytes.
    [words.concat(), [&num_queues.to_le_bytes()[..], &queue_size.to_le_bytes(), &[0; 4]].concat()].concat()
}

impl Inflight {
    /// Asks for an area (GET_INFLIGHT_FD).
    pub fn get(session: &Session, num_queues: u16, queue_size: u16) -> Result<Self> {
        let payload = payload(0, 0, num_queues, queue_size);
        session.channel.send(req::GET_INFLIGHT_FD, VERSION, &payload, &[])?;
        let Message { request, payload, fds, .. } = session.channel.recv().context("GET_INFLIGHT_FD")?;
        ensure!(request == req::GET_INFLIGHT_FD && payload.len() >= 20, "answer {request}: {payload:x?}");
        let word = |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().expect("8 bytes"));
        let half = |at: usize| u16::from_le_bytes([payload[at], payload[at + 1]]);
        let [fd] = <[_; 1]>::try_from(fds).map_err(|fds| anyhow::anyhow!("{} descriptors", fds.len()))?;
        let file = File::from(fd);
        Ok(Self { size: word(0), offset: word(8), num_queues: half(16), queue_size: half(18), file })
    }

    /// Hands the area over (SET_INFLIGHT_FD).
    pub fn set(&self, session: &Session) -> Result<()> {
        ensure!(self.try_set(session)? == 0, "SET_INFLIGHT_FD was refused");
        Ok(())
    }

    /// The number that comes back.
    pub fn try_set(&self, session: &Session) -> Result<u64> {
        let payload = payload(self.size, self.offset, self.num_queues, self.queue_size);
        session.try_set(req::SET_INFLIGHT_FD, &payload, &[self.raw_fd()])
    }

    /// The descriptor's number.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
