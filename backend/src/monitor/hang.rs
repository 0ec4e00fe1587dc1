//! Paths on which a request waits for too long.

use std::cmp::Reverse;

use polypath_paths::{FailOutcome, Table, Waiting};

use super::{Monitor, ns};

/// How often the workers are asked for the age of what they have in flight, while it may be too high.
const LOOK_INTERVAL_NS: u64 = 10_000_000;

/// A worker that is asked and does not look within this time, with a path silent for longer than the path timeout, is
/// taken to be held up by that path.
const LOOK_GRACE_NS: u64 = 500_000_000;

impl Monitor {
    /// Takes out paths on which a request waits for too long. Gives the time of the next look.
    pub(super) fn find_hung(&mut self, table: &Table, now_ns: u64) -> u64 {
        let timeout_ns = ns(self.options.path_timeout);
        // What begins to be waited for after this look cannot be overdue before the next one.
        let mut next_ns = now_ns + timeout_ns;
        let mut ask = false;
        for (index, path) in table.paths().iter().enumerate() {
            if !path.is_active() {
                continue;
            }
            match path.gauges().waiting().map(|waiting| lateness(waiting, timeout_ns, now_ns)).max() {
                None => {}
                Some(Lateness::None(due_ns)) => next_ns = next_ns.min(due_ns.0),
                Some(Lateness::Perhaps) => ask = true,
                Some(Lateness::Sure) => {
                    if let FailOutcome::Failed { nr_active } = table.fail_path(index, now_ns) {
                        log::warn!(
                            "path failed: path={} group={} errno=none (no answer for {} ms) active={nr_active}",
                            path.name().display(),
                            table.group_of(index) + 1,
                            self.options.path_timeout.as_millis(),
                        );
                        if let Some(watched) = self.watched.get_mut(path.name()) {
                            let why = format!("no answer for {} ms", self.options.path_timeout.as_millis());
                            let group = table.group_of(index);
                            watched.note_failed(path, group, &why, nr_active, now_ns, &mut self.events);
                        }
                        // Seen by note_failures at the next tick, which the failure has rung for.
                        next_ns = now_ns;
                    }
                }
            }
        }
        if ask {
            if now_ns >= self.look_asked_ns + LOOK_INTERVAL_NS {
                self.look_asked_ns = now_ns;
                table.map().ask_look();
                self.disk.wakers().wake_all();
            }
            // The workers ring when they have looked.
            next_ns = next_ns.min(self.look_asked_ns + LOOK_INTERVAL_NS);
        }
        next_ns
    }
}

/// Whether a worker has waited too long for one of its requests on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Lateness {
    /// Not before this time, in ns.
    None(Reverse<u64>),
    /// The worker has to look.
    Perhaps,
    /// It has looked, or cannot.
    Sure,
}

fn lateness(waiting: Waiting, timeout_ns: u64, now_ns: u64) -> Lateness {
    let due_ns = waiting.oldest_ns.saturating_add(timeout_ns);
    let silent_ns = waiting.heard_ns.saturating_add(timeout_ns);
    if waiting.looked_ns >= due_ns || now_ns >= silent_ns.saturating_add(LOOK_GRACE_NS) {
        Lateness::Sure
    } else if now_ns >= due_ns {
        Lateness::Perhaps
    } else {
        Lateness::None(Reverse(due_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f10_a_path_is_late_when_the_oldest_request_is() {
        let late = |heard_ns, oldest_ns, looked_ns, now_ns| {
            lateness(Waiting { heard_ns, oldest_ns, looked_ns }, 1_000_000_000, now_ns)
        };
        const S: u64 = 1_000_000_000;
        assert_eq!(late(S, S, S, S), Lateness::None(Reverse(2 * S)));
        // Others are answered: the worker has to say whether the oldest was.
        assert_eq!(late(2 * S, S, S, 2 * S), Lateness::Perhaps);
        assert_eq!(late(2 * S, S, 2 * S, 2 * S), Lateness::Sure);
        assert_eq!(late(2 * S, 2 * S - 1, 2 * S, 2 * S), Lateness::None(Reverse(3 * S - 1)));
        // Nobody looks: as long as the path is heard of, that says nothing about it.
        assert_eq!(late(9 * S, S, S, 9 * S), Lateness::Perhaps);
        assert_eq!(late(S, S, S, 2 * S + LOOK_GRACE_NS), Lateness::Sure);
        assert!(Lateness::None(Reverse(1)) > Lateness::None(Reverse(2)), "the earliest counts");
    }
}
