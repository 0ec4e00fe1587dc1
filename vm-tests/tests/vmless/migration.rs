//! The guest is about to move: every page that the back-end writes is marked in the front-end's log.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::config::WRITEBACK_OFFSET;
use polypath_vm_tests::front_end::dirty::{PAGE, pages};
use polypath_vm_tests::front_end::request::{UNTOUCHED, header};
use polypath_vm_tests::front_end::verify::{Plan, Rng, Verifier};
use polypath_vm_tests::front_end::{
    Chain, Cut, DirtyBits, Disk, Framing, IOERR, OK, Op, Region, Segment, feature,
};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Progress, SetAtEnd, start_loads};

/// Pages that `run` changes, apart from those that only the driver writes while it waits.
fn changed(disk: &mut Disk, run: impl FnOnce(&mut Disk)) -> BTreeSet<u64> {
    let before = pages(&disk.memory);
    run(disk);
    let after = pages(&disk.memory);
    let rings: Vec<[u64; 2]> = disk.queues.iter().map(|q| q.queue.ring_addresses()).collect();
    let differing = before.into_iter().zip(after).filter(|(old, new)| old != new);
    let changed = differing.filter(|((page, old), (_, new))| {
        // The driver writes the flags, the index and the event of the available ring, and nothing else here.
        (page * PAGE..).zip(old.iter().zip(new)).any(|(addr, (old, new))| {
            let is_drivers = rings.iter().any(|[avail, _]| (*avail..*avail + 6 + 2 * 128).contains(&addr));
            old != new && !is_drivers
        })
    });
    changed.map(|((page, _), _)| page).collect()
}

fn some_op(rng: &mut Rng, sectors: u64) -> Op {
    let sector = rng.below(sectors - 64);
    match rng.below(10) {
        0..=5 => Op::read(sector, 1 + rng.below(48) as usize),
        6 => Op::GetId,
        7 => Op::Flush,
        8 => Op::WriteZeroes(vec![Segment::new(sector, 8)]),
        _ => Op::write(sector, filled(sector, 8)),
    }
}

fn some_framing(rng: &mut Rng) -> Framing {
    match rng.below(3) {
        0 => Framing::Plain,
        1 => Framing::Indirect,
        _ => Framing::Cut(Cut { into: vec![1000, 3000, 5000], misalign: 3, ..Cut::default() }),
    }
}

/// A few rounds of random requests; what changed in memory is what is marked, page by page.
fn compare_with_the_log(without: u64) {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let at = Disk::at(server.socket()).queues(2).memory_bytes(4 * MIB).without(without);
    let mut disk = at.open().unwrap();
    let log = disk.start_logging().unwrap();
    let mut rng = Rng::new(49);
    let mut nr_pages = 0;
    for round in 0..40 {
        for q in &mut disk.queues {
            for _ in 0..6 {
                let (op, framing) = (some_op(&mut rng, image.sectors()), some_framing(&mut rng));
                q.stage_framed(&op, &framing).unwrap();
            }
        }
        // Idle rings write nothing, so all marks of earlier rounds are there.
        log.take().unwrap();
        let changed = changed(&mut disk, |disk| {
            disk.queues.iter_mut().for_each(|q| q.kick());
            for q in &mut disk.queues {
                while q.nr_pending() != 0 {
                    // Of a chain that is cut anywhere, a write may be refused; that is written as well.
                    q.done().unwrap();
                }
            }
            // What the back-end writes behind its last answer: that it wants to be kicked.
            disk.stop().unwrap();
        });
        let marked = log.take().unwrap();
        let missing: Vec<_> = changed.difference(&marked).collect();
        assert!(missing.is_empty(), "round {round}: written and not marked: {missing:x?} of {changed:x?}");
        nr_pages += changed.len();
        for q in &disk.queues {
            disk.session.set_up(&q.queue, q.queue.next_avail()).unwrap();
            disk.session.set_vring_addr_logged(&q.queue, Some(q.queue.ring_addresses()[1])).unwrap();
        }
    }
    assert!(nr_pages > 500, "{nr_pages} pages in all");
}

#[test]
fn f49_every_page_written_is_marked() {
    compare_with_the_log(0);
}

