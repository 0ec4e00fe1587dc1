//! While an earlier process has I/O under way, the rings wait; people are told.

use super::{Monitor, ns};
use crate::events::What;
use crate::fence::Look;

/// How long the next look at the lock waits at first, and at most: the kernel tells nobody when it lets go of a ring.
const LOOK_NS: u64 = 2_000_000;
const LOOK_NS_MAX: u64 = 100_000_000;

/// A wait for the I/O of an earlier process.
#[derive(Debug)]
pub(super) struct Fenced {
    since_ns: u64,
    look_ns: u64,
    /// That it takes long has been said.
    is_said: bool,
}

impl Monitor {
    /// For how long the rings have been waiting for the end of an earlier process's I/O, in ns; None: they do not.
    pub(crate) fn fenced_ns(&self, now_ns: u64) -> Option<u64> {
        self.fenced.as_ref().map(|fenced| now_ns.saturating_sub(fenced.since_ns))
    }

    /// Looks whether it has ended. Gives the time of the next look.
    pub(super) fn look_at_fence(&mut self, now_ns: u64) -> u64 {
        let look = self.disk.gate().look();
        if look == Look::Opened {
            // Also when nothing has been said yet: rings may have started since it was shut.
            self.disk.wakers().wake_all();
        }
        let Some(fenced) = &mut self.fenced else {
            if look != Look::Shut {
                return u64::MAX;
            }
            log::info!("rings wait: an earlier process has I/O with the kernel");
            self.fenced = Some(Fenced { since_ns: now_ns, look_ns: LOOK_NS, is_said: false });
            return now_ns + LOOK_NS;
        };
        let waited_ns = now_ns.saturating_sub(fenced.since_ns);
        let waited_ms = waited_ns / 1_000_000;
        if look != Look::Shut {
            log::info!("rings are served: the I/O of the earlier process has ended, after_ms={waited_ms}");
            if fenced.is_said {
                self.events.note(What::EarlierIoEnded { waited_ms });
            }
            self.fenced = None;
            return u64::MAX;
        }
        if !fenced.is_said && waited_ns >= ns(self.options.path_timeout) {
            fenced.is_said = true;
            log::error!(
                "rings still wait: a path does not answer what an earlier process has asked of it; served before, that could \
                 come later than what is newer: after_ms={waited_ms}"
            );
            self.events.note(What::EarlierIoAwaited { waited_ms });
        }
        fenced.look_ns = (fenced.look_ns * 2).min(LOOK_NS_MAX);
        now_ns + fenced.look_ns
    }
}
