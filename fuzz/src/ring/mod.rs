//! The whole way of requests: a ring in guest memory, the real worker, a disk in memory.

mod driver;
mod engine;
mod model;
mod world;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::rc::Rc;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};

use polypath::dirty_log::DirtyLog;
use polypath::disk::{Disk, DiskOptions, Tuning};
use polypath::fuzzing::on_look;
use polypath::memory::Lessor;
use polypath::merge::MergeLimits;
use polypath::vring::Vring;
use polypath::worker::{Worker, WorkerConfig};
use polypath_paths::text::NoPathRetry;
use polypath_paths::{Group, MapState, OpenOptions, Path, Table, TableCell};
use polypath_selector::{GroupArgs, Kind, PathArgs};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes as _, GuestAddress};

use crate::guest::{Guest, Layout3};
use crate::input::Input;
use driver::{Driver, REGIONS};
use engine::TestEngine;
use world::World;

const DISK_BYTES: usize = 128 << 10;

/// Changes that a guest makes while it is looked at.
const RACES_MAX: u32 = 4;

thread_local! {
    /// What lies on the disk at first.
    static CONTENT: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 + at) as u8).collect();
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let disk = disk(&mut input);
    let limits = disk.limits();
    let size = match input.below(16) {
        0 => 1024,
        1 => 1,
        at => 1 << (2 + at % 5),
    };
    let mut ring = Layout3::at(REGIONS[0].0, size);
    if input.rarely(32) {
        ring.used = input.pick(&[
            ring.used + 4,
            ring.available,
            REGIONS[1].0 - 8,
            ring.descriptors,
            0x4_2ef0,
            0x4_2f00,
        ]);
    }
    let guest = Guest::new(&REGIONS);
    let map = Arc::clone(guest.map());
    let index = input.pick(&[0, 65_530, 7]);
    ring.publish(&map, index);
    ring.set_used_index(&map, index);
    let (event_idx, indirect) = (input.below(2) == 0, input.below(8) != 7);
    let Some(mut vring) = Vring::new(&map, size, ring.addresses(), index, event_idx, indirect) else {
        return;
    };
    if event_idx {
        let _ = map.write_obj(input.u16(), GuestAddress(ring.available + ring.available_bytes() - 2));
    }
    let driver = Driver::new(ring, indirect, DISK_BYTES as u64);
    let mut world = World::new(guest, driver, limits, CONTENT.with(Clone::clone), index, 1 + input.below(5));
    if input.rarely(4) {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&file, World::page_count().div_ceil(8)).expect("memfd");
        let log =
            DirtyLog::map(file.try_clone().expect("dup"), 0, World::page_count().div_ceil(8)).expect("log");
        vring.set_log(Some((Arc::new(log), Some(ring.used))));
        world.log = Some(file);
    }
    if input.rarely(8) {
        world.lawless = true;
        race(&mut input, &map);
    }
    let world = Rc::new(RefCell::new(world));
    let lessor = Lessor::new(map);
    let (commands, receiver) = mpsc::channel();
    let config = WorkerConfig {
        index: 0,
        vring,
        map: lessor.lease(),
        kick: Some(eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd")),
        call: None,
        error: None,
        enabled: true,
        // With neither FLUSH nor CONFIG_WCE, writes are durable when they are answered.
        features: disk.features() & !input.pick(&[0, 1 << 11, 1 << 9 | 1 << 11]),
        disk: Arc::new(disk),
        fence: None,
        nr_workers: Arc::new(AtomicUsize::new(0)),
    };
    let engine = TestEngine::new(Rc::clone(&world), input, commands);
    let worker = Worker::new(config, engine, receiver).expect("worker");
    let next_available = worker.run();
    on_look(None);
    world.borrow_mut().end(next_available);
}

/// The guest changes what is looked at, between two looks.
fn race(input: &mut Input<'_>, map: &Arc<polypath::memory::GuestMap>) {
    let mut changes: Vec<(u32, u64, u16)> = (0..1 + input.below(RACES_MAX))
        .map(|_| (u32::from(input.u8()), REGIONS[0].0 + u64::from(input.u16() & 0x3fff), input.u16()))
        .collect();
    let (map, nr_looks) = (Arc::clone(map), Cell::new(0));
    on_look(Some(Box::new(move || {
        let now = nr_looks.replace(nr_looks.get() + 1);
        changes.retain(|(when, addr, value)| {
            if *when == now {
                let _ = map.write_obj(*value, GuestAddress(*addr));
            }
            *when != now
        });
    })));
}

fn disk(input: &mut Input<'_>) -> Disk {
    let nr_paths = 1 + input.index(2);
    let open = |i: usize| {
        let options = OpenOptions { read_only: false, direct: true };
        let path = Path::open(format!("null:{DISK_BYTES},{i}").into(), options, 1).expect("path");
        (Arc::new(path), PathArgs::default())
    };
    let selector = input.pick(&[Kind::RoundRobin, Kind::QueueLength, Kind::ServiceTime]);
    let group = Group {
        paths: (0..nr_paths).map(open).collect(),
        selector,
        args: GroupArgs::default(),
        bypassed: false,
    };
    let mut limits = group.paths[0].0.limits().clone();
    limits.logical_block_bytes = input.pick(&[512, 4096]);
    limits.mem_align_bytes = input.pick(&[1, 4, 512, 4096]);
    limits.read_only = input.rarely(12);
    limits.discard = !input.rarely(12);
    let map = Arc::new(MapState::new(1, NoPathRetry::Fail, || {}));
    let table = Table::with_limits(vec![group], map, Some(limits), true).expect("table");
    let tuning = Tuning {
        path_depth: input.pick(&[128, 1, 3]),
        merge: MergeLimits { bytes_max: input.pick(&[512 << 10, 0, 4096]), ..MergeLimits::default() },
        ..Tuning::default()
    };
    let id = Some(*b"twenty bytes of name");
    Disk::new(TableCell::new(table), DiskOptions { nr_queues: 1, queue_size: 128, id, tuning, cpus: None })
}
