//! What happens to the table: paths come and go, lead elsewhere, are spoken of; the disk grows.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{DELAY_MS_MAX, Events, NR_GROWN_MAX, Whereabouts};
use crate::control::Status;
use crate::faulty::{CacheModel, Rule};
use crate::server::wait_until;
use crate::soak::storage::{NAMES, SOON, Storage};

impl Events {
    pub(super) fn remove(&mut self, storage: &Storage<'_>, at: usize) -> Result<()> {
        let nr_left = self.names.iter().filter(|name| name.place == Whereabouts::Table).count();
        // With a cache for each port nobody takes over what a path wrote that is removed while it is well.
        let allowed = storage.model == CacheModel::Lun;
        if !allowed || self.names[at].place != Whereabouts::Table || nr_left < 2 {
            return Ok(());
        }
        let mut control = storage.control()?;
        control.send(&format!("remove_path {}", storage.dev(self.names[at].name)))?;
        // Out of the table at once; the answer comes when it is closed.
        let path = storage.fs.path(self.names[at].name);
        let mut other = storage.control()?;
        wait_until("a path to leave the table", SOON, || {
            other.json().is_ok_and(|status| !status.has(&path))
        })?;
        self.pending.push((at, false, control));
        self.names[at].place = Whereabouts::Out;
        self.note("path removed", at);
        Ok(())
    }

    pub(super) fn add(&mut self, storage: &Storage<'_>, at: usize) -> Result<()> {
        if self.names[at].place != Whereabouts::Out {
            return Ok(());
        }
        let mut control = storage.control()?;
        let group = 1 + self.rng.below(2);
        control.send(&format!("add_path {group} {}", storage.dev(self.names[at].name)))?;
        self.pending.push((at, true, control));
        self.names[at].place = Whereabouts::Adding;
        self.note("path being added", format_args!("{at} to group {group}"));
        Ok(())
    }

    /// Puts another file behind a name that is out of use, with nothing on its way there.
    pub(super) fn swap(&mut self, storage: &Storage<'_>, at: usize) -> Result<()> {
        let (fs, name) = (storage.fs, self.names[at].name);
        let allowed = storage.model == CacheModel::Lun;
        if !allowed || self.names[at].swapped || self.names[at].place == Whereabouts::Adding {
            return Ok(());
        }
        self.mend(storage, at);
        fs.rule(name, Rule::errno(libc::ENODEV));
        let (path, in_table) = (fs.path(name), self.names[at].place == Whereabouts::Table);
        let mut control = storage.control()?;
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
    pub fn put_back(&mut self, storage: &Storage<'_>) {
        for name in self.names.iter_mut().filter(|name| name.swapped) {
            name.swapped = false;
            storage.fs.rule(name.name, Rule::errno(libc::ENODEV));
            storage.fs.set_backing(name.name, &self.image);
            storage.fs.set_inode(name.name, 4242);
        }
    }

    /// A command that may be refused, as long as it is answered.
    pub(super) fn message(&mut self, storage: &Storage<'_>, at: usize) -> Result<()> {
        let (dev, group) = (storage.dev(self.names[at].name), 1 + self.rng.below(3));
        // What was written by a path that is well and taken out by hand is flushed by another one: not so with a cache for
        // each port.
        let first = if storage.model == CacheModel::Lun { 0 } else { 1 };
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
        let answer = storage.control()?.ask(&line)?;
        let shown = answer.map(|text| text.chars().take(40).collect::<String>());
        self.note("command", format_args!("{line}: {shown:?}"));
        Ok(())
    }

    /// A question that is always answered.
    pub(super) fn question(&mut self, storage: &Storage<'_>) -> Result<()> {
        let questions = [
            json!({ "command": "show" }),
            json!({ "command": "counters" }),
            json!({ "command": "events", "last": 100 }),
            json!({ "command": "dump", "format": "dm_status" }),
            json!({ "command": "reset_counters" }),
        ];
        let question = &questions[usize::try_from(self.rng.below(questions.len() as u64))?];
        storage.control()?.result(question.clone())?;
        self.note("question", &question["command"]);
        Ok(())
    }

    /// The configuration file is read again: what was changed by hand is as before.
    pub(super) fn reload(&mut self, storage: &Storage<'_>) -> Result<()> {
        if !self.pending.is_empty() || self.names.iter().any(|name| name.swapped) {
            return Ok(());
        }
        storage.mend();
        let answer = storage.control()?.ask_json(&json!({ "command": "reload" }))?;
        if answer["ok"] == true {
            self.names.iter_mut().for_each(|name| name.place = Whereabouts::Table);
        }
        self.note("reload", answer["ok"].clone());
        Ok(())
    }

    pub(super) fn grow(&mut self, storage: &Storage<'_>) -> Result<()> {
        if self.nr_grown == NR_GROWN_MAX || self.names.iter().any(|name| name.swapped) {
            return Ok(());
        }
        self.nr_grown += 1;
        let file = std::fs::File::options().write(true).open(&self.image)?;
        file.set_len(file.metadata()?.len() + (1 << 20))?;
        // A path that hangs is waited for.
        storage.mend();
        // FUSE passes an answer about the size over while others are under way; a start would see two sizes.
        let bytes = file.metadata()?.len();
        let has_grown =
            |name: &str| std::fs::metadata(storage.fs.path(name)).is_ok_and(|meta| meta.len() == bytes);
        wait_until("every path to show the size", SOON, || NAMES.iter().all(|name| has_grown(name)))?;
        let answer = storage.control()?.ask("resize")?;
        self.note("resize", format_args!("{answer:?}"));
        Ok(())
    }
}
