//! Which pages of the guest were written, told to the front-end while it moves the guest to another host
//! (`VHOST_USER_PROTOCOL_F_LOG_SHMFD`, `VHOST_F_LOG_ALL`; docs/interop/vhost-user.rst, "Migration").
//!
//! A page is marked after it was written and before the guest is shown the used entry: a front-end that takes the mark
//! and copies the page finds all of it. While nobody asks for marks there is no log, and a ring has one branch for that.

use std::fs::File;

use crate::shared_area::{AreaError, SharedArea};

/// Unit of the log, whatever the host's pages are.
const PAGE_BYTES: u64 = 4096;

/// A bit for each page of guest memory, from address 0 on.
#[derive(Debug)]
pub struct DirtyLog {
    bits: SharedArea,
}

impl DirtyLog {
    /// Takes the log that a front-end made.
    pub fn map(file: File, offset: u64, size_bytes: u64) -> Result<Self, AreaError> {
        Ok(Self { bits: SharedArea::map(file, offset, size_bytes)? })
    }

    /// `len` bytes from guest address `addr` on were written. What lies beyond the log is nobody's concern.
    pub fn mark(&self, addr: u64, len: u64) {
        let nr_pages = self.bits.len() as u64 * 8;
        let (mut page, last) = (addr / PAGE_BYTES, addr.saturating_add(len.max(1) - 1) / PAGE_BYTES);
        let end = if len == 0 { 0 } else { nr_pages.min(last.saturating_add(1)) };
        while page < end {
            // Inside the log, which is no longer than addresses are.
            let at = usize::try_from(page / 8).unwrap_or(usize::MAX);
            if page.is_multiple_of(64) && end - page >= 64 {
                // All bits of a word, so there is nobody else's to keep. What a guest names may be gigabytes.
                self.bits.store(at, u64::MAX);
                page += 64;
            } else {
                self.bits.set_bits(at, 1 << (page % 8));
                page += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    /// The bits of a log of 32 pages after these were marked.
    fn marked(ranges: &[(u64, u64)]) -> u32 {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4).unwrap();
        let log = DirtyLog::map(file.try_clone().unwrap(), 0, 4).unwrap();
        ranges.iter().for_each(|(addr, len)| log.mark(*addr, *len));
        let mut bits = [0; 4];
        file.read_exact_at(&mut bits, 0).unwrap();
        u32::from_le_bytes(bits)
    }

    #[test]
    fn every_page_that_is_touched_is_marked_and_no_other() {
        assert_eq!(marked(&[(0, 1)]), 1);
        assert_eq!(marked(&[(4095, 1)]), 1);
        assert_eq!(marked(&[(4095, 2)]), 0b11);
        assert_eq!(marked(&[(4096, 4096)]), 0b10);
        assert_eq!(marked(&[(0, 0), (8192, 0)]), 0);
        assert_eq!(marked(&[(7 * 4096 + 5, 8192)]), 0b11_1000_0000);
        assert_eq!(marked(&[(3 * 4096, 1), (20 * 4096, 1)]), 1 << 3 | 1 << 20);
    }

    /// Words at a time or not, the same pages.
    #[test]
    fn long_ranges_are_marked_from_their_first_page_to_their_last() {
        for (first, nr) in [(0, 64), (1, 64), (63, 66), (64, 128), (60, 200), (0, 320), (5, 1000), (319, 9)] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(40).unwrap();
            let log = DirtyLog::map(file.try_clone().unwrap(), 0, 40).unwrap();
            log.mark(first * PAGE_BYTES + 7, (nr - 1) * PAGE_BYTES + 1);
            let mut bits = [0; 40];
            file.read_exact_at(&mut bits, 0).unwrap();
            for page in 0..320 {
                let is_marked = bits[page / 8] & 1 << (page % 8) != 0;
                assert_eq!(
                    is_marked,
                    (first..first + nr).contains(&(page as u64)),
                    "{page}: {nr} from {first}"
                );
            }
        }
    }

    #[test]
    fn what_lies_beyond_is_left_alone() {
        assert_eq!(marked(&[(31 * 4096, u64::MAX)]), 1 << 31);
        assert_eq!(marked(&[(32 * 4096, 4096), (u64::MAX, 1), (u64::MAX - 4096, u64::MAX)]), 0);
    }
}
