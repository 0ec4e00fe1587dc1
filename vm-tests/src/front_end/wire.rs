//! vhost-user messages as bytes and descriptors, so that tests can also send what no proper front-end would.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// Message numbers.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod req {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// Protocol feature bits.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod proto {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    pub const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
}

/// Protocol version 1 in the flags of a message.
pub const VERSION: u32 = 1;
/// This message is an answer.
pub const REPLY: u32 = 4;
/// The sender wants an answer to a message that has none.
pub const NEED_REPLY: u32 = 8;
/// Bit 8 of the kick, call and err messages: no descriptor comes with it.
pub const NO_FD: u64 = 1 << 8;

const HEADER_BYTES: usize = 12;
const FDS_MAX: usize = 32;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Message number.
    pub request: u32,
    /// Flags, with the version.
    pub flags: u32,
    /// Payload.
    pub payload: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The payload as one number.
    pub fn u64(&self) -> Result<u64> {
        let bytes = self.payload.get(..8).context("a payload of 8 bytes was expected")?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    }
}

/// The bytes of a message.
pub fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).expect("a small payload");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for word in [request, flags, size] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(payload);
    bytes
}

/// A connection to a back-end.
#[derive(Debug)]
pub struct Channel {
    socket: UnixStream,
    /// How long an answer may take.
    pub timeout: Duration,
}

impl Channel {
    /// Connects to `path`.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = UnixStream::connect(path).with_context(|| format!("connect to {}", path.display()))?;
        Ok(Self::from_stream(socket))
    }

    /// Takes a connected socket.
    pub fn from_stream(socket: UnixStream) -> Self {
        Self { socket, timeout: Duration::from_secs(10) }
    }

    /// Sends raw bytes with descriptors attached.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
        assert!(fds.len() <= FDS_MAX && !bytes.is_empty());
        let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // u64 words keep the control buffer aligned for its header.
        let mut control = [0_u64; 32];
        // SAFETY: all-zero is a valid msghdr.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = &raw mut iov;
        msg.msg_iovlen = 1;
        if !fds.is_empty() {
            let fds_bytes = u32::try_from(size_of_val(fds)).expect("few descriptors");
            msg.msg_control = control.as_mut_ptr().cast();
            // SAFETY: CMSG_SPACE and CMSG_LEN only compute; the control buffer holds FDS_MAX descriptors and its header.
            unsafe {
                msg.msg_controllen = libc::CMSG_SPACE(fds_bytes) as usize;
                assert!(msg.msg_controllen <= size_of_val(&control));
                let header = libc::CMSG_FIRSTHDR(&raw const msg);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(fds_bytes) as usize;
                std::ptr::copy_nonoverlapping(
                    fds.as_ptr().cast::<u8>(),
                    libc::CMSG_DATA(header),
                    fds_bytes as usize,
                );
            }
        }
        // SAFETY: `msg` points to live buffers of the stated lengths.
        let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const msg, libc::MSG_NOSIGNAL) };
        if sent < 0 {
            return Err(io::Error::last_os_error()).context("send a message");
        }
        ensure!(usize::try_from(sent) == Ok(bytes.len()), "sent {sent} of {} bytes", bytes.len());
        Ok(())
    }

    /// Sends a message.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[RawFd]) -> Result<()> {
        self.send_bytes(&encode(request, flags, payload), fds).with_context(|| format!("message {request}"))
    }

    /// Waits for something to read; `false` when time is up.
    fn readable(&self, deadline: Instant) -> Result<bool> {
        poll_in(self.socket.as_raw_fd(), deadline).context("poll the socket")
    }

    fn recv_exact(&self, buf: &mut [u8], fds: &mut Vec<OwnedFd>, deadline: Instant) -> Result<()> {
        let mut got = 0;
        while got < buf.len() {
            if !self.readable(deadline)? {
                bail!("no answer in time ({got} of {} bytes)", buf.len());
            }
            let mut iov = libc::iovec { iov_base: buf[got..].as_mut_ptr().cast(), iov_len: buf.len() - got };
            let mut control = [0_u64; 32];
            // SAFETY: all-zero is a valid msghdr.
            let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
            msg.msg_iov = &raw mut iov;
            msg.msg_iovlen = 1;
            msg.msg_control = control.as_mut_ptr().cast();
            msg.msg_controllen = size_of_val(&control);
            // SAFETY: `msg` points to live buffers of the stated lengths.
            let n = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut msg, libc::MSG_CMSG_CLOEXEC) };
            match n {
                0 => bail!("the back-end hung up ({got} of {} bytes)", buf.len()),
                n if n < 0 => return Err(io::Error::last_os_error()).context("receive"),
                n => got += usize::try_from(n).expect("positive"),
            }
            // SAFETY: the kernel filled the control buffer; the CMSG macros walk what it wrote.
            unsafe {
                let mut header = libc::CMSG_FIRSTHDR(&raw const msg);
                while !header.is_null() {
                    if (*header).cmsg_type == libc::SCM_RIGHTS {
                        let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                        let data = libc::CMSG_DATA(header).cast::<RawFd>();
                        for i in 0..bytes / size_of::<RawFd>() {
                            fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                        }
                    }
                    header = libc::CMSG_NXTHDR(&raw const msg, header);
                }
            }
        }
        Ok(())
    }

    /// Receives one message within the channel's time.
    pub fn recv(&self) -> Result<Message> {
        self.recv_within(self.timeout)
    }

    /// Receives one message within `timeout`.
    pub fn recv_within(&self, timeout: Duration) -> Result<Message> {
        let deadline = Instant::now() + timeout;
        let mut fds = Vec::new();
        let mut header = [0; HEADER_BYTES];
        self.recv_exact(&mut header, &mut fds, deadline)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let (request, flags, size) = (word(0), word(4), word(8));
        ensure!(size <= 0x1000, "an answer claims {size} bytes");
        let mut payload = vec![0; size as usize];
        self.recv_exact(&mut payload, &mut fds, deadline)?;
        Ok(Message { request, flags, payload, fds })
    }

    /// Whether the back-end hangs up within `timeout`; unread answers are thrown away.
    pub fn hangs_up(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut byte = [0; 64];
        loop {
            if !self.readable(deadline).unwrap_or(true) {
                return false;
            }
            // SAFETY: a live buffer of the stated length.
            let n = unsafe { libc::recv(self.socket.as_raw_fd(), byte.as_mut_ptr().cast(), byte.len(), 0) };
            if n <= 0 {
                return true;
            }
        }
    }

    /// Closes the sending side, as a front-end does that goes away.
    pub fn shut_down(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Closing alone could come late: a child that another test is just forking holds a copy until its exec.
        self.shut_down();
    }
}

/// Waits until `fd` is readable (or hung up); `false` when the deadline has passed.
pub fn poll_in(fd: RawFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last wait is no busy loop.
        let ms = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one live pollfd.
        match unsafe { libc::poll(&raw mut poll, 1, ms) } {
            0 => return Ok(false),
            n if n > 0 => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
