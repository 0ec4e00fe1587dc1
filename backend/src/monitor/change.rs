//! Changes by the operator: dm's messages, and paths that come and go while the disk runs.

use std::path::{Path as StdPath, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail};
use polypath_paths::text::NoPathRetry;
use polypath_paths::{Group, Path};
use polypath_selector::{GroupArgs, Kind, PathArgs};
use serde_json::json;

use super::{Adding, Closed, Closing, Monitor, Outcome, Watched, ns};
use crate::events::What;
use crate::probe::{self, Expected, ProbeResult};

/// How often a removed path is looked at while it is still in use.
const REMOVAL_LOOK_NS: u64 = 5_000_000;

impl Monitor {
    /// The name of the path that is meant by `name`: dm takes a device's numbers as well.
    fn known(&self, name: &StdPath) -> anyhow::Result<PathBuf> {
        let table = self.disk.table().load();
        let path = table.paths().iter().find(|path| path.is_named(name));
        path.map(|path| path.name().to_owned())
            .with_context(|| format!("no path {} in the table", name.display()))
    }

    fn group_index(&self, number: usize) -> anyhow::Result<usize> {
        let nr_groups = self.disk.table().load().groups().len();
        match number.checked_sub(1) {
            Some(index) if index < nr_groups => Ok(index),
            _ => bail!("no group {number}: there are {nr_groups}"),
        }
    }

    /// `fail_path`: out, in every group it is in, until the operator puts it back.
    pub fn fail_path(&mut self, name: &StdPath, now_ns: u64) -> anyhow::Result<()> {
        let name = &*self.known(name)?;
        let table = self.disk.table().load();
        for (index, path) in table.paths().iter().enumerate() {
            if path.name() == name {
                table.fail_path(index, now_ns);
            }
        }
        if let Some(watched) = self.watched.get_mut(name)
            && let Some(index) = table.paths().iter().position(|path| path.name() == name)
        {
            let (path, group) = (&table.paths()[index], table.group_of(index));
            watched.note_failed(path, group, "by the operator", table.nr_active(), now_ns, &mut self.events);
            watched.checker.fail_by_operator(now_ns);
        }
        log::warn!("path failed: path={} reason=operator active={}", name.display(), table.nr_active());
        self.failback.path_failed();
        Ok(())
    }

    /// `reinstate_path`: back in use as soon as a probe that begins now has proved it well and the same.
    pub fn reinstate_path(&mut self, name: &StdPath, now_ns: u64) -> anyhow::Result<()> {
        let table = self.disk.table().load();
        let name = &*self.known(name)?;
        let watched = self.watched.get_mut(name).context("the path is gone")?;
        if table.paths().iter().any(|p| p.name() == name && p.is_active()) {
            watched.checker.forget_failures();
            return Ok(());
        }
        watched.checker.reinstate_by_operator(now_ns);
        Ok(())
    }

    /// `switch_group N`: all groups are enabled, and N is in use.
    pub fn switch_group(&mut self, number: usize) -> anyhow::Result<()> {
        let index = self.group_index(number)?;
        self.set_bypassed(|_, bypassed| *bypassed = false)?;
        self.disk.table().load().switch_group(Some(index));
        Ok(())
    }

    /// `disable_group N`: used only if no other has a path.
    pub fn disable_group(&mut self, number: usize) -> anyhow::Result<()> {
        self.bypass(number, true)
    }

    /// `enable_group N`.
    pub fn enable_group(&mut self, number: usize) -> anyhow::Result<()> {
        self.bypass(number, false)
    }

    fn bypass(&mut self, number: usize, to: bool) -> anyhow::Result<()> {
        let index = self.group_index(number)?;
        self.set_bypassed(|group, bypassed| {
            if group == index {
                *bypassed = to;
            }
        })?;
        // As the kernel does: forget the group in use, so that the next I/O chooses.
        self.disk.table().load().switch_group(None);
        Ok(())
    }

    fn set_bypassed(&mut self, change: impl Fn(usize, &mut bool)) -> anyhow::Result<()> {
        let mut groups = self.disk.table().load().groups().to_vec();
        for (index, group) in groups.iter_mut().enumerate() {
            change(index, &mut group.bypassed);
        }
        self.publish(groups)
    }

