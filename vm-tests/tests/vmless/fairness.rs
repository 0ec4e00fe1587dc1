//! Nobody waits for ever behind others that merge better.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use polypath_vm_tests::control::Status;
use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::{BlkQueue, Disk, OK, Op};
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need, no_path_failed};
use crate::rig::{SetAtEnd, controlled};

const NR_STREAMS: u64 = 64;
const PER_STREAM: u64 = 5;
const NR_READS: u64 = 60;
const BLOCK_SECTORS: u64 = 8;

/// One random reader beside 64 sequential writers that always have several requests each in the same ring, and a path
/// that takes two I/Os at a time. Counted is how many I/Os the path is given between a read's coming and its answer.
#[test]
fn one_random_reader_is_not_starved_by_64_sequential_writers() {
    need!(faulty);
    let image = Image::filled((NR_STREAMS + 1) * MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let server =
        Server::polypath().path(fs.path("a")).arg("--path-depth=2").queue_size(1024).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(1024).open().unwrap();
    let nr_ios = || {
        let counts = fs.counts("a");
        counts.reads + counts.writes
    };
    let mut rng = Rng::new(64);
    let stream_sectors = MIB / 512;
    let mut next = [0; NR_STREAMS as usize];
    let mut write = |stream: u64| {
        let at = &mut next[stream as usize];
        let sector = stream * stream_sectors + *at;
        *at = (*at + BLOCK_SECTORS) % stream_sectors;
        Op::write(sector, filled(sector, BLOCK_SECTORS))
    };
    let q = disk.q();
    let mut writers = std::collections::HashMap::new();
    for stream in (0..NR_STREAMS).cycle().take((NR_STREAMS * PER_STREAM) as usize) {
        writers.insert(q.stage(&write(stream)).unwrap(), stream);
    }
    q.kick();
    let place = |rng: &mut Rng| NR_STREAMS * stream_sectors + rng.below(stream_sectors / 8) * 8;
    let (mut nr_read, mut nr_written, mut worst) = (0, 0_u64, 0);
    let mut sector = place(&mut rng);
    let mut since = nr_ios();
    let mut reader = q.submit(&Op::read(sector, BLOCK_SECTORS as usize)).unwrap();
    while nr_read < NR_READS {
        let mut done = Some(q.done().unwrap());
        while let Some(one) = done {
            assert_eq!(one.status, OK);
            if one.tag == reader {
                assert!(one.data == filled(sector, BLOCK_SECTORS), "read {nr_read}");
                worst = worst.max(nr_ios() - since);
                nr_read += 1;
                sector = place(&mut rng);
                since = nr_ios();
                reader = q.submit(&Op::read(sector, BLOCK_SECTORS as usize)).unwrap();
            } else {
                nr_written += 1;
                let stream = writers.remove(&one.tag).unwrap();
                writers.insert(q.stage(&write(stream)).unwrap(), stream);
            }
            done = q.done_now().unwrap();
        }
        q.kick();
    }
    println!("{nr_written} writes beside {nr_read} reads, which {worst} I/Os at most went before");
    // Those that waited, a run for each stream. On a busy machine this client is late with both counts: meanwhile as many can be
    // sent again as others are out, which is a run for each stream at most.
    assert!(worst <= 3 * NR_STREAMS + 8, "{worst} I/Os went before a read");
    assert!(nr_written > NR_READS * NR_STREAMS / 2, "{nr_written} writes: the reader met no writers");
    while q.nr_pending() != 0 {
        assert_eq!(q.done().unwrap().status, OK);
    }
    image.assert_filled(0..image.sectors());
}

/// What a device takes at a time, and how many requests each of the queues has under way.
const NR_REQUESTS: u32 = 32;
const DEPTH: u64 = 40;
const NR_QUEUES: u16 = 4;

/// Looks in a row that have to find what is asked for.
const NR_LOOKS: u32 = 20;

/// Requests that a device has no room for would each wait in a kernel thread, where nothing merges.
#[test]
fn queues_that_are_busy_share_what_a_device_takes() {
    need!(faulty);
    need!(loopdev);
    let image = Image::filled(4 * MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    fs.logging(false);
    let device = LoopDev::on(&fs.path("a")).direct_io(true).attach().unwrap();
    device.set_nr_requests(NR_REQUESTS).unwrap();
    let (server, control) = controlled(Server::polypath().path(device.path()).num_queues(NR_QUEUES.into()));
    let mut disk = Disk::at(server.socket()).queues(NR_QUEUES).open().unwrap();
    fs.rule("a", Rule::delay_ms(5).reads());
    let stop = AtomicBool::new(false);
    let in_flight = || -> u64 {
        let status: Status = control.connect().unwrap().json().unwrap();
        status.path(device.path())["in_flight"].as_u64().unwrap()
    };
    // So often in a row are so many on the device.
    let settles = |what: &str, wanted: std::ops::RangeInclusive<u64>| {
        let (mut looks, mut seen) = (0, Vec::new());
        let settled = wait_until(what, SOON, || {
            std::thread::sleep(Duration::from_millis(2));
            let now = in_flight();
            seen.push(now);
            looks = if wanted.contains(&now) { looks + 1 } else { 0 };
            looks == NR_LOOKS
        });
        assert!(settled.is_ok(), "{what}: {wanted:?} wanted, {seen:?} seen");
    };
    std::thread::scope(|scope| {
        let _stop = SetAtEnd(&stop);
        let (first, others) = disk.queues.split_first_mut().unwrap();
        scope.spawn(|| keep_reading(first, &stop));
        settles("one queue to have all of it", 20..=NR_REQUESTS.into());
        for q in others {
            scope.spawn(|| keep_reading(q, &stop));
        }
        settles("four queues to have no more", 20..=NR_REQUESTS.into());
    });
    no_path_failed(&server);
}

fn keep_reading(q: &mut BlkQueue, stop: &AtomicBool) {
    let mut sector = u64::from(q.queue.index()) * 1024;
    let mut next = || {
        // Apart from each other, so that no two become one.
        sector = (sector + 24) % (4 * MIB / 512 - 8);
        Op::read(sector, 8)
    };
    for _ in 0..DEPTH {
        q.stage(&next()).unwrap();
    }
    q.kick();
    while q.nr_pending() != 0 {
        assert_eq!(q.done().unwrap().status, OK);
        if !stop.load(Ordering::Relaxed) {
            q.submit(&next()).unwrap();
        }
    }
}
