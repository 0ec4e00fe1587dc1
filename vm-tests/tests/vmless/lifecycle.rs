//! Queues that stop and start, memory that comes and goes, front-ends that reset.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::verify::{Plan, Verifier};
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, OK, Op, Region, feature};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need, serve_faulty};
use crate::rig::{change_memory, start_loads};

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

#[test]
fn f17_get_vring_base_waits_for_what_is_in_flight() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a"]);
    disk.q().read(0, 8).unwrap();
    let before = disk.q().queue.next_avail();
    fs.rule("a", Rule::hold().reads());
    for i in 0..32 {
        // Apart from each other, so that each is an operation of its own.
        disk.q().stage(&Op::read(i * 64, 8)).unwrap();
    }
    disk.q().kick();
    fs.wait_held("a", 32, SOON).unwrap();
    disk.session.send_stop(0).unwrap();
    let early = disk.session.recv_stop(MOMENT);
    assert!(early.is_err(), "answered {early:?} with 32 reads in flight");
    fs.release("a");
    let base = disk.session.recv_stop(SOON).unwrap();
    assert_eq!(base, before + 32);
    // All answers were there before that one.
    for _ in 0..32 {
        let done = disk.q().done_now().unwrap().expect("an answer that came after the queue was stopped");
        assert_eq!(done.status, OK);
    }
    let memory = disk.memory.read_vec(disk.memory.regions()[0].guest, 8 << 20);
    assert_eq!(disk.session.stop(0).unwrap(), base, "asked a second time");
    std::thread::sleep(MOMENT);
    assert!(
        memory == disk.memory.read_vec(disk.memory.regions()[0].guest, 8 << 20),
        "memory changed after the stop"
    );

    disk.session.start(&disk.queues[0].queue, base).unwrap();
    for i in 0..64 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8), "after going on");
    }
    assert_eq!(disk.session.stop(0).unwrap(), base + 64);
}

#[test]
fn f17_stop_and_go_on_under_load_loses_and_repeats_nothing() {
    let image = Image::empty(8 * MIB);
    let server = Server::any().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let mut verifier = Verifier::new(0..image.sectors(), 17);
    for round in 0..40 {
        let Disk { session, queues, .. } = &mut disk;
        let q = &mut queues[0];
        let stop = AtomicBool::new(false);
        let plan = Plan { requests: u64::MAX, stop: Some(&stop), ..Plan::default() };
        std::thread::scope(|scope| {
            let load = scope.spawn(|| verifier.run(q, &plan));
            std::thread::sleep(Duration::from_millis(10));
            stop.store(true, Ordering::Relaxed);
            load.join().unwrap().unwrap_or_else(|e| panic!("round {round}: {e:#}"));
        });
        let base = session.stop(0).unwrap();
        assert_eq!(base, queues[0].queue.next_avail(), "round {round}");
        session.start(&queues[0].queue, base).unwrap();
    }
    verifier.check_all(&mut disk.queues[0]).unwrap();
}

#[test]
fn f17_requests_not_taken_before_the_stop_are_served_after_it() {
    let image = Image::filled(4 * MIB);
    let server = Server::any().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    disk.q().read(0, 8).unwrap();
    let base = disk.session.stop(0).unwrap();
    for i in 0..16 {
        disk.q().stage(&Op::read(i * 8, 8)).unwrap();
    }
    disk.q().queue.publish();
    disk.session.start(&disk.queues[0].queue, base).unwrap();
    disk.q().queue.kick_always();
    for (i, done) in (0..).zip(disk.q().drain().unwrap()) {
        assert!(done.data == filled(i * 8, 8));
    }
}

