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

    /// A path that was to be flushed may have failed meanwhile: see [`Self::plan_flush`].
    fn skip_dead_flushes(&mut self) {
        let Some(view) = self.view.upgrade() else { return };
        for (i, path) in view.paths().iter().enumerate() {
            if !path.is_active() {
                self.to_flush &= !(1 << i);
            }
        }
    }

    /// The path that a flush was on cannot do it. True if the flush is complete without it.
    pub fn drop_flush_target(&mut self) -> bool {
        self.to_flush &= !(1 << self.path);
        self.skip_dead_flushes();
        self.is_empty()
    }
}
