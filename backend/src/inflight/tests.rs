use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::*;
use crate::crash;
use crate::memory::{GuestMap, anonymous};
use crate::sim::ring::RawRing;
use crate::vring::{Pop, Vring};

const SIZE: u16 = 8;
const NR_QUEUES: u16 = 4;
const QUEUE: usize = 2;

/// Where the front-end starts a ring after a crash.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    /// At the used index, as QEMU does.
    Used,
    /// At the available index, as Cloud Hypervisor does.
    Available,
}

/// A guest with a ring, and an area that outlives each device.
struct World {
    map: Arc<GuestMap>,
    ring: RawRing,
    area: File,
    bytes: u64,
    base: Base,
    available: u16,
    used: u16,
    /// What the guest has made available and not got back, in its order.
    outstanding: Vec<u16>,
    device: Option<Vring>,
    /// What the device has taken and not given back.
    taken: Vec<u16>,
}

impl World {
    fn new(index: u16, base: Base) -> Self {
        let map = anonymous(64 << 10);
        let ring = RawRing::new(&map, SIZE, 0);
        ring.publish_available(index);
        ring.set_used_index(index);
        let (area, bytes) = create(NR_QUEUES, SIZE, 64).unwrap();
        let mut world = Self {
            map,
            ring,
            area,
            bytes,
            base,
            available: index,
            used: index,
            outstanding: Vec::new(),
            device: None,
            taken: Vec::new(),
        };
        world.start().unwrap();
        world
    }

    fn part(&self) -> InflightQueue {
        let file = self.area.try_clone().unwrap();
        let area = InflightArea::open(file, 0, self.bytes, NR_QUEUES, SIZE, 64).unwrap();
        area.queue(QUEUE, SIZE).unwrap()
    }

    fn start(&mut self) -> Result<usize, Garbage> {
        let base = if self.base == Base::Used { self.ring.used_index() } else { self.available };
        let mut device = Vring::new(&self.map, SIZE, self.ring.at(), base, false, true).unwrap();
        let begun = device.track(&self.map, self.part(), false);
        self.device = Some(device);
        self.taken.clear();
        begun
    }

    fn device(&mut self) -> &mut Vring {
        self.device.as_mut().unwrap()
    }

    /// The guest makes a head available that it has not.
    fn offer(&mut self, head: u16) {
        assert!(!self.outstanding.contains(&head));
        self.ring.set_available(self.available, head);
        self.available = self.available.wrapping_add(1);
        self.ring.publish_available(self.available);
        self.outstanding.push(head);
    }

    fn take(&mut self) {
        let map = Arc::clone(&self.map);
        if let Pop::Head(head) = self.device().pop(&map) {
            self.taken.push(head);
        }
    }

    fn give_back(&mut self, at: usize) {
        if self.taken.is_empty() {
            return;
        }
        let head = self.taken.remove(at % self.taken.len());
        let map = Arc::clone(&self.map);
        self.device().push_used(&map, head, 1);
    }

    fn publish(&mut self) {
        let map = Arc::clone(&self.map);
        self.device().publish(&map);
    }

    /// The guest takes what it has got back: each head once, and only those that it is waiting for.
    fn collect(&mut self) {
        while self.used != self.ring.used_index() {
            let head = u16::try_from(self.ring.used(self.used).0).unwrap();
            let at = self.outstanding.iter().position(|h| *h == head);
            self.outstanding.remove(at.unwrap_or_else(|| panic!("head {head} was answered twice")));
            self.used = self.used.wrapping_add(1);
        }
    }

    /// After a crash: everything that the guest waits for is taken again, in the order in which it was offered.
    fn recover(&mut self) {
        self.device = None;
        self.collect();
        self.start().unwrap();
        (0..=SIZE).for_each(|_| self.take());
        assert_eq!(self.taken, self.outstanding);
    }
}

/// A few numbers that look like chance.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A run of random life; true if it came to its end without the crash.
fn live(world: &mut World, chance: &mut Chance) {
    for _ in 0..80 {
        match chance.below(6) {
            0 | 1 => {
                world.collect();
                let head = u16::try_from(chance.below(u64::from(SIZE))).unwrap();
                if !world.outstanding.contains(&head) {
                    world.offer(head);
                }
            }
            2 => world.take(),
            3 | 4 => {
                let at = usize::try_from(chance.below(8)).unwrap();
                world.give_back(at);
            }
            _ => world.publish(),
        }
    }
}

