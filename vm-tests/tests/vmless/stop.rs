//! Stops while no path is usable: they end at once, and what was taken waits in the in-flight area for the next start.

use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, IOERR, Kept, OK, Op, Resume};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::Rig;

/// Well above what an answer takes on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

const NR_READS: u64 = 16;

/// A tracked disk with 16 reads that are held.
fn held() -> (Rig, Disk, Kept) {
    let rig = Rig::start(Image::filled(MIB), &["a"], &["--no-path-retry", "queue"]);
    let mut disk = Disk::at(rig.server.socket()).connect().unwrap();
    let kept = Kept::of(&disk, Some(disk.track().unwrap())).unwrap();
    disk.start().unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    rig.fs.rule("a", Rule::errno(libc::ENODEV));
    send_reads(&mut disk);
    wait_held(&rig);
    (rig, disk, kept)
}

fn send_reads(disk: &mut Disk) {
    for i in 1..=NR_READS {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
}

fn wait_held(rig: &Rig) {
    rig.wait_status("all to be held", |status| status.nr_held() == NR_READS);
}

/// All reads are answered, each once, with their data.
fn all_well(disk: &mut Disk) {
    for (i, done) in (1..).zip(disk.q().drain().unwrap()) {
        assert!(done.status == OK && done.data == filled(i * 16, 8), "read {i}: {}", done.status);
    }
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    assert!(disk.q().done_now().unwrap().is_none());
}

#[test]
fn f17_a_stop_without_a_path_leaves_what_it_has_for_the_next_start() {
    need!(faulty);
    let (rig, mut disk, _kept) = held();
    for _ in 0..3 {
        let start = Instant::now();
        let base = disk.session.stop(0).unwrap();
        assert!(start.elapsed() < AT_ONCE, "GET_VRING_BASE took {:?}", start.elapsed());
        assert_eq!(base, disk.q().queue.next_avail());
        assert!(disk.q().done_now().unwrap().is_none(), "answered without a path");
        assert_eq!(rig.status().nr_held(), 0);
        disk.session.start(&disk.queues[0].queue, base).unwrap();
        wait_held(&rig);
    }
    rig.fs.clear("a");
    all_well(&mut disk);
    assert_eq!(disk.session.stop(0).unwrap(), disk.q().queue.next_avail());
}

/// The guest is about to be moved, and the front-end does not take the area along: there is nobody to go on with them.
#[test]
fn f17_a_stop_for_a_move_leaves_nothing_behind() {
    need!(faulty);
    let (_rig, mut disk, _kept) = held();
    disk.start_logging().unwrap();
    assert_eq!(disk.session.stop(0).unwrap(), disk.q().queue.next_avail());
    for _ in 0..NR_READS {
        assert_eq!(disk.q().done_now().unwrap().expect("an answer before the stop").status, IOERR);
    }
}

/// A reset's guest waits for nothing any more: nothing is answered, and nothing is done again.
#[test]
fn f18_a_reset_without_a_path_forgets_what_was_held() {
    need!(faulty);
    let (rig, mut disk, kept) = held();
    let before = disk.memory.read_vec(disk.memory.regions()[0].guest, 4 << 20);
    let start = Instant::now();
    disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
    assert!(start.elapsed() < AT_ONCE, "a reset took {:?}", start.elapsed());
    assert!(before == disk.memory.read_vec(disk.memory.regions()[0].guest, 4 << 20), "memory was written");
    disk.q().reset();
    disk.session.set_features(disk.session.features).unwrap();
    // Also with the area of before.
    kept.inflight().unwrap().set(&disk.session).unwrap();
    disk.session.start(&disk.queues[0].queue, 0).unwrap();
    rig.fs.clear("a");
    rig.wait_active("a", true);
    send_reads(&mut disk);
    all_well(&mut disk);
}

/// A new front-end, or the old one again, goes on with what was held when the connection was lost.
#[test]
fn f56_a_front_end_that_comes_back_gets_what_was_held() {
    need!(faulty);
    for resume in [Resume::Used, Resume::Available] {
        let (rig, mut disk, kept) = held();
        let start = Instant::now();
        disk.session.channel.shut_down();
        disk.session = kept.reconnect(rig.server.socket(), resume, SOON).unwrap();
        wait_held(&rig);
        assert!(start.elapsed() < AT_ONCE * 2, "coming back took {:?}", start.elapsed());
        rig.fs.clear("a");
        all_well(&mut disk);
    }
}

/// The program is ended while requests are held; the next one takes them up.
#[test]
fn f07_f14_ended_without_a_path_and_started_again() {
    need!(faulty);
    let (mut rig, mut disk, kept) = held();
    let socket = rig.server.socket().to_owned();
    let start = Instant::now();
    assert_eq!(rig.server.terminate(SOON).unwrap(), 0);
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    assert!(disk.q().done_now().unwrap().is_none(), "answered without a path");
    rig.fs.clear("a");
    let paths = rig.fs.paths(&["a"]);
    let server = polypath_vm_tests::server::Server::polypath().paths(paths).socket(socket).start().unwrap();
    disk.session = kept.reconnect(server.socket(), Resume::Used, SOON).unwrap();
    all_well(&mut disk);
}
