//! Races, storms and latency.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::request::{header, kind};
use polypath_vm_tests::front_end::verify::{self, Plan, Rng, Verifier};
use polypath_vm_tests::front_end::{Chain, Disk, IOERR, OK, Op, Segment, UNSUPP};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled, need, serve_faulty};

#[test]
fn f26_values_that_change_while_they_are_looked_at() {
    let image = Image::filled(4 * MIB);
    let n = image.sectors();
    let mut server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let memory = disk.memory.clone();
    let head = memory.alloc_with(&header(kind::IN, 0));
    let data = memory.alloc(4096);
    let segment = memory.alloc_with(&Segment::new(0, 1).bytes());
    let status = memory.alloc(1);
    let table = memory.alloc(3 * 16);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Between legal and illegal: the header's sector and type, lengths and addresses in the table, the segment.
            // What is legal here never reaches beyond the first eight sectors.
            let mut rng = Rng::new(26);
            while !stop.load(Ordering::Relaxed) {
                let pick = rng.next_u64();
                let sector = if pick & 1 == 0 { 0 } else { n - 1 + (pick >> 60) };
                let request = if pick & 2 == 0 { kind::IN } else { kind::OUT };
                memory.write(head.addr, &header(if pick & 1 == 0 { request } else { kind::IN }, sector));
                let len: u32 = if pick & 4 == 0 { 512 } else { 1 << 31 };
                memory.write(table.addr + 16 + 8, &len.to_le_bytes());
                let addr = if pick & 8 == 0 { data.addr } else { memory.end() - 256 };
                memory.write(table.addr + 16, &addr.to_le_bytes());
                let num = if pick & 16 == 0 { 1 } else { u32::MAX };
                memory.write(segment.addr, &Segment::new(if pick & 32 == 0 { 0 } else { n }, num).bytes());
            }
        });
        let deadline = Instant::now() + Duration::from_secs(4);
        let mut rounds = 0_u64;
        while Instant::now() < deadline {
            let queue = &mut disk.queues[0].queue;
            let chain = match rounds % 3 {
                0 => Chain::new().readable(head.addr, 16).writable(data.addr, 512).writable(status.addr, 1),
                1 => Chain::new()
                    .readable(head.addr, 16)
                    .writable(data.addr, 512)
                    .writable(status.addr, 1)
                    .indirect(table.addr),
                _ => Chain::new().readable(head.addr, 16).readable(segment.addr, 16).writable(status.addr, 1),
            };
            for _ in 0..16 {
                queue.stage(&chain).unwrap();
            }
            queue.kick();
            for _ in 0..16 {
                queue.wait(SOON).unwrap();
            }
            rounds += 1;
        }
        stop.store(true, Ordering::Relaxed);
        assert!(rounds > 100, "{rounds} rounds");
    });
    assert!(server.is_alive());
    assert_eq!(image.file().metadata().unwrap().len(), image.bytes, "the file grew");
    image.assert_filled(8..n - 8);
    assert!(disk.q().read(64, 8).unwrap() == filled(64, 8));
}

#[test]
fn f27_each_kind_of_answer_comes_at_once() {
    let image = Image::filled(MIB);
    let n = image.sectors();
    let server = Server::any().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let kinds = [
        (Op::GetId, OK),
        (Op::read(n, 8), IOERR),
        (Op::Other { kind: 99, sector: 0, out: vec![], in_len: 0 }, UNSUPP),
        (Op::Flush, OK),
        (Op::read(0, 8), OK),
        (Op::read(0, 1), OK),
    ];
    for (op, expected) in kinds {
        let mut latencies: Vec<_> = (0..21)
            .map(|_| {
                let done = disk.q().run(&op).unwrap();
                assert_eq!(done.status, expected, "{op:?}");
                done.latency
            })
            .collect();
        latencies.sort();
        // The middle one: others load this machine too.
        assert!(latencies[10] < Duration::from_millis(10), "{op:?} took {:?}", latencies[10]);
    }
}

#[test]
fn f27_answers_come_without_another_kick() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a"]);
    // A long read is held; what needs no I/O, and other I/O, is answered meanwhile.
    fs.rule("a", Rule::hold().reads().sectors(1024..1025));
    disk.q().submit(&Op::read(1024, 8)).unwrap();
    fs.wait_held("a", 1, SOON).unwrap();
    for op in [Op::GetId, Op::read(0, 8), Op::Other { kind: 99, sector: 0, out: vec![], in_len: 0 }] {
        let tag = disk.q().submit(&op).unwrap();
        let done = disk.q().done_within(Duration::from_secs(1)).unwrap();
        assert_eq!(done.tag, tag, "{op:?}");
    }
    // The beginning of a run, and nothing behind it.
    let ops = [0, 8, 16].map(|sector| Op::write(sector, filled(sector, 8)));
    for op in &ops {
        disk.q().stage(op).unwrap();
    }
    disk.q().kick();
    for _ in 0..3 {
        assert_eq!(disk.q().done_within(Duration::from_secs(1)).unwrap().status, OK);
    }
    fs.release("a");
    assert!(disk.q().done().unwrap().data == filled(1024, 8));
}

