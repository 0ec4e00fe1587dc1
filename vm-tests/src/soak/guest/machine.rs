//! A guest that lives through everything: storage, a back-end that comes again, a machine that is left for another.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::faulty::FaultyFs;
use crate::front_end::verify::Rng;
use crate::guest::{Guest, Qemu, Vm};
use crate::server::{Server, wait_until};
use crate::soak::events::{Events, Stage};
use crate::soak::storage::{NAMES, Place, SOON, Setup, Storage};

use super::load::JOBS;

const QUEUES: u16 = 4;
/// Requests that are to come by before polypath ends: the front-end has it, and there is something to be lost.
const NR_BEFORE_END: u64 = 50;
/// Longest time for which the guest stands still.
const STILL_MS_MAX: u64 = 200;

/// All of some things, one after the other, in an order by chance; then all of them again.
#[derive(Debug)]
pub struct Deck<T> {
    all: Vec<T>,
    left: Vec<T>,
    nr_drawn: usize,
}

impl<T: Copy> Deck<T> {
    /// Full.
    pub fn new(all: &[T]) -> Self {
        Self { all: all.into(), left: Vec::new(), nr_drawn: 0 }
    }

    /// The next one.
    pub fn draw(&mut self, rng: &mut Rng) -> T {
        if self.left.is_empty() {
            self.left.clone_from(&self.all);
        }
        self.nr_drawn += 1;
        self.left.swap_remove(usize::try_from(rng.below(self.left.len() as u64)).expect("small"))
    }

    /// Whether each of them has been drawn.
    pub fn was_seen(&self) -> bool {
        self.nr_drawn >= self.all.len()
    }
}

/// How polypath ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Kill,
    KillWhileHanging,
    Restart,
    Move,
}

/// The storage, the guest and the back-end.
#[derive(Debug)]
pub struct Machine {
    /// What it was made of.
    pub setup: Setup,
    // Before the server in the order of drops: a process cannot end while the kernel waits for what a path holds.
    /// The storage.
    pub fs: FaultyFs,
    /// The guest.
    pub guest: Guest,
    /// The back-end.
    pub server: Server,
    /// The disk's name in the guest.
    pub disk: String,
    /// How often the guest has moved.
    pub nr_moves: u64,
    qemu: Qemu,
    ends: Deck<End>,
    dir: TempDir,
    place: Place,
}

fn describe(qemu: Qemu, place: &Place) -> Vm {
    Vm::new().qemu(qemu).cpus(JOBS).disk(place.socket().as_path()).queues(QUEUES.into()).reconnect()
}