#[test]
fn f49_every_page_written_is_marked_without_event_indices() {
    compare_with_the_log(feature::EVENT_IDX);
}

/// Data that the device only reads is not marked: the log is about what was written.
#[test]
fn writes_mark_no_data() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let log = disk.start_logging().unwrap();
    for i in 0..32 {
        disk.q().write(i * 256, &filled(i * 256, 256)).unwrap();
    }
    // 32 writes of 32 pages each: status bytes and the used ring.
    let marked = log.take().unwrap();
    assert!((1..40).contains(&marked.len()), "{marked:x?}");
}

/// Nobody tells the other host of a guest's choice.
#[test]
fn a_move_of_a_guest_that_chose_write_through_is_warned_of() {
    let image = Image::empty(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    disk.start_logging().unwrap();
    disk.stop_logging().unwrap();
    assert!(!server.stderr().contains("write through"), "{}", server.stderr());
    disk.session.set_config(WRITEBACK_OFFSET, &[0]).unwrap();
    disk.start_logging().unwrap();
    wait_until("the warning", SOON, || server.stderr().contains("it chose write through")).unwrap();
}

/// Requests that are on a path when the log is handed over, and end afterwards.
#[test]
fn f49_requests_from_before_the_log_are_marked() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let server = Server::polypath().path(fs.path("a")).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    disk.q().read(0, 8).unwrap();
    fs.rule("a", Rule::hold().reads());
    let memory = disk.memory.clone();
    let (data, small) = (memory.alloc(16 * 4096), memory.alloc(4096));
    small.put(&header(0, 64));
    let chain =
        Chain::new().readable(small.addr, 16).writable(data.addr, 16 * 4096).writable(small.addr + 100, 1);
    let head = disk.q().queue.send(&chain).unwrap();
    fs.wait_held("a", 1, SOON).unwrap();
    let log = disk.start_logging().unwrap();
    log.take().unwrap();
    fs.release("a");
    disk.q().queue.wait_head(head, SOON).unwrap();
    assert!(data.bytes() == filled(64, 128));
    let marked = log.take().unwrap();
    for page in (data.addr / PAGE..(data.addr + 16 * 4096) / PAGE).chain([small.addr / PAGE]) {
        assert!(marked.contains(&page), "page {page:x} of {marked:x?}");
    }
    // A stop is answered when the last mark is made.
    fs.rule("a", Rule::hold().reads());
    disk.q().queue.send(&chain).unwrap();
    fs.wait_held("a", 1, SOON).unwrap();
    disk.session.send_stop(0).unwrap();
    fs.release("a");
    disk.session.recv_stop(SOON).unwrap();
    assert!(log.take().unwrap().contains(&(data.addr / PAGE + 15)));
}

/// Memory that is plugged in while the log is kept, with a longer log for it.
/// Marking costs what memory there is, not what a chain says: one that names all of it a thousand times would keep the worker,
/// and the front-end that waits for it, for seconds each.
#[test]
fn f49_f20_chains_that_name_gigabytes_do_not_hold_up_the_move() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).memory_bytes(4 << 30).open().unwrap();
    let log = disk.start_logging().unwrap();
    let memory = disk.memory.clone();
    let (head, table) = (memory.alloc_with(&header(0, 0)), memory.alloc(16 << 10));
    let status = memory.alloc_with(&[UNTOUCHED]);
    let chain = (0..1000)
        .fold(Chain::new().readable(head.addr, 16), |chain, _| chain.writable(0, u32::MAX - 511))
        .writable(status.addr, 1)
        .indirect(table.addr);
    let queue = &mut disk.q().queue;
    for _ in 0..queue.size() {
        queue.stage(&chain).unwrap();
    }
    queue.publish();
    queue.kick();
    for _ in 0..queue.size() {
        queue.wait(Duration::from_secs(60)).unwrap();
    }
    assert_eq!(status.bytes(), [IOERR]);
    // All that the chains name, and the ring.
    assert!(log.take().unwrap().len() > (4 << 30) / 4096);
    disk.stop_logging().unwrap();
}

