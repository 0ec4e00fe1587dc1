//! The state of one name: its file, its rules, its counters, its write-back cache.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use super::rule::{Action, Counts, Kind, Rule, Times};

const BLOCK: usize = 512;
const BLOCK_BYTES: u64 = 512;

/// What the rules make of one operation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fate {
    pub delay_ms: u64,
    pub hold: bool,
    pub errno: Option<i32>,
    pub short: Option<usize>,
}

#[derive(Debug)]
struct RuleState {
    rule: Rule,
    seen: u64,
}

impl RuleState {
    fn fires(&mut self) -> bool {
        self.seen += 1;
        match self.rule.times {
            Times::All => true,
            Times::Next(n) => self.seen <= n,
            Times::Every(n) => self.seen.is_multiple_of(n.max(1)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Name {
    pub name: String,
    pub file: Arc<File>,
    /// `st_ino` as told to stat; the same for all names unless a test changes it.
    pub ino: u64,
    /// Size as told to stat, when it is not the file's own.
    pub size: Option<u64>,
    pub gone: bool,
    /// It leads to another file than the others, which the cache is not for.
    pub foreign: bool,
    pub counts: Counts,
    rules: Vec<RuleState>,
    /// Unsynced blocks, when write-back is on.
    unsynced: Option<BTreeMap<u64, [u8; BLOCK]>>,
}

impl Name {
    pub fn new(name: String, file: Arc<File>, ino: u64) -> Self {
        let counts = Counts::default();
        Self {
            name,
            file,
            ino,
            size: None,
            gone: false,
            foreign: false,
            counts,
            rules: Vec::new(),
            unsynced: None,
        }
    }

    pub fn add_rule(&mut self, rule: Rule) {
        self.rules.push(RuleState { rule, seen: 0 });
    }

    pub fn clear_rules(&mut self) {
        self.rules.clear();
    }

    pub fn clear_holds(&mut self) {
        self.rules.retain(|state| state.rule.action != Action::Hold);
    }

    pub fn count(&mut self, kind: Kind) {
        match kind {
            Kind::Read => self.counts.reads += 1,
            Kind::Write => self.counts.writes += 1,
            Kind::Fsync => self.counts.fsyncs += 1,
            Kind::Fallocate => self.counts.fallocates += 1,
            Kind::Open => self.counts.opens += 1,
            Kind::Stat => {}
        }
    }

    pub fn fate(&mut self, kind: Kind, offset: u64, len: u64) -> Fate {
        let mut fate = Fate::default();
        for state in self.rules.iter_mut().filter(|state| state.rule.matches(kind, offset, len)) {
            if !state.fires() {
                continue;
            }
            match state.rule.action {
                Action::DelayMs(ms) => {
                    fate.delay_ms += ms;
                    continue;
                }
                Action::Errno(errno) => fate.errno = Some(errno),
                Action::Short(bytes) => fate.short = Some(bytes),
                Action::Hold => fate.hold = true,
            }
            break;
        }
        fate
    }

    pub fn set_write_back(&mut self, on: bool) -> io::Result<()> {
        if on {
            self.unsynced.get_or_insert_default();
            return Ok(());
        }
        self.sync()?;
        self.unsynced = None;
        Ok(())
    }

    pub fn forget_unsynced(&mut self) {
        if let Some(unsynced) = &mut self.unsynced {
            unsynced.clear();
        }
    }

    /// Whether data operations need this state at all; without a cache they go to the file with no lock held.
    pub fn caches(&self) -> bool {
        self.unsynced.is_some()
    }

    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let got = read_full(&self.file, offset, buf)?;
        let end = offset + got as u64;
        for (&block, bytes) in
            self.unsynced.iter().flat_map(|u| u.range(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)))
        {
            for (at, byte) in (block * BLOCK_BYTES..).zip(bytes) {
                if (offset..end).contains(&at) {
                    buf[usize::try_from(at - offset).expect("within buf")] = *byte;
                }
            }
        }
        Ok(got)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let Some(unsynced) = &mut self.unsynced else { return self.file.write_all_at(data, offset) };
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let (block, within) = (at / BLOCK_BYTES, usize::try_from(at % BLOCK_BYTES).expect("below 512"));
            let piece = rest.len().min(BLOCK - within);
            if let std::collections::btree_map::Entry::Vacant(vacant) = unsynced.entry(block) {
                let mut old = [0; BLOCK];
                read_full(&self.file, block * BLOCK_BYTES, &mut old)?;
                vacant.insert(old);
            }
            let bytes = unsynced.get_mut(&block).expect("just inserted");
            bytes[within..within + piece].copy_from_slice(&rest[..piece]);
            rest = &rest[piece..];
            at += piece as u64;
        }
        Ok(())
    }

    pub fn sync(&mut self) -> io::Result<()> {
        if let Some(unsynced) = &mut self.unsynced {
            for (block, bytes) in std::mem::take(unsynced) {
                self.file.write_all_at(&bytes, block * BLOCK_BYTES)?;
            }
        }
        Ok(())
    }
}

/// Reads until `buf` is full or the file ends.
pub(super) fn read_full(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buf.len() {
        match file.read_at(&mut buf[got..], offset + got as u64)? {
            0 => break,
            n => got += n,
        }
    }
    Ok(got)
}
