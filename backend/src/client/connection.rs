//! A connection to a control socket: a question, an answer, in time.

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde_json::{Value, json};

use super::Failure;

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
    timeout: Duration,
}

impl Connection {
    /// Connects. No answer may take longer than `timeout`.
    pub(super) fn open(socket: &Path, timeout: Duration) -> Result<Self, Failure> {
        let stream = connect(socket, timeout).map_err(|error| no_connection(socket, error))?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { socket: socket.to_owned(), stream: BufReader::new(stream), timeout })
    }

    /// Asks, and gives the result.
    pub(super) fn ask(&mut self, mut question: Value) -> Result<Value, Failure> {
        question["version"] = json!(crate::command::VERSION);
        let line = format!("{question}\n");
        self.stream.get_mut().write_all(line.as_bytes()).map_err(|error| self.broken(&error))?;
        let mut answer = self.next()?;
        if answer["ok"] == true {
            return Ok(answer["result"].take());
        }
        let message = answer["error"]["message"].as_str().unwrap_or("refused without a reason").to_owned();
        Err(match answer["error"]["code"].as_str() {
            Some("timed_out") => Failure::TimedOut(message),
            _ => Failure::Refused(message),
        })
    }

    /// The next object that comes.
    pub(super) fn next(&mut self) -> Result<Value, Failure> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err(Failure::NotThere(format!("{}: polypath has ended", self.socket.display()))),
            Ok(_) => serde_json::from_str(&line).map_err(|error| {
                Failure::Refused(format!("{}: not polypath's answer: {error}", self.socket.display()))
            }),
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// What comes may take as long as it likes.
    pub(super) fn wait_for_ever(&self) -> Result<(), Failure> {
        Ok(self.stream.get_ref().set_read_timeout(None)?)
    }

    fn broken(&self, error: &std::io::Error) -> Failure {
        let socket = self.socket.display();
        if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
            return Failure::TimedOut(format!(
                "{socket}: no answer within {} s; what was asked may still be done: look with `polypath show --control \
                 {socket}`, wait longer with --timeout",
                self.timeout.as_secs()
            ));
        }
        Failure::NotThere(format!("{socket}: the connection broke: {error}"))
    }
}

/// connect(2) with an end: a server that does not accept would be waited for without one.
fn connect(socket: &Path, timeout: Duration) -> rustix::io::Result<UnixStream> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(timeout))?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?)?;
    Ok(UnixStream::from(fd))
}

fn no_connection(socket: &Path, error: Errno) -> Failure {
    let name = socket.display();
    match error {
        Errno::AGAIN => {
            Failure::TimedOut(format!("{name}: polypath does not accept the connection; it may hang"))
        }
        Errno::ACCESS => Failure::NotThere(format!(
            "{name}: permission denied; try it as root, or serve with --control-group and join that group"
        )),
        Errno::CONNREFUSED => Failure::NotThere(format!(
            "{name}: no polypath listens there any more; start it again, it replaces the socket"
        )),
        Errno::NOENT => Failure::NotThere(format!(
            "{name}: no such socket; is the disk served, and with --control {name}? `polypath show` lists those under \
             /run/polypath"
        )),
        error => Failure::NotThere(format!("{name}: {error}")),
    }
}
