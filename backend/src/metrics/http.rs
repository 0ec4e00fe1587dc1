//! As much HTTP as a scrape needs: one question on each connection, and nobody is waited for without end.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::sandbox::{self, Kind};

/// A client that takes or gives nothing for so long is dropped.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Most connections at a time; more wait.
const THREADS_MAX: usize = 32;

/// Threads that are kept for connections to come.
const WAITING_MAX: usize = 2;

/// Longest head of a question.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Most header lines of a question.
const HEADERS_MAX: usize = 64;

/// How long to wait when no connection can be accepted (no descriptor is left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection of either kind.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn set_timeouts(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    pub body: String,
}

impl Answer {
    /// A line for people.
    pub(super) fn text(status: u16, body: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: body.to_owned() }
    }
}

/// Answers what comes, on threads of its own: one that has a connection to serve lets another wait for the next, and they
/// are kept, since making a thread costs several times what a scrape does.
pub(super) fn serve(
    accept: impl Fn() -> io::Result<Stream> + Send + Sync + 'static,
    answer: Arc<impl Fn(&str) -> Answer + Send + Sync + 'static>,
) -> io::Result<()> {
    let answer = move |path: &str| answer(path);
    begin(Arc::new(Server {
        accept,
        answer,
        nr_waiting: AtomicUsize::new(0),
        nr_threads: AtomicUsize::new(0),
    }))
}

/// What the threads share.
struct Server<A, B> {
    accept: A,
    answer: B,
    /// Threads that wait for a connection.
    nr_waiting: AtomicUsize,
    nr_threads: AtomicUsize,
}

fn begin<A, B>(server: Arc<Server<A, B>>) -> io::Result<()>
where
    A: Fn() -> io::Result<Stream> + Send + Sync + 'static,
    B: Fn(&str) -> Answer + Send + Sync + 'static,
{
    server.nr_threads.fetch_add(1, Ordering::Relaxed);
    server.nr_waiting.fetch_add(1, Ordering::Relaxed);
    let shared = Arc::clone(&server);
    let begun = std::thread::Builder::new().name("metrics".into()).stack_size(256 << 10).spawn(move || {
        sandbox::confine(Kind::Metrics);
        loop {
            let accepted = (server.accept)();
            let is_last = server.nr_waiting.fetch_sub(1, Ordering::Relaxed) == 1;
            match accepted {
                Ok(stream) => {
                    // If no more can be had, those who come wait for the end of this one.
                    if is_last && server.nr_threads.load(Ordering::Relaxed) < THREADS_MAX {
                        let _ = begin(Arc::clone(&server));
                    }
                    // A client that has gone has no use for its answer.
                    let _ = talk(stream, &server.answer);
                }
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            }
            if server.nr_waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
                server.nr_waiting.fetch_sub(1, Ordering::Relaxed);
                server.nr_threads.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        }
    });
    if begun.is_err() {
        shared.nr_waiting.fetch_sub(1, Ordering::Relaxed);
        shared.nr_threads.fetch_sub(1, Ordering::Relaxed);
    }
    begun.map(drop)
}

fn talk(mut stream: Stream, answer: &impl Fn(&str) -> Answer) -> io::Result<()> {
    stream.set_timeouts(CLIENT_TIMEOUT)?;
    let (until, mut head, mut bytes) = (Instant::now() + CLIENT_TIMEOUT, Vec::new(), [0; 1024]);
    let answer = loop {
        let nr_bytes = stream.read(&mut bytes)?;
        head.extend_from_slice(bytes.get(..nr_bytes).unwrap_or_default());
        match asked(&head) {
            Asked::Path(path) => break answer(&path),
            Asked::Wrong(why) => break why,
            Asked::Part if nr_bytes == 0 || Instant::now() > until => return Ok(()),
            Asked::Part if head.len() > HEAD_BYTES_MAX => break Answer::text(431, "too long a question\n"),
            Asked::Part => {}
        }
    };
    let Answer { status, content_type, body } = answer;
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} -\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    stream.write_all(body.as_bytes())
}

/// What a question that has come so far asks.
enum Asked {
    Path(String),
    Wrong(Answer),
    /// Its end has not come yet.
    Part,
}

fn asked(head: &[u8]) -> Asked {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => Asked::Part,
        Err(_) => Asked::Wrong(Answer::text(400, "not HTTP\n")),
        Ok(httparse::Status::Complete(_)) if request.method != Some("GET") => {
            Asked::Wrong(Answer::text(405, "only GET is served\n"))
        }
        Ok(httparse::Status::Complete(_)) => {
            let target = request.path.unwrap_or_default();
            Asked::Path(target.split('?').next().unwrap_or_default().to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(head: &str) -> String {
        match asked(head.as_bytes()) {
            Asked::Path(path) => path,
            Asked::Wrong(answer) => answer.status.to_string(),
            Asked::Part => "part".to_owned(),
        }
    }

    #[test]
    fn a_question_is_read_when_it_is_whole() {
        let whole = "GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n";
        assert_eq!(shown(whole), "/metrics");
        assert!((0..whole.len()).all(|end| shown(&whole[..end]) == "part"));
        assert_eq!(shown("POST /metrics HTTP/1.1\r\n\r\n"), "405");
        assert_eq!(shown("\u{1}\u{2}\r\n\r\n"), "400");
        assert_eq!(shown(&format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(HEADERS_MAX + 1))), "400");
    }
}
