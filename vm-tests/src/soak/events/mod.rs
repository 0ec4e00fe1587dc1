//! What happens to a world under load, one event after the other, from a seed: what both forms of the soak have in common.

mod table;

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::storage::{NAMES, SOON, Storage};
use crate::control::Control;
use crate::faulty::{FaultyFs, Kind, Rule};
use crate::front_end::verify::Rng;
use crate::server::wait_until;

/// Longest delay of a slow path.
const DELAY_MS_MAX: u64 = 40;
/// How many events are kept to be shown after a failure.
const NR_SHOWN: usize = 60;
/// How often the disk grows at most.
const NR_GROWN_MAX: u64 = 16;

/// What events happen to.
pub trait Stage {
    /// The paths, and whom to tell of them.
    fn storage(&self) -> Storage<'_>;

    /// One of the events that only this one has.
    fn own_event(&mut self, events: &mut Events) -> Result<()>;
}

/// Where a name is, as far as is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    Table,
    Out,
    Adding,
}

#[derive(Debug)]
struct Name {
    name: &'static str,
    place: Whereabouts,
    /// It leads to another file.
    swapped: bool,
}

/// Everything that happens to a world.
#[derive(Debug)]
pub struct Events {
    /// Chooses what happens, and when.
    pub rng: Rng,
    /// How often each kind of event happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Whether the process may be killed, restarted or left.
    pub may_end_process: bool,
    /// The file that no name of the table may lead to.
    stranger: PathBuf,
    /// The file behind the disk.
    image: PathBuf,
    names: Vec<Name>,
    /// Commands that are answered when they are: index of the name, whether it is an addition.
    pending: Vec<(usize, bool, Control)>,
    history: VecDeque<String>,
    nr_grown: u64,
}

impl Events {
    /// Nothing has happened yet.
    pub fn new(rng: Rng, stranger: PathBuf, image: PathBuf) -> Self {
        let names = NAMES.map(|name| Name { name, place: Whereabouts::Table, swapped: false });
        Self {
            rng,
            counts: BTreeMap::new(),
            may_end_process: true,
            stranger,
            image,
            names: names.into(),
            pending: Vec::new(),
            history: VecDeque::new(),
            nr_grown: 0,
        }
    }

    /// Counts an event and keeps it for whoever asks what happened.
    pub fn note(&mut self, kind: &'static str, what: impl std::fmt::Display) {
        *self.counts.entry(kind).or_default() += 1;
        self.history.push_back(format!("{kind} {what}"));
        if self.history.len() > NR_SHOWN {
            self.history.pop_front();
        }
    }

    /// The last events.
    pub fn history(&self) -> impl Iterator<Item = &str> {
        self.history.iter().map(String::as_str)
    }

    /// The time between two events, at most so long.
    pub fn pause(&mut self, most: Duration) {
        let most_us = u64::try_from(most.as_micros()).expect("short");
        std::thread::sleep(Duration::from_micros(self.rng.below(most_us)));
    }

    fn at(&mut self) -> usize {
        usize::try_from(self.rng.below(NAMES.len() as u64)).expect("small")
    }

    /// The back-end has started anew: by its file, all names are in the table.
    pub fn begun_anew(&mut self) {
        self.pending.clear();
        self.names.iter_mut().for_each(|name| name.place = Whereabouts::Table);
    }

    /// Looks at answers that have come, and that no path is used that should not be.
    pub fn look(&mut self, storage: &Storage<'_>) -> Result<()> {
        for (at, adding, mut control) in std::mem::take(&mut self.pending) {
            match (control.answer_within(Duration::from_millis(1))?, adding) {
                (None, _) => self.pending.push((at, adding, control)),
                (Some(answer), true) => {
                    ensure!(answer.is_err() || !self.names[at].swapped, "a stranger was added");
                    self.names[at].place = if answer.is_ok() { Whereabouts::Table } else { Whereabouts::Out };
                    self.note("path added", format_args!("{at}: {answer:?}"));
                }
                (Some(answer), false) => self.note("path closed", format_args!("{at}: {answer:?}")),
            }
        }
        if self.names.iter().any(|name| name.swapped) {
            let status = storage.control()?.json()?;
            for name in self.names.iter().filter(|name| name.swapped) {
                let is_used = status.is_active(&storage.fs.path(name.name));
                ensure!(!is_used, "{} leads elsewhere and is used", name.name);
            }
        }
        Ok(())
    }

