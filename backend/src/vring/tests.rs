use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::memory::anonymous;
use crate::sim::fixture::cases;
use crate::sim::ring::{NEXT, RawRing, passes};

mod chains;
mod threads;

/// Everything is within the first 64 KiB; the ring is at the start.
const MEMORY_BYTES: usize = 64 << 10;

/// Both sides of a ring that has run up to `index` and is idle.
struct Both {
    map: Arc<GuestMap>,
    guest: RawRing,
    device: Vring,
}

impl Both {
    fn at(size: u16, index: u16, event_idx: bool) -> Self {
        let map = anonymous(MEMORY_BYTES);
        let guest = RawRing::new(&map, size, 0);
        guest.publish_available(index);
        guest.set_used_index(index);
        let device = Vring::new(&map, size, guest.at(), index, event_idx, true).unwrap();
        Self { map, guest, device }
    }

    /// The guest makes heads available, from `index` on.
    fn offer(&self, index: u16, heads: &[u16]) -> u16 {
        let mut at = index;
        for head in heads {
            self.guest.set_available(at, *head);
            at = at.wrapping_add(1);
        }
        self.guest.publish_available(at);
        at
    }

    fn pop(&mut self) -> Pop {
        self.device.pop(&self.map)
    }

    fn pop_all(&mut self) -> Vec<u16> {
        let mut heads = Vec::new();
        while let Pop::Head(head) = self.pop() {
            heads.push(head);
        }
        heads
    }

    fn give_back(&mut self, head: u16, len: u32) {
        self.device.push_used(&self.map, head, len);
    }
}

/// Index from which a ring of four runs over the end of 16 bits within a round.
const BEFORE_WRAP: u16 = 65_533;

#[test]
fn heads_come_once_and_in_order_over_the_wrap_of_the_index() {
    for event_idx in [false, true] {
        let mut ring = Both::at(4, BEFORE_WRAP, event_idx);
        let mut index = BEFORE_WRAP;
        for round in 0..6_u32 {
            assert_eq!(ring.pop(), Pop::Empty);
            index = ring.offer(index, &[2, 0, 3, 1]);
            assert_eq!(ring.pop_all(), [2, 0, 3, 1]);
            assert_eq!(ring.pop(), Pop::Empty);
            for head in [3, 1, 2, 0] {
                ring.give_back(head, round * 10 + u32::from(head));
            }
            assert!(ring.device.publish(&ring.map) || event_idx);
            assert_eq!(ring.guest.used_index(), index);
            for (back, head) in [(4, 3), (3, 1), (2, 2), (1, 0)] {
                assert_eq!(ring.guest.used(index.wrapping_sub(back)), (head, round * 10 + head));
            }
        }
        assert_eq!(ring.device.next_avail(), BEFORE_WRAP.wrapping_add(24));
        assert!(!ring.device.is_broken());
    }
}

#[test]
fn a_full_ring_is_lawful_and_one_more_is_impossible() {
    for start in [0, 1, BEFORE_WRAP, 65_535] {
        let mut ring = Both::at(4, start, false);
        ring.offer(start, &[0, 1, 2, 3]);
        assert_eq!(ring.pop_all().len(), 4);

        for beyond in [5, 6, 0x8000, 0xffff] {
            let mut ring = Both::at(4, start, false);
            ring.guest.publish_available(start.wrapping_add(beyond));
            assert_eq!(ring.pop(), Pop::Broken);
            assert!(ring.device.is_broken());
            // It is said once; after that there is nothing, whatever the guest does.
            ring.guest.publish_available(start.wrapping_add(1));
            assert_eq!(ring.pop(), Pop::Empty);
            assert!(!ring.device.arm_kicks(&ring.map));
            assert_eq!(ring.device.next_avail(), start);
        }
    }
}

