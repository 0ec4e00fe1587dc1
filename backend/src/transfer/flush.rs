//! Which paths a flush has to visit.

use polypath_paths::{Path, Table};

use super::Transfer;

impl Transfer {
    /// A flush visits every active path that carried a write since its last flush.
    pub(super) fn plan_flush(&mut self, table: &Table) {
        let bits = |wanted: &dyn Fn(&Path) -> bool| {
            let paths = table.paths().iter().enumerate();
            paths.filter(|(_, p)| wanted(p)).fold(0u64, |bits, (i, _)| bits | 1 << i)
        };
        let dirty = bits(&|p| p.ledger().is_dirty());
        self.to_flush = dirty & bits(&|p| p.is_active());
        // What a failed path carried reached the LUN (writes are direct): any path's flush covers it.
        self.flush_owed = dirty != 0;
    }

    /// A path that was to be flushed may have failed meanwhile: see [`Self::flush_target_failed`].
    fn skip_dead_flushes(&mut self) {
        let Some(view) = self.view.upgrade() else { return };
        for (i, path) in view.paths().iter().enumerate() {
            if self.to_flush >> i & 1 == 1 && !path.is_active() {
                self.to_flush &= !(1 << i);
                self.flush_owed = true;
            }
        }
    }

    /// The path that a flush was on has done its part. True if the flush is complete with it.
    pub(super) fn flush_target_done(&mut self) -> bool {
        self.flush_owed = false;
        self.to_flush &= !(1 << self.path);
        self.skip_dead_flushes();
        self.is_empty()
    }

    /// The path that a flush was on has failed. What it carried is another one's to flush, from now on: storage that keeps
    /// a cache for each port hands it over when the port is lost, which a flush of before that does not cover.
    pub fn flush_target_failed(&mut self) {
        self.to_flush &= !(1 << self.path);
        self.flush_owed = true;
        self.skip_dead_flushes();
    }
}
