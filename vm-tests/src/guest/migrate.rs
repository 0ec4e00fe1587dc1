//! Moving a guest to another front-end while it runs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::json;

use super::Guest;
use crate::server::wait_for;

/// Memory is copied while an emulated CPU writes it; on a busy machine that takes a while.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Slow enough that a move is still under way when it is cancelled, in bytes per second.
const CRAWL: u64 = 4 << 20;

impl Guest {
    /// The state of the move, as QEMU names it.
    pub fn migration(&self) -> Result<String> {
        let info = self.qmp("query-migrate", json!({}))?;
        Ok(info["status"].as_str().unwrap_or("none").to_owned())
    }

    fn begin_move(&self, socket: &Path, bandwidth: u64) -> Result<()> {
        self.qmp("migrate-set-parameters", json!({ "max-bandwidth": bandwidth }))?;
        self.qmp("migrate", json!({ "uri": format!("unix:{}", socket.display()) })).map(drop)
    }

    fn wait_move(&self, wanted: &str) -> Result<()> {
        let state = wait_for(&format!("a move that is {wanted}"), MIGRATION_TIMEOUT, || {
            let state = self.migration().unwrap_or_else(|e| format!("failed: {e:#}"));
            let is_over = state == wanted || state.starts_with("failed") || state == "completed";
            is_over.then_some(state)
        })?;
        ensure!(state == wanted, "the move is {state}: {}", self.qemu_log());
        Ok(())
    }

    /// Moves the guest to the machine that waits at `socket`, and ends this one.
    pub fn move_to(self, socket: &Path) -> Result<()> {
        self.begin_move(socket, 1 << 40)?;
        self.wait_move("completed")?;
        self.kill();
        Ok(())
    }

    /// Begins to move the guest, lets `meanwhile` run, and cancels the move: the guest goes on here.
    pub fn move_and_cancel(&self, socket: &Path, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        self.begin_move(socket, CRAWL)?;
        self.wait_move("active")?;
        meanwhile()?;
        if self.migration()? != "active" {
            bail!("the move was over before it was cancelled: {}", self.migration()?);
        }
        self.qmp("migrate_cancel", json!({}))?;
        self.wait_move("cancelled")
    }
}