/// Holds 32 reads, lets the disk be reset by `reset`, and looks at whether they are written into the new guest's memory.
fn late_reads_do_not_hit(reset: impl FnOnce(&mut Disk, &Server) + Send) {
    let image = Image::filled(4 * MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a"]);
    fs.rule("a", Rule::hold().reads());
    let memory = disk.memory.clone();
    let buffers: Vec<_> = (0..32).map(|_| memory.alloc(4096)).collect();
    let status = memory.alloc(32);
    let headers: Vec<_> = (0..32)
        .map(|i| memory.alloc_with(&polypath_vm_tests::front_end::request::header(0, i * 64)))
        .collect();
    let queue = &mut disk.q().queue;
    for ((i, buffer), header) in (0..).zip(&buffers).zip(&headers) {
        let chain = polypath_vm_tests::front_end::Chain::new()
            .readable(header.addr, 16)
            .writable(buffer.addr, 4096)
            .writable(status.addr + i, 1);
        queue.stage(&chain).unwrap();
    }
    queue.kick();
    fs.wait_held("a", 32, SOON).unwrap();
    std::thread::scope(|scope| {
        let new_guest = scope.spawn(|| {
            reset(&mut disk, &server);
            // The reset is acknowledged, so the memory is the new guest's.
            buffers.iter().for_each(|buffer| buffer.fill(0x99));
            status.fill(0x99);
            disk
        });
        std::thread::sleep(MOMENT);
        fs.release("a");
        let mut disk = new_guest.join().unwrap();
        for i in 0..40 {
            assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8), "a new request");
        }
        std::thread::sleep(MOMENT);
        for buffer in &buffers {
            assert!(buffer.bytes().iter().all(|&b| b == 0x99), "a late read hit the new guest's memory");
        }
        assert!(status.bytes().iter().all(|&b| b == 0x99), "a late status hit the new guest's memory");
        assert!(disk.q().done_now().unwrap().is_none(), "a late answer on the new ring");
    });
}

#[test]
fn f18_late_reads_after_a_device_reset() {
    need!(faulty);
    late_reads_do_not_hit(|disk, _| {
        disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
        disk.q().reset();
        disk.session.set_features(disk.session.features).unwrap();
        disk.session.start(&disk.queues[0].queue, 0).unwrap();
    });
}

#[test]
fn f18_late_reads_after_the_front_end_came_back() {
    need!(faulty);
    late_reads_do_not_hit(|disk, server| {
        disk.session.channel.shut_down();
        let memory = disk.memory.clone();
        // The back-end may keep the new one waiting until the old requests are done, but not send it away.
        let mut new = Disk::at(server.socket()).connect_with(&memory).unwrap();
        new.session.start(&new.queues[0].queue, 0).unwrap();
        std::mem::swap(disk, &mut new);
    });
}

#[test]
fn f19_memory_tables_change_under_load() {
    let image = Image::empty(16 * MIB);
    let server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).open().unwrap();
    let mut verifiers = Verifier::share(image.sectors(), 2, 19);
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), ..Plan::default() };
    let Disk { session, memory, queues, .. } = &mut disk;
    std::thread::scope(|scope| {
        let loads = start_loads(scope, queues, &mut verifiers, &plan);
        for round in 0..1000_u64 {
            change_memory(session, memory, round % 2 == 0);
            if loads.iter().any(|load| load.is_finished()) {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        for load in loads {
            let report = load.join().unwrap().unwrap();
            assert!(report.answered > 100, "{report:?}");
        }
    });
    for (q, verifier) in queues.iter_mut().zip(&mut verifiers) {
        verifier.check_all(q).unwrap();
    }
}

#[test]
fn f19_a_region_with_a_read_under_way_is_removed() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a"]);
    let mapped = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.pid())).unwrap();
        maps.lines().filter(|line| line.contains("memfd:guest-memory")).count()
    };
    assert_eq!(mapped(), 1);
    let region = disk.memory.add(Region::new(disk.memory.end() + MIB, MIB, 0).unwrap());
    disk.session.add_region(&region).unwrap();
    assert_eq!(mapped(), 2);
    fs.rule("a", Rule::hold().reads());
    let memory = disk.memory.clone();
    let header = memory.alloc_with(&polypath_vm_tests::front_end::request::header(0, 8));
    let status = memory.alloc(1);
    let chain = polypath_vm_tests::front_end::Chain::new()
        .readable(header.addr, 16)
        .writable(region.guest, 4096)
        .writable(status.addr, 1);
    let head = disk.q().queue.send(&chain).unwrap();
    fs.wait_held("a", 1, SOON).unwrap();
    std::thread::scope(|scope| {
        let session = &disk.session;
        let removal = scope.spawn(|| {
            session.remove_region(&region).unwrap();
            mapped()
        });
        std::thread::sleep(MOMENT);
        fs.release("a");
        assert_eq!(removal.join().unwrap(), 1, "still mapped when the removal was acknowledged");
    });
    disk.q().queue.wait_head(head, SOON).unwrap();
    assert_eq!(status.bytes(), [OK]);
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
}

