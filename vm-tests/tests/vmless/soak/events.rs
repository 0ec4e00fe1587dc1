//! The events of the soak, one by one.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use polypath_vm_tests::control::{Control, Status};
use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::{Memory, Session};
use polypath_vm_tests::server::wait_until;

use crate::common::SOON;
use crate::rig::{Rig, change_memory};

pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Longest delay of a slow path.
const DELAY_MS_MAX: u64 = 40;

/// How many events are kept to be shown after a failure.
const NR_SHOWN: usize = 40;

/// Where a name is, as far as the test knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Table,
    Out,
    Adding,
}

#[derive(Debug)]
struct Name {
    name: &'static str,
    place: Place,
    /// It leads to another file.
    swapped: bool,
    held: bool,
}

/// Everything that happens to a rig.
pub struct Events<'a> {
    pub rig: &'a Rig,
    pub rng: Rng,
    pub stranger: PathBuf,
    pub counts: BTreeMap<&'static str, u64>,
    seed: u64,
    names: Vec<Name>,
    control: Control,
    /// Commands that are answered when they are: index of the name, whether it is an addition.
    pending: Vec<(usize, bool, Control)>,
    history: VecDeque<String>,
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.rig.fs.cont();
            eprintln!("POLYPATH_SOAK_SEED={}; the last events:", self.seed);
            self.history.iter().for_each(|event| eprintln!("  {event}"));
            self.names.iter().for_each(|name| eprintln!("{name:?} {:?}", self.rig.fs.counts(name.name)));
            for command in ["status", "json"] {
                eprintln!("{:?}", self.rig.socket.connect().and_then(|mut control| control.run(command)));
            }
        }
    }
}

impl<'a> Events<'a> {
    pub fn new(rig: &'a Rig, seed: u64, rng: Rng, stranger: PathBuf) -> Self {
        let names = NAMES.map(|name| Name { name, place: Place::Table, swapped: false, held: false });
        Self {
            rig,
            rng,
            stranger,
            counts: BTreeMap::new(),
            seed,
            names: names.into(),
            control: rig.control(),
            pending: Vec::new(),
            history: VecDeque::new(),
        }
    }

    pub fn note(&mut self, kind: &'static str, what: impl std::fmt::Display) {
        *self.counts.entry(kind).or_default() += 1;
        self.history.push_back(format!("{kind} {what}"));
        if self.history.len() > NR_SHOWN {
            self.history.pop_front();
        }
    }

    /// The time between two events.
    pub fn pause(&mut self) {
        std::thread::sleep(Duration::from_millis(self.rng.below(30)));
    }

    fn dev(&self, at: usize) -> String {
        self.rig.dev(self.names[at].name)
    }

    /// Looks at answers that have come, and that no path is used that should not be.
    pub fn look(&mut self) {
        for (at, adding, mut control) in std::mem::take(&mut self.pending) {
            match (control.answer_within(Duration::from_millis(1)).unwrap(), adding) {
                (None, _) => self.pending.push((at, adding, control)),
                (Some(answer), true) => {
                    assert!(answer.is_err() || !self.names[at].swapped, "a stranger was added");
                    self.names[at].place = if answer.is_ok() { Place::Table } else { Place::Out };
                    self.note("added", format_args!("{at}: {answer:?}"));
                }
                (Some(answer), false) => self.note("closed", format_args!("{at}: {answer:?}")),
            }
        }
        let status = self.control.json().unwrap();
        for name in self.names.iter().filter(|name| name.swapped) {
            assert!(
                !status.is_active(&self.rig.fs.path(name.name)),
                "{} leads elsewhere and is used",
                name.name
            );
        }
    }

