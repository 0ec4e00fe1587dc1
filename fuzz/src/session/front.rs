//! The front-end: messages in an order that makes sense, or in none.

use std::io::{self, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::files::{Files, Kind};
use crate::guest::Layout3;
use crate::input::Input;

/// Length of the guest's memory.
pub const MEMORY_BYTES: u64 = 0x2_0000;
/// Where the guest has it, and where the front-end.
const GUEST_ADDR: u64 = 0x1000_0000;
const USER_ADDR: u64 = 0x7f00_0000_0000;

const NEED_REPLY: u32 = 8;

/// Most descriptors that go along.
const FILES_MAX: usize = 40;

/// Requests that have no body, and those whose body is one number.
const NO_BODY: [u32; 10] = [1, 3, 4, 15, 17, 34, 36, 40, 42, 31];
const NUMBER: [u32; 6] = [2, 16, 12, 13, 14, 20];

pub struct Front {
    pub stream: UnixStream,
    pub files: Files,
    pub features: u64,
    /// Whether the other end has hung up.
    pub is_over: bool,
}

impl Front {
    /// Where ring `index` lies, counted from the beginning of the memory.
    pub fn ring(index: u32, size: u16) -> Layout3 {
        Layout3::at(0x4000 * u64::from(index), size)
    }

    pub fn address(offset: u64) -> u64 {
        GUEST_ADDR + offset
    }

    /// Does one thing.
    pub fn step(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0..=3 => self.set_up(input),
            4..=9 => self.queue_message(input),
            10 | 11 => self.memory_message(input),
            12 => self.area_message(input),
            13 => self.config_message(input),
            14 => self.plain_message(input),
            _ => self.any_message(input),
        }
    }

    /// What every front-end says first, and all that starts a ring.
    fn set_up(&mut self, input: &mut Input<'_>) {
        let index = input.below(4);
        if input.below(2) == 0 {
            self.number(input, 16, 0x3_ffff & !(1 << 13));
            self.number(input, 2, self.features);
        }
        self.mem_table(input);
        self.queue(input, 8, index, 1 << (1 + input_size(index)));
        self.queue(input, 10, index, 0);
        self.ring_address(input, index);
        self.event(input, 13, index);
        self.event(input, 12, index);
        self.queue(input, 18, index, 1);
    }

    fn queue_message(&mut self, input: &mut Input<'_>) {
        let index = if input.rarely(16) { input.u32() } else { input.below(4) };
        match input.below(10) {
            0 => {
                let size = if input.rarely(4) { input.u32() } else { 1 << input.below(11) };
                self.queue(input, 8, index, size);
            }
            1 => {
                let base = if input.rarely(4) { input.u32() } else { input.below(4) };
                self.queue(input, 10, index, base);
            }
            2 => self.ring_address(input, index),
            3 => self.event(input, 12, index),
            4 => self.event(input, 13, index),
            5 => self.event(input, 14, index),
            6 => {
                let on = input.below(3);
                self.queue(input, 18, index, on);
            }
            _ => self.queue(input, 11, index, 0),
        }
    }

    fn queue(&mut self, input: &mut Input<'_>, code: u32, index: u32, value: u32) {
        self.send(input, code, &words(&[index, value]), Vec::new());
    }

    fn ring_address(&mut self, input: &mut Input<'_>, index: u32) {
        let ring = Self::ring(index & 7, 1 << (1 + input_size(index)));
        let mut addresses = [ring.descriptors, ring.used, ring.available].map(|at| USER_ADDR + at);
        if input.rarely(8) {
            let at = input.index(3);
            addresses[at] =
                if input.below(2) == 0 { input.u64() } else { addresses[at] + u64::from(input.u16()) };
        }
        let flags = input.below(2);
        let log = if input.rarely(4) { input.u64() } else { Self::address(ring.used) };
        let mut body = words(&[index, flags]);
        addresses.iter().chain(&[log]).for_each(|word| body.extend_from_slice(&word.to_ne_bytes()));
        self.send(input, 9, &body, Vec::new());
    }

    fn event(&mut self, input: &mut Input<'_>, code: u32, index: u32) {
        let no_file = input.rarely(8);
        let number = u64::from(index & 0xff) | u64::from(no_file) << 8;
        let files = if no_file { Vec::new() } else { vec![self.files.one(input, Kind::Event)] };
        self.send(input, code, &number.to_ne_bytes(), files);
    }

    fn region(&mut self, input: &mut Input<'_>, at: u64, len: u64) -> Vec<u8> {
        let mut region = [GUEST_ADDR + at, len, USER_ADDR + at, at];
        if input.rarely(12) {
            region[input.index(4)] =
                input.pick(&[0, 1, 0x1000, u64::MAX, u64::MAX - 0xfff, 1 << 40, 1 << 63]);
        }
        region.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn mem_table(&mut self, input: &mut Input<'_>) {
        let nr = 1 + u64::from(input.below(3));
        let len = MEMORY_BYTES / 4 * (4 / nr.next_power_of_two());
        let mut body = words(&[u32::try_from(nr).expect("few"), 0]);
        let mut files = Vec::new();
        for i in 0..nr {
            body.extend(self.region(input, i * len, len));
            files.push(self.files.one(input, Kind::Memory));
        }
        self.send(input, 5, &body, files);
    }

    fn memory_message(&mut self, input: &mut Input<'_>) {
        let at = 0x8000 * u64::from(input.below(4));
        match input.below(4) {
            0 => self.mem_table(input),
            1 => {
                let file = self.files.one(input, Kind::Memory);
                let mut body = 0_u64.to_ne_bytes().to_vec();
                body.extend(self.region(input, at, 0x8000));
                self.send(input, 37, &body, vec![file]);
            }
            2 => {
                let mut body = 0_u64.to_ne_bytes().to_vec();
                body.extend(self.region(input, at, 0x8000));
                self.send(input, 38, &body, Vec::new());
            }
            _ => {
                let mut body = (MEMORY_BYTES / 8).to_ne_bytes().to_vec();
                body.extend_from_slice(&[0; 8]);
                if input.rarely(4) {
                    body[..8].copy_from_slice(&input.u64().to_ne_bytes());
                }
                let file = self.files.one(input, Kind::Memory);
                self.send(input, 6, &body, vec![file]);
            }
        }
    }

    fn area_message(&mut self, input: &mut Input<'_>) {
        let mut body = [u64::from(input.u16()), 0].map(u64::to_ne_bytes).concat();
        let nr = if input.rarely(4) { input.u16() } else { 4 };
        let size = if input.rarely(4) { input.u16() } else { 1 << input.below(8) };
        if input.below(2) == 0 {
            let bytes = u64::from(nr) * (16 + 16 * u64::from(size)).next_multiple_of(64);
            body[..8].copy_from_slice(&bytes.to_ne_bytes());
        }
        body.extend_from_slice(&nr.to_ne_bytes());
        body.extend_from_slice(&size.to_ne_bytes());
        // The specification's structure has padding that front-ends send along.
        body.extend_from_slice(&[0; 4]);
        match input.below(3) {
            0 => {
                self.send(input, 31, &body, Vec::new());
                self.wait_for_answer();
            }
            _ => {
                let file = self.files.one(input, Kind::Area);
                self.send(input, 32, &body, vec![file]);
            }
        }
    }

    fn config_message(&mut self, input: &mut Input<'_>) {
        let (offset, size) = match input.below(3) {
            0 => (input.u32(), input.u32()),
            1 => (32, 1),
            _ => (input.below(64), 1 + input.below(64)),
        };
        let mut body = words(&[offset, size, input.below(2)]);
        let payload = if input.rarely(4) { input.below(256) } else { size.min(256) };
        body.resize(body.len() + payload as usize, input.below(2) as u8);
        let code = 24 + input.below(2);
        self.send(input, code, &body, Vec::new());
    }

    fn plain_message(&mut self, input: &mut Input<'_>) {
        match input.below(3) {
            0 => {
                let code = input.pick(&NO_BODY);
                self.send(input, code, &[], Vec::new());
            }
            1 => {
                let code = input.pick(&NUMBER);
                let number = if input.below(2) == 0 { self.features } else { input.u64() };
                self.number(input, code, number);
            }
            _ => {
                let channel = self.files.one(input, Kind::Stream);
                self.send(input, 21, &[], vec![channel]);
            }
        }
    }

    fn number(&mut self, input: &mut Input<'_>, code: u32, number: u64) {
        self.send(input, code, &number.to_ne_bytes(), Vec::new());
    }

    /// Any code, with any body and any descriptors.
    fn any_message(&mut self, input: &mut Input<'_>) {
        let code = if input.rarely(4) { input.u32() } else { input.below(46) };
        let mut files = Vec::new();
        for _ in 0..input.pick(&[0, 1, 2, 8, 33]) {
            files.push(self.files.one(input, Kind::Event));
        }
        let most = usize::from(input.u8());
        let body = input.bytes(most).to_vec();
        self.send(input, code, &body, files);
    }

    /// Sends it, whole for the most part, and takes what answers have come.
    fn send(&mut self, input: &mut Input<'_>, code: u32, body: &[u8], mut files: Vec<OwnedFd>) {
        let mut flags = 1 | if input.below(3) == 0 { NEED_REPLY } else { 0 };
        let mut len = u32::try_from(body.len()).expect("short");
        let mut bytes = body.to_vec();
        if input.rarely(24) {
            match input.below(5) {
                0 => flags = input.u32(),
                1 => len = input.u32(),
                2 => bytes.truncate(input.index(bytes.len() + 1)),
                3 => files.clear(),
                _ => files.push(self.files.one(input, Kind::Event)),
            }
        }
        let mut message = words(&[code, flags, len]);
        message.extend(bytes);
        files.truncate(FILES_MAX);
        // In one piece, or in several; the descriptors go with the first.
        let cut = if input.rarely(12) { input.index(message.len()) } else { message.len() };
        let (first, rest) = message.split_at(cut);
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&self.stream, &[IoSlice::new(first)], &mut control, flags);
        self.is_over |= sent.is_err();
        if !rest.is_empty() {
            self.is_over |= rustix::net::send(&self.stream, rest, flags).is_err();
        }
        self.take_answers();
    }

    /// What has come, so that the other end can always send; the area, if it brings one.
    pub fn take_answers(&mut self) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [io::IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.stream, &mut parts, &mut control, flags) {
                Ok(taken) if taken.bytes != 0 => {}
                Ok(_) => return self.is_over = true,
                Err(_) => return,
            }
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.files.area = fds.last().or(self.files.area.take());
                }
            }
        }
    }

    /// Gives the other end a moment to answer.
    fn wait_for_answer(&mut self) {
        let mut fds = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::IN)];
        let moment = rustix::event::Timespec { tv_sec: 0, tv_nsec: 500_000 };
        let _ = rustix::event::poll(&mut fds, Some(&moment));
        self.take_answers();
    }

    /// Hangs up, and takes what is still said.
    pub fn hang_up(mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        self.stream.set_nonblocking(false).expect("socket");
        let mut bytes = [0; 4096];
        while self.stream.read(&mut bytes).is_ok_and(|nr| nr != 0) {}
    }
}

/// Ring sizes differ by queue: 4, 8, 16, 32 entries.
pub fn input_size(index: u32) -> u32 {
    1 + (index & 3)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
