//! The write cache of a LUN: what is in it and not synced may be lost when the power goes.
//!
//! Reads by any name see what was written last by any name, as storage with several ports shows it. What becomes of what is
//! not synced is up to the power cut: each block by itself keeps what was durable, or any version written since.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use serde::{Deserialize, Serialize};

use super::names::read_full;
use crate::front_end::verify::Rng;

const BLOCK: usize = 512;
const BLOCK_BYTES: u64 = 512;

/// What a sync by one name makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheModel {
    /// Everything that was written before it, by whatever name: SYNCHRONIZE CACHE speaks of the whole LUN.
    Lun,
    /// What was written by this name, and by names that have failed a request since (the other controller has taken over
    /// what was theirs; so it does with what comes by descriptors from before the failure). Harsher than the standard.
    Port,
}

/// Written by a name that has failed since.
const NOBODY: usize = usize::MAX;

#[derive(Debug)]
struct Version {
    /// Place in the order of all writes.
    at: u64,
    /// Index of the name.
    by: usize,
    bytes: [u8; BLOCK],
}

/// A cache in front of the backing file.
#[derive(Debug)]
pub(super) struct Cache {
    model: CacheModel,
    last: u64,
    /// What is not durable, oldest first.
    blocks: BTreeMap<u64, Vec<Version>>,
    /// For each name the first open that came after its last failure.
    lost_before: Vec<u64>,
}

impl Cache {
    pub fn new(model: CacheModel) -> Self {
        Self { model, last: 0, blocks: BTreeMap::new(), lost_before: Vec::new() }
    }

    /// Everything that was written up to now: what a sync that begins now covers.
    pub fn mark(&self) -> u64 {
        self.last
    }

