//! The whole route of a request without a kernel: a worker whose engine answers everything at once, and a guest that
//! makes the same requests available again and again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path as StdPath;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath::disk::{Disk, DiskOptions, Tuning};
use polypath::engine::{Engine, Event, Wanted};
use polypath::memory::{GuestMap, Lessor};
use polypath::transfer::Transfer;
use polypath::vring::{RingAddresses, Vring};
use polypath::worker::{Command, Worker, WorkerConfig};
use polypath_paths::text::NoPathRetry;
use polypath_paths::{Group, MapState, OpenOptions, Path, Table, TableCell};
use polypath_selector::{GroupArgs, Kind, PathArgs};
use vm_memory::{Bytes as _, GuestAddress};

/// Requests per kick, which is what the ring holds.
const DEPTH: u16 = 64;
const RING_SIZE: u16 = 256;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADERS: u64 = 0x5000;
const DATA: u64 = 0x10_0000;
const DATA_BYTES: u32 = 4096;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Paths of the table, in one group.
    pub nr_paths: usize,
    /// Workers that exist; one of them runs.
    pub nr_workers: usize,
    /// How paths are chosen.
    pub selector: Kind,
    /// Kicks of 64 requests each.
    pub nr_kicks: u32,
    /// Each so-and-so-manieth answer is an error of the path; 0: none is. Failed paths are back at the next kick.
    pub errors: u32,
}

/// Answers at once; between the answers it plays the guest.
struct Loopback<F> {
    map: Arc<GuestMap>,
    done: VecDeque<Event>,
    stop: mpsc::Sender<Command>,
    nr_kicks_left: u32,
    avail: u16,
    nr_in_flight: usize,
    now_ns: u64,
    disk: Arc<Disk>,
    errors: u32,
    nr_started: u32,
    each_kick: F,
}

impl<F: FnMut(u32)> Engine for Loopback<F> {
    fn start(&mut self, transfer: Box<Transfer>) {
        let len = i32::try_from(transfer.nr_bytes()).unwrap_or(i32::MAX);
        self.nr_started += 1;
        let is_error = self.errors != 0 && self.nr_started.is_multiple_of(self.errors);
        // ENODEV.
        self.done.push_back(Event::Done(transfer, if is_error { -19 } else { len }));
        self.nr_in_flight += 1;
    }

