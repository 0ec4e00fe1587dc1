//! The world around a worker: the guest, its memory, the storage, and who sends the commands.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Weak};

use polypath_paths::Path;
use vm_memory::{GuestAddress, GuestRegionMmap};

use super::control::Control;
use super::driver::Driver;
use super::fixture::Links;
use super::lun::{Last, Lun, Moment, NR_PORTS, Record, Step};
use super::model::Model;
use super::plan::{NR_SECTORS, Plan};
use super::ports;
use super::profile::Profile;
use super::ring::RawRing;
use super::rng::Rng;
use super::slot::{Placed, SLOT_BYTES, Slot};
use crate::disk::Disk;
use crate::engine::Event;
use crate::memory::{GuestMap, Lessor};
use crate::transfer::Transfer;

/// Slots per region.
const NR_SLOTS: u64 = 8;
/// Where the ring and the first slots lie in the first region, and where the second region begins.
const RING_AT: u64 = 0x1000;
const SLOTS_AT: u64 = 0x4000;
const SECOND_AT: u64 = 1 << 20;

/// A request that the device has not returned, or that the guest has not seen returned.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) id: u64,
    pub(crate) plan: Plan,
    pub(crate) slot: usize,
    pub(crate) placed: Placed,
    pub(crate) descriptors: Vec<u16>,
    pub(crate) since: Moment,
    pub(crate) is_published: bool,
    pub(crate) record: Record,
    /// A change that has not come back from a path that failed: others that overlap it may have to wait.
    pub(crate) is_stuck: bool,
    /// Its memory went away: if it has to wait, it cannot go on.
    pub(crate) may_be_lost: bool,
    /// How things stood when the device returned it.
    pub(crate) ended: Option<Ended>,
}

/// How things stood at the end of a turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    /// Ports with an active path, when the turn began and at its end.
    pub(crate) active_before: u64,
    pub(crate) active: u64,
    pub(crate) stopping: bool,
    pub(crate) ns: u64,
    pub(crate) no_path_ns: Option<u64>,
}

/// A step that is with the kernel.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) transfer: Box<Transfer>,
    pub(crate) step: Step,
    pub(crate) path: Arc<Path>,
    pub(crate) port: usize,
    /// Heads of the requests that are sent as one; none for a flush, which has no data to know it by.
    pub(crate) heads: Vec<u16>,
    pub(crate) since: u64,
    /// The answer, once the kernel has it.
    pub(crate) result: i32,
}

/// A write that was answered OK and is not known to be durable.
#[derive(Debug)]
pub(crate) struct Volatile {
    pub(crate) answered: u64,
    pub(crate) parts: [Option<u64>; NR_PORTS],
}

/// All of it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) profile: Profile,
    pub(crate) trace: bool,
    pub(crate) now_ns: u64,
    /// Counts everything that happens.
    pub(crate) clock: u64,

    pub(crate) regions: [Arc<GuestRegionMmap<()>>; 2],
    pub(crate) lessor: Lessor,
    pub(crate) current_map: Weak<GuestMap>,
    pub(crate) old_maps: Vec<Weak<GuestMap>>,

    pub(crate) driver: Driver,
    pub(crate) slots: Vec<Slot>,
    pub(crate) outstanding: BTreeMap<u16, Outstanding>,
    pub(crate) nr_sent: u64,
    pub(crate) model: Model,
    pub(crate) volatile: Vec<Volatile>,

    pub(crate) disk: Arc<Disk>,
    pub(crate) lun: Lun,
    pub(crate) links: Rc<Links>,
    pub(crate) old_paths: Vec<Weak<Path>>,
    /// The state of the map that the worker was last woken for.
    pub(crate) woken_epoch: u64,
    /// Since when no path is active, in ns.
    pub(crate) no_path_ns: Option<u64>,
    /// When the port was last without an active path.
    pub(crate) last_out: [u64; NR_PORTS],
    /// Ports whose path may be out: it had an error that speaks of it, or somebody took it out.
    pub(crate) may_be_out: [bool; NR_PORTS],
    /// Paths that must be out at the end of this turn.
    pub(crate) must_be_out: Vec<Arc<Path>>,
    /// When the last successful sync of each port was sent.
    pub(crate) synced: [u64; NR_PORTS],
    /// What came of the syncs of flushes that failed.
    pub(crate) flushes: Vec<(u64, Last)>,

    pub(crate) ops: Vec<Op>,
    pub(crate) answered: VecDeque<Op>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) control: Control,
}