    pub fn read(&self, file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let got = read_full(file, offset, buf)?;
        let end = offset + got as u64;
        for (&block, versions) in self.blocks.range(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)) {
            let Some(newest) = versions.last() else { continue };
            for (at, byte) in (block * BLOCK_BYTES..).zip(&newest.bytes) {
                if (offset..end).contains(&at) {
                    buf[usize::try_from(at - offset).expect("within buf")] = *byte;
                }
            }
        }
        Ok(got)
    }

    /// A write by a name, through its open number `fh`.
    pub fn write(&mut self, file: &File, (by, fh): (usize, u64), offset: u64, data: &[u8]) -> io::Result<()> {
        let is_lost = self.lost_before.get(by).is_some_and(|first| fh < *first);
        let by = if is_lost { NOBODY } else { by };
        let (mut at, mut rest) = (offset, data);
        self.last += 1;
        while !rest.is_empty() {
            let (block, within) = (at / BLOCK_BYTES, usize::try_from(at % BLOCK_BYTES).expect("below 512"));
            let piece = rest.len().min(BLOCK - within);
            let mut bytes = [0; BLOCK];
            if piece < BLOCK {
                self.read(file, block * BLOCK_BYTES, &mut bytes)?;
            }
            bytes[within..within + piece].copy_from_slice(&rest[..piece]);
            self.blocks.entry(block).or_default().push(Version { at: self.last, by, bytes });
            rest = &rest[piece..];
            at += piece as u64;
        }
        Ok(())
    }

    /// A sync by a name, which began at this mark, ends well.
    pub fn sync(&mut self, file: &File, by: usize, mark: u64) -> io::Result<()> {
        let is_covered = |version: &Version| {
            version.at <= mark && (self.model == CacheModel::Lun || [by, NOBODY].contains(&version.by))
        };
        for (block, versions) in &mut self.blocks {
            // A later version by another name has taken the place of the older ones there as well.
            if let Some(newest) = versions.iter().rposition(is_covered) {
                file.write_all_at(&versions[newest].bytes, block * BLOCK_BYTES)?;
                versions.drain(..=newest);
            }
        }
        self.blocks.retain(|_, versions| !versions.is_empty());
        Ok(())
    }

    /// A name has failed a request, or hangs; opens of it from `next_fh` on are as new.
    pub fn lose(&mut self, by: usize, next_fh: u64) {
        if self.lost_before.len() <= by {
            self.lost_before.resize(by + 1, 0);
        }
        self.lost_before[by] = next_fh;
        for version in self.blocks.values_mut().flatten().filter(|version| version.by == by) {
            version.by = NOBODY;
        }
    }

    /// The power goes: of each block something survives.
    pub fn cut(&mut self, file: &File, seed: u64) -> io::Result<()> {
        let mut rng = Rng::new(seed);
        // Most storage loses all or nothing; the rest is what makes orders visible.
        let kept_percent = [0, 100, 50, 20][usize::try_from(rng.below(4)).expect("small")];
        for (block, versions) in std::mem::take(&mut self.blocks) {
            if rng.percent(kept_percent) {
                let at = usize::try_from(rng.below(versions.len() as u64)).expect("an index");
                file.write_all_at(&versions[at].bytes, block * BLOCK_BYTES)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        file
    }

    fn on_disk(file: &File, block: u64) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * BLOCK_BYTES).unwrap();
        byte[0]
    }

    #[test]
    fn every_name_reads_what_was_written_last() {
        let (file, mut cache) = (file(), Cache::new(CacheModel::Port));
        cache.write(&file, (0, 1), 0, &[1; 1024]).unwrap();
        cache.write(&file, (1, 2), 100, &[2; 10]).unwrap();
        let mut buf = [9; 1200];
        assert_eq!(cache.read(&file, 0, &mut buf).unwrap(), 1200);
        assert_eq!((buf[99], buf[100], buf[109], buf[110], buf[1023], buf[1024]), (1, 2, 2, 1, 1, 0));
        assert_eq!(on_disk(&file, 0), 0, "nothing is durable before a sync");
    }

    #[test]
    fn a_sync_covers_what_its_model_says_and_nothing_behind_its_mark() {
        for (model, other) in [(CacheModel::Lun, 2), (CacheModel::Port, 0)] {
            let (file, mut cache) = (file(), Cache::new(model));
            cache.write(&file, (0, 1), 0, &[1; 512]).unwrap();
            cache.write(&file, (1, 2), 512, &[2; 512]).unwrap();
            let mark = cache.mark();
            cache.write(&file, (0, 1), 1024, &[3; 512]).unwrap();
            cache.sync(&file, 0, mark).unwrap();
            assert_eq!([0, 1, 2].map(|block| on_disk(&file, block)), [1, other, 0], "{model:?}");
        }
    }

    #[test]
    fn what_a_lost_name_wrote_is_synced_by_another_one() {
        let (file, mut cache) = (file(), Cache::new(CacheModel::Port));
        cache.write(&file, (0, 1), 0, &[1; 512]).unwrap();
        cache.lose(0, 3);
        cache.write(&file, (0, 1), 512, &[2; 512]).unwrap();
        cache.sync(&file, 1, cache.mark()).unwrap();
        assert_eq!([0, 1].map(|block| on_disk(&file, block)), [1, 2]);
        cache.write(&file, (0, 3), 1024, &[3; 512]).unwrap();
        cache.sync(&file, 1, cache.mark()).unwrap();
        assert_eq!(on_disk(&file, 2), 0, "it is there again, and was not synced");
    }

    #[test]
    fn after_a_cut_each_block_holds_a_version_that_was_there() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let (file, mut cache) = (file(), Cache::new(CacheModel::Lun));
            cache.write(&file, (0, 1), 0, &[1; 512]).unwrap();
            cache.sync(&file, 0, cache.mark()).unwrap();
            cache.write(&file, (0, 1), 0, &[2; 512]).unwrap();
            cache.write(&file, (1, 2), 0, &[3; 512]).unwrap();
            cache.cut(&file, seed).unwrap();
            seen.insert(on_disk(&file, 0));
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2, 3]);
    }
}
