//! The guest's side: what it has asked for, and whether what comes back is right.

use std::os::unix::fs::FileExt as _;
use std::{fs::File, ops::Range, time::Duration};

use polypath::request::DiskLimits;

use super::driver::Driver;
use super::model::{Answer, Chain};
use crate::guest::Guest;
use crate::input::Input;

const PAGE_BYTES: u64 = 4096;

pub struct World {
    pub guest: Guest,
    pub driver: Driver,
    pub limits: DiskLimits,
    /// What is on the disk, and what should be.
    pub disk: Vec<u8>,
    expected: Vec<u8>,
    nr_rounds: u32,
    /// The driver's two indices, and how many requests it has made.
    available: u16,
    used: u16,
    /// Requests that have not come back, and those of this round that have.
    outstanding: Vec<(u16, Chain)>,
    back: Vec<Chain>,
    /// Memory as it was when the round began.
    before: Vec<u8>,
    /// The guest does what no guest may: only the worker's life is at stake.
    pub lawless: bool,
    /// Buffers overlap: what lies in them in the end is anybody's guess.
    tangled: bool,
    /// Requests of this round were made at different times.
    is_mixed: bool,
    pub nr_faults: u32,
    pub nr_back: u32,
    pub log: Option<File>,
}

impl World {
    pub fn new(
        guest: Guest,
        driver: Driver,
        limits: DiskLimits,
        disk: Vec<u8>,
        index: u16,
        nr_rounds: u32,
    ) -> Self {
        let mut before = Vec::new();
        guest.copy_into(&mut before);
        Self {
            guest,
            driver,
            limits,
            expected: disk.clone(),
            disk,
            nr_rounds,
            available: index,
            used: index,
            outstanding: Vec::new(),
            back: Vec::new(),
            before,
            lawless: false,
            tangled: false,
            is_mixed: false,
            nr_faults: 0,
            nr_back: 0,
            log: None,
        }
    }

    /// Whether the worker waits for a time of its own.
    pub fn is_owed(&self, timeout: Option<Duration>) -> bool {
        timeout.is_some()
    }

    /// The guest takes what came back and asks for more. False if it has nothing more to ask.
    pub fn go_on(&mut self, input: &mut Input<'_>, all_back: bool) -> bool {
        self.collect();
        if all_back {
            self.end_round();
            self.driver.start_over();
        }
        if self.nr_rounds == 0 {
            return false;
        }
        self.nr_rounds -= 1;
        let map = self.guest.map().clone();
        let nr_under_way = self.outstanding.len();
        self.driver.is_reused = false;
        for _ in 0..1 + input.below(12) {
            if self.driver.nr_free() == 0 || self.outstanding.len() >= usize::from(self.driver.ring.size) {
                break;
            }
            let head = self.driver.lay(input, &self.guest);
            self.driver.offer(&map, self.available, head);
            self.available = self.available.wrapping_add(1);
            self.outstanding.push((head, Chain::default()));
            if input.is_empty() {
                break;
            }
        }
        self.driver.ring.publish(&map, self.available);
        if input.rarely(10) {
            self.lawless = true;
            for _ in 0..1 + input.below(4) {
                self.driver.damage(input, &self.guest);
            }
        }
        // What is under way has its memory changed.
        self.lawless |= self.driver.is_reused && nr_under_way != 0;
        let (ring, indirect, limits) = (self.driver.ring, self.driver.indirect, self.limits);
        if !self.lawless {
            for (head, chain) in &mut self.outstanding[nr_under_way..] {
                *chain = Chain::read(&self.guest, &ring, indirect, *head, &limits);
            }
            self.find_overlaps();
        }
        if self.back.is_empty() {
            self.guest.copy_into(&mut self.before);
        } else {
            // The guest writes while requests are under way: what they do is not looked at one by one.
            self.back.clear();
            self.lawless |= self.log.is_some();
            self.guest.copy_into(&mut self.before);
            self.tangled = true;
            self.is_mixed = true;
        }
        true
    }

    fn chains(&self) -> impl Iterator<Item = &Chain> {
        self.outstanding.iter().map(|(_, chain)| chain).chain(&self.back)
    }

    /// What is written and read at the same time makes the outcome a matter of order.
    fn find_overlaps(&mut self) {
        #[derive(Clone, Copy, PartialEq)]
        enum Use {
            Written,
            Control,
            Data,
        }
        let ring = &self.driver.ring;
        let mut all: Vec<(u64, u64, Use)> = vec![
            (ring.used, ring.used + ring.used_bytes(), Use::Written),
            (ring.available, ring.available + ring.available_bytes(), Use::Control),
        ];
        for chain in self.chains() {
            let ranges = |parts: &[(u64, u64)], of: Use| -> Vec<(u64, u64, Use)> {
                parts.iter().map(|(addr, len)| (*addr, addr.saturating_add(*len), of)).collect()
            };
            all.extend(ranges(&chain.writable, Use::Written));
            all.extend(ranges(&chain.readable, Use::Data));
            all.extend(chain.control.iter().map(|range| (range.start, range.end, Use::Control)));
        }
        all.retain(|(start, end, _)| start < end);
        all.sort_by_key(|(start, ..)| *start);
        let (mut written, mut control, mut data) = (0, 0, 0);
        for (start, end, of) in all {
            match of {
                Use::Written => {
                    self.tangled |= start < written || start < data;
                    self.lawless |= start < control;
                    written = written.max(end);
                }
                Use::Control => {
                    self.lawless |= start < written;
                    control = control.max(end);
                }
                Use::Data => {
                    self.tangled |= start < written;
                    data = data.max(end);
                }
            }
        }
    }