impl World {
    pub(crate) fn new(mut rng: Rng, profile: Profile, links: Rc<Links>, trace: bool) -> Self {
        let region =
            |at, len| Arc::new(GuestRegionMmap::from_range(GuestAddress(at), len, None).expect("region"));
        let len = |bytes: u64| usize::try_from(bytes).expect("small");
        let slots_bytes = NR_SLOTS * SLOT_BYTES;
        let regions = [region(0, len(SLOTS_AT + slots_bytes)), region(SECOND_AT, len(slots_bytes))];
        let map = Arc::new(GuestMap::from_arc_regions(regions.to_vec()).expect("memory"));
        // The guest's own view is apart from what is lent to workers, so that it can be seen when that is let go of.
        let lent = Arc::new(GuestMap::clone(&map));
        let ring = RawRing::new(&map, profile.ring_size, RING_AT);
        let first = (0..NR_SLOTS).map(|i| SLOTS_AT + i * SLOT_BYTES);
        let second = (0..NR_SLOTS).map(|i| SECOND_AT + i * SLOT_BYTES);
        let mut faults = profile.faults;
        if profile.gaps.asking {
            faults.not_allowed = 0;
        }
        let lun = Lun::new(&mut rng, faults, profile.nr_bad_sectors);
        Self {
            driver: Driver::new(ring, profile.index, profile.event_idx, profile.indirect),
            slots: first.chain(second).map(|base| Slot::new(&map, base)).collect(),
            model: Model::new(usize::try_from(NR_SECTORS).expect("small")),
            disk: Arc::new(ports::disk(&mut rng, &profile, &links)),
            current_map: Arc::downgrade(&lent),
            lessor: Lessor::new(lent),
            control: Control::default(),
            now_ns: 1_000_000,
            clock: 1,
            outstanding: BTreeMap::new(),
            ops: Vec::new(),
            answered: VecDeque::new(),
            events: VecDeque::new(),
            old_maps: Vec::new(),
            old_paths: Vec::new(),
            woken_epoch: 0,
            no_path_ns: None,
            last_out: [0; NR_PORTS],
            may_be_out: [false; NR_PORTS],
            must_be_out: Vec::new(),
            nr_sent: 0,
            synced: [0; NR_PORTS],
            flushes: Vec::new(),
            volatile: Vec::new(),
            rng,
            profile,
            trace,
            regions,
            lun,
            links,
        }
    }

    /// Says what happens, when a single seed is looked at.
    pub(crate) fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.trace {
            println!("{:>6} {what}", self.clock);
        }
    }

    pub(crate) fn now(&self) -> Moment {
        Moment { clock: self.clock, ns: self.now_ns }
    }

    /// Which request a slot's address belongs to.
    pub(crate) fn head_at(&self, addr: u64) -> Option<u16> {
        let slot = match addr.checked_sub(SECOND_AT) {
            Some(offset) => NR_SLOTS + offset / SLOT_BYTES,
            None => addr.checked_sub(SLOTS_AT)? / SLOT_BYTES,
        };
        self.outstanding.iter().find(|(_, o)| o.slot as u64 == slot).map(|(head, _)| *head)
    }

    /// Whether a slot lies in the second region.
    pub(crate) fn is_second(slot: usize) -> bool {
        slot as u64 >= NR_SLOTS
    }

    /// Requests of which the device has been told, without those that it has returned already.
    pub(crate) fn nr_with_device(&self) -> usize {
        let nr_published = self.outstanding.values().filter(|o| o.is_published).count();
        nr_published - usize::from(self.driver.nr_used())
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_over(&self) -> bool {
        let all_sent = self.nr_sent >= self.profile.nr_requests && self.outstanding.is_empty();
        all_sent && !self.driver.has_unpublished() && (!self.profile.wreck || self.control.is_wrecked)
    }
}
