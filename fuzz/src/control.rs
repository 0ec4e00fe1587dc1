//! Clients of the control socket that send anything: every line is answered, and nothing piles up.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use polypath::fuzzing::ControlLoop;

use crate::input::{Input, ignore_broken_pipes};

/// For how long a loaded machine may keep an answer back.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(20);

/// The longest line that is taken, and what a client may leave unread (both from `docs/control.md`).
const LINE_BYTES_MAX: usize = 64 << 10;

const LINES: [&str; 48] = [
    "status",
    "table",
    "toml",
    "json",
    "no_path_retry fail",
    "no_path_retry queue",
    "no_path_retry 5",
    "add_path 1 null:1M,7",
    "add_path 2 null:1M,8 1",
    "add_path 1 null:2M",
    "add_path 9 null:1M,9",
    "add_path x y",
    "remove_path null:1M,1",
    "remove_path null:1M,7",
    "path_args null:1M,1 1",
    "regroup_path null:1M,2 1",
    "resize",
    "resize shrink",
    "fail_path null:1M,1",
    "fail_path null:1M,2",
    "reinstate_path null:1M,1",
    "switch_group 1",
    "switch_group 2",
    "disable_group 1",
    "enable_group 1",
    "queue_if_no_path",
    "fail_if_no_path",
    r#"{"command":"hello"}"#,
    r#"{"version":1,"id":7,"command":"show"}"#,
    r#"{"version":2,"command":"show"}"#,
    r#"{"command":"message","message":"fail_path null:1M,1"}"#,
    r#"{"command":"fail_path","path":"null:1M,2"}"#,
    r#"{"command":"reinstate_path","path":"null:1M,2"}"#,
    r#"{"command":"switch_group","group":2}"#,
    r#"{"command":"add_path","path":"null:1M,7","group":2,"args":[1]}"#,
    r#"{"command":"remove_path","path":"null:1M,2"}"#,
    r#"{"command":"set_path_args","path":"null:1M,1","args":["1"]}"#,
    r#"{"command":"set_path_weight","path":"null:1M,1","weight":9}"#,
    r#"{"command":"move_path","path":"null:1M,1","group":2}"#,
    r#"{"command":"set_selector","group":1,"selector":"service-time","args":[]}"#,
    r#"{"command":"set_selector","group":1,"selector":"io-affinity"}"#,
    r#"{"command":"resize","shrink":true}"#,
    r#"{"command":"set_no_path_retry","value":"queue"}"#,
    r#"{"command":"dump","format":"dm"}"#,
    r#"{"command":"events","last":99,"follow":true}"#,
    r#"{"command":"counters"}"#,
    r#"{"command":"reset_counters"}"#,
    r#"{"command":"reload"}"#,
];

/// One connection.
struct Client {
    stream: UnixStream,
    sent: Vec<u8>,
    received: Vec<u8>,
    is_over: bool,
    reads: bool,
}

pub fn run(bytes: &[u8]) {
    ignore_broken_pipes();
    let mut input = Input::new(bytes);
    let dir = directory();
    let mut control = ControlLoop::new(
        &dir,
        &["--path", "null:1M,1", "--path", "null:1M,2", "--num-queues", "1", "--no-path-retry", "fail"],
    )
    .expect("control loop");
    let mut clients: Vec<Client> = (0..1 + input.below(2)).map(|_| Client::new(&dir)).collect();
    let mut is_up = true;
    for _ in 0..24 {
        let at = input.index(clients.len());
        clients[at].say(&mut input);
        if input.rarely(24) {
            clients[at].reads = false;
        }
        for _ in 0..input.below(3) {
            is_up = is_up && control.turn(0).expect("turn");
        }
        clients.iter_mut().for_each(Client::listen);
        if input.is_empty() {
            break;
        }
    }
    for client in &mut clients {
        client.reads = true;
        let _ = client.stream.shutdown(std::net::Shutdown::Write);
    }
    let begun = Instant::now();
    while is_up && clients.iter().any(Client::is_owed) {
        assert!(
            begun.elapsed() < ANSWER_WAIT_MAX,
            "not answered: {:?}",
            clients.iter().find(|c| c.is_owed()).map(Client::show)
        );
        is_up = control.turn(1).expect("turn");
        clients.iter_mut().for_each(Client::listen);
    }
    clients.iter().for_each(|client| client.check(is_up));
}

