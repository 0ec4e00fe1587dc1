//! The real ring on temporary files.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use polypath_paths::OpenOptions;
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::engine::SURE_GATHER_TIME;
use crate::lane::{Snapshot, View};
use crate::memory::{GuestMap, Lessor, MapLease, anonymous};
use crate::request::{Operation, Range, Segment, Status, unreadable};
use crate::sim::fixture::{CACHED, Links};
use crate::transfer::Next;

mod buffers;
mod events;
mod files;
mod polled;

const DISK_BYTES: u64 = 4 << 20;
const MEMORY_BYTES: usize = 4 << 20;

/// Rings whose entries calls send, and such as have a thread of the kernel's for it, which sleeps after so many ms.
const KINDS: [u32; 2] = [0, 20];

/// For what should come: an answer later than this is none.
const SOON: Duration = Duration::from_secs(10);

/// An engine with a disk and memory to work on.
struct Case {
    links: Links,
    table: Snapshot,
    guest: Arc<GuestMap>,
    lease: Rc<MapLease>,
    engine: UringEngine,
    wake: OwnedFd,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

impl Case {
    /// One of each kind of ring.
    fn new(nr_slots: u32) -> [Self; 2] {
        KINDS.map(|idle_ms| Self::on(nr_slots, Links::new(2, DISK_BYTES), idle_ms))
    }

    /// These, on any file system, and one on tmpfs, whose I/O the worker does itself.
    fn all(nr_slots: u32) -> [Self; 3] {
        let in_memory = Self::on(nr_slots, Links::within("/dev/shm".as_ref(), 2, DISK_BYTES), 0);
        assert!(in_memory.table.lane(1).unwrap().path().limits().in_memory, "/dev/shm is a tmpfs");
        let [called, polled] = Self::new(nr_slots);
        [called, polled, in_memory]
    }

    fn on(nr_slots: u32, links: Links, idle_ms: u32) -> Self {
        let guest = anonymous(MEMORY_BYTES);
        let wake = event();
        Self {
            table: Rc::new(View::new(Arc::new(links.table(2, CACHED, 1)), None, 0)),
            lease: Rc::new(Lessor::new(Arc::clone(&guest)).lease()),
            engine: UringEngine::new(nr_slots, wake.try_clone().unwrap(), None, idle_ms).unwrap(),
            links,
            guest,
            wake,
        }
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(self.links.name(0)).unwrap()
    }

    fn transfer(&self, operation: Operation, segments: &[(u64, u64)], ranges: &[Range]) -> Box<Transfer> {
        let mut request = unreadable(0);
        (request.operation, request.data_len) = (operation, segments.iter().map(|s| s.1).sum());
        let mut transfer = Box::new(Transfer::default());
        transfer.buffers.segments =
            segments.iter().map(|(addr, len)| Segment { addr: GuestAddress(*addr), len: *len }).collect();
        transfer.buffers.ranges = ranges.to_vec();
        transfer.begin(request, &self.lease, &self.table, false, 0).unwrap();
        transfer.set_path(1);
        transfer
    }

    fn start(&mut self, operation: Operation, segments: &[(u64, u64)]) {
        let transfer = self.transfer(operation, segments, &[]);
        self.engine.start(transfer);
    }

    /// The next event, whatever it is.
    fn next(&mut self) -> Event {
        let start = Instant::now();
        loop {
            if let Some(event) = self.engine.next_event() {
                return event;
            }
            assert!(start.elapsed() < SOON, "nothing happens");
            self.engine.wait(Some(SOON), Wanted::ONE).unwrap();
        }
    }

    fn next_done(&mut self) -> (Box<Transfer>, i32) {
        match self.next() {
            Event::Done(transfer, result) => (transfer, result),
            event => panic!("{event:?}"),
        }
    }

    /// One step from start to end.
    fn run(&mut self, transfer: Box<Transfer>) -> i32 {
        self.engine.start(transfer);
        let (transfer, result) = self.next_done();
        end(transfer);
        result
    }

    /// Whatever has happened and must not have: waits a moment for it.
    fn assert_quiet(&mut self) {
        self.engine.wait(Some(Duration::from_millis(20)), Wanted::ONE).unwrap();
        if let Some(event) = self.engine.next_event() {
            panic!("{event:?}");
        }
    }

    fn put(&self, addr: u64, bytes: &[u8]) {
        self.guest.write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    fn get(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }
}

fn end(mut transfer: Box<Transfer>) {
    let (request, ..) = transfer.end(Status::Ok).unwrap();
    let _ = request.into_head();
}

fn letters(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251).to_le_bytes()[0]).collect()
}

#[test]
fn a_ring_can_be_had_here() {
    for nr_slots in [1, 1024] {
        UringEngine::probe(nr_slots).unwrap();
        UringEngine::probe_polled(nr_slots, 1).unwrap();
    }
    assert_eq!(Case::new(1).map(|case| case.engine.is_polled), [false, true]);
}

#[test]
fn a_write_is_in_the_file_and_a_read_in_memory() {
    for mut case in Case::all(4) {
        let bytes = letters(8192);
        case.put(0x1000, &bytes[..5000]);
        case.put(0x8000, &bytes[5000..]);
        let write = case.transfer(Operation::Write { offset: 4096 }, &[(0x1000, 5000), (0x8000, 3192)], &[]);
        assert_eq!(case.run(write), 8192);
        let mut file_bytes = vec![0; 8192];
        case.file().read_exact_at(&mut file_bytes, 4096).unwrap();
        assert!(file_bytes == bytes);

        let read =
            case.transfer(Operation::Read { offset: 4096 }, &[(0x20_0000, 512), (0x21_0000, 7680)], &[]);
        assert_eq!(case.run(read), 8192);
        assert!(case.get(0x20_0000, 512) == bytes[..512] && case.get(0x21_0000, 7680) == bytes[512..]);
    }
}

