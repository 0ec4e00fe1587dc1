//! With `--sqpoll-idle-ms`: a thread of the kernel's sends what the workers queue.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::verify::{Plan, Verifier};
use polypath_vm_tests::front_end::{Disk, Kept, OK, Op, Resume};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::crash::Again;
use crate::rig::{Progress, SetAtEnd, start_loads};

const ARGS: [&str; 2] = ["--sqpoll-idle-ms", "10"];

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

/// What the log says while requests wait.
const WAIT: &str = "rings wait: an earlier process has I/O";

/// There are as many of the kernel's threads, when those of rings that have ended have gone.
fn wait_threads(server: &Server, nr: usize) {
    wait_until(&format!("{nr} threads that send"), SOON, || server.nr_polling_threads() == nr)
        .unwrap_or_else(|e| panic!("{e:#}\n{}", server.stderr()));
}

/// A server with such rings, and a front-end of it.
fn start(fs: &FaultyFs, names: &[&str]) -> (Again, Disk, Kept) {
    let mut again = Again::start(fs.paths(names)).args(&ARGS);
    again.server().kill();
    again.restart();
    let (disk, kept) = again.disk();
    wait_threads(again.server(), disk.queues.len());
    (again, disk, kept)
}

#[test]
fn all_data_is_right_over_a_path_failure_kills_and_a_stop() {
    need!(faulty);
    let image = Image::empty(16 * MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let (mut again, mut disk, kept) = start(&fs, &["a", "b"]);
    let progress = Progress::of(&disk);
    let mut verifiers = Verifier::share(image.sectors(), disk.queues.len(), 7);
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), depth: 64, flush_percent: 3, ..Plan::default() };
    std::thread::scope(|scope| {
        let Disk { session, queues, .. } = &mut disk;
        queues.iter_mut().for_each(|q| q.timeout = SOON * 3);
        let loads = start_loads(scope, queues, &mut verifiers, &plan);
        let stop_at_end = SetAtEnd(&stop);
        progress.wait(50, SOON).unwrap();
        fs.rule("a", Rule::errno(libc::ENODEV));
        again.server().wait_for_log("path failed", SOON).unwrap();
        progress.wait(50, SOON).unwrap();
        fs.clear("a");
        for _ in 0..3 {
            again.server().kill();
            again.restart();
            *session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
            progress.wait(50, SOON * 3).unwrap();
        }
        drop(stop_at_end);
        for load in loads {
            load.join().unwrap().unwrap_or_else(|e| panic!("{e:#}\n{}", again.server().stderr()));
        }
    });
    for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
        assert_eq!(q.nr_pending(), 0);
        verifier.check_all(q).unwrap();
        q.flush().unwrap();
        verifier.check_file(&image.path).unwrap();
    }
    wait_threads(again.server(), disk.queues.len());
    disk.stop().unwrap();
    wait_threads(again.server(), 0);
    assert_eq!(again.server().terminate(SOON).unwrap(), 0);
    assert_eq!(again.server().count_log("sandbox: not confined"), 0, "{}", again.server().stderr());
}

/// The kernel's thread waits for what it has sent, and the process for its thread: it is there, with all that it has open,
/// until its last I/O is over. Somebody else who has the area waits as well.
#[test]
fn f02_a_killed_process_ends_when_its_io_has_and_the_next_one_waits() {
    need!(faulty);
    let image = Image::filled(4 * MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let (mut again, mut disk, kept) = start(&fs, &["a"]);
    fs.rule("a", Rule::hold().writes().next(1));
    disk.q().stage(&Op::write(104, filled(8, 8))).unwrap();
    disk.q().kick();
    fs.wait_held("a", 1, SOON).unwrap();
    again.server().signal(libc::SIGKILL);
    std::thread::sleep(MOMENT);
    assert!(again.server().is_alive(), "its I/O is under way");
    let command = Server::polypath().path(fs.path("a")).num_queues(disk.queues.len() as u32);
    let next = ARGS.iter().fold(command, |command, arg| command.arg(arg)).start().unwrap();
    disk.session = kept.reconnect(next.socket(), Resume::Used, SOON).unwrap();
    next.wait_for_log(WAIT, SOON).unwrap();
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "served while the first copy is under way");
    assert!(image.at(104, 8) == filled(104, 8), "the first copy was under way");
    fs.release("a");
    again.server().wait_exit(SOON).unwrap();
    assert_eq!(disk.q().done().unwrap().status, OK);
    disk.q().write(104, &filled(16, 8)).unwrap();
    std::thread::sleep(MOMENT);
    assert!(image.at(104, 8) == filled(16, 8), "an old write came back");
    assert_eq!(fs.counts("a").writes, 3, "once by the killed one, once more, and the newer one");
}

#[test]
fn f47_idle_queues_cost_no_cpu_when_their_threads_sleep() {
    let image = Image::filled(MIB);
    let command = Server::polypath().path(&image.path).num_queues(8);
    let server = ARGS.iter().fold(command, |command, arg| command.arg(arg)).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(8).open().unwrap();
    disk.queues.iter_mut().for_each(|q| drop(q.read(0, 8).unwrap()));
    std::thread::sleep(Duration::from_millis(500));
    let before = server.stats();
    std::thread::sleep(Duration::from_secs(2));
    let after = server.stats();
    assert_eq!(server.nr_polling_threads(), 8);
    let cpu = after.cpu.checked_sub(before.cpu).unwrap();
    assert!(cpu <= Duration::from_millis(20), "{cpu:?} of CPU in two idle seconds");
    let switches = after.voluntary_switches - before.voluntary_switches;
    assert!(switches < 100, "{switches} wakes in two idle seconds");
    // They are woken as they fell asleep.
    for q in &mut disk.queues {
        assert!(q.read(8, 8).unwrap() == filled(8, 8));
    }
}
