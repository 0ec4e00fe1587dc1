//! The driver's side of the simulated ring: descriptors, kicks wanted, calls wanted.

use super::plan::Twist;
use super::ring::{DESCRIPTOR_BYTES, INDIRECT, NEXT, Raw, RawRing, WRITE, passes};
use super::rng::Rng;

/// One buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

/// From when on the guest waits for a call, and for which index.
#[derive(Debug, Clone, Copy)]
struct Armed {
    event: u16,
    since: u16,
}

/// A driver as virtio prescribes it.
#[derive(Debug)]
pub(crate) struct Driver {
    ring: RawRing,
    event_idx: bool,
    indirect: bool,
    free: Vec<u16>,
    next_avail: u16,
    published: u16,
    next_used: u16,
    /// Entries without a head: how many were offered, and how many of them the device has surely taken.
    nr_bad: u16,
    nr_bad_taken: u16,
    armed: Option<Armed>,
}

impl Driver {
    /// A ring that has run up to `index` and is empty.
    pub(crate) fn new(ring: RawRing, index: u16, event_idx: bool, indirect: bool) -> Self {
        ring.publish_available(index);
        ring.set_used_index(index);
        let free = (0..ring.size()).collect();
        let mut driver = Self {
            ring,
            event_idx,
            indirect,
            free,
            next_avail: index,
            published: index,
            next_used: index,
            nr_bad: 0,
            nr_bad_taken: 0,
            armed: None,
        };
        driver.disarm();
        driver
    }

    /// The ring itself.
    pub(crate) fn ring(&self) -> &RawRing {
        &self.ring
    }

    /// The index up to which the device has been told.
    pub(crate) fn published(&self) -> u16 {
        self.published
    }

    /// Whether there are entries of which the device has not been told.
    pub(crate) fn has_unpublished(&self) -> bool {
        self.next_avail != self.published
    }

    /// How many more entries the available ring has room for.
    fn room(&self) -> u16 {
        // Every entry is given back once, but for those without a head.
        let taken = self.next_used.wrapping_add(self.nr_bad_taken);
        self.ring.size() - self.next_avail.wrapping_sub(taken)
    }

    /// The device has taken everything that was published.
    pub(crate) fn all_taken(&mut self) {
        if !self.has_unpublished() {
            self.nr_bad_taken = self.nr_bad;
        }
    }

    /// Puts a chain into descriptors and, if it needs one, the table at `table`. None if there are not enough. Gives the
    /// head and all descriptors taken.
    pub(crate) fn chain(
        &mut self,
        rng: &mut Rng,
        pieces: &[Piece],
        twist: Twist,
        table: u64,
    ) -> Option<(u16, Vec<u16>)> {
        let needs_table = matches!(twist, Twist::TableEmpty | Twist::TableNested | Twist::TableNext);
        let nr_direct = match (self.indirect, rng.weighted(&[4, 4, 2])) {
            _ if needs_table => 0,
            (true, 0) => 0,
            (true, 2) if pieces.len() > 1 => 1 + rng.index(pieces.len() - 1),
            _ => pieces.len(),
        };
        let has_table = nr_direct < pieces.len();
        let nr = nr_direct + usize::from(has_table);
        if nr > self.free.len() || self.room() == 0 {
            return None;
        }
        rng.shuffle(&mut self.free);
        let taken = self.free.split_off(self.free.len() - nr);

        let flags = |piece: &Piece| if piece.writable { WRITE } else { 0 };
        let mut raws: Vec<Raw> = Vec::new();
        for (piece, next) in pieces[..nr_direct].iter().zip(taken[1..].iter().map(|d| Some(*d)).chain([None]))
        {
            let more = if next.is_some() { NEXT } else { 0 };
            raws.push((piece.addr, piece.len, flags(piece) | more, next.unwrap_or(0)));
        }
        let mut inside: Vec<Raw> = Vec::new();
        if has_table {
            let rest = &pieces[nr_direct..];
            for (i, piece) in (1..).zip(rest) {
                let more = if usize::from(i) < rest.len() { NEXT } else { 0 };
                inside.push((piece.addr, piece.len, flags(piece) | more, i));
            }
            let len = u32::try_from(rest.len()).expect("few") * 16;
            raws.push((table, len, INDIRECT, 0));
        }
        let (outer_size, head) = (self.ring.size(), taken[0]);
        let size = if has_table { u16::try_from(inside.len()).expect("few") } else { outer_size };
        let first = if has_table { 0 } else { head };
        let sequence = if has_table { &mut inside } else { &mut raws };
        if let Some(last) = sequence.last_mut() {
            match twist {
                Twist::BadNext => (last.2, last.3) = (last.2 | NEXT, size + u16::from(rng.chance(50))),
                Twist::Loop => (last.2, last.3) = (last.2 | NEXT, first),
                Twist::TableNested => *last = (table, 16, INDIRECT, 0),
                _ => {}
            }
        }
        if let Some(leader) = raws.last_mut() {
            match twist {
                Twist::TableEmpty => leader.1 = rng.pick(&[0, 1, 15, 17, leader.1 + 8]),
                Twist::TableNext => leader.2 |= NEXT,
                _ => {}
            }
        }
        for (at, raw) in (0..).zip(&inside) {
            self.ring.set_descriptor_at(table + DESCRIPTOR_BYTES * at, *raw);
        }
        for (descriptor, raw) in taken.iter().zip(&raws) {
            self.ring.set_descriptor(*descriptor, *raw);
        }
        self.offer(head);
        Some((head, taken))
    }

