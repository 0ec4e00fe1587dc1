//! The control socket and its clients. What they may ask is in [`crate::command`].
//!
//! Reads and writes never block. What a client does not take in time is kept for it up to a limit; beyond that it is
//! dropped. Nobody waits for anybody.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events as Watched};
use serde_json::Value;

use crate::command::{self, Code, Context, Done, Request, VERSION, words};
use crate::events::Event;
use crate::listen::{Access, Listener, SocketFile};
use crate::monitor::Outcome;

/// Longest command.
const LINE_BYTES_MAX: usize = 64 << 10;

/// How much is read at a time, so that one client does not keep the loop from the others.
const READ_BYTES: usize = 4096;

/// Most that is kept for a client that does not read.
const OUT_BYTES_MAX: usize = 1 << 20;

/// Most clients at a time.
const CLIENTS_MAX: usize = 256;

/// The socket and its clients.
#[derive(Debug)]
pub(crate) struct CommandSocket {
    listener: Listener,
    /// Tag of the first client in the event loop.
    first_tag: u32,
    clients: BTreeMap<u32, Client>,
    next_client: u32,
    /// Who waits for which answer.
    waiting: BTreeMap<u64, Waiting>,
    next_token: u64,
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    line: Vec<u8>,
    out: Vec<u8>,
    watched: EventSet,
    /// Wants to be told of events.
    follows: bool,
    /// Has said that it asks nothing more.
    asked_all: bool,
    gone: bool,
}

#[derive(Debug)]
struct Waiting {
    client: u32,
    /// In JSON, with the client's name for the question; None: in words.
    id: Option<Option<Value>>,
}

impl Client {
    /// Sends what the socket takes, and keeps the rest.
    fn send(&mut self, line: &str) {
        self.out.extend_from_slice(line.as_bytes());
        self.out.push(b'\n');
        self.flush();
        self.gone |= self.out.len() > OUT_BYTES_MAX;
    }

    fn flush(&mut self) {
        while !self.out.is_empty() {
            match self.stream.write(&self.out) {
                Ok(nr_bytes) => drop(self.out.drain(..nr_bytes)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It reads no more; that it has gone is seen when there is nothing more to read of it.
                Err(_) => self.out.clear(),
            }
        }
    }

    fn fill(&mut self) {
        let mut bytes = [0; READ_BYTES];
        match self.stream.read(&mut bytes) {
            Ok(0) => self.asked_all = true,
            Ok(nr_bytes) => self.line.extend_from_slice(bytes.get(..nr_bytes).unwrap_or_default()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.gone = true,
        }
    }

    fn take_line(&mut self) -> Option<String> {
        let end = self.line.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.line.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim().to_owned())
    }

    /// What to watch its socket for.
    fn wanted(&self) -> EventSet {
        let mut wanted = EventSet::empty();
        if !self.asked_all {
            wanted |= EventSet::IN;
        }
        if !self.out.is_empty() {
            wanted |= EventSet::OUT;
        }
        wanted
    }
}

impl CommandSocket {
    /// Listens on `path`. Its clients have the tags from `first_tag` on in the event loop.
    pub(crate) fn bind(path: &Path, access: Access, first_tag: u32) -> anyhow::Result<Self> {
        let listener = Listener::bind_for("--control", path, access)?;
        listener.socket().set_nonblocking(true)?;
        Ok(Self {
            listener,
            first_tag,
            clients: BTreeMap::new(),
            next_client: 0,
            waiting: BTreeMap::new(),
            next_token: 0,
        })
    }

    /// Leaves the removing of the socket's file to somebody else.
    pub(crate) fn take_file(&mut self) -> Option<SocketFile> {
        self.listener.take_file()
    }

    pub(crate) fn listener(&self) -> &UnixListener {
        self.listener.socket()
    }

    /// Takes new clients in.
    pub(crate) fn accept(&mut self, ops: &mut EventOps<'_>) {
        while let Some(mut stream) = Listener::accept(self.listener.socket(), "client") {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() >= CLIENTS_MAX {
                let why = format!("{CLIENTS_MAX} clients are connected already");
                let _ = writeln!(stream, "{}", command::refusal(None, Code::Refused, &why));
                continue;
            }
            // One that stays for long keeps its number.
            while self.clients.contains_key(&self.next_client) {
                self.next_client = (self.next_client + 1) % (1 << 15);
            }
            let number = self.next_client;
            self.next_client = (number + 1) % (1 << 15);
            let watched = EventSet::IN;
            if let Err(error) = ops.add(self.watch(stream.as_raw_fd(), number, watched)) {
                log::error!("event loop: {error}");
                continue;
            }
            let client = Client {
                stream,
                line: Vec::new(),
                out: Vec::new(),
                watched,
                follows: false,
                asked_all: false,
                gone: false,
            };
            self.clients.insert(number, client);
        }
    }

    fn watch(&self, fd: RawFd, number: u32, set: EventSet) -> Watched {
        Watched::with_data_raw(fd, self.first_tag + number, set)
    }