    /// `queue_if_no_path`, `fail_if_no_path`, or a time.
    pub fn set_no_path_retry(&mut self, policy: NoPathRetry) {
        self.disk.map().set_no_path_retry(policy);
        self.setting_changed("no_path_retry", policy);
    }

    pub(super) fn setting_changed(&mut self, setting: &str, value: impl ToString) {
        let value = value.to_string();
        log::info!("setting changed: {setting}={value}");
        self.events.note(What::SettingChanged { setting: setting.to_owned(), value });
    }

    /// Adds a path to a group (a new one, if it is the number after the last). The answer comes later, under `token`.
    pub fn add_path(
        &mut self,
        name: PathBuf,
        group_number: usize,
        words: &[&str],
        token: u64,
        now_ns: u64,
    ) -> anyhow::Result<()> {
        let table = self.disk.table().load();
        let nr_groups = table.groups().len();
        if group_number == 0 || group_number > nr_groups + 1 {
            bail!("no group {group_number}: there are {nr_groups}, the next new one is {}", nr_groups + 1);
        }
        if self.watched.contains_key(&name) || self.adding.contains_key(&name) {
            bail!("path {} is in the table already", name.display());
        }
        let kind = table.groups()[(group_number - 1).min(nr_groups - 1)].selector;
        let args = if words.is_empty() {
            PathArgs::for_path(kind, table.paths().len(), table.paths().len() + 1)
        } else {
            PathArgs::parse(kind, words)?
        };
        let bell = Arc::clone(&self.bell);
        let id = self.next_id;
        self.next_id += 1;
        probe::open(
            id,
            name.clone(),
            self.options.open,
            self.options.nr_workers,
            Expected {
                identity: (!self.options.trust_paths).then(|| self.identity.clone()),
                size_bytes: self.limits.size_bytes,
                reference: table.paths().iter().find(|p| p.is_active()).map(Arc::downgrade),
            },
            self.results_in.clone(),
            move || bell(),
        )?;
        let until_ns = now_ns + ns(self.options.path_timeout);
        self.adding
            .insert(name, Adding { id, since_ns: now_ns, until_ns, group: group_number - 1, args, token });
        Ok(())
    }

    pub(super) fn finish_adding(&mut self, result: ProbeResult, adding: Adding, now_ns: u64) {
        let name = result.name.clone();
        let answer = match self.try_add(result, &adding, now_ns) {
            Ok(()) => {
                log::info!("path added: path={} group={}", name.display(), adding.group + 1);
                let (path, nr_active) = (name.display().to_string(), self.disk.table().load().nr_active());
                self.events.note(What::PathAdded { path, group: adding.group + 1, nr_active });
                Outcome::Done(json!({ "took_ms": now_ns.saturating_sub(adding.since_ns) / 1_000_000 }))
            }
            Err(error) => {
                log::error!("path refused: path={} reason={error:#}", name.display());
                let reason = format!("{error:#}");
                if reason.starts_with("refused") {
                    self.events.note(What::IdentityRefused { path: name.display().to_string(), reason });
                }
                Outcome::Refused(format!("path {}: {error:#}", name.display()))
            }
        };
        self.answers.push((adding.token, answer));
    }

    fn try_add(&mut self, result: ProbeResult, adding: &Adding, now_ns: u64) -> anyhow::Result<()> {
        let path = result.found.map_err(|why| anyhow!(why))?.context("not opened")?;
        self.check(&path).map_err(|why| anyhow!(why))?;
        let mut groups = self.disk.table().load().groups().to_vec();
        if adding.group == groups.len() {
            let last = groups.last().context("no group")?;
            groups.push(Group { paths: Vec::new(), bypassed: false, ..last.clone() });
        }
        let group = groups.get_mut(adding.group).context("the group is gone")?;
        group.paths.push((Arc::clone(&path), adding.args.clone()));
        let first = group.paths.iter().filter(|(p, _)| p.is_active()).count() == 1;
        self.publish(groups)?;
        let table = self.disk.table().load();
        if let Some(best) = table.best_group()
            && self.failback.path_up(now_ns, adding.group, first, best, table.map().current_group())
        {
            self.fail_back(&table);
        }
        let mut watched = Watched::new(self.options.checker, path.identity().clone(), now_ns);
        watched.size_bytes = Some(path.limits().size_bytes);
        self.watched.insert(result.name, watched);
        Ok(())
    }

