//! Probes: when one is due, what its answer means, and what a path that comes back has to be.

use std::path::Path as StdPath;
use std::sync::Arc;

use polypath_paths::{CheckerVerdict, Group, Path, Table};

use super::{Closing, Monitor};
use crate::events::What;
use crate::gather;
use crate::probe::{self, Expected, ProbeResult};

impl Monitor {
    pub(super) fn run_checkers(&mut self, table: &Table, now_ns: u64) -> u64 {
        let mut next_ns = u64::MAX;
        for (index, path) in table.paths().iter().enumerate() {
            let Some(watched) = self.watched.get_mut(path.name()) else { continue };
            if watched.checker.check_overdue(now_ns) == CheckerVerdict::Fail {
                watched.fail(table, index, "its probe gives no answer", now_ns, &mut self.events);
            }
            if watched.checker.is_due(now_ns) {
                watched.checker.begin(now_ns);
                watched.probe_id = self.next_id;
                self.probes_out.insert(self.next_id);
                self.next_id += 1;
                let bell = Arc::clone(&self.bell);
                let reopen = (!path.is_active()).then(|| Expected {
                    identity: (!self.options.trust_paths).then(|| watched.identity.clone()),
                    size_bytes: self.limits.size_bytes,
                    reference: table.paths().iter().find(|p| p.is_active()).map(Arc::downgrade),
                });
                let begun = probe::probe(
                    watched.probe_id,
                    Arc::clone(path),
                    reopen,
                    self.results_in.clone(),
                    move || bell(),
                );
                if let Err(error) = begun {
                    log::error!("cannot start a probe: {error}");
                    self.probes_out.remove(&watched.probe_id);
                    watched.checker.end(now_ns, path.is_active(), false);
                }
            }
            next_ns = next_ns.min(watched.checker.next_ns().unwrap_or(u64::MAX));
        }
        next_ns
    }

    pub(super) fn probe_ended(&mut self, result: ProbeResult, now_ns: u64) {
        self.probes_out.remove(&result.id);
        let Some(result) = self.replacing_opened(result, now_ns) else { return };
        if self.adding.get(&result.name).is_some_and(|adding| adding.id == result.id)
            && let Some(adding) = self.adding.remove(&result.name)
        {
            return self.finish_adding(result, adding, now_ns);
        }
        let table = self.disk.table().load();
        let Some(index) = table.paths().iter().position(|p| p.name() == result.name) else { return };
        let Some(watched) = self.watched.get_mut(&result.name) else { return };
        if watched.probe_id != result.id {
            return;
        }
        let is_last = table.nr_active() == 0;
        let new = match result.found {
            Ok(new) => new,
            Err(why) => {
                if why.starts_with("refused") && watched.refused.as_ref() != Some(&why) {
                    log::error!("path {why}: path={}", result.name.display());
                    let path = result.name.display().to_string();
                    self.events.note(What::IdentityRefused { path, reason: why.clone() });
                    watched.refused = Some(why.clone());
                }
                if watched.checker.end(now_ns, false, is_last) == CheckerVerdict::Fail {
                    watched.fail(&table, index, &why, now_ns, &mut self.events);
                }
                watched.last_error = Some(why);
                return;
            }
        };
        if result.size_bytes.is_some() {
            watched.size_bytes = result.size_bytes;
        }
        match (watched.checker.end(now_ns, true, is_last), new) {
            (CheckerVerdict::Reinstate, Some(new)) => self.reinstate(&table, new, now_ns),
            // It was active when the probe began, so it was not opened anew.
            (CheckerVerdict::Reinstate, None) => watched.checker.suspected(now_ns),
            _ => {}
        }
        self.grow();
    }

    /// Puts a path that was opened anew in the place of the old one, if it proves to be the same disk.
    fn reinstate(&mut self, table: &Table, new: Arc<Path>, now_ns: u64) {
        if let Err(why) = self.check(&new) {
            return self.refuse(&new, why, now_ns);
        }
        let name = new.name().to_owned();
        if let Some(old) = table.paths().iter().find(|p| p.name() == name) {
            self.closing.push(Closing {
                path: Arc::clone(old),
                probe_id: 0,
                since_ns: now_ns,
                is_removed: false,
                waiting: None,
            });
        }
        let groups = replaced(table.groups(), &name, &new);
        let Some(group) = groups.iter().position(|g| g.paths.iter().any(|(p, _)| Arc::ptr_eq(p, &new)))
        else {
            return;
        };
        let first = groups[group].paths.iter().filter(|(p, _)| p.is_active()).count() == 1;
        if let Err(error) = self.publish(groups) {
            log::error!("cannot put back a path: path={} error={error:#}", name.display());
            return;
        }
        let table = self.disk.table().load();
        let (nr_active, mut failed_ms) = (table.nr_active(), 0);
        if let Some(watched) = self.watched.get_mut(&name) {
            watched.checker.reinstated(now_ns);
            (watched.refused, watched.last_error, watched.reason) = (None, None, None);
            watched.is_noted = false;
            failed_ms = now_ns.saturating_sub(watched.since_ns) / 1_000_000;
            watched.since_ns = now_ns;
        }
        let path = name.display().to_string();
        self.events.note(What::PathReinstated { path, group: group + 1, failed_ms, nr_active });
        log::info!("path reinstated: path={} group={} active={nr_active}", name.display(), group + 1);
        if let Some(best) = table.best_group()
            && self.failback.path_up(now_ns, group, first, best, table.map().current_group())
        {
            self.fail_back(&table);
        }
    }

    pub(super) fn check(&self, new: &Path) -> Result<(), String> {
        let (limits, known) = (new.limits(), &self.limits);
        // A larger one has been enlarged, and the others not yet; but what is not proved has to fit.
        let fits = match self.options.trust_paths {
            true => limits.size_bytes == known.size_bytes,
            false => limits.size_bytes >= known.size_bytes,
        };
        if !fits {
            return Err(format!("its size is {} bytes, expected {}", limits.size_bytes, known.size_bytes));
        }
        if limits.logical_block_bytes > known.logical_block_bytes {
            return Err(format!(
                "its blocks are {} bytes, the guest was told {}",
                limits.logical_block_bytes, known.logical_block_bytes
            ));
        }
        // The guest is told nothing of this, so tables follow their paths. What is cut at blocks has to stay aligned.
        let align_max_bytes = known.logical_block_bytes.min(gather::MEM_ALIGN_BYTES_MAX);
        if limits.mem_align_bytes > align_max_bytes {
            return Err(format!(
                "it asks for buffers aligned to {} bytes, at most {align_max_bytes} are possible",
                limits.mem_align_bytes
            ));
        }
        Ok(())
    }

    fn refuse(&mut self, new: &Path, why: String, now_ns: u64) {
        let Some(watched) = self.watched.get_mut(new.name()) else { return };
        watched.checker.rejected(now_ns);
        if watched.refused.as_ref() != Some(&why) {
            log::error!("path refused: path={} reason={why}", new.name().display());
            let path = new.name().display().to_string();
            self.events.note(What::IdentityRefused { path, reason: why.clone() });
        }
        watched.last_error = Some(why.clone());
        watched.refused = Some(why);
    }
}

/// The groups with another descriptor for the path of this name.
fn replaced(groups: &[Group], name: &StdPath, new: &Arc<Path>) -> Vec<Group> {
    let mut groups = groups.to_vec();
    for (path, _) in groups.iter_mut().flat_map(|group| group.paths.iter_mut()) {
        if path.name() == name {
            *path = Arc::clone(new);
        }
    }
    groups
}
