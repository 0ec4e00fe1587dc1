//! Runs the program's commands as a user would.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use polypath_vm_tests::server::{exit_code, polypath_bin, spawn_tied, wait_for};

/// Far above what a command takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Its output, if it did what it was told.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self.out
    }

    /// Its one line on stderr, with this exit code.
    #[track_caller]
    pub fn refused(self, code: i32) -> String {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "one line: {self:?}");
        self.err
    }
}

/// Runs any program to its end.
pub fn run_to_end(mut command: Command, input: &str) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let shown = format!("{command:?}");
    let mut child = spawn_tied(command).unwrap_or_else(|e| panic!("{shown}: {e}"));
    let mut stdin = child.stdin.take().unwrap();
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    // A full pipe would keep it from its end.
    let out = std::thread::spawn(move || read(&mut stdout));
    let err = std::thread::spawn(move || read(&mut stderr));
    let status = wait_for(&format!("the end of {shown}"), TIMEOUT, || child.try_wait().unwrap());
    let _ = child.kill();
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    let status = status.unwrap_or_else(|e| panic!("{e:#}\n{out}\n{err}"));
    Ran { code: exit_code(status), out, err }
}

fn read(from: &mut impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs the program with these words.
pub fn polypath(args: &[&str]) -> Ran {
    let mut command = Command::new(polypath_bin().unwrap());
    command.args(args);
    run_to_end(command, "")
}

/// Runs a command for the disk with this control socket.
pub fn told(socket: &Path, args: &[&str]) -> Ran {
    polypath(&[args, &["--control", socket.to_str().unwrap()]].concat())
}