    /// Whoever waits for a path whose opening takes too long is told so; the path is not added later.
    pub(super) fn give_up_adding(&mut self, now_ns: u64) -> u64 {
        let (answers, timeout) = (&mut self.answers, self.options.path_timeout);
        self.adding.retain(|name, adding| {
            let in_time = now_ns < adding.until_ns;
            if !in_time {
                let ms = timeout.as_millis();
                answers.push((
                    adding.token,
                    Outcome::TimedOut(format!(
                        "path {}: gives no answer within {ms} ms; it is not added",
                        name.display()
                    )),
                ));
            }
            in_time
        });
        self.adding.values().map(|adding| adding.until_ns).min().unwrap_or(u64::MAX)
    }

    /// Takes a path out of the table. The answer comes when its descriptor is closed, under `token`.
    pub fn remove_path(&mut self, name: &StdPath, token: u64, now_ns: u64) -> anyhow::Result<()> {
        let name = &*self.known(name)?;
        let table = self.disk.table().load();
        let mut groups = table.groups().to_vec();
        for group in &mut groups {
            group.paths.retain(|(path, _)| path.name() != name);
        }
        groups.retain(|group| !group.paths.is_empty());
        if groups.is_empty() {
            bail!("path {} is the only one of the table", name.display());
        }
        let path = table.paths().iter().find(|p| p.name() == name).cloned().context("the path is gone")?;
        // The group in use is found again by a path of it: numbers move when a group vanishes.
        let current = table.current_group().and_then(|group| table.groups().get(group));
        let kept =
            current.and_then(|g| g.paths.iter().find(|(p, _)| p.name() != name)).map(|(p, _)| Arc::clone(p));
        let group = kept.and_then(|kept| {
            groups.iter().position(|g| g.paths.iter().any(|(path, _)| Arc::ptr_eq(path, &kept)))
        });
        let heir = groups.iter().flat_map(|g| &g.paths).next().map(|(path, _)| Arc::clone(path));
        drop(table);
        self.publish_to(groups, heir)?;
        let table = self.disk.table().load();
        table.switch_group(group);
        let probe_id = self.watched.remove(name).map_or(0, |watched| watched.probe_id);
        log::info!("path removed: path={} active={}", name.display(), table.nr_active());
        let nr_active = table.nr_active();
        self.events.note(What::PathRemoved { path: name.display().to_string(), nr_active });
        let until_ns = now_ns + ns(self.options.path_timeout);
        self.closing.push(Closing {
            path,
            probe_id,
            since_ns: now_ns,
            is_removed: true,
            waiting: Some((token, until_ns)),
        });
        Ok(())
    }

    /// Closes the paths that nothing uses any more, and answers who waits for that.
    pub(super) fn close_unused(&mut self, now_ns: u64) -> u64 {
        let (closing, mut in_use) = (std::mem::take(&mut self.closing), Vec::new());
        for mut closing in closing {
            // One hold is this one; the table's, the workers' and the probes' are the others.
            if Arc::strong_count(&closing.path) != 1 || self.probes_out.contains(&closing.probe_id) {
                if let Some((token, until_ns)) = closing.waiting
                    && now_ns >= until_ns
                {
                    let name = closing.path.name().display();
                    let why =
                        "is out of the table but has requests that do not end; it is closed when they do";
                    self.answers.push((token, Outcome::TimedOut(format!("path {name}: {why}"))));
                    closing.waiting = None;
                }
                in_use.push(closing);
                continue;
            }
            let (name, token) = (closing.path.name().display().to_string(), closing.waiting.map(|(t, _)| t));
            let (closed, bell, since_ns) = (self.closed_in.clone(), Arc::clone(&self.bell), closing.since_ns);
            let level = if closing.is_removed { log::Level::Info } else { log::Level::Debug };
            let begun = probe::close(closing.path, move || {
                log::log!(level, "path closed: path={name}");
                let _ = closed.send(Closed { name, since_ns, token });
                bell();
            });
            if let Err(error) = begun {
                log::error!("cannot start a thread to close a path: {error}");
            }
        }
        self.closing = in_use;
        while let Ok(Closed { name, since_ns, token }) = self.closed.try_recv() {
            // A path that came back has got another descriptor: that the old one is closed is of no interest.
            if !self.watched.contains_key(StdPath::new(&name)) {
                self.events.note(What::PathClosed { path: name });
            }
            let took_ms = now_ns.saturating_sub(since_ns) / 1_000_000;
            let outcome = || Outcome::Done(json!({ "drained_ms": took_ms }));
            self.answers.extend(token.map(|token| (token, outcome())));
        }
        if self.closing.is_empty() { u64::MAX } else { now_ns + REMOVAL_LOOK_NS }
    }