#[test]
fn f49_regions_added_later_are_covered() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let short = disk.start_logging().unwrap();
    let region = disk.memory.add(Region::new(disk.memory.end() + 64 * MIB, MIB, 0).unwrap());
    disk.session.add_region(&region).unwrap();
    let log = DirtyBits::new(disk.memory.end()).unwrap();
    log.set(&disk.session).unwrap();
    let small = disk.memory.alloc(4096);
    small.put(&header(0, 64));
    let chain =
        Chain::new().readable(small.addr, 16).writable(region.guest, 4096).writable(small.addr + 100, 1);
    let head = disk.q().queue.send(&chain).unwrap();
    disk.q().queue.wait_head(head, SOON).unwrap();
    assert_eq!(small.bytes()[100], OK);
    let marked = log.take().unwrap();
    assert!(marked.contains(&(region.guest / PAGE)) && marked.contains(&(small.addr / PAGE)), "{marked:x?}");
    assert!(!short.take().unwrap().contains(&(region.guest / PAGE)), "the old log is still written");
}

#[test]
fn f49_logs_that_cannot_be_are_refused() {
    use polypath_vm_tests::front_end::memory::anonymous_file;
    use polypath_vm_tests::front_end::wire::{VERSION, req};
    use std::os::fd::AsRawFd as _;
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let file = anonymous_file(4096).unwrap();
    for (bytes, offset) in [(8192_u64, 0_u64), (4096, 4096), (0, 0), (u64::MAX, 1), (1 << 40, 0), (100, 100)]
    {
        let disk = Disk::open(server.socket()).unwrap();
        let payload = [bytes.to_le_bytes(), offset.to_le_bytes()].concat();
        let channel = &disk.session.channel;
        channel.send(req::SET_LOG_BASE, VERSION, &payload, &[file.as_raw_fd()]).unwrap();
        assert!(channel.hangs_up(SOON), "{bytes} bytes at {offset}");
    }
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
}

/// On and off under load, ten times: I/O never stops, and off is off.
#[test]
fn f49_on_and_off_under_load() {
    let image = Image::empty(8 * MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).connect().unwrap();
    disk.track().unwrap();
    disk.start().unwrap();
    let progress = Progress::of(&disk);
    let mut verifiers = Verifier::share(image.sectors(), 2, 49);
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), ..Plan::default() };
    // The messages of a second handle on the same queues, since the load has the first.
    let features = disk.session.features;
    let mut old = Vec::new();
    std::thread::scope(|scope| {
        let Disk { session, memory, queues, .. } = &mut disk;
        let rings: Vec<_> = queues
            .iter()
            .map(|q| (q.queue.index(), q.queue.user_addresses(), q.queue.ring_addresses()[1]))
            .collect();
        let log_rings = |session: &polypath_vm_tests::front_end::Session, on: bool| {
            for (index, [desc, avail, used], guest) in &rings {
                let mut payload =
                    polypath_vm_tests::front_end::session::state_bytes((*index).into(), on.into());
                for addr in [desc, used, avail, guest] {
                    payload.extend(addr.to_le_bytes());
                }
                session.set(polypath_vm_tests::front_end::wire::req::SET_VRING_ADDR, &payload, &[]).unwrap();
            }
        };
        let loads = start_loads(scope, queues, &mut verifiers, &plan);
        let stop_at_end = SetAtEnd(&stop);
        for round in 0..10 {
            let log = DirtyBits::new(memory.end()).unwrap();
            log.set(session).unwrap();
            session.set_features(features | polypath_vm_tests::front_end::dirty::F_LOG_ALL).unwrap();
            log_rings(session, true);
            progress.wait(50, SOON).unwrap_or_else(|e| panic!("round {round}, on: {e:#}"));
            session.set_features(features).unwrap();
            log_rings(session, false);
            assert!(log.take().unwrap().len() > 10, "round {round}");
            progress.wait(50, SOON).unwrap_or_else(|e| panic!("round {round}, off: {e:#}"));
            assert_eq!(log.take().unwrap(), BTreeSet::new(), "round {round}: marks after the end");
            old.push(log);
        }
        drop(stop_at_end);
        for load in loads {
            load.join().unwrap().unwrap();
        }
    });
    std::thread::sleep(Duration::from_millis(1));
    for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
        verifier.check_all(q).unwrap();
    }
    assert!(old.iter().all(|log| log.take().unwrap().is_empty()));
}