    /// One event.
    pub fn one(&mut self, session: &Session, memory: &Memory) {
        let at = usize::try_from(self.rng.below(NAMES.len() as u64)).unwrap();
        let (fs, name) = (&self.rig.fs, self.names[at].name);
        match self.rng.below(100) {
            0..12 => {
                let errnos = [libc::EIO, libc::ENODEV, libc::ETIMEDOUT, libc::ENOLINK];
                let errno = errnos[usize::try_from(self.rng.below(4)).unwrap()];
                // An EIO of a flush is the guest's to hear.
                fs.rule(name, Rule::errno(errno).on(&[Kind::Read, Kind::Write]));
                self.note("fail", format_args!("{name} errno {errno}"));
            }
            12..20 => {
                let nr = 1 + self.rng.below(4);
                fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]).next(nr));
                self.note("hiccup", format_args!("{name} {nr}"));
            }
            20..26 => {
                let bytes = 512 * (1 + self.rng.below(16));
                fs.rule(name, Rule::short(usize::try_from(bytes).unwrap()).next(2));
                self.note("short", format_args!("{name} {bytes}"));
            }
            26..34 => {
                let (ms, nr) = (1 + self.rng.below(DELAY_MS_MAX), 20 + self.rng.below(100));
                fs.rule(name, Rule::delay_ms(ms).next(nr));
                self.note("slow", format_args!("{name} {ms} ms, {nr} times"));
            }
            34..42 => {
                fs.rule(name, Rule::hold());
                self.names[at].held = true;
                self.note("hang", name);
            }
            42..44 => {
                fs.stop();
                std::thread::sleep(Duration::from_millis(50 + self.rng.below(300)));
                fs.cont();
                self.note("hang of all", "");
            }
            44..62 => self.mend(at),
            62..68 => self.remove(at),
            68..76 => self.add(at),
            76..80 => self.swap(at),
            80..96 => self.message(at),
            _ => self.change_memory(session, memory),
        }
    }

    fn mend(&mut self, at: usize) {
        let name = self.names[at].name;
        self.rig.fs.clear(name);
        self.rig.fs.release(name);
        self.names[at].held = false;
        self.note("mend", name);
    }

    fn remove(&mut self, at: usize) {
        let nr_left = self.names.iter().filter(|name| name.place == Place::Table).count();
        if self.names[at].place != Place::Table || nr_left < 2 {
            return;
        }
        let mut control = self.rig.control();
        control.send(&format!("remove_path {}", self.dev(at))).unwrap();
        // Out of the table at once; the answer comes when it is closed.
        let path = self.rig.fs.path(self.names[at].name);
        wait_until("a path to leave the table", SOON, || !self.control.json().unwrap().has(&path)).unwrap();
        self.pending.push((at, false, control));
        self.names[at].place = Place::Out;
        self.note("remove", at);
    }

    fn add(&mut self, at: usize) {
        if self.names[at].place != Place::Out {
            return;
        }
        let mut control = self.rig.control();
        let group = 1 + self.rng.below(2);
        control.send(&format!("add_path {group} {}", self.dev(at))).unwrap();
        self.pending.push((at, true, control));
        self.names[at].place = Place::Adding;
        self.note("add", format_args!("{at} to group {group}"));
    }

    /// Puts another file behind a name that is out of use, with nothing on its way there.
    fn swap(&mut self, at: usize) {
        let (fs, name) = (&self.rig.fs, self.names[at].name);
        if self.names[at].swapped || self.names[at].place == Place::Adding || fs.counts(name).held != 0 {
            return;
        }
        self.mend(at);
        fs.rule(name, Rule::errno(libc::ENODEV));
        let (path, in_table) = (fs.path(name), self.names[at].place == Place::Table);
        // No request may come to meet the error, if another group is in use.
        if in_table {
            self.control.run(&format!("fail_path {}", path.display())).unwrap();
        }
        let at_rest = |status: &Status| {
            !status.is_active(&path) && status.path(&path)["in_flight"].as_u64().unwrap_or(0) == 0
        };
        wait_until("a path to be at rest", SOON, || at_rest(&self.control.json().unwrap())).unwrap();
        // Descriptors of before may have slow requests left.
        std::thread::sleep(Duration::from_millis(DELAY_MS_MAX * 3));
        fs.set_backing(name, &self.stranger);
        fs.set_inode(name, 77);
        fs.clear(name);
        self.names[at].swapped = true;
        if in_table {
            self.control.run(&format!("reinstate_path {}", path.display())).unwrap();
        }
        self.note("swap", name);
    }

    /// A command that may be refused, as long as it is answered.
    fn message(&mut self, at: usize) {
        let (dev, group) = (self.dev(at), 1 + self.rng.below(3));
        let line = match self.rng.below(12) {
            0 => format!("fail_path {dev}"),
            1..4 => format!("reinstate_path {dev}"),
            4 => format!("switch_group {group}"),
            5 => format!("disable_group {group}"),
            6 => format!("enable_group {group}"),
            7 => format!("regroup_path {dev} {group}"),
            8 => format!("path_args {dev} 1"),
            9 => ["queue_if_no_path", "no_path_retry 600"][usize::try_from(group).unwrap() % 2].to_owned(),
            10 => "table".to_owned(),
            _ => "toml".to_owned(),
        };
        let answer = self.control.ask(&line).unwrap();
        self.note("message", format_args!("{line}: {answer:?}"));
    }

    fn change_memory(&mut self, session: &Session, memory: &Memory) {
        // The old memory is in use for as long as a path keeps a request.
        if self.names.iter().any(|name| name.held || self.rig.fs.counts(name.name).held != 0) {
            return;
        }
        change_memory(session, memory, self.rng.percent(50));
        self.note("memory", "");
    }

    /// Makes everything well again, and waits until it is.
    pub fn mend_all(&mut self) {
        for at in 0..self.names.len() {
            if std::mem::take(&mut self.names[at].swapped) {
                self.rig.fs.rule(self.names[at].name, Rule::errno(libc::ENODEV));
                self.rig.fs.set_backing(self.names[at].name, &self.rig.image.path);
                self.rig.fs.set_inode(self.names[at].name, 4242);
            }
            self.mend(at);
        }
        wait_until("every command to be answered", SOON, || {
            self.look();
            self.pending.is_empty()
        })
        .unwrap();
        for at in 0..self.names.len() {
            let dev = self.dev(at);
            if self.names[at].place == Place::Out {
                // Not at once, if an open of before has not ended yet, or the machine is too busy for the path timeout.
                let line = format!("add_path {} {dev}", 1 + at % 2);
                wait_until(&line, SOON, || self.control.ask(&line).unwrap().is_ok()).unwrap();
                self.names[at].place = Place::Table;
            }
            // Quarantine and the operator's word are forgotten.
            self.control.run(&format!("reinstate_path {dev}")).unwrap();
        }
        self.rig
            .wait_status("all paths to be well", |status| status.nr_active() == 4 && status.nr_held() == 0);
    }
}