#[test]
fn f47_any_subset_of_the_queues_works() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).num_queues(8).start().unwrap();
    let stop = |disk: &Disk, indices: &[u16]| {
        let start = Instant::now();
        for &index in indices {
            disk.session.stop(index).unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(1), "stopping {indices:?} took {:?}", start.elapsed());
    };
    let all: Vec<u16> = (0..8).collect();
    for indices in [&[0][..], &[3], &[2, 7], &all] {
        let mut disk = Disk::at(server.socket()).queues(8).connect().unwrap();
        for round in 0..2 {
            for &index in indices {
                let q = &mut disk.queues[usize::from(index)];
                q.reset();
                disk.session.start(&q.queue, 0).unwrap();
                assert!(q.read(8, 8).unwrap() == filled(8, 8), "queue {index} of {indices:?}, round {round}");
            }
            stop(&disk, indices);
            if round == 0 {
                // Also those that never ran.
                stop(&disk, &all);
            }
        }
    }
}

#[test]
fn f47_idle_queues_cost_no_cpu() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(64).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(8).open().unwrap();
    disk.queues.iter_mut().for_each(|q| drop(q.read(0, 8).unwrap()));
    std::thread::sleep(Duration::from_millis(100));
    let before = server.stats();
    std::thread::sleep(Duration::from_secs(2));
    let after = server.stats();
    let cpu = after.cpu.checked_sub(before.cpu).unwrap();
    assert!(cpu <= Duration::from_millis(20), "{cpu:?} of CPU in two idle seconds");
    let switches = after.voluntary_switches - before.voluntary_switches;
    assert!(switches < 100, "{switches} wakes in two idle seconds");
}

#[test]
fn a_second_front_end_is_refused_and_the_first_works_on() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), write_percent: 0, ..Plan::default() };
    let mut verifier = Verifier::new(0..image.sectors(), 3);
    verifier.set_all(1);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verifier.run(disk.q(), &plan));
        for _ in 0..20 {
            let second = polypath_vm_tests::front_end::wire::Channel::connect(server.socket()).unwrap();
            assert!(second.hangs_up(SOON), "neither served nor refused");
        }
        stop.store(true, Ordering::Relaxed);
        load.join().unwrap().unwrap();
    });
    drop(disk);
    wait_until("the next front-end", SOON, || Disk::open(server.socket()).is_ok()).unwrap();
}

#[test]
fn f56_a_front_end_right_behind_another_is_served() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    for round in 0..200 {
        let mut disk = Disk::open(server.socket()).unwrap_or_else(|e| panic!("round {round}: {e:#}"));
        for i in 0..32 {
            disk.q().stage(&Op::read(i * 8, 8)).unwrap();
        }
        disk.q().kick();
        if round % 2 == 0 {
            disk.q().drain().unwrap();
        }
    }
}

#[test]
fn resets_without_a_new_connection() {
    let image = Image::filled(4 * MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    for round in 0..50 {
        assert!(disk.q().read(round * 8, 8).unwrap() == filled(round * 8, 8));
        if round % 2 == 0 {
            disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
        } else {
            disk.session.stop(0).unwrap();
        }
        disk.q().reset();
        disk.session.set_features(disk.session.features).unwrap();
        disk.session.start(&disk.queues[0].queue, 0).unwrap();
    }
    assert!(disk.has(feature::VERSION_1));
}
