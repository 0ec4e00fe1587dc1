//! The size of the disk follows its paths: up when all that are in use show more, down only when the operator says so.

use std::collections::BTreeSet;
use std::path::{Path as StdPath, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use serde_json::json;

use super::{Monitor, Outcome, ns};
use crate::events::What;
use crate::probe;

/// A question to all paths that are in use, and who asked.
#[derive(Debug)]
pub(super) struct Resizing {
    token: u64,
    may_shrink: bool,
    until_ns: u64,
    /// Paths that have not answered.
    waiting: BTreeSet<PathBuf>,
    found: Vec<(PathBuf, Result<u64, String>)>,
}

impl Monitor {
    /// `resize`: asks all active paths for their size, and takes the smallest of the answers over. A path that does not answer, or
    /// cannot, changes nothing, and a smaller size only if `may_shrink`. The answer comes later, under `token`.
    pub fn resize(&mut self, may_shrink: bool, token: u64, now_ns: u64) -> anyhow::Result<()> {
        if self.resizing.is_some() {
            bail!("another resize is under way");
        }
        let table = self.disk.table().load();
        let active: Vec<_> = table.paths().iter().filter(|path| path.is_active()).collect();
        if active.is_empty() {
            bail!("no path is active");
        }
        if let Some(path) = active.iter().find(|path| self.sizes_out.contains(path.name())) {
            bail!("path {}: has not answered an earlier question for its size", path.name().display());
        }
        let mut waiting = BTreeSet::new();
        for path in active {
            let bell = Arc::clone(&self.bell);
            probe::size(Arc::clone(path), self.sizes_in.clone(), move || bell())?;
            self.sizes_out.insert(path.name().to_owned());
            waiting.insert(path.name().to_owned());
        }
        let until_ns = now_ns + ns(self.options.path_timeout);
        self.resizing = Some(Resizing { token, may_shrink, until_ns, waiting, found: Vec::new() });
        Ok(())
    }

    /// Takes answers to [`Self::resize`]. Gives the time at which to come back at the latest.
    pub(super) fn go_on_resizing(&mut self, now_ns: u64) -> u64 {
        while let Ok((name, found)) = self.sizes.try_recv() {
            self.sizes_out.remove(&name);
            if let Some(resizing) = &mut self.resizing
                && resizing.waiting.remove(&name)
            {
                resizing.found.push((name, found));
            }
        }
        let Some(resizing) = &self.resizing else { return u64::MAX };
        if !resizing.waiting.is_empty() && now_ns < resizing.until_ns {
            return resizing.until_ns;
        }
        if let Some(resizing) = self.resizing.take() {
            let answer = match self.end_resizing(&resizing) {
                Ok(()) => Outcome::Done(json!({ "size_bytes": self.limits.size_bytes })),
                Err(error) => {
                    Outcome::Refused(format!("the size stays {} bytes: {error:#}", self.limits.size_bytes))
                }
            };
            self.answers.push((resizing.token, answer));
        }
        u64::MAX
    }

    fn end_resizing(&mut self, resizing: &Resizing) -> anyhow::Result<()> {
        if let Some(name) = resizing.waiting.first() {
            let ms = self.options.path_timeout.as_millis();
            bail!("path {}: gives no answer within {ms} ms", name.display());
        }
        let mut smallest = u64::MAX;
        for (name, found) in &resizing.found {
            match found {
                Ok(size_bytes) => {
                    self.remember_size(name, Some(*size_bytes));
                    smallest = smallest.min(*size_bytes);
                }
                Err(why) => bail!("path {}: {why}", name.display()),
            }
        }
        let new = self.whole_blocks(smallest);
        if new == 0 || new == u64::MAX {
            bail!("the paths show {smallest} bytes");
        }
        if new < self.limits.size_bytes && !resizing.may_shrink {
            bail!("the paths show {new} bytes; the disk is made smaller only if it is told to shrink");
        }
        self.set_size(new)
    }

    /// Notes what a path showed; None: it could not be asked.
    pub(super) fn remember_size(&mut self, name: &StdPath, size_bytes: Option<u64>) {
        if let (Some(watched), Some(_)) = (self.watched.get_mut(name), size_bytes) {
            watched.size_bytes = size_bytes;
        }
    }

    /// Makes the disk larger if every active path shows more.
    pub(super) fn grow(&mut self) {
        let table = self.disk.table().load();
        let mut smallest = None;
        for path in table.paths().iter().filter(|path| path.is_active()) {
            let Some(shown) = self.watched.get(path.name()).and_then(|watched| watched.size_bytes) else {
                return;
            };
            smallest = Some(smallest.unwrap_or(u64::MAX).min(shown));
        }
        let new = self.whole_blocks(smallest.unwrap_or(0));
        if new > self.limits.size_bytes
            && let Err(error) = self.set_size(new)
        {
            log::error!("cannot make the disk larger: {error:#}");
        }
    }

    fn whole_blocks(&self, size_bytes: u64) -> u64 {
        let block = u64::from(self.limits.logical_block_bytes);
        size_bytes / block * block
    }

    fn set_size(&mut self, size_bytes: u64) -> anyhow::Result<()> {
        let old = self.limits.size_bytes;
        if size_bytes == old {
            return Ok(());
        }
        self.limits.size_bytes = size_bytes;
        self.disk.set_size(size_bytes);
        let groups = self.disk.table().load().groups().to_vec();
        self.publish(groups)?;
        log::info!("size changed: from_bytes={old} to_bytes={size_bytes}");
        self.events
            .note(What::SettingChanged { setting: "size_bytes".into(), value: size_bytes.to_string() });
        self.disk.back_channel().config_changed();
        Ok(())
    }
}
