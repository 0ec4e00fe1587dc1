//! `vm-tests/record DIR`: records what an operator sees when a path is pulled, into DIR/recording.txt and DIR/top.svg.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::{Disk, Op};
use polypath_vm_tests::screen;
use polypath_vm_tests::server::{Process, polypath_bin, wait_until};

const DISK_MIB: u64 = 256;
/// Where the disk is served: `/run` is the recorder's own.
const RUN: &str = "/run/polypath";
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Of the terminal that `top` runs in.
const COLUMNS: usize = 132;
const ROWS: usize = 14;
/// Requests that the load keeps under way on each queue.
const DEPTH: usize = 16;

/// The text so far, which is shown as it grows.
#[derive(Default)]
struct Recording(String);

impl Recording {
    fn add(&mut self, text: &str) {
        println!("{}", text.trim_end());
        self.0.push_str(text.trim_end());
        self.0.push('\n');
    }

    /// What happens outside.
    fn note(&mut self, text: &str) {
        self.add(&format!("\n-- {text}"));
    }

    /// Runs a command of the program as it is typed, and gives what it printed.
    fn run(&mut self, words: &str) -> Result<()> {
        self.add(&format!("# polypath {words}"));
        let ran = Command::new(polypath_bin()?).args(words.split(' ')).output()?;
        ensure!(ran.status.success(), "{words}: {}", String::from_utf8_lossy(&ran.stderr));
        let text = String::from_utf8_lossy(&ran.stdout);
        if !text.trim().is_empty() {
            self.add(&text);
        }
        Ok(())
    }
}

/// What the disk says of itself in a word.
fn state() -> String {
    let ran = polypath_bin().map(|bin| Command::new(bin).args(["show", "--json"]).output());
    let text = ran.ok().and_then(Result::ok).map(|ran| ran.stdout).unwrap_or_default();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
    json["state"].as_str().unwrap_or_default().to_owned()
}

fn wait_state(wanted: &str) -> Result<()> {
    wait_until(&format!("the state {wanted}"), STEP_TIMEOUT, || state() == wanted)
}

/// Keeps the disk at work until told to stop: blocks here and there, and runs of neighbours.
fn load(socket: &Path, stop: &AtomicBool) -> Result<()> {
    let mut disk = Disk::at(socket).queues(2).memory_bytes(64 << 20).open()?;
    let (nr_sectors, mut random, mut next) = ((DISK_MIB << 20) / 512, 0x9e37_79b9_7f4a_7c15_u64, 0);
    while !stop.load(Ordering::Relaxed) {
        for (number, queue) in disk.queues.iter_mut().enumerate() {
            for _ in 0..DEPTH {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                next = (next + 8) % nr_sectors;
                let sector = if number == 0 { random % (nr_sectors / 8) * 8 } else { next };
                queue.stage(&Op::read(sector, 8));
            }
            queue.kick();
        }
        for queue in &mut disk.queues {
            for done in queue.drain()? {
                ensure!(done.status == 0, "the guest got status {}", done.status);
            }
        }
    }
    Ok(())
}

/// A terminal of its own, which ends with this.
struct Terminal(String);