    /// Takes what is on the used ring.
    fn collect(&mut self) {
        let map = self.guest.map().clone();
        let ring = self.driver.ring;
        let index = ring.used_index(&map);
        if self.lawless {
            self.used = index;
            self.outstanding.clear();
            return;
        }
        let nr_new = index.wrapping_sub(self.used);
        assert!(usize::from(nr_new) <= self.outstanding.len(), "{nr_new} answers too many");
        while self.used != index {
            let (head, len) = ring.used_entry(&map, self.used);
            self.used = self.used.wrapping_add(1);
            let at = self.outstanding.iter().position(|(h, _)| u32::from(*h) == head);
            let at = at.unwrap_or_else(|| panic!("head {head} was not asked for, or is answered twice"));
            let (_, chain) = self.outstanding.swap_remove(at);
            self.check_answer(&chain, len);
            self.nr_back += 1;
            self.back.push(chain);
        }
    }

    fn check_answer(&self, chain: &Chain, len: u32) {
        let len = u64::from(len);
        assert!(
            len <= chain.writable_bytes(),
            "{len} bytes written, the chain has {}",
            chain.writable_bytes()
        );
        if self.tangled {
            return;
        }
        let status = chain.status_at().and_then(|at| self.guest.read::<1>(at)).map(|[status]| status);
        let found = (len, status);
        let may_fail = self.nr_faults != 0;
        let is_right = match chain.answer {
            Answer::Mute => len == 0,
            Answer::Status(expected) => found == (1, Some(expected)),
            Answer::Id(u64::MAX) => true,
            Answer::Id(nr) => found == (nr + 1, Some(0)),
            Answer::Read(nr) => found == (nr + 1, Some(0)) || may_fail && found == (1, Some(1)),
            Answer::Changed => found == (1, Some(0)) || may_fail && matches!(found, (1, Some(1 | 2))),
        };
        assert!(is_right, "answer {found:?} to {chain:?}");
    }

    /// Everything has come back.
    fn end_round(&mut self) {
        if self.lawless {
            self.expected.copy_from_slice(&self.disk);
            return;
        }
        assert!(self.outstanding.is_empty(), "not answered: {:?}", self.outstanding);
        if let Some(log) = &self.log {
            for page in self.guest.changed_pages(&self.before) {
                let mut byte = [0];
                // What lies beyond the log is nobody's concern.
                let is_logged = log.read_at(&mut byte, page / 8).expect("log") == 1;
                assert!(
                    !is_logged || byte[0] & 1 << (page % 8) != 0,
                    "page {page} was written and not marked"
                );
            }
        }
        let mut before = std::mem::take(&mut self.before);
        let ring = &self.driver.ring;
        self.guest.forgive(&mut before, ring.used, ring.used_bytes());
        for (addr, len) in self.back.iter().flat_map(|chain| &chain.writable) {
            self.guest.forgive(&mut before, *addr, *len);
        }
        if let Some(addr) = self.guest.first_change(&before) {
            panic!("{addr:#x} was written, where nothing may be: {:?}", self.back);
        }
        self.before = before;
        self.check_disk();
        self.back.clear();
        self.tangled = false;
        self.is_mixed = false;
    }

    /// The disk holds what was written, and nothing else has changed.
    fn check_disk(&mut self) {
        if self.is_mixed {
            return self.expected.copy_from_slice(&self.disk);
        }
        let mut changes: Vec<Range<u64>> = Vec::new();
        let mut reads: Vec<(&Range<u64>, &Chain)> = Vec::new();
        for chain in &self.back {
            match chain.answer {
                Answer::Changed => changes.extend(chain.disk.iter().cloned()),
                Answer::Read(_) => reads.extend(chain.disk.iter().map(|range| (range, chain))),
                _ => {}
            }
        }
        let meets = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let clash = |at: usize| changes[..at].iter().any(|other| meets(other, &changes[at]));
        let is_certain = self.nr_faults == 0 && !self.tangled && !(0..changes.len()).any(clash);
        for (range, chain) in reads {
            if is_certain && !changes.iter().any(|change| meets(change, range)) {
                let mut data: Vec<u8> =
                    chain.writable.iter().flat_map(|(addr, len)| self.guest.slice(*addr, *len)).collect();
                data.pop();
                assert!(
                    data == self.disk[range.start as usize..range.end as usize],
                    "read {range:?} is not the disk's"
                );
            }
        }
        for chain in self.back.iter().filter(|chain| chain.answer == Answer::Changed) {
            for range in &chain.disk {
                let block = u64::from(self.limits.block_bytes);
                let whole = match chain.data {
                    Some(_) => range.clone(),
                    None => range.start.next_multiple_of(block)..range.end / block * block,
                };
                let at = whole.start as usize..whole.end.max(whole.start) as usize;
                match &chain.data {
                    _ if !is_certain => self.expected[at.clone()].copy_from_slice(&self.disk[at]),
                    Some(data) => self.expected[at].copy_from_slice(&data.0),
                    None => self.expected[at].fill(0),
                }
            }
        }
        if self.expected != self.disk {
            let differs = self.expected.iter().zip(&self.disk).position(|(a, b)| a != b);
            panic!("the disk differs at {differs:?}: {:?}", self.back);
        }
    }

    /// The worker has ended.
    pub fn end(&mut self, next_available: u16) {
        self.collect();
        if !self.lawless {
            self.end_round();
            assert_eq!(next_available, self.available, "where the next start goes on");
        }
    }

    pub fn page_count() -> u64 {
        0x5_0000 / PAGE_BYTES
    }
}