    /// Changes the arguments of a path for its group's selector (for service-time, its weight).
    pub fn set_path_args(&mut self, name: &StdPath, words: &[&str]) -> anyhow::Result<()> {
        let name = &*self.known(name)?;
        let mut groups = self.disk.table().load().groups().to_vec();
        for group in &mut groups {
            let kind = group.selector;
            for (path, args) in &mut group.paths {
                if path.name() == name {
                    *args = PathArgs::parse(kind, words)?;
                }
            }
        }
        self.publish(groups)
    }

    /// Changes the weight of a path, in groups of a selector that has weights.
    pub fn set_path_weight(&mut self, name: &StdPath, weight: u8) -> anyhow::Result<()> {
        let name = &*self.known(name)?;
        let mut groups = self.disk.table().load().groups().to_vec();
        let mut changed = false;
        for group in &mut groups {
            for (path, args) in group.paths.iter_mut().filter(|(path, _)| path.name() == name) {
                if group.selector != Kind::ServiceTime {
                    let (name, selector) = (path.name().display(), group.selector);
                    bail!("path {name}: its group's selector {selector} has no weights, service-time has");
                }
                let words = [args.repeat_count.to_string(), weight.to_string()];
                *args = PathArgs::parse(group.selector, &[words[0].as_str(), words[1].as_str()])?;
                changed = true;
            }
        }
        if changed { self.publish(groups) } else { bail!("the path is gone") }
    }

    /// Gives a group another selector. Of the paths' arguments stays what the selector knows.
    pub fn set_selector(&mut self, number: usize, kind: Kind, words: &[&str]) -> anyhow::Result<()> {
        let index = self.group_index(number)?;
        let mut groups = self.disk.table().load().groups().to_vec();
        let group = groups.get_mut(index).context("the group is gone")?;
        let nr_paths = group.paths.len();
        group.args = GroupArgs::parse(kind, words)?;
        group.selector = kind;
        for (at, (_, args)) in group.paths.iter_mut().enumerate() {
            *args = args.carried_to(kind, at, nr_paths);
        }
        self.publish(groups)?;
        self.setting_changed(&format!("selector of group {number}"), kind);
        Ok(())
    }

    /// Puts a path into another group, with its arguments as far as that group's selector knows them.
    pub fn regroup_path(&mut self, name: &StdPath, number: usize) -> anyhow::Result<()> {
        let name = &*self.known(name)?;
        let index = self.group_index(number)?;
        let mut groups = self.disk.table().load().groups().to_vec();
        let mut moved: Option<(Arc<Path>, PathArgs)> = None;
        for group in &mut groups {
            if let Some(at) = group.paths.iter().position(|(p, _)| p.name() == name) {
                moved = Some(group.paths.remove(at));
            }
        }
        let (path, args) = moved.context("the path is gone")?;
        let group = groups.get_mut(index).context("the group is gone")?;
        let args = args.carried_to(group.selector, group.paths.len(), group.paths.len() + 1);
        group.paths.push((path, args));
        groups.retain(|group| !group.paths.is_empty());
        self.publish(groups)?;
        self.disk.table().load().switch_group(None);
        Ok(())
    }
}
