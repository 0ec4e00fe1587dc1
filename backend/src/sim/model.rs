//! What each sector may hold: every write that a later one has not surely replaced.
//!
//! Requests that are outstanding at the same time may be done in any order, sector by sector. So a sector has a set of
//! possible contents: a write adds its own when it is sent, and when it is answered OK removes those of the writes
//! that had been answered before it was sent. One that failed may have been done or not, but never after its answer.

use std::ops::Range;
use std::sync::LazyLock;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;

/// The content of a sector of zeros.
pub(crate) const ZEROS: u64 = 0;

/// Bytes without a pattern, so that data at a wrong place is not taken for right.
pub(crate) static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = super::rng::Rng::new(0);
    (0..64 << 10).map(|_| rng.below(256).to_le_bytes()[0]).collect()
});

/// The bytes of a sector with this content.
pub(crate) fn sector_bytes(content: u64, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if content != ZEROS {
        let from = usize::try_from((content * 61 + sector * 17) % 4096).expect("small");
        bytes.copy_from_slice(&NOISE[from..from + SECTOR]);
        bytes[..8].copy_from_slice(&content.to_le_bytes());
        bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    }
    bytes
}

/// The content that these bytes are of; None if of none, or torn.
pub(crate) fn content_of(bytes: &[u8], sector: u64) -> Option<u64> {
    let content = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    (bytes == sector_bytes(content, sector)).then_some(content)
}

#[derive(Debug)]
struct Version {
    content: u64,
    /// Which write it is of.
    id: u64,
    from: u64,
    ended: Option<u64>,
    /// When it was surely replaced.
    gone: Option<u64>,
}

/// The possible contents of all sectors.
#[derive(Debug)]
pub(crate) struct Model {
    sectors: Vec<Vec<Version>>,
}

impl Model {
    /// All sectors are zeros.
    pub(crate) fn new(nr_sectors: usize) -> Self {
        let zeros = || vec![Version { content: ZEROS, id: 0, from: 0, ended: Some(0), gone: None }];
        Self { sectors: (0..nr_sectors).map(|_| zeros()).collect() }
    }

    fn part(&mut self, sectors: &Range<u64>) -> &mut [Vec<Version>] {
        let index = |at| usize::try_from(at).expect("sector");
        &mut self.sectors[index(sectors.start)..index(sectors.end)]
    }

    /// Write `id` is sent.
    pub(crate) fn begin(&mut self, id: u64, content: u64, sectors: &Range<u64>, now: u64) {
        for versions in self.part(sectors) {
            versions.push(Version { content, id, from: now, ended: None, gone: None });
        }
    }

    /// It is answered; `is_sure` if it was surely done.
    pub(crate) fn end(&mut self, id: u64, sectors: &Range<u64>, is_sure: bool, now: u64) {
        for versions in self.part(sectors) {
            let mut from = 0;
            for version in versions.iter_mut().filter(|v| v.id == id) {
                version.ended = Some(now);
                from = version.from;
            }
            if is_sure {
                for version in versions.iter_mut() {
                    let is_before = version.ended.is_some_and(|ended| ended < from);
                    if is_before && version.gone.is_none() {
                        version.gone = Some(now);
                    }
                }
            }
        }
    }

    /// Whether a read that was sent at `from` and is answered now may have seen this.
    pub(crate) fn allows(&self, sector: u64, content: u64, from: u64) -> bool {
        let versions = &self.sectors[usize::try_from(sector).expect("sector")];
        versions.iter().any(|v| v.content == content && v.gone.is_none_or(|gone| gone >= from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_at_the_same_time_may_come_in_any_order_and_later_ones_may_not() {
        let mut model = Model::new(1);
        model.begin(1, 11, &(0..1), 10);
        model.begin(2, 12, &(0..1), 11);
        assert!(model.allows(0, ZEROS, 12) && model.allows(0, 11, 12) && model.allows(0, 12, 12));
        model.end(1, &(0..1), true, 20);
        assert!(!model.allows(0, ZEROS, 21) && model.allows(0, ZEROS, 20));
        model.end(2, &(0..1), true, 21);
        assert!(model.allows(0, 11, 22) && model.allows(0, 12, 22));
        model.begin(3, 13, &(0..1), 30);
        model.end(3, &(0..1), false, 31);
        assert!([11, 12, 13].iter().all(|content| model.allows(0, *content, 32)), "it may have failed early");
        model.begin(4, 14, &(0..1), 40);
        model.end(4, &(0..1), true, 41);
        assert!(model.allows(0, 14, 42));
        assert!([ZEROS, 11, 12, 13].iter().all(|content| !model.allows(0, *content, 42)));
    }

    #[test]
    fn contents_are_told_apart() {
        let bytes = sector_bytes(7, 3);
        assert_eq!(content_of(&bytes, 3), Some(7));
        assert_eq!(content_of(&bytes, 4), None);
        assert_eq!(content_of(&[0; SECTOR], 4), Some(ZEROS));
        let mut torn = bytes;
        torn[511] ^= 1;
        assert_eq!(content_of(&torn, 3), None);
    }
}