#[test]
fn f07_a_crash_at_any_store_loses_and_repeats_nothing() {
    let mut nr_steps_max = 0;
    for base in [Base::Used, Base::Available] {
        for seed in 0..40 {
            for nr_steps in 0.. {
                let index = if seed % 2 == 0 { 0 } else { 65_530 };
                let mut world = World::new(index, base);
                let ended = crash::at_step(nr_steps, || live(&mut world, &mut Chance(seed)));
                world.recover();
                // And all can be answered, in any order.
                while !world.taken.is_empty() {
                    world.give_back(nr_steps);
                }
                world.publish();
                world.collect();
                assert!(world.outstanding.is_empty());
                world.recover();
                if ended.is_some() {
                    nr_steps_max = nr_steps_max.max(nr_steps);
                    break;
                }
            }
        }
    }
    assert!(nr_steps_max > 40, "the longest life had {nr_steps_max} stores");
}

/// Crashes while what an earlier crash left is being put right.
#[test]
fn f07_a_crash_within_the_recovery_loses_and_repeats_nothing() {
    for base in [Base::Used, Base::Available] {
        for seed in 100..120 {
            for first in 0..60 {
                for second in 0.. {
                    let mut world = World::new(65_530, base);
                    crash::at_step(first, || live(&mut world, &mut Chance(seed)));
                    world.device = None;
                    let ended = crash::at_step(second, || world.start().map(drop));
                    world.recover();
                    if ended.is_some() {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn f07_several_lives_in_a_row() {
    for base in [Base::Used, Base::Available] {
        for seed in 0..100 {
            let mut chance = Chance(seed);
            let mut world = World::new(65_500, base);
            for _ in 0..20 {
                let nr_steps = usize::try_from(chance.below(120)).unwrap();
                crash::at_step(nr_steps, || live(&mut world, &mut chance));
                world.recover();
            }
        }
    }
}

/// A head that never comes back while all others do many times: its place in the available ring is long overwritten.
#[test]
fn f07_one_that_hangs_is_not_forgotten() {
    for base in [Base::Used, Base::Available] {
        let mut world = World::new(0, base);
        world.offer(5);
        world.take();
        for round in 0..100 {
            world.offer(round % 3);
            world.take();
            world.give_back(1);
            world.publish();
            world.collect();
        }
        world.offer(6);
        world.recover();
        assert_eq!(world.taken, [5, 6]);
    }
}

/// An area that was never used, and a ring that was: another host has served it before.
#[test]
fn a_new_area_for_a_ring_that_has_run_answers_nothing() {
    for base in [Base::Used, Base::Available] {
        let mut world = World::new(3, base);
        let (area, bytes) = create(NR_QUEUES, SIZE, 64).unwrap();
        (world.area, world.bytes) = (area, bytes);
        world.offer(0);
        world.recover();
    }
}

#[test]
fn f46_areas_that_cannot_be_are_refused() {
    let (file, bytes) = create(2, 128, 64).unwrap();
    assert_eq!(bytes, 2 * queue_bytes(128) as u64);
    let open = |offset, bytes, nr_queues, queue_size| {
        InflightArea::open(file.try_clone().unwrap(), offset, bytes, nr_queues, queue_size, 64)
    };
    assert!(open(0, bytes, 2, 128).is_ok());
    assert!(matches!(open(0, bytes, 0, 128), Err(InflightError::Queues(0))));
    assert!(matches!(open(0, bytes, 65, 128), Err(InflightError::Queues(65))));
    assert!(matches!(open(0, bytes, 2, 0), Err(InflightError::QueueSize(0))));
    assert!(matches!(open(0, bytes, 2, 1025), Err(InflightError::QueueSize(1025))));
    assert!(matches!(open(0, bytes, 3, 128), Err(InflightError::Small { .. })));
    assert!(matches!(open(0, bytes - 1, 2, 128), Err(InflightError::Small { .. })));
    assert!(matches!(open(0, bytes + 1, 2, 128), Err(InflightError::Area(AreaError::Short { .. }))));
    assert!(matches!(open(u64::MAX, bytes, 2, 128), Err(InflightError::Area(AreaError::Short { .. }))));
    assert!(matches!(open(0, u64::MAX, 2, 128), Err(InflightError::Area(AreaError::Size(_)))));
    let area = open(0, bytes, 2, 128).unwrap();
    assert!(area.queue(1, 128).is_some() && area.queue(1, 64).is_some());
    assert!(area.queue(2, 128).is_none() && area.queue(1, 256).is_none());
    for (nr_queues, queue_size) in [(0, 128), (65, 128), (2, 0), (2, 2048)] {
        assert!(create(nr_queues, queue_size, 64).is_err());
    }
    // Nobody can pull it away.
    assert!(file.set_len(0).is_err());
}

#[test]
fn f46_random_contents_invent_nothing() {
    let mut nr_garbage = 0;
    for seed in 0..2000 {
        let mut world = World::new(0, Base::Used);
        world.device = None;
        let mut chance = Chance(seed);
        let len = usize::try_from(world.bytes).unwrap();
        let bytes: Vec<u8> = (0..len).map(|_| u8::try_from(chance.below(256)).unwrap()).collect();
        world.area.write_all_at(&bytes, 0).unwrap();
        let base = QUEUE * queue_bytes(SIZE);
        if seed % 2 == 0 {
            // As if it were ours, so that it is believed as far as possible.
            let head = [&[0_u8; 8][..], &1_u16.to_le_bytes(), &SIZE.to_le_bytes(), &bytes[..4]].concat();
            world.area.write_all_at(&head, base as u64).unwrap();
            for entry in 0..usize::from(SIZE) {
                let at = base + HEAD_BYTES + ENTRY_BYTES * entry;
                world.area.write_all_at(&[u8::from(chance.below(2) == 1)], at as u64).unwrap();
            }
        }
        nr_garbage += u32::from(world.start().is_err());
        // The guest waits for nothing, so there is nothing to take; and the ring works.
        world.take();
        assert_eq!(world.taken, [0; 0], "seed {seed}");
        for head in 0..SIZE {
            world.offer(head);
        }
        world.recover();
    }
    assert!(nr_garbage > 1000, "{nr_garbage}");
}

#[test]
fn f46_another_layout_is_not_believed() {
    let mut world = World::new(0, Base::Used);
    world.offer(3);
    world.take();
    let base = (QUEUE * queue_bytes(SIZE)) as u64;
    for (at, value, expected) in [
        (FEATURES, 1_u16, Garbage::Features(1)),
        (VERSION_AT, 2, Garbage::Version(2)),
        (DESC_NUM, 4, Garbage::Size(4)),
        (USED_IDX, 100, Garbage::Batch),
    ] {
        let mut saved = [0; 2];
        world.area.read_exact_at(&mut saved, base + at as u64).unwrap();
        world.area.write_all_at(&value.to_le_bytes(), base + at as u64).unwrap();
        assert_eq!(world.part().recover(0, 1, |_| None), Err(expected));
        world.area.write_all_at(&saved, base + at as u64).unwrap();
    }
    assert_eq!(world.part().recover(0, 1, |_| None), Ok(vec![3]));
    assert_eq!(world.part().recover(0, 0, |_| None), Err(Garbage::TooMany { marked: 1, outstanding: 0 }));
    assert_eq!(world.part().recover(0, 2, |_| Some(3)), Err(Garbage::NotTaken(3)));
}

#[test]
fn what_is_cleared_is_forgotten() {
    let mut world = World::new(0, Base::Used);
    world.offer(3);
    world.take();
    world.part().area.clear();
    assert_eq!(world.part().recover(0, 1, |_| None), Ok(vec![]));
}

/// The layout is the protocol's: another back-end may take over.
#[test]
fn the_layout_is_the_one_of_the_specification() {
    let mut world = World::new(7, Base::Used);
    world.offer(3);
    world.offer(5);
    world.take();
    world.take();
    world.give_back(0);
    let mut bytes = vec![0; queue_bytes(SIZE)];
    let read = |world: &World, bytes: &mut [u8]| {
        world.area.read_exact_at(bytes, (QUEUE * queue_bytes(SIZE)) as u64).unwrap();
    };
    read(&world, &mut bytes);
    assert_eq!(bytes[..8], [0; 8]);
    assert_eq!(bytes[8..16], [1, 0, 8, 0, 3, 0, 7, 0]);
    assert_eq!(bytes[16 + 3 * 16..][..16], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[16 + 5 * 16..][..16], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    world.publish();
    read(&world, &mut bytes);
    assert_eq!((bytes[14], bytes[16 + 3 * 16], bytes[16 + 5 * 16]), (8, 0, 1));
}

#[test]
fn the_guests_choice_of_write_through_outlives_the_process() {
    let (file, size_bytes) = create(2, 4, 64).unwrap();
    let open = || InflightArea::open(file.try_clone().unwrap(), 0, size_bytes, 2, 4, 64).unwrap();
    assert!(!open().is_write_through());
    open().note_write_through(true);
    assert!(open().is_write_through());
    // It is nothing that the requests in flight depend on.
    let mut queue = open().queue(0, 4).unwrap();
    assert_eq!(queue.recover(0, 0, |_| None).unwrap(), [0_u16; 0]);
    queue.begin(0, &[]);
    queue.mark(0);
    assert!(open().is_write_through());
    open().note_write_through(false);
    assert!(!open().is_write_through());
    open().note_write_through(true);
    open().clear();
    assert!(!open().is_write_through());
}
