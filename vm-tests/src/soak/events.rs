//! What happens to a world under load, one event after the other, from a seed.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::world::{NAMES, Parts, SOON};
use crate::control::{Control, Status};
use crate::faulty::{CacheModel, Kind, Rule};
use crate::front_end::verify::Rng;
use crate::front_end::{Region, Resume};
use crate::server::wait_until;

/// Longest delay of a slow path.
const DELAY_MS_MAX: u64 = 40;
/// How many events are kept to be shown after a failure.
const NR_SHOWN: usize = 60;
/// How often the disk grows at most.
const NR_GROWN_MAX: u64 = 16;

/// Where a name is, as far as is known here.
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
        let names = NAMES.map(|name| Name { name, place: Place::Table, swapped: false });
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

    /// The time between two events.
    pub fn pause(&mut self) {
        std::thread::sleep(Duration::from_millis(self.rng.below(30)));
    }

    fn at(&mut self) -> usize {
        usize::try_from(self.rng.below(NAMES.len() as u64)).expect("small")
    }

    /// The back-end has started anew: by its file, all names are in the table.
    pub fn begun_anew(&mut self) {
        self.pending.clear();
        self.names.iter_mut().for_each(|name| name.place = Place::Table);
    }

    /// Looks at answers that have come, and that no path is used that should not be.
    pub fn look(&mut self, world: &Parts<'_>) -> Result<()> {
        for (at, adding, mut control) in std::mem::take(&mut self.pending) {
            match (control.answer_within(Duration::from_millis(1))?, adding) {
                (None, _) => self.pending.push((at, adding, control)),
                (Some(answer), true) => {
                    ensure!(answer.is_err() || !self.names[at].swapped, "a stranger was added");
                    self.names[at].place = if answer.is_ok() { Place::Table } else { Place::Out };
                    self.note("path added", format_args!("{at}: {answer:?}"));
                }
                (Some(answer), false) => self.note("path closed", format_args!("{at}: {answer:?}")),
            }
        }
        if self.names.iter().any(|name| name.swapped) {
            let status = world.control()?.json()?;
            for name in self.names.iter().filter(|name| name.swapped) {
                let is_used = status.is_active(&world.fs.path(name.name));
                ensure!(!is_used, "{} leads elsewhere and is used", name.name);
            }
        }
        Ok(())
    }

    /// One event.
    pub fn one(&mut self, world: &mut Parts<'_>) -> Result<()> {
        let at = self.at();
        let (fs, name) = (world.fs, self.names[at].name);
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
            48..68 => self.mend(world, at),
            68..74 => self.remove(world, at)?,
            74..82 => self.add(world, at)?,
            82..85 => self.swap(world, at)?,
            85..98 => self.message(world, at)?,
            98..101 => self.reload(world)?,
            101..103 => self.grow(world)?,
            103..107 => self.change_memory(world)?,
            _ => self.change_ends(world)?,
        }
        Ok(())
    }

    fn mend(&mut self, world: &Parts<'_>, at: usize) {
        let name = self.names[at].name;
        world.fs.clear(name);
        world.fs.release(name);
        self.note("path mended", name);
    }

    /// Nothing fails or hangs by a rule any more.
    fn mend_rules(&mut self, world: &Parts<'_>) {
        for name in NAMES {
            world.fs.clear(name);
            world.fs.release(name);
        }
    }

    fn remove(&mut self, world: &Parts<'_>, at: usize) -> Result<()> {
        let nr_left = self.names.iter().filter(|name| name.place == Place::Table).count();
        // With a cache for each port nobody takes over what a path wrote that is removed while it is well.
        let allowed = world.setup.model == CacheModel::Lun;
        if !allowed || self.names[at].place != Place::Table || nr_left < 2 {
            return Ok(());
        }
        let mut control = world.control()?;
        control.send(&format!("remove_path {}", world.dev(self.names[at].name)))?;
        // Out of the table at once; the answer comes when it is closed.
        let path = world.fs.path(self.names[at].name);
        let mut other = world.control()?;
        wait_until("a path to leave the table", SOON, || {
            other.json().is_ok_and(|status| !status.has(&path))
        })?;
        self.pending.push((at, false, control));
        self.names[at].place = Place::Out;
        self.note("path removed", at);
        Ok(())
    }

    fn add(&mut self, world: &Parts<'_>, at: usize) -> Result<()> {
        if self.names[at].place != Place::Out {
            return Ok(());
        }
        let mut control = world.control()?;
        let group = 1 + self.rng.below(2);
        control.send(&format!("add_path {group} {}", world.dev(self.names[at].name)))?;
        self.pending.push((at, true, control));
        self.names[at].place = Place::Adding;
        self.note("path being added", format_args!("{at} to group {group}"));
        Ok(())
    }

    /// Puts another file behind a name that is out of use, with nothing on its way there.
    fn swap(&mut self, world: &Parts<'_>, at: usize) -> Result<()> {
        let (fs, name) = (world.fs, self.names[at].name);
        let allowed = world.setup.model == CacheModel::Lun;
        if !allowed || self.names[at].swapped || self.names[at].place == Place::Adding {
            return Ok(());
        }
        self.mend(world, at);
        fs.rule(name, Rule::errno(libc::ENODEV));
        let (path, in_table) = (fs.path(name), self.names[at].place == Place::Table);
        let mut control = world.control()?;
        // No request may come to meet the error, if another group is in use.
        if in_table {
            control.run(&format!("fail_path {}", path.display()))?;
        }
        let at_rest = |status: &Status| {
            !status.is_active(&path) && status.path(&path)["in_flight"].as_u64().unwrap_or(0) == 0
        };
        wait_until("a path to be at rest", SOON, || control.json().is_ok_and(|status| at_rest(&status)))?;
        // Descriptors of before may have slow requests left.
        std::thread::sleep(Duration::from_millis(DELAY_MS_MAX * 3));
        fs.set_backing(name, &self.stranger);
        fs.set_inode(name, 77);
        fs.clear(name);
        self.names[at].swapped = true;
        if in_table {
            control.run(&format!("reinstate_path {}", path.display()))?;
        }
        self.note("another disk", name);
        Ok(())
    }

    /// Every name leads to the disk again.
    pub fn put_back(&mut self, world: &Parts<'_>) {
        for name in self.names.iter_mut().filter(|name| name.swapped) {
            name.swapped = false;
            world.fs.rule(name.name, Rule::errno(libc::ENODEV));
            world.fs.set_backing(name.name, &self.image);
            world.fs.set_inode(name.name, 4242);
        }
    }

    /// A command that may be refused, as long as it is answered.
    fn message(&mut self, world: &Parts<'_>, at: usize) -> Result<()> {
        let (dev, group) = (world.dev(self.names[at].name), 1 + self.rng.below(3));
        // What was written by a path that is well and taken out by hand is flushed by another one: not so with a cache for
        // each port.
        let first = if world.setup.model == CacheModel::Lun { 0 } else { 1 };
        let line = match first + self.rng.below(14 - first) {
            0 => format!("fail_path {dev}"),
            1..4 => format!("reinstate_path {dev}"),
            4 => format!("switch_group {group}"),
            5 => format!("disable_group {group}"),
            6 => format!("enable_group {group}"),
            7 => format!("regroup_path {dev} {group}"),
            8 => format!("path_args {dev} 1"),
            9 => ["queue_if_no_path", "no_path_retry 600"][usize::try_from(group)? % 2].to_owned(),
            10 => "table".to_owned(),
            11 => "status".to_owned(),
            12 => "json".to_owned(),
            _ => "toml".to_owned(),
        };
        let answer = world.control()?.ask(&line)?;
        let shown = answer.map(|text| text.chars().take(40).collect::<String>());
        self.note("command", format_args!("{line}: {shown:?}"));
        Ok(())
    }

    /// The configuration file is read again: what was changed by hand is as before.
    fn reload(&mut self, world: &Parts<'_>) -> Result<()> {
        if !self.pending.is_empty() || self.names.iter().any(|name| name.swapped) {
            return Ok(());
        }
        self.mend_rules(world);
        let answer = world.control()?.ask_json(&json!({ "command": "reload" }))?;
        if answer["ok"] == true {
            self.names.iter_mut().for_each(|name| name.place = Place::Table);
        }
        self.note("reload", answer["ok"].clone());
        Ok(())
    }

    fn grow(&mut self, world: &Parts<'_>) -> Result<()> {
        if self.nr_grown == NR_GROWN_MAX || self.names.iter().any(|name| name.swapped) {
            return Ok(());
        }
        self.nr_grown += 1;
        let file = std::fs::File::options().write(true).open(&self.image)?;
        file.set_len(file.metadata()?.len() + (1 << 20))?;
        // A path that hangs is waited for.
        self.mend_rules(world);
        // FUSE passes an answer about the size over while others are under way; a start would see two sizes.
        let bytes = file.metadata()?.len();
        let has_grown =
            |name: &str| std::fs::metadata(world.fs.path(name)).is_ok_and(|meta| meta.len() == bytes);
        wait_until("every path to show the size", SOON, || NAMES.iter().all(|name| has_grown(name)))?;
        let answer = world.control()?.ask("resize")?;
        self.note("resize", format_args!("{answer:?}"));
        Ok(())
    }

    fn change_memory(&mut self, world: &Parts<'_>) -> Result<()> {
        // The old memory is in use for as long as a path keeps a request.
        self.mend_rules(world);
        let memory = world.memory;
        let region = memory.add(Region::new(memory.end() + (1 << 20), 1 << 20, 0)?);
        if self.rng.percent(50) {
            world.session.set_mem_table(memory)?;
            memory.remove(region.guest);
            world.session.set_mem_table(memory)?;
        } else {
            world.session.add_region(&region)?;
            world.session.remove_region(&region)?;
            memory.remove(region.guest);
        }
        self.note("memory", "a region came and went");
        Ok(())
    }

    /// The back-end or the front-end goes and comes again.
    fn change_ends(&mut self, world: &mut Parts<'_>) -> Result<()> {
        let resume = if self.rng.percent(50) { Resume::Used } else { Resume::Available };
        let what = if self.may_end_process { self.rng.below(5) } else { 3 };
        // A start asks every path who it is, and a stop waits for every request.
        self.put_back(world);
        if what == 0 && self.rng.percent(50) {
            // Killed with requests that hang: the next process waits for them.
            let name = NAMES[self.at()];
            world.fs.rule(name, Rule::hold());
            std::thread::sleep(Duration::from_millis(self.rng.below(20)));
            for name in NAMES {
                world.fs.clear(name);
            }
            let fs = world.fs;
            let wait = Duration::from_millis(self.rng.below(60));
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(wait);
                    NAMES.iter().for_each(|name| fs.release(name));
                });
                world.kill(resume)
            })
            .context("kill -9 while a path hangs")?;
            self.begun_anew();
            self.note("kill -9", format_args!("while {name} hangs"));
            return Ok(());
        }
        self.mend_rules(world);
        match what {
            0 | 1 => {
                world.kill(resume).context("kill -9")?;
                self.begun_anew();
                self.note("kill -9", format_args!("{resume:?}"));
            }
            2 => {
                world.restart(resume).context("restart")?;
                self.begun_anew();
                self.note("restart", format_args!("{resume:?}"));
            }
            3 => {
                let is_in_order = self.rng.percent(50);
                world.come_anew(is_in_order).context("front-end comes anew")?;
                self.note(
                    "front-end reconnects",
                    if is_in_order { "after a stop" } else { "without a stop" },
                );
            }
            _ => {
                world.hand_over().context("hand-over")?;
                self.begun_anew();
                self.note("hand-over", "");
            }
        }
        Ok(())
    }

    /// Makes everything well again, and waits until it is.
    pub fn mend_all(&mut self, world: &Parts<'_>) -> Result<()> {
        self.put_back(world);
        self.mend_rules(world);
        wait_until("every command to be answered", SOON, || {
            self.look(world).is_err() || self.pending.is_empty()
        })?;
        self.look(world)?;
        let mut control = world.control()?;
        for at in 0..self.names.len() {
            let dev = world.dev(self.names[at].name);
            if self.names[at].place == Place::Out {
                // Not at once, if an open of before has not ended yet, or the machine is too busy for the path timeout.
                let line = format!("add_path {} {dev}", 1 + at % 2);
                wait_until(&line, SOON, || control.ask(&line).is_ok_and(|answer| answer.is_ok()))?;
                self.names[at].place = Place::Table;
            }
            // Quarantine and the operator's word are forgotten.
            control.run(&format!("reinstate_path {dev}"))?;
        }
        let is_well = |status: &Status| status.nr_active() == NAMES.len() && status.nr_held() == 0;
        wait_until("all paths to be well", SOON, || control.json().is_ok_and(|status| is_well(&status)))
            .with_context(|| format!("{:?}", control.json().map(|status| status.0.to_string())))
    }
}