#[test]
fn an_index_that_becomes_impossible_behind_good_entries_breaks_the_ring_after_them() {
    let mut ring = Both::at(4, 0, true);
    let index = ring.offer(0, &[1, 2]);
    assert_eq!(ring.pop(), Pop::Head(1));
    ring.guest.publish_available(index.wrapping_add(7));
    assert_eq!(ring.pop(), Pop::Head(2), "was seen before");
    assert_eq!(ring.pop(), Pop::Broken);
    // What was taken can still be given back.
    ring.give_back(2, 1);
    ring.give_back(1, 1);
    ring.device.publish(&ring.map);
    assert_eq!((ring.guest.used_index(), ring.guest.used(0), ring.guest.used(1)), (2, (2, 1), (1, 1)));
}

/// It may jump between the last look of a turn and the sleep: whoever takes must hear of it.
#[test]
fn an_index_that_becomes_impossible_before_the_sleep_is_told_by_pop() {
    let mut ring = Both::at(4, 0, true);
    assert_eq!(ring.pop(), Pop::Empty);
    ring.guest.publish_available(9);
    assert!(ring.device.arm_kicks(&ring.map), "there is something to look at");
    assert_eq!(ring.pop(), Pop::Broken);
    assert!(!ring.device.arm_kicks(&ring.map));
}

#[test]
fn heads_outside_the_ring_are_consumed_and_nothing_else() {
    let mut ring = Both::at(4, 0, false);
    ring.offer(0, &[4, 65_535, 0x8001, 3]);
    assert_eq!(ring.pop(), Pop::BadHead(4));
    assert_eq!(ring.pop(), Pop::BadHead(65_535));
    assert_eq!(ring.pop(), Pop::BadHead(0x8001));
    assert_eq!(ring.pop(), Pop::Head(3));
    assert_eq!(ring.pop(), Pop::Empty);
    assert_eq!(ring.device.next_avail(), 4);
    assert!(!ring.device.publish(&ring.map), "nothing is returned for them");
}

#[test]
fn a_head_that_is_in_flight_cannot_be_taken_again_until_it_was_returned() {
    let mut ring = Both::at(4, 0, false);
    let index = ring.offer(0, &[2, 2, 1]);
    assert_eq!(ring.pop(), Pop::Head(2));
    assert_eq!(ring.pop(), Pop::BadHead(2));
    assert_eq!(ring.pop(), Pop::Head(1));
    ring.give_back(2, 0);
    ring.device.publish(&ring.map);
    ring.offer(index, &[2]);
    assert_eq!(ring.pop(), Pop::Head(2));
}

#[test]
#[should_panic(expected = "returned twice")]
fn returning_a_head_twice_is_caught() {
    let mut ring = Both::at(4, 0, false);
    ring.offer(0, &[2]);
    assert_eq!(ring.pop(), Pop::Head(2));
    ring.give_back(2, 0);
    ring.give_back(2, 0);
}

#[test]
fn used_entries_are_seen_only_when_they_are_published_all_at_once() {
    let mut ring = Both::at(8, 65_534, false);
    ring.offer(65_534, &[0, 1, 2]);
    assert_eq!(ring.pop_all().len(), 3);
    assert!(!ring.device.has_unpublished());
    for head in [1, 0, 2] {
        ring.give_back(head, 0x0102_0304 + u32::from(head));
        assert_eq!(ring.guest.used_index(), 65_534);
        assert!(ring.device.has_unpublished());
    }
    assert!(ring.device.publish(&ring.map));
    assert_eq!(ring.guest.used_index(), 1);
    assert_eq!(ring.guest.used(65_534), (1, 0x0102_0305));
    assert_eq!(ring.guest.used(65_535), (0, 0x0102_0304));
    assert_eq!(ring.guest.used(0), (2, 0x0102_0306));
    assert!(!ring.device.has_unpublished());
    assert!(!ring.device.publish(&ring.map), "nothing new, no call");
}

