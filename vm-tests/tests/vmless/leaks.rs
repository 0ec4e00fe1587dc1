//! Front-ends that come, do everything that a front-end can do, and go: nothing of them is left.

use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, Op, Region};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, filled};
use crate::malformed::{assert_nothing_left, baseline};
use crate::rig::change_memory;

/// Front-ends; `POLYPATH_LEAK_ROUNDS` says otherwise.
const ROUNDS: u64 = 100;

/// Memory that may have been taken meanwhile, for good: what allocators keep, and not what grows by the round.
const GROWTH_MAX_KIB: u64 = 8 << 10;

const QUEUES: u16 = 4;

/// All of the handshake with in-flight tracking, I/O, stops and starts, memory that comes and goes, a reset; then it goes.
fn come_and_go(server: &Server, round: u64) {
    let mut disk = Disk::at(server.socket()).queues(QUEUES).connect().unwrap();
    disk.track().unwrap();
    disk.start().unwrap();
    let read_all = |disk: &mut Disk| {
        for q in &mut disk.queues {
            assert!(q.read(round % 64 * 8, 8).unwrap() == filled(round % 64 * 8, 8), "round {round}");
        }
    };
    read_all(&mut disk);
    change_memory(&disk.session, &disk.memory, round.is_multiple_of(2));
    disk.queues[1].queue.replace_call().unwrap();
    let call = disk.queues[1].queue.call_fd();
    for request in [req::SET_VRING_CALL, req::SET_VRING_ERR] {
        disk.session.set_vring_fd(request, 1, call).unwrap();
    }
    // Stopped and started again, with the same area and with another.
    let bases = disk.stop().unwrap();
    if round.is_multiple_of(2) {
        disk.track().unwrap();
    }
    for (q, base) in disk.queues.iter().zip(bases) {
        disk.session.start(&q.queue, base).unwrap();
    }
    read_all(&mut disk);
    if round.is_multiple_of(3) {
        disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
        disk.queues.iter_mut().for_each(|q| q.reset());
        disk.session.set_features(disk.session.features).unwrap();
        disk.track().unwrap();
        disk.start().unwrap();
        read_all(&mut disk);
    }
    // It goes in peace, or with a region of its own and with requests in flight.
    if round.is_multiple_of(4) {
        disk.stop().unwrap();
    } else {
        let region = disk.memory.add(Region::new(disk.memory.end() + MIB, MIB, 0).unwrap());
        disk.session.add_region(&region).unwrap();
        for q in &mut disk.queues {
            for i in 0..16 {
                q.stage(&Op::read(i * 8, 8)).unwrap();
            }
            q.kick();
        }
    }
}

#[test]
fn f45_f56_front_ends_that_do_everything_leave_nothing() {
    let rounds = std::env::var("POLYPATH_LEAK_ROUNDS").map_or(ROUNDS, |n| n.parse().expect("a number"));
    let image = Image::filled(MIB);
    let mut server = Server::polypath().path(&image.path).num_queues(QUEUES.into()).start().unwrap();
    for round in 0..8 {
        come_and_go(&server, round);
    }
    let before = baseline(&mut server);
    let rss_kib = server.stats().rss_kib;
    for round in 0..rounds {
        come_and_go(&server, round);
    }
    assert_nothing_left(&server, before, "front-ends that do everything");
    let after = server.stats();
    println!(
        "{rounds} front-ends: (fds, mappings, threads) {before:?} before, {:?} after; {rss_kib} KiB before, {} KiB after",
        (after.fds, after.mappings, after.threads),
        after.rss_kib
    );
    assert!(after.rss_kib < rss_kib + GROWTH_MAX_KIB, "{rss_kib} KiB have become {} KiB", after.rss_kib);
}