#[test]
fn bounced_pieces_go_both_ways() {
    for mut case in Case::all(1) {
        let bytes = letters(1024);
        case.put(0x1001, &bytes[..100]);
        case.put(0x2003, &bytes[100..]);
        let write = case.transfer(Operation::Write { offset: 0 }, &[(0x1001, 100), (0x2003, 924)], &[]);
        assert_eq!(case.run(write), 1024);
        let read = case.transfer(Operation::Read { offset: 0 }, &[(0x5001, 1000), (0x6007, 24)], &[]);
        assert_eq!(case.run(read), 1024);
        assert!(case.get(0x5001, 1000) == bytes[..1000] && case.get(0x6007, 24) == bytes[1000..]);
    }
}

#[test]
fn f31_a_read_past_the_end_of_a_shrunk_file_is_short() {
    for mut case in Case::all(1) {
        case.file().set_len(4096 + 100).unwrap();
        let mut read = case.transfer(Operation::Read { offset: 0 }, &[(0, 16384)], &[]);
        for expected in [Next::Again, Next::Finished(Status::IoErr)] {
            case.engine.start(read);
            let (transfer, result) = case.next_done();
            read = transfer;
            assert!(result < 16384, "{result}");
            assert_eq!(read.complete(result), expected);
        }
        end(read);
    }
}

#[test]
fn sync_and_holes_and_zeros() {
    for mut case in Case::all(2) {
        let file = case.file();
        file.write_all_at(&letters(65536), 0).unwrap();
        let mut flush = case.transfer(Operation::Flush, &[], &[]);
        flush.set_path(0);
        assert_eq!(case.run(flush), 0);
        let range = |offset, len, unmap| Range { offset, len, unmap };
        let discard = case.transfer(Operation::Discard, &[], &[range(4096, 8192, true)]);
        let zeroes = case.transfer(Operation::WriteZeroes, &[], &[range(32768, 4096, true)]);
        for transfer in [discard, zeroes] {
            assert_eq!(case.run(transfer), 0);
        }
        let mut expected = letters(65536);
        expected[4096..12288].fill(0);
        expected[32768..36864].fill(0);
        let mut bytes = vec![0; 65536];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == expected);

        // Not every file system can zero a range; what comes then is the errno that makes zeros be written.
        let zeroes = case.transfer(Operation::WriteZeroes, &[], &[range(DISK_BYTES - 4096, 4096, false)]);
        let result = case.run(zeroes);
        assert!([0, -libc::EOPNOTSUPP].contains(&result), "{result}");
        assert_eq!(file.metadata().unwrap().len(), DISK_BYTES, "F52: the size stays");
    }
}

#[test]
fn an_error_is_a_negative_errno_and_the_next_transfer_works() {
    for mut case in Case::all(1) {
        let writable = Rc::clone(&case.table);
        let read_only = OpenOptions { read_only: true, direct: false };
        case.table = Rc::new(View::new(Arc::new(case.links.table(2, read_only, 1)), None, 0));
        let write = case.transfer(Operation::Write { offset: 0 }, &[(0, 512)], &[]);
        assert_eq!(case.run(write), -libc::EBADF);
        case.table = writable;
        let write = case.transfer(Operation::Write { offset: 0 }, &[(0, 512)], &[]);
        assert_eq!(case.run(write), 512);
    }
}

#[test]
fn f28_every_slot_at_once_round_after_round() {
    const NR_SLOTS: u32 = 256;
    for mut case in Case::all(NR_SLOTS) {
        let bytes = letters(1 << 20);
        case.file().write_all_at(&bytes, 0).unwrap();
        for _ in 0..4 {
            for i in 0..u64::from(NR_SLOTS) {
                case.start(Operation::Read { offset: i * 4096 }, &[(i * 4096, 4096)]);
            }
            assert_eq!(case.engine.nr_in_flight(), NR_SLOTS as usize);
            for _ in 0..NR_SLOTS {
                let (transfer, result) = case.next_done();
                assert_eq!(result, 4096);
                end(transfer);
            }
            assert_eq!(case.engine.nr_in_flight(), 0);
            assert!(case.get(0, bytes.len()) == bytes);
            case.put(0, &vec![0; bytes.len()]);
        }
    }
}

#[test]
fn f18_nothing_is_let_go_of_while_the_kernel_works_on_it() {
    for is_sent in [false, true] {
        for mut case in Case::new(64) {
            case.put(0, &letters(64 * 4096));
            for i in 0..64 {
                case.start(Operation::Write { offset: i * 4096 }, &[(i * 4096, 4096)]);
            }
            if is_sent {
                case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap();
            }
            let Case { links, table, guest, lease, engine, .. } = case;
            // The view has the lane as well, and so has the ring, for the file.
            assert_eq!((Rc::strong_count(&lease), Rc::strong_count(table.lane(1).unwrap())), (65, 66));
            drop(engine);
            // Dropping waits for all of them: what they own is free only now.
            assert_eq!((Rc::strong_count(&lease), Rc::strong_count(table.lane(1).unwrap())), (1, 1));
            let mut bytes = vec![0; 64 * 4096];
            File::open(links.name(0)).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == letters(64 * 4096));
            drop(guest);
        }
    }
}
