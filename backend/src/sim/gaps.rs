//! What the runs leave out because it is known to go wrong: each goes with its fault.

/// True is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gaps {
    /// Waiting for a busy path without turning round and round.
    pub(crate) spinning: bool,
    /// A path's load is 0 when nothing is in flight there.
    pub(crate) load: bool,
    /// Memory that goes away under requests, the ring's own included.
    pub(crate) memory: bool,
    /// What waits for a path is shown as held.
    pub(crate) held: bool,
    /// Asking the other paths when one may not write, while tables change.
    pub(crate) asking: bool,
    /// A stop fails no write that only waits for another one.
    pub(crate) blocked: bool,
    /// Reading nothing from the middle of a block.
    pub(crate) nothing: bool,
    /// The sync that write-through owes goes down the path that carried the last part.
    pub(crate) write_through: bool,
    /// Paths that are removed with writes to flush.
    pub(crate) dirty_removal: bool,
    /// The last active path is removed while others, which have failed, stay.
    pub(crate) last_removal: bool,
}

impl Gaps {
    /// What is known to go wrong today.
    pub(crate) const KNOWN: Self = Self {
        spinning: false,
        load: false,
        memory: true,
        held: false,
        asking: false,
        blocked: true,
        nothing: true,
        write_through: true,
        dirty_removal: false,
        last_removal: false,
    };
}
