//! What is said between the confined process and its helper: a question as one packet of JSON, an answer as JSON up to the
//! end of a socket of its own. Descriptors travel beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use polypath_paths::{Facts, OpenOptions};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use super::proof::Bounds;
use crate::cli::Options;
use crate::listen::SocketFile;

/// Longest question.
const QUESTION_BYTES_MAX: usize = 128 << 10;

/// Most descriptors beside a message: where to answer, and what the question is about.
const FDS_MAX: usize = 2;

/// What can be asked. There is nothing else, and each is bounded by what the helper was told before there was a front-end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Question {
    /// The disk is known: from here on the helper works, within these bounds. Comes first, and counts once.
    Begin(Box<Bounds>, Vec<SocketFile>),
    /// A path of the disk, by this name, of this size at least.
    Open {
        name: PathBuf,
        options: OpenOptions,
        size_bytes: u64,
        /// Name of a path to compare contents with where identifiers do not tell.
        reference: Option<PathBuf>,
    },
    /// The in-flight area that comes along, as an open file of its own.
    Reopen,
    /// The files that the program was configured by, as they are now.
    Configuration,
    /// Runs the event command, if there is one. Has no answer.
    Event { name: String, line: String },
    /// The end has come: takes the sockets' files away.
    RemoveSockets,
}

/// What is answered; an error is a sentence.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Begun,
    /// With the descriptor.
    Opened(Facts),
    /// With the descriptor.
    Reopened,
    /// The options, and their table as TOML.
    Configuration(Box<Options>, String),
    Removed,
}

/// Sends a packet with descriptors.
pub(super) fn send(
    to: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match sendmsg(to.as_fd(), &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Receives some bytes (none: the end), and descriptors beside them.
fn receive(from: impl AsFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let nr_bytes = loop {
        let room = &mut [IoSliceMut::new(bytes)];
        match recvmsg(from.as_fd(), room, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?.bytes,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(nr_bytes)
}

/// Receives a whole packet; None: there will be no more.
pub(super) fn receive_packet(from: impl AsFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let (mut bytes, mut fds) = (vec![0; QUESTION_BYTES_MAX], Vec::new());
    let nr_bytes = receive(from, &mut bytes, &mut fds)?;
    bytes.truncate(nr_bytes);
    Ok((nr_bytes != 0).then_some((bytes, fds)))
}

/// Receives everything up to the end.
pub(super) fn receive_all(from: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut all, mut fds, mut part) = (Vec::new(), Vec::new(), [0; 4096]);
    loop {
        match receive(from.as_fd(), &mut part, &mut fds)? {
            0 => return Ok((all, fds)),
            nr_bytes => all.extend_from_slice(part.get(..nr_bytes).unwrap_or_default()),
        }
    }
}
