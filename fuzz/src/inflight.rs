//! The area that says what is in flight: histories that end at any store, and areas with anything in them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use polypath::fuzzing::at_step;
use polypath::inflight::{InflightArea, create};
use polypath::vring::{Pop, Vring};

use crate::guest::{Guest, Layout3};
use crate::input::Input;

const REGIONS: [(u64, usize); 1] = [(0, 0x4000)];
const NR_QUEUES: u16 = 2;
const QUEUE: usize = 1;

/// Most that happens in one life of a device.
const STEPS_MAX: u32 = 40;

/// A guest with a ring and an area that outlive the device.
struct World {
    guest: Guest,
    ring: Layout3,
    area: File,
    area_bytes: u64,
    /// Whether the front-end starts a ring at the available index (Cloud Hypervisor) or at the used one (QEMU).
    from_available: bool,
    available: u16,
    used: u16,
    /// What was made available and has not come back, in its order.
    outstanding: Vec<u16>,
    device: Option<Vring>,
    /// What the device has taken and not given back.
    taken: Vec<u16>,
    /// Something was written into the area that no device has written.
    is_damaged: bool,
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let size = 1 << input.below(5);
    let index = input.pick(&[0, 65_530]);
    let mut world = World::new(size, index, input.below(2) == 0);
    for _ in 0..1 + input.below(4) {
        let nr_stores = usize::from(input.u8());
        let nr_steps = input.below(STEPS_MAX);
        let ended = at_step(nr_stores, || world.live(&mut input, nr_steps));
        world.device = None;
        if input.rarely(3) {
            world.damage(&mut input);
        }
        if ended.is_none() && input.rarely(3) {
            // And once more while what is left is put right.
            let nr_stores = usize::from(input.u8() & 31);
            at_step(nr_stores, || world.start());
        }
        world.recover();
    }
    world.finish();
}

impl World {
    fn new(size: u16, index: u16, from_available: bool) -> Self {
        let guest = Guest::new(&REGIONS);
        let ring = Layout3::at(0, size);
        ring.publish(guest.map(), index);
        ring.set_used_index(guest.map(), index);
        let (area, area_bytes) = create(NR_QUEUES, size, NR_QUEUES).expect("area");
        let mut world = Self {
            guest,
            ring,
            area,
            area_bytes,
            from_available,
            available: index,
            used: index,
            outstanding: Vec::new(),
            device: None,
            taken: Vec::new(),
            is_damaged: false,
        };
        assert!(world.start(), "a new area is not believed");
        world
    }

    /// Whether the area was believed.
    fn start(&mut self) -> bool {
        let map = self.guest.map();
        let base = if self.from_available { self.available } else { self.ring.used_index(map) };
        let mut device =
            Vring::new(map, self.ring.size, self.ring.addresses(), base, false, true).expect("ring");
        let file = self.area.try_clone().expect("dup");
        let area = InflightArea::open(file, 0, self.area_bytes, NR_QUEUES, self.ring.size, NR_QUEUES);
        let part = area.expect("area").queue(QUEUE, self.ring.size).expect("queue");
        let is_believed = device.track(map, part, false).is_ok();
        self.device = Some(device);
        self.taken.clear();
        is_believed
    }

    fn live(&mut self, input: &mut Input<'_>, nr_steps: u32) {
        let map = Arc::clone(self.guest.map());
        for _ in 0..nr_steps {
            match input.below(8) {
                0..=2 => {
                    self.collect();
                    let head = u16::try_from(input.below(self.ring.size.into())).expect("small");
                    if !self.outstanding.contains(&head) {
                        self.ring.set_available(&map, self.available, head);
                        self.available = self.available.wrapping_add(1);
                        self.ring.publish(&map, self.available);
                        self.outstanding.push(head);
                    }
                }
                3 | 4 => self.take(),
                5 | 6 if !self.taken.is_empty() => {
                    let head = self.taken.remove(input.index(self.taken.len()));
                    self.device.as_mut().expect("a device").push_used(&map, head, 1);
                }
                _ => _ = self.device.as_mut().expect("a device").publish(&map),
            }
        }
    }