impl Machine {
    /// Storage that holds zeros, served, and a guest that has booted.
    pub fn start(setup: Setup, qemu: Qemu, can_move: bool) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("soak-").tempdir().context("make a directory")?;
        std::fs::File::create(dir.path().join("disk"))?.set_len(setup.bytes)?;
        let fs = FaultyFs::mount(&dir.path().join("disk"), &NAMES)?;
        fs.logging(false);
        std::fs::write(dir.path().join("config"), setup.config(&fs))?;
        let place = Place::first(dir.path());
        let server = place.back_end(QUEUES).start()?;
        let guest = describe(qemu, &place).boot()?;
        let ends = [End::Kill, End::Restart, End::KillWhileHanging, End::Move];
        let ends = Deck::new(&ends[..if can_move { 4 } else { 3 }]);
        Ok(Self { setup, fs, guest, server, disk: "vda".into(), nr_moves: 0, qemu, ends, dir, place })
    }

    /// The file behind everything.
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Another place for a file in the same directory.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Whether polypath has ended in every way.
    pub fn has_met_all_ends(&self) -> bool {
        self.ends.was_seen()
    }

    /// What the guest is told of the disk's cache.
    pub fn choose_cache(&self, write_through: bool) -> Result<()> {
        let word = if write_through { "write through" } else { "write back" };
        self.guest.sh(&format!("echo {word} >/sys/block/{}/cache_type", self.disk)).map(drop)
    }

    /// Waits until so many more requests have come by some path.
    pub fn wait_requests(&self, more: u64) -> Result<()> {
        let goal = self.storage().nr_requests() + more;
        wait_until(&format!("{more} requests"), SOON, || self.storage().nr_requests() >= goal)
    }

    /// The last words of all sides, and where they are.
    pub fn log(&self) -> String {
        let (server, console, qemu) = (self.server.stderr(), self.guest.console(), self.guest.qemu_log());
        let ask = |question: &str| self.storage().control()?.result(json!({ "command": question }));
        let [show, counters] = ["show", "counters"]
            .map(|question| ask(question).map_or_else(|e| format!("{e:#}"), |v| v.to_string()));
        let state = self.guest.state();
        format!("polypath:\n{server}\n{show}\n{counters}\nconsole:\n{console}\nqemu:\n{qemu}\n{state}\n")
    }

    /// The guest is switched off and polypath ends in order.
    pub fn end(&mut self) -> Result<()> {
        self.guest.shut_down()?;
        let code = self.server.terminate(SOON)?;
        ensure!(code == 0, "the end by SIGTERM gave code {code}");
        Ok(())
    }

    /// The back-end is killed, with all that it has under way, and started again. The guest finds it by itself.
    fn kill(&mut self) -> Result<()> {
        self.server.kill();
        self.server = self.place.back_end(QUEUES).start()?;
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        let code = self.server.terminate(SOON)?;
        ensure!(code == 0, "the end by SIGTERM gave code {code}: {}", self.server.stderr());
        self.server = self.place.back_end(QUEUES).start()?;
        Ok(())
    }

    /// The guest moves to another machine, whose disk another process serves from the same storage; the first one ends.
    fn move_away(&mut self) -> Result<()> {
        let place = self.place.next();
        let other = place.back_end(QUEUES).start()?;
        let socket = self.beside(&format!("move{}", self.nr_moves));
        let next = describe(self.qemu, &place).incoming(&socket).start()?;
        let old = std::mem::replace(&mut self.guest, next);
        old.move_to(&socket).with_context(|| format!("the other one: {}", self.guest.qemu_log()))?;
        self.place = place;
        self.nr_moves += 1;
        let code = std::mem::replace(&mut self.server, other).terminate(SOON)?;
        ensure!(code == 0, "the process that was left gave code {code}");
        Ok(())
    }

    /// The guest stands still for a moment: the front-end stops all queues and starts them again.
    fn stand_still(&mut self, events: &mut Events) -> Result<()> {
        let ms = events.rng.below(STILL_MS_MAX);
        self.guest.qmp("stop", json!({}))?;
        std::thread::sleep(Duration::from_millis(ms));
        self.guest.qmp("cont", json!({}))?;
        events.note("guest stands still", format_args!("{ms} ms"));
        Ok(())
    }
}

impl Stage for Machine {
    fn storage(&self) -> Storage<'_> {
        Storage { fs: &self.fs, model: self.setup.model, control: self.place.control() }
    }

    /// polypath ends and comes again, if it may.
    fn own_event(&mut self, events: &mut Events) -> Result<()> {
        if !events.may_end_process {
            // A stop waits for every request.
            self.storage().mend();
            return self.stand_still(events);
        }
        // And a start asks every path who it is.
        events.mend_all(&self.storage())?;
        self.wait_requests(NR_BEFORE_END).context("before polypath ends")?;
        match self.ends.draw(&mut events.rng) {
            End::Kill => {
                self.kill().context("kill -9")?;
                events.note("kill -9", "");
            }
            End::KillWhileHanging => {
                let Self { fs, server, place, .. } = self;
                events.kill_while_hanging(fs, || {
                    server.kill();
                    *server = place.back_end(QUEUES).start()?;
                    Ok(())
                })?;
            }
            End::Restart => {
                self.restart().context("restart")?;
                events.note("restart", "");
            }
            End::Move => {
                self.move_away().context("the guest moves")?;
                events.note("guest moves", "");
            }
        }
        events.begun_anew();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deck_gives_each_once_before_any_again() {
        let mut rng = Rng::new(5);
        let mut deck = Deck::new(&[1, 2, 3, 4]);
        for _ in 0..20 {
            let mut round: Vec<i32> = (0..4).map(|_| deck.draw(&mut rng)).collect();
            assert!(deck.was_seen());
            round.sort_unstable();
            assert_eq!(round, [1, 2, 3, 4]);
        }
        assert!(!Deck::new(&[1]).was_seen());
    }
}
