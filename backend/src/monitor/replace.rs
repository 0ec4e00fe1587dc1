//! Another table in the place of the running one: what is new is opened and proved first, then all changes at once, or
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as StdPath, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail};
use polypath_paths::text::TableSpec;
use polypath_paths::{Group, Path, Table};
use serde_json::json;

use super::{Closing, Monitor, Outcome, Watched, ns};
use crate::events::What;
use crate::probe::{self, Expected, ProbeResult};

/// A table whose new paths are being opened.
#[derive(Debug)]
pub(super) struct Replacing {
    spec: TableSpec,
    token: u64,
    until_ns: u64,
    /// Probes that have not answered.
    opening: BTreeSet<u64>,
    opened: BTreeMap<PathBuf, Arc<Path>>,
}

impl Monitor {
    /// Makes `spec` the running table. The answer comes later, under `token`.
    pub fn replace_table(&mut self, spec: TableSpec, token: u64, now_ns: u64) -> anyhow::Result<()> {
        if self.replacing.is_some() {
            bail!("another table is on its way in");
        }
        let found = self.limits.size_bytes / 512;
        if let Some(sectors) = spec.length_sectors
            && sectors != found
        {
            bail!("table: the length is {sectors} sectors, but the disk has {found}");
        }
        let names: BTreeSet<PathBuf> = spec.paths().map(|path| PathBuf::from(&path.device)).collect();
        if let Some(name) = names.iter().find(|name| self.adding.contains_key(*name)) {
            bail!("path {} is being added", name.display());
        }
        if names.is_empty() {
            bail!("the table has no path");
        }
        let mut opening = BTreeSet::new();
        let table = self.disk.table().load();
        for name in names.iter().filter(|name| !self.watched.contains_key(*name)) {
            let id = self.next_id;
            self.next_id += 1;
            let bell = Arc::clone(&self.bell);
            let expected = Expected {
                identity: (!self.options.trust_paths).then(|| self.identity.clone()),
                size_bytes: self.limits.size_bytes,
                reference: table.paths().iter().find(|p| p.is_active()).map(Arc::downgrade),
            };
            let (open, nr_workers, results) =
                (self.options.open, self.options.nr_workers, self.results_in.clone());
            probe::open(id, name.clone(), open, nr_workers, expected, results, move || bell())?;
            opening.insert(id);
        }
        let until_ns = now_ns + ns(self.options.path_timeout);
        self.replacing = Some(Replacing { spec, token, until_ns, opening, opened: BTreeMap::new() });
        self.finish_replacing(now_ns);
        Ok(())
    }

    /// Takes the answer of a probe, if it is one of these.
    pub(super) fn replacing_opened(&mut self, result: ProbeResult, now_ns: u64) -> Option<ProbeResult> {
        let Some(replacing) =
            self.replacing.as_mut().filter(|replacing| replacing.opening.contains(&result.id))
        else {
            return Some(result);
        };
        replacing.opening.remove(&result.id);
        match result.found {
            Ok(Some(path)) => drop(replacing.opened.insert(result.name, path)),
            found => {
                let why = found.err().unwrap_or_else(|| "not opened".to_owned());
                let path = result.name.display().to_string();
                if why.starts_with("refused") {
                    self.events.note(What::IdentityRefused { path: path.clone(), reason: why.clone() });
                }
                self.end_replacing(Outcome::Refused(format!("path {path}: {why}; nothing was changed")));
            }
        }
        self.finish_replacing(now_ns);
        None
    }

    /// A table whose paths take too long does not come.
    pub(super) fn give_up_replacing(&mut self, now_ns: u64) -> u64 {
        let Some(replacing) = &self.replacing else { return u64::MAX };
        if now_ns < replacing.until_ns {
            return replacing.until_ns;
        }
        let ms = self.options.path_timeout.as_millis();
        let why = format!("a new path gives no answer within {ms} ms; nothing was changed");
        self.end_replacing(Outcome::TimedOut(why));
        u64::MAX
    }

    fn end_replacing(&mut self, outcome: Outcome) {
        if let Some(replacing) = self.replacing.take() {
            self.answers.push((replacing.token, outcome));
            // Closing may hang as well.
            for path in replacing.opened.into_values() {
                let _ = probe::close(path, || {});
            }
        }
    }

