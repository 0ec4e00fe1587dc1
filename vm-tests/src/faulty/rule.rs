//! The words of the control protocol between a test and its file server: rules, operations, commands.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Kind of an operation that reaches a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Data read.
    Read,
    /// Data write.
    Write,
    /// fsync or fdatasync.
    Fsync,
    /// fallocate in any mode.
    Fallocate,
    /// Open.
    Open,
    /// stat of the name or of an open descriptor.
    Stat,
}

/// What a rule does to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Refuse with this errno; nothing is done.
    Errno(i32),
    /// Do only the first so many bytes.
    Short(usize),
    /// Wait so long, then go on with the rules behind this one.
    DelayMs(u64),
    /// Keep it until it is released.
    Hold,
}

/// How often a rule fires among the operations that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Times {
    /// Each time.
    All,
    /// So many times, then never again.
    Next(u64),
    /// Each so-and-so-manieth time: `Every(3)` fires on the third, the sixth, ...
    Every(u64),
}

/// One scripted fault. The first rule of a name that fires decides; a delay lets the rules behind it decide too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub(super) action: Action,
    pub(super) kinds: Vec<Kind>,
    pub(super) sectors: Option<Range<u64>>,
    pub(super) times: Times,
}

impl Rule {
    /// A rule for reads, writes, fsyncs and fallocates, each time, anywhere.
    pub fn new(action: Action) -> Self {
        let kinds = vec![Kind::Read, Kind::Write, Kind::Fsync, Kind::Fallocate];
        Self { action, kinds, sectors: None, times: Times::All }
    }

    /// Refuses with `errno`.
    pub fn errno(errno: i32) -> Self {
        Self::new(Action::Errno(errno))
    }

    /// Serves only `bytes`, of reads and writes.
    pub fn short(bytes: usize) -> Self {
        Self::new(Action::Short(bytes)).on(&[Kind::Read, Kind::Write])
    }

    /// Answers so many milliseconds later.
    pub fn delay_ms(ms: u64) -> Self {
        Self::new(Action::DelayMs(ms))
    }

    /// Keeps operations until they are released.
    pub fn hold() -> Self {
        Self::new(Action::Hold)
    }

    /// Only for these kinds.
    pub fn on(mut self, kinds: &[Kind]) -> Self {
        self.kinds = kinds.to_vec();
        self
    }

    /// Only for reads.
    pub fn reads(self) -> Self {
        self.on(&[Kind::Read])
    }

    /// Only for writes.
    pub fn writes(self) -> Self {
        self.on(&[Kind::Write])
    }

    /// Only for fsyncs.
    pub fn fsyncs(self) -> Self {
        self.on(&[Kind::Fsync])
    }

    /// Only for fallocates.
    pub fn fallocates(self) -> Self {
        self.on(&[Kind::Fallocate])
    }

    /// Only when the operation touches one of these 512-byte sectors.
    pub fn sectors(mut self, sectors: Range<u64>) -> Self {
        self.sectors = Some(sectors);
        self
    }

    /// Only for the next `n` that match.
    pub fn next(mut self, n: u64) -> Self {
        self.times = Times::Next(n);
        self
    }

    /// Only for each `n`th that matches.
    pub fn every(mut self, n: u64) -> Self {
        self.times = Times::Every(n);
        self
    }

    pub(super) fn matches(&self, kind: Kind, offset: u64, len: u64) -> bool {
        let touches = |sectors: &Range<u64>| {
            offset < sectors.end.saturating_mul(512) && offset + len > sectors.start.saturating_mul(512)
        };
        self.kinds.contains(&kind) && self.sectors.as_ref().is_none_or(touches)
    }
}

/// An operation as the server saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Op {
    /// Place in the order of all arrivals and completions of this mount.
    pub order: u64,
    /// Place of its completion in the same order; `None` while held or delayed.
    pub done: Option<u64>,
    /// The name that was used.
    pub name: String,
    /// What it was.
    pub kind: Kind,
    /// Byte offset.
    pub offset: u64,
    /// Byte length.
    pub len: u64,
    /// Number of the open that it came through.
    pub fh: u64,
    /// fallocate: the mode bits. A write: `O_DSYNC` if it has to be durable. Else 0.
    pub mode: i32,
    /// Bytes done, or `-errno`; 0 while not done.
    pub result: i64,
}

/// Numbers of operations answered and kept, for one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Reads that arrived.
    pub reads: u64,
    /// Writes that arrived.
    pub writes: u64,
    /// fsyncs that arrived.
    pub fsyncs: u64,
    /// fallocates that arrived.
    pub fallocates: u64,
    /// Opens that arrived.
    pub opens: u64,
    /// Closes of the last descriptor of an open.
    pub releases: u64,
    /// Opens that were not closed yet.
    pub open: u64,
    /// Operations refused by a rule.
    pub refused: u64,
    /// Operations held at this moment.
    pub held: u64,
}

impl Counts {
    /// Reads and writes.
    pub fn data(&self) -> u64 {
        self.reads + self.writes
    }
}

/// A line from the test to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    Rule { name: String, rule: Rule },
    ClearRules { name: String },
    Release { name: String, errno: Option<i32>, nr: Option<usize> },
    Counts { name: String },
    Log,
    ClearLog,
    Logging(bool),
    WriteBack { name: String, on: bool },
    ForgetUnsynced { name: String },
    Cache { model: super::CacheModel },
    PowerOff { seed: u64 },
    PowerOn,
    Size { name: String, size: Option<u64> },
    Inode { name: String, ino: u64 },
    Backing { name: String, file: std::path::PathBuf },
    Add { name: String },
    Remove { name: String },
}

/// The server's line back.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Counts(Counts),
    Log(Vec<Op>),
    Failed(String),
}