#[test]
fn f28_thousands_outstanding_in_a_storm_of_signals() {
    let image = Image::empty(64 * MIB);
    let mut server = Server::polypath().path(&image.path).num_queues(8).queue_size(1024).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(8).queue_size(1024).memory_bytes(1 << 30).open().unwrap();
    let mut verifiers = Verifier::share(image.sectors(), 8, 28);
    let plan =
        Plan { requests: 2500, depth: 1000, batch: 100, sectors_max: 4, flush_percent: 0, ..Plan::default() };
    let stop = AtomicBool::new(false);
    let pid = server.pid();
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            // To each thread by itself, so that system calls are interrupted.
            while !stop.load(Ordering::Relaxed) {
                for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                    let Some(tid) = task.file_name().to_str().and_then(|tid| tid.parse::<i32>().ok()) else {
                        continue;
                    };
                    for signal in [libc::SIGUSR1, libc::SIGWINCH, libc::SIGCHLD] {
                        // SAFETY: plain numbers; a thread that is gone gives an error only.
                        unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) };
                    }
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        let report = verify::load_with(&mut disk.queues, &mut verifiers, &plan);
        stop.store(true, Ordering::Relaxed);
        report
    });
    let report = report.unwrap();
    assert_eq!((report.answered, report.errors), (8 * plan.requests, 0));
    assert!(server.is_alive());
    for q in &mut disk.queues {
        assert_eq!(q.nr_pending(), 0);
        q.flush().unwrap();
    }
    verifiers.iter().for_each(|verifier| verifier.check_file(&image.path).unwrap());
}

#[test]
fn f28_all_slots_held_and_let_go_at_once() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let (fs, _server, _) = serve_faulty(&image, &["a", "b"]);
    drop(_server);
    let builder = Server::polypath().paths(fs.paths(&["a", "b"])).queue_size(256);
    let server = builder.arg("--path-depth").arg("1024").start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).queue_size(256).open().unwrap();
    for name in ["a", "b"] {
        fs.rule(name, Rule::hold().reads());
    }
    for q in &mut disk.queues {
        // Indirect, so that there are as many requests as descriptors.
        for i in 0..256_u64 {
            q.stage_framed(&Op::read(i * 16, 8), &polypath_vm_tests::front_end::Framing::Indirect).unwrap();
        }
        q.kick();
    }
    fs.wait_held("a", 200, SOON).unwrap();
    fs.wait_held("b", 200, SOON).unwrap();
    fs.release("a");
    fs.release("b");
    for q in &mut disk.queues {
        for (i, done) in (0..).zip(q.drain().unwrap()) {
            assert!(done.status == OK && done.data == filled(i * 16, 8));
        }
    }
}

#[test]
fn an_end_asked_for_with_io_in_flight_comes_after_the_io() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (fs, mut server, mut disk) = serve_faulty(&image, &["a"]);
    fs.rule("a", Rule::hold().writes());
    for i in 0..16 {
        disk.q().stage(&Op::write(i * 64, vec![8; 4096])).unwrap();
    }
    disk.q().kick();
    fs.wait_held("a", 16, SOON).unwrap();
    server.signal(libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    assert!(server.is_alive(), "ended with writes in flight");
    fs.release("a");
    let start = Instant::now();
    let status = server.wait_exit(SOON).unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(!server.socket().exists());
    for i in 0..16 {
        assert_eq!(image.at(i * 64, 8), [8; 4096]);
    }
    for done in disk.q().drain().unwrap() {
        assert_eq!(done.status, OK, "what was done was also answered");
    }
}

#[test]
fn an_end_under_load_leaves_what_was_answered_in_the_file() {
    let image = Image::empty(8 * MIB);
    for round in 0..5 {
        let mut server = Server::any().path(&image.path).start().unwrap();
        let mut disk = Disk::at(server.socket()).queues(2).open().unwrap();
        let block = |i: u64| i * 8 % (image.sectors() - 8);
        let mut answered: u64 = 0;
        disk.q().timeout = Duration::from_millis(300);
        let start = Instant::now();
        loop {
            if start.elapsed() > Duration::from_millis(50) {
                server.signal(libc::SIGTERM);
            }
            match disk.q().run(&Op::write(block(answered), filled(block(answered), 8))) {
                Ok(done) if done.status == OK => answered += 1,
                _ => break,
            }
        }
        assert_eq!(server.wait_exit(SOON).unwrap().code(), Some(0), "round {round}");
        assert!(answered > 0);
        (0..answered.min(1000)).for_each(|i| image.assert_filled(block(i)..block(i) + 8));
    }
}