    fn finish_replacing(&mut self, now_ns: u64) {
        let Some(replacing) = self.replacing.as_ref().filter(|replacing| replacing.opening.is_empty()) else {
            return;
        };
        let (spec, opened) = (replacing.spec.clone(), replacing.opened.clone());
        let outcome = match self.try_replace(&spec, opened, now_ns) {
            Ok((added, removed)) => {
                self.spec = spec;
                if let Some(replacing) = &mut self.replacing {
                    replacing.opened.clear();
                }
                Outcome::Done(json!({ "added": added, "removed": removed }))
            }
            Err(error) => Outcome::Refused(format!("{error:#}; nothing was changed")),
        };
        self.end_replacing(outcome);
    }

    fn try_replace(
        &mut self,
        spec: &TableSpec,
        opened: BTreeMap<PathBuf, Arc<Path>>,
        now_ns: u64,
    ) -> anyhow::Result<(Vec<String>, Vec<String>)> {
        for path in opened.values() {
            self.check(path).map_err(|why| anyhow!("path {}: {why}", path.name().display()))?;
        }
        let old = self.disk.table().load();
        let groups = groups_of(spec, &old, &opened)?;
        let is_kept =
            |path: &Path| groups.iter().flat_map(|g| &g.paths).any(|(p, _)| p.name() == path.name());
        let mut gone: Vec<Arc<Path>> = Vec::new();
        for path in old.paths().iter().filter(|path| !is_kept(path)) {
            if !gone.iter().any(|known| Arc::ptr_eq(known, path)) {
                gone.push(Arc::clone(path));
            }
        }
        // The group in use is found again by a path of it.
        let current = old.current_group().and_then(|group| old.groups().get(group));
        let group = current.and_then(|current| {
            let is_of = |path: &Path| current.paths.iter().any(|(p, _)| p.name() == path.name());
            groups.iter().position(|group| group.paths.iter().any(|(path, _)| is_of(path)))
        });
        let heir = groups.iter().flat_map(|g| &g.paths).next().filter(|_| !gone.is_empty());
        let heir = heir.map(|(path, _)| Arc::clone(path));
        drop(old);
        self.publish_to(groups, heir)?;
        let table = self.disk.table().load();
        table.switch_group(group);
        let nr_active = table.nr_active();
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        for (name, path) in opened {
            let index = table.paths().iter().position(|p| p.name() == name).unwrap_or(0);
            self.watched
                .insert(name.clone(), Watched::new(self.options.checker, path.identity().clone(), now_ns));
            log::info!("path added: path={} group={}", name.display(), table.group_of(index) + 1);
            let (path, group) = (name.display().to_string(), table.group_of(index) + 1);
            self.events.note(What::PathAdded { path: path.clone(), group, nr_active });
            added.push(path);
        }
        for path in gone {
            let probe_id = self.watched.remove(path.name()).map_or(0, |watched| watched.probe_id);
            let name = path.name().display().to_string();
            log::info!("path removed: path={name} active={nr_active}");
            self.events.note(What::PathRemoved { path: name.clone(), nr_active });
            removed.push(name);
            self.closing.push(Closing { path, probe_id, since_ns: now_ns, is_removed: true, waiting: None });
        }
        Ok((added, removed))
    }
}

/// The groups of `spec`, of paths that are in use and of such as were opened for it.
fn groups_of(
    spec: &TableSpec,
    old: &Table,
    opened: &BTreeMap<PathBuf, Arc<Path>>,
) -> anyhow::Result<Vec<Group>> {
    let path_of = |device: &str| {
        let name = StdPath::new(device);
        let known = old.paths().iter().find(|path| path.name() == name).or_else(|| opened.get(name));
        known.map(Arc::clone).with_context(|| format!("path {device} is gone"))
    };
    let mut groups = Vec::new();
    for (index, group) in spec.groups.iter().enumerate() {
        let mut paths = Vec::new();
        for path in &group.paths {
            paths.push((path_of(&path.device)?, path.args.clone()));
        }
        // A group that was disabled stays so as long as it is the same.
        let is_same = |old: &&Group| {
            let names = |paths: &[(Arc<Path>, _)]| {
                paths.iter().map(|(p, _)| p.name().to_owned()).collect::<BTreeSet<_>>()
            };
            names(&old.paths) == names(&paths)
        };
        let bypassed = old.groups().get(index).filter(is_same).is_some_and(|old| old.bypassed);
        groups.push(Group { paths, selector: group.selector, args: group.args.clone(), bypassed });
    }
    Ok(groups)
}