    /// The device takes what is next, which it has not taken yet.
    fn take(&mut self) {
        let map = Arc::clone(self.guest.map());
        match self.device.as_mut().expect("a device").pop(&map) {
            Pop::Head(head) => {
                assert!(!self.taken.contains(&head), "head {head} is given twice");
                self.taken.push(head);
            }
            Pop::Empty => {}
            other => assert!(self.is_damaged, "{other:?}"),
        }
    }

    /// The guest takes what has come back: each head once, and only what it waits for.
    fn collect(&mut self) {
        let index = self.ring.used_index(self.guest.map());
        while self.used != index {
            let (head, _) = self.ring.used_entry(self.guest.map(), self.used);
            let at = self.outstanding.iter().position(|outstanding| u32::from(*outstanding) == head);
            match at {
                Some(at) => _ = self.outstanding.remove(at),
                None => assert!(self.is_damaged, "head {head} was answered twice, or never asked for"),
            }
            self.used = self.used.wrapping_add(1);
        }
    }

    /// Something else than a device writes into the area.
    fn damage(&mut self, input: &mut Input<'_>) {
        self.is_damaged = true;
        let queue = self.area_bytes / u64::from(NR_QUEUES) * QUEUE as u64;
        let entry = queue + 16 + 16 * u64::from(input.below(self.ring.size.into()));
        for _ in 0..1 + input.below(6) {
            let (bytes, at) = match input.below(8) {
                0 => (input.bytes(64).to_vec(), queue + u64::from(input.u8())),
                1 => (vec![input.below(3) as u8], entry),
                2 => (input.u16().to_le_bytes().to_vec(), entry + 6),
                3 => (input.u64().to_le_bytes().to_vec(), entry + 8),
                4 => (input.below(32).to_le_bytes()[..2].to_vec(), queue + 12),
                5 => (self.used.wrapping_sub(u16::from(input.u8() & 7)).to_le_bytes().to_vec(), queue + 14),
                6 => (input.u16().to_le_bytes().to_vec(), queue + 2 * u64::from(input.below(8))),
                _ => (vec![1; 1], entry),
            };
            let room = usize::try_from(self.area_bytes.saturating_sub(at)).expect("small");
            self.area.write_all_at(&bytes[..bytes.len().min(room)], at).expect("area");
        }
    }

    /// After a crash: what the guest waits for is taken again, in its order.
    fn recover(&mut self) {
        self.device = None;
        self.collect();
        let is_believed = self.start();
        let map = Arc::clone(self.guest.map());
        (0..=self.ring.size).for_each(|_| self.take());
        if !self.is_damaged {
            assert!(is_believed, "what a device wrote is not believed");
            assert_eq!(self.taken, self.outstanding, "taken again");
        }
        let device = self.device.as_mut().expect("a device");
        assert_eq!(usize::from(device.nr_in_flight()), self.taken.len());
        // It is damaged no more: the next start finds what this one has written.
        if !self.is_damaged {
            return;
        }
        self.is_damaged = false;
        for head in std::mem::take(&mut self.taken) {
            assert!(head < self.ring.size, "head {head} is outside the ring");
            device.push_used(&map, head, 0);
        }
        device.publish(&map);
        // The guest, which may have been told nonsense, begins anew.
        self.outstanding.clear();
        self.used = self.ring.used_index(&map);
        self.available = self.used;
        self.ring.publish(&map, self.available);
        assert!(self.start(), "what was put right is not believed");
    }

    /// Everything can be answered.
    fn finish(&mut self) {
        let map = Arc::clone(self.guest.map());
        (0..=self.ring.size).for_each(|_| self.take());
        let device = self.device.as_mut().expect("a device");
        self.taken.drain(..).for_each(|head| device.push_used(&map, head, 1));
        device.publish(&map);
        self.collect();
        assert!(self.outstanding.is_empty(), "never answered: {:?}", self.outstanding);
    }
}