impl Terminal {
    fn start(command: &str) -> Result<Self> {
        let terminal = Self(format!("record-{}", std::process::id()));
        let (columns, rows) = (COLUMNS.to_string(), ROWS.to_string());
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &rows, command])?;
        Ok(terminal)
    }

    fn tmux(&self, args: &[&str]) -> Result<String> {
        let ran = Command::new("tmux").args(["-L", &self.0]).args(args).output().context("tmux")?;
        ensure!(ran.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&ran.stderr));
        Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
    }

    fn press(&self, key: &str) -> Result<()> {
        self.tmux(&["send-keys", key]).map(drop)
    }

    fn wait_for(&self, words: &str) -> Result<()> {
        let shows = || self.tmux(&["capture-pane", "-p"]).is_ok_and(|screen| screen.contains(words));
        wait_until(&format!("{words} on the screen"), STEP_TIMEOUT, shows)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

fn main() -> Result<()> {
    let out = std::env::args_os().nth(1).context("where to? polypath-record DIR")?;
    let work = tempfile::Builder::new().prefix("polypath-record-").tempdir()?;
    let image = work.path().join("disk");
    File::create(&image)?.set_len(DISK_MIB << 20)?;
    let fs = FaultyFs::mount(&image, &["a", "b"])?;
    fs.logging(false);
    // Names that mean something: /run/san/a and /run/san/b.
    std::fs::create_dir_all(RUN)?;
    let real = fs.path("a").parent().context("no directory")?.to_owned();
    std::os::unix::fs::symlink(real, "/run/san")?;

    let mut recording = Recording::default();
    let words = format!(
        "-s {RUN}/disk0.sock --control {RUN}/disk0.control --serial demo --path /run/san/a --path /run/san/b"
    );
    recording.add(&format!("# polypath {words} &"));
    let mut command = Command::new(polypath_bin()?);
    command.args(words.split(' '));
    let mut server = Process::spawn(command, work.path(), "polypath")?;
    server.wait_for_log("listening", STEP_TIMEOUT)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(Path::new(&format!("{RUN}/disk0.sock")), &stop));
        let told = story(&mut recording, &fs);
        stop.store(true, Ordering::Relaxed);
        let loaded = loading.join().map_err(|_| anyhow::anyhow!("the load panicked"))?;
        let (text, picture) = told?;
        loaded.context("the guest noticed")?;
        recording.note("the guest got no error; its front-end goes");
        recording.run("shutdown")?;
        let code = server.wait_exit(STEP_TIMEOUT)?.code();
        ensure!(code == Some(0), "polypath ended with {code:?}: {}", server.stderr());
        recording.note("what polypath logged meanwhile");
        recording.add(&server.stderr());
        recording.0.push_str(&text);
        std::fs::write(Path::new(&out).join("recording.txt"), &recording.0)?;
        std::fs::write(Path::new(&out).join("top.svg"), picture)?;
        Ok(())
    })
}

/// Everything that is seen. Gives the screens of `top`, as text and the last of them as a picture.
fn story(recording: &mut Recording, fs: &FaultyFs) -> Result<(String, String)> {
    wait_state("ok")?;
    recording.note("a guest reads on two queues");
    pause(2);
    recording.run("show")?;
    recording.note("path a is pulled: every read and write by it fails from now on");
    fs.rule("a", Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
    wait_state("degraded")?;
    pause(3);
    recording.run("show")?;
    recording.run("events")?;
    recording.note("path a is plugged in again");
    fs.clear("a");
    recording.run("reinstate-path /run/san/a")?;
    wait_state("ok")?;
    recording.run("show")?;
    recording.run("events --last 2")?;
    recording.note("polypath top: the keys f and y take path a out");
    let terminal = Terminal::start(&format!("{} top --interval 500", polypath_bin()?.display()))?;
    terminal.wait_for("PATH")?;
    pause(8);
    let mut text = String::from("\n-- polypath top\n");
    let mut capture = |what: &str| -> Result<()> {
        let screen = terminal.tmux(&["capture-pane", "-p"])?;
        text.push_str(&format!("\n-- {what}\n{}\n", screen.trim_end()));
        Ok(())
    };
    capture("both paths at work")?;
    terminal.press("f")?;
    terminal.wait_for("y: yes")?;
    capture("the key f asks first")?;
    terminal.press("y")?;
    terminal.wait_for("DEGRADED")?;
    pause(3);
    capture("after y")?;
    let picture = screen::svg(&terminal.tmux(&["capture-pane", "-p", "-e"])?, COLUMNS);
    terminal.press("r")?;
    terminal.wait_for("y: yes")?;
    terminal.press("y")?;
    wait_state("ok")?;
    terminal.press("q")?;
    Ok((text, picture))
}

/// Lets so many seconds go by, so that there is something to see.
fn pause(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}