#[test]
fn without_event_idx_the_flags_say_who_wants_what() {
    let mut ring = Both::at(4, 0, false);
    for no_interrupt in [true, false] {
        ring.guest.set_no_interrupt(no_interrupt);
        let next = ring.device.next_avail();
        ring.offer(next, &[0]);
        assert_eq!(ring.pop(), Pop::Head(0));
        ring.device.suppress_kicks(&ring.map);
        assert!(ring.guest.is_no_notify());
        ring.give_back(0, 1);
        assert_eq!(ring.device.publish(&ring.map), !no_interrupt);
        assert!(!ring.device.arm_kicks(&ring.map));
        assert!(!ring.guest.is_no_notify());
    }
    // The other format's field is not looked at and not written.
    ring.guest.set_used_event(0x1234);
    let next = ring.device.next_avail();
    ring.offer(next, &[0]);
    assert_eq!(ring.pop(), Pop::Head(0));
    ring.give_back(0, 1);
    assert!(ring.device.publish(&ring.map));
    assert_eq!(ring.guest.available_event(), 0);
}

#[test]
fn with_event_idx_the_armed_index_is_the_next_one() {
    let mut ring = Both::at(4, 65_534, true);
    let mut index = 65_534;
    for _ in 0..4 {
        index = ring.offer(index, &[0, 1]);
        assert_eq!(ring.pop_all(), [0, 1]);
        ring.device.suppress_kicks(&ring.map);
        assert!(!ring.guest.is_no_notify(), "the flag must stay 0 (virtio 1.2, 2.7.10)");
        assert!(!ring.device.arm_kicks(&ring.map));
        assert_eq!(ring.guest.available_event(), index);
        ring.give_back(0, 0);
        ring.give_back(1, 0);
        ring.device.publish(&ring.map);
    }
}

#[test]
fn f27_entries_that_came_before_the_wish_for_a_kick_are_reported() {
    for event_idx in [false, true] {
        let mut ring = Both::at(4, 65_535, event_idx);
        assert!(!ring.device.arm_kicks(&ring.map));
        ring.offer(65_535, &[1]);
        assert!(ring.device.arm_kicks(&ring.map), "came in between: nobody will kick");
        assert_eq!(ring.pop(), Pop::Head(1));
        assert!(!ring.device.arm_kicks(&ring.map));
    }
}

/// The guest's used_event and what the device says when it publishes from `old` to `new`.
fn calls(size: u16, old: u16, new: u16, event: u16) -> bool {
    let mut ring = Both::at(size, old, true);
    let nr = new.wrapping_sub(old);
    let heads: Vec<u16> = (0..nr).collect();
    ring.offer(old, &heads);
    assert_eq!(ring.pop_all(), heads);
    ring.guest.set_used_event(event);
    heads.iter().for_each(|head| ring.give_back(*head, 0));
    ring.device.publish(&ring.map)
}

#[test]
fn the_need_for_a_call_by_example() {
    for (old, new, event, wanted) in [
        (0, 1, 0, true),
        (0, 1, 1, false),
        (0, 1, 65_535, false),
        (5, 8, 4, false),
        (5, 8, 5, true),
        (5, 8, 7, true),
        (5, 8, 8, false),
        (65_534, 2, 65_533, false),
        (65_534, 2, 65_534, true),
        (65_534, 2, 65_535, true),
        (65_534, 2, 0, true),
        (65_534, 2, 1, true),
        (65_534, 2, 2, false),
        (65_534, 2, 0x8000, false),
    ] {
        assert_eq!(calls(8, old, new, event), wanted, "{old} to {new}, event {event}");
    }
}

proptest! {
    #![proptest_config(cases(512))]

    #[test]
    fn the_need_for_a_call_is_what_the_definition_says(old: u16, nr in 1_u16..=32, near in -40_i16..40, far: u16, is_near: bool) {
        let event = if is_near { old.wrapping_add_signed(near) } else { far };
        let new = old.wrapping_add(nr);
        prop_assert_eq!(calls(32, old, new, event), passes(event, old, new));
    }
}