    fn offer(&mut self, head: u16) {
        self.ring.set_available(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Offers a head that no ring has. True if there was room.
    pub(crate) fn offer_bad_head(&mut self, rng: &mut Rng) -> bool {
        if self.room() < 2 {
            return false;
        }
        let head = rng.pick(&[self.ring.size(), self.ring.size() + 1, 0x8000, 65_535]);
        self.nr_bad = self.nr_bad.wrapping_add(1);
        self.offer(head);
        true
    }

    /// Tells the device of the entries. True if it wants a kick for them.
    pub(crate) fn publish(&mut self) -> bool {
        let old = self.published;
        self.published = self.next_avail;
        self.ring.publish_available(self.published);
        if self.event_idx {
            passes(self.ring.available_event(), old, self.published)
        } else {
            old != self.published && !self.ring.is_no_notify()
        }
    }

    /// Whether the device has armed a kick for what comes next.
    pub(crate) fn is_kick_armed(&self) -> bool {
        if self.event_idx { self.ring.available_event() == self.published } else { !self.ring.is_no_notify() }
    }

    /// The next used entry.
    pub(crate) fn next_used(&mut self) -> Option<(u32, u32)> {
        let has_one = self.next_used != self.ring.used_index();
        has_one.then(|| {
            self.next_used = self.next_used.wrapping_add(1);
            self.ring.used(self.next_used.wrapping_sub(1))
        })
    }

    /// A chain that was returned.
    pub(crate) fn release(&mut self, descriptors: &[u16]) {
        self.free.extend(descriptors);
    }

    /// Asks for a call, now or some entries later; nothing waits at this moment.
    pub(crate) fn arm(&mut self, later: u16) {
        let since = self.ring.used_index();
        assert_eq!(since, self.next_used, "the driver looks before it waits");
        let event = since.wrapping_add(if self.event_idx { later } else { 0 });
        if self.event_idx {
            self.ring.set_used_event(event);
        } else {
            self.ring.set_no_interrupt(false);
        }
        self.armed = Some(Armed { event, since });
    }

    /// Asks not to be called.
    pub(crate) fn disarm(&mut self) {
        self.armed = None;
        if self.event_idx {
            self.ring.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.ring.set_no_interrupt(true);
        }
    }

    /// Whether the guest has asked for calls.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    /// Whether the device must have called by now.
    pub(crate) fn is_call_due(&self) -> bool {
        self.armed.is_some_and(|armed| passes(armed.event, armed.since, self.ring.used_index()))
    }

    /// The heads of the used entries that wait to be looked at.
    pub(crate) fn used_heads(&self) -> Vec<u16> {
        let index = |i| self.next_used.wrapping_add(i);
        (0..self.nr_used()).filter_map(|i| u16::try_from(self.ring.used(index(i)).0).ok()).collect()
    }

    /// Used entries that wait to be looked at.
    pub(crate) fn nr_used(&self) -> u16 {
        self.ring.used_index().wrapping_sub(self.next_used)
    }

    /// Of `nr_taken` entries from `start` on, all were returned but those that had no head.
    pub(crate) fn assert_all_returned(&self, start: u16, nr_taken: u16) {
        let nr_lost = nr_taken.wrapping_sub(self.ring.used_index().wrapping_sub(start));
        assert!(
            (self.nr_bad_taken..=self.nr_bad).contains(&nr_lost),
            "{nr_lost} were taken and not returned"
        );
    }

    /// Whether used entries wait to be looked at.
    pub(crate) fn has_used(&self) -> bool {
        self.next_used != self.ring.used_index()
    }

    /// Makes the available index impossible. True if the device wants a kick for it.
    pub(crate) fn wreck(&mut self) -> bool {
        self.next_avail = self.next_avail.wrapping_add(self.ring.size() * 2 + 3);
        self.publish()
    }
}