    /// Something has happened on the socket of the client with this tag.
    pub(crate) fn ready(&mut self, tag: u32, set: EventSet, context: &mut Context<'_>) {
        let number = tag - self.first_tag;
        let Some(client) = self.clients.get_mut(&number) else { return };
        client.flush();
        // What it has asked before it went is done all the same.
        let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
        if !set.contains(EventSet::IN) && !hung_up {
            return;
        }
        client.fill();
        while let Some(line) = self.clients.get_mut(&number).and_then(Client::take_line) {
            self.run(number, &line, context);
        }
        if let Some(client) = self.clients.get_mut(&number)
            && client.line.len() > LINE_BYTES_MAX
        {
            client.send(&format!("error: a line of more than {LINE_BYTES_MAX} bytes"));
            client.gone = true;
        }
        if let Some(client) = self.clients.get_mut(&number) {
            client.gone |= hung_up && client.asked_all;
        }
    }

    fn run(&mut self, number: u32, line: &str, context: &mut Context<'_>) {
        let token = self.next_token;
        self.next_token += 1;
        let (id, answer, mut follows) = if line.starts_with('{') {
            let request = Request::parse(line);
            let id = request.id;
            let done = match request.command {
                Ok(command) => command::run(command, context, token)
                    .map_err(|error| (Code::Refused, format!("{error:#}"))),
                Err(error) => Err((Code::BadRequest, error)),
            };
            let (answer, follows) = match done {
                Ok(Done::Value(value)) => (Some(command::answer(id.as_ref(), value)), false),
                Ok(Done::Text(text)) => (Some(command::text_answer(id.as_ref(), &text)), false),
                Ok(Done::Follow(value)) => (Some(command::answer(id.as_ref(), value)), true),
                Ok(Done::Later) => (None, false),
                Err((code, why)) => (Some(command::refusal(id.as_ref(), code, &why)), false),
            };
            (Some(id), answer, follows)
        } else {
            let answer = match words::run(line, context.monitor, token, context.now_ns) {
                Ok(text) => text.map(|text| words::answer(&text)),
                Err(error) => Some(format!("error: {error:#}")),
            };
            (None, answer, false)
        };
        let Some(client) = self.clients.get_mut(&number) else { return };
        follows |= client.follows;
        client.follows = follows;
        match answer {
            Some(answer) => client.send(&answer),
            None => drop(self.waiting.insert(token, Waiting { client: number, id })),
        }
    }

    /// Passes on answers that have become ready.
    pub(crate) fn answer(&mut self, answers: Vec<(u64, Outcome)>) {
        for (token, outcome) in answers {
            // A client that has gone has given up its answer.
            let Some(waiting) = self.waiting.remove(&token) else { continue };
            let Some(client) = self.clients.get_mut(&waiting.client) else { continue };
            match waiting.id {
                Some(id) => client.send(&command::late_answer(id.as_ref(), outcome)),
                None => client.send(&words::late_answer(&outcome)),
            }
        }
    }

    /// Tells whoever follows.
    pub(crate) fn tell(&mut self, events: &[Arc<Event>]) {
        for event in events {
            let mut line = None;
            for client in self.clients.values_mut().filter(|client| client.follows) {
                let line = line.get_or_insert_with(|| {
                    let mut value = event.json();
                    value["version"] = VERSION.into();
                    value.to_string()
                });
                client.send(line);
            }
        }
    }

    /// Whoever still waits is told that the process ends.
    pub(crate) fn give_up(&mut self) {
        let tokens: Vec<u64> = self.waiting.keys().copied().collect();
        let why = || Outcome::Refused("polypath stops; what was begun may or may not be done".to_owned());
        self.answer(tokens.into_iter().map(|token| (token, why())).collect());
    }

    /// Whether [`Self::settle`] has something to do.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.clients
            .iter()
            .any(|(number, client)| self.is_over(*number, client) || client.wanted() != client.watched)
    }

    /// A client that asks nothing more goes when it has all its answers.
    fn is_over(&self, number: u32, client: &Client) -> bool {
        let is_owed = || self.waiting.values().any(|waiting| waiting.client == number);
        client.gone || (client.asked_all && client.out.is_empty() && !client.follows && !is_owed())
    }

    /// Tells the event loop what to watch for, and lets go of clients that have gone.
    pub(crate) fn settle(&mut self, ops: &mut EventOps<'_>) {
        let over: Vec<u32> =
            self.clients.iter().filter(|(n, client)| self.is_over(**n, client)).map(|(n, _)| *n).collect();
        for number in over {
            if let Some(client) = self.clients.remove(&number) {
                let _ = ops.remove(Watched::empty(&client.stream));
            }
            self.waiting.retain(|_, waiting| waiting.client != number);
        }
        let first_tag = self.first_tag;
        for (number, client) in &mut self.clients {
            let wanted = client.wanted();
            if wanted != client.watched {
                let fd = client.stream.as_raw_fd();
                match ops.modify(Watched::with_data_raw(fd, first_tag + number, wanted)) {
                    Ok(()) => client.watched = wanted,
                    Err(error) => log::error!("event loop: {error}"),
                }
            }
        }
    }
}
