//! The helper: a process beside the confined one that holds the rights which that one gives up.
//!
//! It is forked at the start, before a path is open, and never maps guest memory. What it does for the other is little, and
//! bounded by what it was told before there was a front-end: it opens names that prove to lead to the disk, reads the program's own
//! configuration, runs the event command, takes away the sockets' files. Who controls the confined process can ask for
//! that and for nothing else.

mod proof;
mod server;
mod wire;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context as _, anyhow};
use polypath_paths::text::TableSpec;
use polypath_paths::{OpenOptions, Opened};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

use crate::cli::Options;
use crate::config::Launch;
use crate::listen::SocketFile;
pub(crate) use proof::Bounds;
use wire::{Answer, Question};

/// The process has at most one.
static CLIENT: OnceLock<Client> = OnceLock::new();

/// The confined process's end.
#[derive(Debug)]
pub(crate) struct Client {
    channel: OwnedFd,
}

/// The helper, if there is one: without it everything is done by this process itself.
pub(crate) fn client() -> Option<&'static Client> {
    CLIENT.get()
}

/// Makes the helper, of what it reads and runs later. To be called while the process has one thread, and nothing open that
/// is not the helper's to hold, or even to close: a path may hang then.
pub(crate) fn start(launch: Launch, event_command: Option<PathBuf>) -> anyhow::Result<Client> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    server::fork(launch, event_command, theirs).context("cannot start the helper process")?;
    Ok(Client { channel: ours })
}

impl Client {
    /// Sets the bounds of all that is asked later. From then on [`client`] has it.
    pub(crate) fn begin(self, bounds: Bounds, sockets: Vec<SocketFile>) -> anyhow::Result<&'static Self> {
        match self.ask(&Question::Begin(Box::new(bounds), sockets), None).map_err(|why| anyhow!(why))? {
            (Answer::Begun, _) => Ok(CLIENT.get_or_init(|| self)),
            (other, _) => Err(anyhow!("an odd answer: {other:?}")),
        }
    }

    fn ask(&self, question: &Question, fd: Option<BorrowedFd<'_>>) -> Result<(Answer, Vec<OwnedFd>), String> {
        let gone =
            |error: io::Error| format!("the helper process has gone, a restart brings it back ({error})");
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| format!("no socket for the helper process: {error}"))?;
        let bytes = serde_json::to_vec(question).map_err(|error| error.to_string())?;
        let fds: Vec<BorrowedFd<'_>> = [theirs.as_fd()].into_iter().chain(fd).collect();
        wire::send(&self.channel, &bytes, &fds, SendFlags::empty()).map_err(gone)?;
        drop(theirs);
        let (bytes, fds) = wire::receive_all(&ours).map_err(gone)?;
        if bytes.is_empty() {
            return Err("the helper process gives no answer".to_owned());
        }
        let answer: Result<Answer, String> =
            serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        Ok((answer?, fds))
    }

    /// Opens a path that proves to be the disk. Blocks as long as the storage does.
    pub(crate) fn open(
        &self,
        name: PathBuf,
        options: OpenOptions,
        size_bytes: u64,
        reference: Option<PathBuf>,
    ) -> Result<Opened, String> {
        match self.ask(&Question::Open { name, options, size_bytes, reference }, None)? {
            (Answer::Opened(facts), fds) => {
                let file = fds.into_iter().next().ok_or("no descriptor came")?;
                Ok(Opened { file: File::from(file), facts })
            }
            (other, _) => Err(format!("an odd answer: {other:?}")),
        }
    }

    /// Opens an in-flight area once more, for reading.
    pub(crate) fn reopen(&self, area: &File) -> io::Result<File> {
        match self.ask(&Question::Reopen, Some(area.as_fd())).map_err(io::Error::other)? {
            (Answer::Reopened, fds) => {
                let file = fds.into_iter().next().ok_or_else(|| io::Error::other("no descriptor came"))?;
                Ok(File::from(file))
            }
            (other, _) => Err(io::Error::other(format!("an odd answer: {other:?}"))),
        }
    }

    /// Reads the program's configuration anew.
    pub(crate) fn configuration(&self) -> anyhow::Result<(Options, TableSpec)> {
        match self.ask(&Question::Configuration, None).map_err(|why| anyhow!(why))? {
            (Answer::Configuration(options, table), _) => Ok((*options, TableSpec::parse_toml(&table)?)),
            (other, _) => Err(anyhow!("an odd answer: {other:?}")),
        }
    }

    /// Has the event command run. False: there was no room for it, or nobody to do it.
    pub(crate) fn tell(&self, name: String, line: String) -> bool {
        let Ok(bytes) = serde_json::to_vec(&Question::Event { name, line }) else { return false };
        wire::send(&self.channel, &bytes, &[], SendFlags::DONTWAIT).is_ok()
    }

    /// Takes the sockets' files away.
    pub(crate) fn remove_sockets(&self) {
        if let Err(why) = self.ask(&Question::RemoveSockets, None) {
            log::warn!("the sockets' files are left: {why}");
        }
    }
}
