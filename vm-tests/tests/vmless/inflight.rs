//! The messages about the in-flight area, and what the back-end makes of areas that it did not make.

use std::os::unix::fs::FileExt as _;

use polypath_vm_tests::front_end::inflight::payload;
use polypath_vm_tests::front_end::memory::anonymous_file;
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::wire::{VERSION, req};
use polypath_vm_tests::front_end::{Disk, Inflight, Op, Session, feature};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled};

fn negotiated(server: &Server) -> Session {
    Session::negotiate(server.socket(), feature::ALL).unwrap()
}

#[test]
fn f46_an_area_is_given_and_taken_again_and_again() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(4).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(4).connect().unwrap();
    let before = server.stats();
    for _ in 0..100 {
        let inflight = disk.track().unwrap();
        assert_eq!((inflight.num_queues, inflight.queue_size, inflight.offset), (4, 128, 0));
        assert_eq!(inflight.size, 4 * (16 + 16 * 128_u64).next_multiple_of(64));
        assert!(inflight.file.metadata().unwrap().len() >= inflight.size);
    }
    let after = server.stats();
    // The area, and the file by which it is locked.
    assert!(after.fds <= before.fds + 2 && after.mappings <= before.mappings + 1, "{before:?} {after:?}");
    disk.start().unwrap();
    for q in &mut disk.queues {
        assert!(q.read(8, 8).unwrap() == filled(8, 8));
    }
}

#[test]
fn f46_impossible_areas_are_refused() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(4).start().unwrap();
    // Nothing can be given for these: the connection ends, and the next one is served.
    for (queues, size) in [(0, 128), (5, 128), (65535, 128), (4, 0), (4, 2048)] {
        let session = negotiated(&server);
        session.channel.send(req::GET_INFLIGHT_FD, VERSION, &payload(0, 0, queues, size), &[]).unwrap();
        assert!(session.channel.hangs_up(SOON), "{queues} queues of {size}");
    }
    // The first message of all, with any area.
    let area = || {
        let size = 4 * (16 + 16 * 128_u64).next_multiple_of(64);
        Inflight { size, offset: 0, num_queues: 4, queue_size: 128, file: anonymous_file(size).unwrap() }
    };
    let session = Session::raw(server.socket()).unwrap();
    let _ = area().set(&session);
    drop(session);
    let odd = [
        Inflight { num_queues: 5, ..area() },
        Inflight { num_queues: 65535, ..area() },
        Inflight { queue_size: 2048, ..area() },
        Inflight { queue_size: 256, ..area() },
        Inflight { size: 1 << 20, ..area() },
        Inflight { size: 0, ..area() },
        Inflight { size: u64::MAX, ..area() },
        Inflight { offset: 100, size: 8192, file: anonymous_file(16384).unwrap(), num_queues: 1, ..area() },
        Inflight { offset: 1 << 40, ..area() },
        Inflight { offset: u64::MAX, ..area() },
        Inflight { file: anonymous_file(0).unwrap(), ..area() },
        Inflight { file: anonymous_file(4096).unwrap(), ..area() },
    ];
    for inflight in odd {
        let session = negotiated(&server);
        assert_ne!(inflight.try_set(&session).unwrap_or(u64::MAX), 0, "{inflight:?}");
    }
    // What is right is taken, also at an offset.
    let session = negotiated(&server);
    let file = anonymous_file(area().size + 8192).unwrap();
    let inflight = Inflight { offset: 8192, file, ..area() };
    assert_eq!(inflight.try_set(&session).unwrap(), 0);
}

/// Random bytes in an area that is said to be one: nothing is lost and nothing invented.
#[test]
fn f46_areas_full_of_nonsense() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let mut rng = Rng::new(46);
    for round in 0..50 {
        let mut disk = Disk::at(server.socket()).queues(2).connect().unwrap();
        let inflight = Inflight::get(&disk.session, 2, 128).unwrap();
        let mut bytes: Vec<u8> = (0..inflight.size).map(|_| rng.next_u64() as u8).collect();
        if round % 2 == 0 {
            // The version and the size are right, and every second descriptor is said to be in flight.
            for part in bytes.chunks_mut((16 + 16 * 128_usize).next_multiple_of(64)) {
                part[..12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 128, 0]);
                part[16..].chunks_mut(16).for_each(|entry| entry[0] %= 2);
            }
        }
        inflight.file.write_all_at(&bytes, 0).unwrap();
        inflight.set(&disk.session).unwrap();
        disk.start().unwrap();
        for q in &mut disk.queues {
            for i in 0..40 {
                assert!(q.read(i * 8, 8).unwrap() == filled(i * 8, 8), "round {round}");
            }
            assert!(q.done_now().unwrap().is_none());
        }
    }
    wait_until("a word about it", SOON, || server.count_log("in-flight area is not believed") > 0).unwrap();
}

/// A ring that is larger than the area has place for runs without being tracked.
#[test]
fn f46_a_ring_that_the_area_has_no_place_for() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).connect().unwrap();
    Inflight::get(&disk.session, 1, 64).unwrap().set(&disk.session).unwrap();
    disk.start().unwrap();
    for q in &mut disk.queues {
        assert!(q.read(8, 8).unwrap() == filled(8, 8));
    }
    assert_eq!(server.count_log("has no place for a ring"), 2);
}

/// Stops and starts, with the area, by the index that the stop gave.
#[test]
fn a_tracked_ring_stops_and_goes_on() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).connect().unwrap();
    disk.track().unwrap();
    let mut base = 0;
    for round in 0..50 {
        disk.session.start(&disk.queues[0].queue, base).unwrap();
        for i in 0..8 {
            disk.q().stage(&Op::read((round + i) * 8, 8)).unwrap();
        }
        disk.q().kick();
        for (i, done) in (0..).zip(disk.q().drain().unwrap()) {
            assert!(done.data == filled((round + i) * 8, 8));
        }
        base = disk.session.stop(0).unwrap();
        assert_eq!(base, disk.q().queue.next_avail());
    }
    // A reset forgets all.
    disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
    disk.q().reset();
    disk.session.set_features(disk.session.features).unwrap();
    disk.track().unwrap();
    disk.session.start(&disk.queues[0].queue, 0).unwrap();
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
}
