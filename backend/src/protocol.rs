//! What the `vhost` crate does not take: looks at a message before the crate does.
//!
//! The crate makes an object of the channel back to the front-end that keeps the socket to itself and has no message for
//! a changed config space, so that channel is taken here. It also ends the connection at a GET_CONFIG or SET_CONFIG whose offset or size is out of bounds. The protocol has
//! an answer for those (docs/interop/vhost-user.rst: a payload of size 0 on error), so they are answered here.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketType, recv,
    recvmsg, send, sockopt,
};

const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;

/// Bits of the header's flags (version 1 in the low two).
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

const HEADER_BYTES: usize = 12;
/// Offset, size and flags of a config message.
const CONFIG_HEADER_BYTES: u32 = 12;
/// Bound of the crate for offset + size, and for one message.
const CONFIG_END_MAX: u32 = 0x1000;
const MESSAGE_BYTES_MAX: u32 = 0x1000;

/// Takes the message that comes next if it brings the channel back to the front-end.
///
/// # Errors
/// It brings something else, or the connection is lost.
pub(crate) fn take_back_channel(stream: &UnixStream, reply_ack: bool) -> io::Result<Option<UnixStream>> {
    let mut header = [0; HEADER_BYTES];
    let (nr_bytes, _) = recv(stream, &mut header[..], RecvFlags::PEEK)?;
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (code, flags, body_bytes) = (word(0), word(4), word(8));
    if nr_bytes != header.len() || code != SET_BACKEND_REQ_FD || body_bytes > MESSAGE_BYTES_MAX {
        return Ok(None);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut taken = [0; HEADER_BYTES];
    // What comes along comes with the first byte.
    recvmsg(stream, &mut [io::IoSliceMut::new(&mut taken)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    take(stream, body_bytes as usize)?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a channel to the front-end");
    let (Some(fd), true) = (fds.pop(), fds.is_empty()) else { return Err(invalid()) };
    let is_unix = sockopt::socket_domain(fd.as_fd()) == Ok(AddressFamily::UNIX);
    if !is_unix || sockopt::socket_type(fd.as_fd()) != Ok(SocketType::STREAM) {
        return Err(invalid());
    }
    if reply_ack && flags & NEED_REPLY != 0 {
        put(stream, &[code, VERSION | REPLY, 8, 0, 0])?;
    }
    Ok(Some(UnixStream::from(fd)))
}

/// Answers the message that comes next if the crate would not. True if it was answered, false if it is the crate's.
pub(crate) fn answer_odd_config(stream: &UnixStream, reply_ack: bool) -> io::Result<bool> {
    let mut message = [0; HEADER_BYTES + CONFIG_HEADER_BYTES as usize];
    let (nr_bytes, _) = recv(stream, &mut message[..], RecvFlags::PEEK)?;
    let word =
        |at: usize| u32::from_ne_bytes([message[at], message[at + 1], message[at + 2], message[at + 3]]);
    let (code, flags, body_bytes) = (word(0), word(4), word(8));
    let is_config = matches!(code, GET_CONFIG | SET_CONFIG);
    // A message that comes in pieces is left to the crate.
    if nr_bytes != message.len() || !is_config || body_bytes > MESSAGE_BYTES_MAX {
        return Ok(false);
    }
    let (offset, size) = (word(12), word(16));
    let in_bounds = offset.checked_add(size).is_some_and(|end| end <= CONFIG_END_MAX);
    let whole = body_bytes.checked_sub(CONFIG_HEADER_BYTES) == Some(size);
    if (size != 0 && in_bounds && whole) || body_bytes < CONFIG_HEADER_BYTES {
        return Ok(false);
    }
    take(stream, HEADER_BYTES + body_bytes as usize)?;
    let reply_flags = VERSION | REPLY;
    if code == GET_CONFIG {
        let reply = [code, reply_flags, CONFIG_HEADER_BYTES, offset, 0, word(20)];
        put(stream, &reply)?;
    } else if reply_ack && flags & NEED_REPLY != 0 {
        put(stream, &[code, reply_flags, 8, 1, 0])?;
    }
    Ok(true)
}

fn take(stream: &UnixStream, mut nr_bytes: usize) -> io::Result<()> {
    let mut bytes = [0; 256];
    while nr_bytes != 0 {
        let here = nr_bytes.min(bytes.len());
        match recv(stream, &mut bytes[..here], RecvFlags::empty())? {
            (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (taken, _) => nr_bytes -= taken,
        }
    }
    Ok(())
}

fn put(stream: &UnixStream, words: &[u32]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    // Small enough to be taken whole; a front-end that is gone is found out at the next receive.
    send(stream, &bytes, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    fn message(code: u32, flags: u32, body: &[u32]) -> Vec<u8> {
        let header = [code, flags, u32::try_from(4 * body.len()).unwrap()];
        header.iter().chain(body).flat_map(|w| w.to_ne_bytes()).collect()
    }

    fn answer(sent: &[u8]) -> (bool, Vec<u8>) {
        let (mut front, back) = UnixStream::pair().unwrap();
        front.write_all(sent).unwrap();
        let answered = answer_odd_config(&back, true).unwrap();
        drop(back);
        let mut reply = Vec::new();
        let _ = front.read_to_end(&mut reply);
        (answered, reply)
    }

    #[test]
    fn f41_nonsense_gets_an_answer_of_size_0() {
        for (offset, size) in [(0, 0), (u32::MAX, 2), (0x1000, 1), (8, 0x1000)] {
            // The body may be as long as it says or empty: both are seen in the wild.
            let (answered, reply) = answer(&message(GET_CONFIG, VERSION, &[offset, size, 0]));
            assert!(answered);
            assert_eq!(reply, message(GET_CONFIG, VERSION | REPLY, &[offset, 0, 0]));
        }
    }

    #[test]
    fn f41_what_makes_sense_is_left_to_the_crate() {
        let lawful = message(GET_CONFIG, VERSION, &[0, 4, 0, 0]);
        assert_eq!(answer(&lawful), (false, Vec::new()));
        assert_eq!(answer(&message(1, VERSION, &[])), (false, Vec::new()));
        assert_eq!(answer(&lawful[..14]), (false, Vec::new()));
    }

    #[test]
    fn f42_an_empty_write_is_refused_and_the_connection_lives() {
        let (answered, reply) = answer(&message(SET_CONFIG, VERSION | NEED_REPLY, &[0, 0, 0]));
        assert!(answered);
        assert_eq!(reply, message(SET_CONFIG, VERSION | REPLY, &[1, 0]));
    }
}
