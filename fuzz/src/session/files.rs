//! Descriptors that a front-end sends along, right and wrong ones.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::input::Input;

/// What a descriptor leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The guest's memory.
    Memory,
    /// An eventfd; one that can take no more; a descriptor that polls.
    Event,
    FullEvent,
    /// The area that the back-end made.
    Area,
    /// Memory of another length.
    OtherMemory,
    Empty,
    PipeRead,
    PipeWrite,
    /// A pipe that can take no more.
    FullPipe,
    Stream,
    Null,
    Directory,
}

const ALL: [Kind; 12] = [
    Kind::Memory,
    Kind::Event,
    Kind::FullEvent,
    Kind::Area,
    Kind::OtherMemory,
    Kind::Empty,
    Kind::PipeRead,
    Kind::PipeWrite,
    Kind::FullPipe,
    Kind::Stream,
    Kind::Null,
    Kind::Directory,
];

/// The front-end's own.
pub struct Files {
    pub memory: File,
    pub area: Option<OwnedFd>,
    /// Other ends, to be kept open.
    kept: Vec<OwnedFd>,
}

impl Files {
    pub fn new(memory_bytes: u64) -> Self {
        Self { memory: memory(memory_bytes), area: None, kept: Vec::new() }
    }

    /// The descriptor that belongs there, for the most part.
    pub fn one(&mut self, input: &mut Input<'_>, right: Kind) -> OwnedFd {
        let kind = if input.rarely(10) { input.pick(&ALL) } else { right };
        self.open(kind)
    }

    fn open(&mut self, kind: Kind) -> OwnedFd {
        let event = |value| eventfd(value, EventfdFlags::CLOEXEC).expect("eventfd");
        match kind {
            Kind::Memory => self.memory.try_clone().expect("dup").into(),
            Kind::Event => event(0),
            Kind::FullEvent => {
                let full = event(0);
                let _ = rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes());
                full
            }
            Kind::Area => match &self.area {
                Some(area) => area.try_clone().expect("dup"),
                None => memory(0x1000).into(),
            },
            Kind::OtherMemory => memory(0x5800).into(),
            Kind::Empty => memory(0).into(),
            Kind::PipeRead | Kind::PipeWrite | Kind::FullPipe => {
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
                if kind == Kind::FullPipe {
                    rustix::io::ioctl_fionbio(&writer, true).expect("pipe");
                    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
                    rustix::io::ioctl_fionbio(&writer, false).expect("pipe");
                }
                let (given, kept) = if kind == Kind::PipeRead { (reader, writer) } else { (writer, reader) };
                self.kept.push(kept);
                given
            }
            Kind::Stream => {
                let (given, kept) = UnixStream::pair().expect("sockets");
                self.kept.push(kept.into());
                given.into()
            }
            Kind::Null => File::open("/dev/null").expect("null").into(),
            Kind::Directory => File::open("/").expect("directory").into(),
        }
    }
}

fn memory(bytes: u64) -> File {
    let file = memfd_create("fuzz-memory", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&file, bytes).expect("memfd");
    file.into()
}