/// Where the sockets are: one process has one.
fn directory() -> PathBuf {
    let dir = std::env::temp_dir().join(format!("polypath-fuzz-{}", std::process::id()));
    let _ = std::fs::create_dir(&dir);
    // Names without a slash lead to nothing.
    std::env::set_current_dir(&dir).expect("directory");
    dir
}

impl Client {
    fn new(dir: &std::path::Path) -> Self {
        let stream = UnixStream::connect(dir.join("control")).expect("connect");
        stream.set_nonblocking(true).expect("socket");
        Self { stream, sent: Vec::new(), received: Vec::new(), is_over: false, reads: true }
    }

    fn say(&mut self, input: &mut Input<'_>) {
        let mut bytes = match input.below(12) {
            0 => input.bytes(64).to_vec(),
            1 => {
                let mut line = input.pick(&LINES).as_bytes().to_vec();
                let at = input.index(line.len());
                line[at] = input.u8();
                line
            }
            2 if input.rarely(8) => vec![b'x'; LINE_BYTES_MAX / 4],
            3 => {
                let mut line = String::from(r#"{"command":"#);
                (0..input.below(200))
                    .for_each(|_| line.push(input.pick(&['[', '{', '"', ']', '}', ':', ','])));
                line.into_bytes()
            }
            4 => {
                let line = input.pick(&LINES).as_bytes();
                line[..input.index(line.len())].to_vec()
            }
            _ => input.pick(&LINES).as_bytes().to_vec(),
        };
        if !input.rarely(10) {
            bytes.push(b'\n');
        }
        let mut left = &bytes[..];
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(nr) => {
                    self.sent.extend_from_slice(&left[..nr]);
                    left = &left[nr..];
                }
                // The socket is full: the rest is never said.
                Err(_) => return,
            }
        }
    }

    fn listen(&mut self) {
        let mut bytes = [0; 16 << 10];
        while self.reads && !self.is_over {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.is_over = true,
                Ok(nr) => self.received.extend_from_slice(&bytes[..nr]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.is_over = true,
            }
        }
    }

    /// Whole lines that were sent.
    fn nr_asked(&self) -> usize {
        self.sent.iter().filter(|byte| **byte == b'\n').count()
    }

    fn lines(&self) -> impl Iterator<Item = std::borrow::Cow<'_, str>> {
        self.received.split(|byte| *byte == b'\n').map(String::from_utf8_lossy)
    }

    /// Answers that came, each by its last line.
    fn nr_answered(&self) -> usize {
        self.lines()
            .filter(|line| {
                let in_json =
                    || serde_json::from_str::<serde_json::Value>(line).is_ok_and(|v| v.get("ok").is_some());
                line == "ok" || line.starts_with("error: ") || line.starts_with('{') && in_json()
            })
            .count()
    }

    fn has_long_line(&self) -> bool {
        self.sent.split(|byte| *byte == b'\n').any(|line| line.len() > LINE_BYTES_MAX - 4096)
    }

    fn is_owed(&self) -> bool {
        !self.is_over && self.nr_answered() < self.nr_asked()
    }

    fn show(&self) -> String {
        format!("{}\n->\n{}", String::from_utf8_lossy(&self.sent), String::from_utf8_lossy(&self.received))
    }

    fn check(&self, is_up: bool) {
        let (asked, answered) = (self.nr_asked(), self.nr_answered());
        if is_up && !self.has_long_line() {
            assert_eq!(answered, asked, "lines and answers: {}", self.show());
        } else {
            assert!(answered <= asked + 1, "more answers than lines: {}", self.show());
        }
    }
}