    fn wait(&mut self, _timeout: Option<Duration>, _wanted: Wanted) -> io::Result<()> {
        if !self.done.is_empty() {
            return Ok(());
        }
        self.now_ns += 100_000;
        (self.each_kick)(self.nr_kicks_left);
        if self.nr_kicks_left == 0 {
            self.stop.send(Command::Stop(false)).expect("the worker listens");
            self.done.push_back(Event::Wake);
            return Ok(());
        }
        self.nr_kicks_left -= 1;
        if self.errors != 0 {
            let table = self.disk.table().load();
            (0..table.paths().len()).for_each(|path| table.reinstate_path(path));
        }
        for i in 0..DEPTH {
            let slot = u64::from(self.avail.wrapping_add(i) % RING_SIZE);
            let head = (i * 3).to_le();
            self.map.write_obj(head, GuestAddress(AVAILABLE + 4 + 2 * slot)).expect("ring");
        }
        self.avail = self.avail.wrapping_add(DEPTH);
        self.map.store(self.avail.to_le(), GuestAddress(AVAILABLE + 2), Ordering::Release).expect("ring");
        self.done.push_back(Event::Kick);
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn note_new_view(&mut self) {}

    fn has_event(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.done.pop_front();
        if matches!(event, Some(Event::Done(..))) {
            self.nr_in_flight -= 1;
            self.now_ns += 1_000;
        }
        event
    }

    fn watch_kick(&mut self, _kick: Option<OwnedFd>) {}

    fn visit(&self, _each: &mut dyn FnMut(&Transfer)) {}

    fn nr_in_flight(&self) -> usize {
        self.nr_in_flight
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }
}

/// Runs the plan on this thread; `each_kick` is called before each kick with the number of those to come. Gives the
/// number of requests that were answered with OK.
pub fn run(dir: &StdPath, plan: Plan, each_kick: impl FnMut(u32)) -> u64 {
    let disk = Arc::new(make_disk(dir, plan));
    let map = Arc::new(
        GuestMap::from_ranges(&[(GuestAddress(0), usize::from(DEPTH) * 4096 + (2 << 20))]).expect("map"),
    );
    prepare(&map);
    let lessor = Lessor::new(Arc::clone(&map));
    let at = RingAddresses {
        descriptors: GuestAddress(DESCRIPTORS),
        available: GuestAddress(AVAILABLE),
        used: GuestAddress(USED),
    };
    let vring = Vring::new(&map, RING_SIZE, at, 0, false, true).expect("ring");
    let (stop, commands) = mpsc::channel();
    let engine = Loopback {
        map: Arc::clone(&map),
        done: VecDeque::with_capacity(usize::from(RING_SIZE)),
        stop,
        nr_kicks_left: plan.nr_kicks,
        avail: 0,
        nr_in_flight: 0,
        now_ns: 1,
        disk: Arc::clone(&disk),
        errors: plan.errors,
        nr_started: 0,
        each_kick,
    };
    let config = WorkerConfig {
        index: 0,
        vring,
        map: lessor.lease(),
        kick: None,
        call: None,
        error: None,
        enabled: true,
        disk,
        features: u64::MAX,
        fence: None,
        nr_workers: Arc::new(AtomicUsize::new(plan.nr_workers)),
    };
    let end = Worker::new(config, engine, commands).expect("worker").run();
    let expected = u64::from(plan.nr_kicks) * u64::from(DEPTH);
    assert_eq!(u64::from(end), expected % (1 << 16), "requests taken");
    let used: u16 = map.load(GuestAddress(USED + 2), Ordering::Acquire).expect("ring");
    assert_eq!(u64::from(u16::from_le(used)), expected % (1 << 16), "requests returned");
    for i in 0..u64::from(DEPTH) {
        let status: u8 = map.read_obj(GuestAddress(HEADERS + 32 * i + 16)).expect("status");
        assert_eq!(status, 0, "request {i}");
    }
    expected
}

fn make_disk(dir: &StdPath, plan: Plan) -> Disk {
    let first = dir.join("disk");
    std::fs::File::create(&first).and_then(|f| f.set_len(1 << 20)).expect("file");
    let open = OpenOptions { read_only: false, direct: false };
    let paths = (0..plan.nr_paths).map(|i| {
        let name = dir.join(format!("path{i}"));
        std::fs::hard_link(&first, &name).expect("link");
        let path = Path::open(name, open, plan.nr_workers).expect("path");
        (Arc::new(path), PathArgs::for_path(plan.selector, i, plan.nr_paths))
    });
    let group = Group {
        paths: paths.collect(),
        selector: plan.selector,
        args: GroupArgs::default(),
        bypassed: false,
    };
    let map = Arc::new(MapState::new(plan.nr_workers, NoPathRetry::Fail, || {}));
    let table = Table::new(vec![group], map).expect("table");
    Disk::new(
        TableCell::new(table),
        DiskOptions { nr_queues: 64, queue_size: RING_SIZE, id: None, tuning: Tuning::default(), cpus: None },
    )
}

/// Lays 64 requests of 4 KiB into guest memory, reads and writes by turns.
fn prepare(map: &GuestMap) {
    for i in 0..u64::from(DEPTH) {
        let header = HEADERS + 32 * i;
        let is_write = i % 2;
        map.write_obj(is_write, GuestAddress(header)).expect("header");
        map.write_obj(i * 8, GuestAddress(header + 8)).expect("header");
        let head = 3 * i;
        let data_flags = if is_write == 1 { 1 } else { 3 };
        describe(map, head, header, 16, 1);
        describe(map, head + 1, DATA + 4096 * i, DATA_BYTES, data_flags);
        describe(map, head + 2, header + 16, 1, 2);
    }
}

fn describe(map: &GuestMap, index: u64, addr: u64, len: u32, flags: u64) {
    let at = DESCRIPTORS + 16 * index;
    map.write_obj(addr, GuestAddress(at)).expect("descriptor");
    let rest = u64::from(len) | flags << 32 | (index + 1) << 48;
    map.write_obj(rest, GuestAddress(at + 8)).expect("descriptor");
}