    /// One event.
    pub fn one(&mut self, stage: &mut impl Stage) -> Result<()> {
        let at = self.at();
        let storage = stage.storage();
        let (fs, name) = (storage.fs, self.names[at].name);
        // An EIO of a flush is the guest's to hear.
        let data = [Kind::Read, Kind::Write];
        match self.rng.below(112) {
            0..12 => {
                let errnos = [libc::EIO, libc::ENODEV, libc::ETIMEDOUT, libc::ENOLINK];
                let errno = errnos[usize::try_from(self.rng.below(4))?];
                fs.rule(name, Rule::errno(errno).on(&data));
                self.note("path error", format_args!("{name} errno {errno}"));
            }
            12..20 => {
                let nr = 1 + self.rng.below(4);
                fs.rule(name, Rule::errno(libc::EIO).on(&data).next(nr));
                self.note("hiccup", format_args!("{name} {nr}"));
            }
            20..26 => {
                let bytes = 512 * (1 + self.rng.below(16));
                fs.rule(name, Rule::short(usize::try_from(bytes)?).next(2));
                self.note("short transfer", format_args!("{name} {bytes}"));
            }
            26..34 => {
                let (ms, nr) = (1 + self.rng.below(DELAY_MS_MAX), 20 + self.rng.below(100));
                fs.rule(name, Rule::delay_ms(ms).next(nr));
                self.note("slow path", format_args!("{name} {ms} ms, {nr} times"));
            }
            34..40 => {
                let ms = 1 + self.rng.below(DELAY_MS_MAX);
                fs.rule(name, Rule::delay_ms(ms).fsyncs().next(10));
                self.note("slow sync", format_args!("{name} {ms} ms"));
            }
            40..46 => {
                fs.rule(name, Rule::hold());
                self.note("path hangs", name);
            }
            46..48 => {
                fs.stop();
                std::thread::sleep(Duration::from_millis(50 + self.rng.below(300)));
                fs.cont();
                self.note("all paths hang", "");
            }
            48..68 => self.mend(&storage, at),
            68..74 => self.remove(&storage, at)?,
            74..82 => self.add(&storage, at)?,
            82..85 => self.swap(&storage, at)?,
            85..94 => self.message(&storage, at)?,
            94..98 => self.question(&storage)?,
            98..101 => self.reload(&storage)?,
            101..103 => self.grow(&storage)?,
            _ => stage.own_event(self)?,
        }
        Ok(())
    }

    fn mend(&mut self, storage: &Storage<'_>, at: usize) {
        let name = self.names[at].name;
        storage.fs.clear(name);
        storage.fs.release(name);
        self.note("path mended", name);
    }

    /// The back-end is killed while a path keeps requests, which the next process waits for. `end` kills it and starts the
    /// next.
    pub fn kill_while_hanging(&mut self, fs: &FaultyFs, end: impl FnOnce() -> Result<()>) -> Result<()> {
        let name = NAMES[self.at()];
        fs.rule(name, Rule::hold());
        std::thread::sleep(Duration::from_millis(self.rng.below(20)));
        for name in NAMES {
            fs.clear(name);
        }
        let wait = Duration::from_millis(self.rng.below(60));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(wait);
                NAMES.iter().for_each(|name| fs.release(name));
            });
            end()
        })
        .context("kill -9 while a path hangs")?;
        self.begun_anew();
        self.note("kill -9", format_args!("while {name} hangs"));
        Ok(())
    }

    /// Makes everything well again, and waits until it is.
    pub fn mend_all(&mut self, storage: &Storage<'_>) -> Result<()> {
        self.put_back(storage);
        storage.mend();
        wait_until("every command to be answered", SOON, || {
            self.look(storage).is_err() || self.pending.is_empty()
        })?;
        self.look(storage)?;
        let mut control = storage.control()?;
        for at in 0..self.names.len() {
            let dev = storage.dev(self.names[at].name);
            if self.names[at].place == Whereabouts::Out {
                // Not at once, if an open of before has not ended yet, or the machine is too busy for the path timeout.
                let line = format!("add_path {} {dev}", 1 + at % 2);
                wait_until(&line, SOON, || control.ask(&line).is_ok_and(|answer| answer.is_ok()))?;
                self.names[at].place = Whereabouts::Table;
            }
            // Quarantine and the operator's word are forgotten.
            control.run(&format!("reinstate_path {dev}"))?;
        }
        let devs = NAMES.map(|name| storage.dev(name));
        wait_until("all paths to be well", SOON, || {
            let Ok(status) = control.json() else { return false };
            // An error of before that came late on a slow path may have put it there again.
            for dev in devs.iter().filter(|dev| !status.path(Path::new(dev))["quarantine_left_ms"].is_null())
            {
                let _ = control.run(&format!("reinstate_path {dev}"));
            }
            status.nr_active() == NAMES.len() && status.nr_held() == 0
        })
        .with_context(|| format!("{:?}", control.json().map(|status| status.0.to_string())))
    }
}