#[test]
fn f17_a_later_start_goes_on_where_this_one_stopped() {
    let mut ring = Both::at(4, 65_535, true);
    let index = ring.offer(65_535, &[3, 1]);
    assert_eq!(ring.pop_all(), [3, 1]);
    ring.give_back(1, 0);
    ring.give_back(3, 0);
    ring.device.publish(&ring.map);
    let next = ring.device.next_avail();
    assert_eq!(next, index);
    let index = ring.offer(index, &[2]);
    let mut device = Vring::new(&ring.map, 4, ring.guest.at(), next, true, true).unwrap();
    assert_eq!(device.pop(&ring.map), Pop::Head(2));
    device.push_used(&ring.map, 2, 7);
    device.publish(&ring.map);
    assert_eq!((ring.guest.used_index(), ring.guest.used(index.wrapping_sub(1))), (index, (2, 7)));
}

#[test]
fn a_ring_must_lie_in_memory_and_be_aligned() {
    let map = anonymous(MEMORY_BYTES);
    let end = MEMORY_BYTES as u64;
    let at = |descriptors, available, used| RingAddresses {
        descriptors: GuestAddress(descriptors),
        available: GuestAddress(available),
        used: GuestAddress(used),
    };
    let fits = |at| Vring::new(&map, 16, at, 0, true, true).is_some();
    assert!(fits(at(0, 0x1000, 0x2000)));
    // To the last byte: 16 * 16, 6 + 2 * 16 and 6 + 8 * 16 bytes.
    assert!(fits(at(end - 256, 0x1000, 0x2000)));
    assert!(fits(at(0, end - 38, 0x2000)));
    assert!(fits(at(0, 0x1000, end - 136)));
    for outside in [
        at(end - 240, 0x1000, 0x2000),
        at(0, end - 36, 0x2000),
        at(0, 0x1000, end - 132),
        at(end, 0x1000, 0x2000),
        at(u64::MAX - 15, 0x1000, 0x2000),
        at(0, u64::MAX - 1, 0x2000),
        at(0, 0x1000, u64::MAX - 3),
        at(8, 0x1000, 0x2000),
        at(0, 0x1001, 0x2000),
        at(0, 0x1000, 0x2002),
    ] {
        assert!(!fits(outside), "{outside:?}");
    }
}

#[test]
fn f19_a_ring_goes_on_at_another_place() {
    let mut ring = Both::at(4, 7, true);
    ring.offer(7, &[0]);
    assert_eq!(ring.pop(), Pop::Head(0));
    let other = anonymous(MEMORY_BYTES);
    let moved = RawRing::new(&other, 4, 0x4000);
    moved.publish_available(9);
    moved.set_available(8, 2);
    moved.set_descriptor(2, (0x100, 5, 0, 0));
    ring.device.move_to(moved.at());
    assert_eq!(ring.device.pop(&other), Pop::Head(2));
    let mut chain = Vec::new();
    ring.device.read_chain(&other, 2, &mut chain).unwrap();
    assert_eq!((chain[0].addr.0, chain[0].len), (0x100, 5));
    ring.device.push_used(&other, 0, 3);
    ring.device.publish(&other);
    assert_eq!((moved.used_index(), moved.used(7)), (8, (0, 3)));
    assert_eq!(ring.guest.used_index(), 7, "the old place is left alone");
}

#[test]
fn a_ring_whose_memory_is_gone_is_broken_and_nothing_panics() {
    let mut ring = Both::at(4, 0, true);
    ring.offer(0, &[0]);
    assert_eq!(ring.pop(), Pop::Head(0));
    let nothing = GuestMap::new();
    let mut chain = Vec::new();
    assert_eq!(ring.device.read_chain(&nothing, 0, &mut chain), Err(ChainError::Memory));
    ring.device.push_used(&nothing, 0, 0);
    ring.device.publish(&nothing);
    ring.device.suppress_kicks(&nothing);
    // Whichever of the two finds it out.
    ring.device.arm_kicks(&nothing);
    let _ = ring.device.pop(&nothing);
    assert!(ring.device.is_broken());
    assert!(!ring.device.arm_kicks(&nothing));
}
