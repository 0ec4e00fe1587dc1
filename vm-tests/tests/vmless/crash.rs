//! The back-end is killed and started again: every request is answered, once, with the right data.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::config::WRITEBACK_OFFSET;
use polypath_vm_tests::front_end::verify::{Plan, Rng, Verifier};
use polypath_vm_tests::front_end::{Disk, Kept, OK, Op, Resume};
use polypath_vm_tests::server::{Builder, Server};
use tempfile::TempDir;

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Progress, SetAtEnd};

const QUEUES: u16 = 4;

/// Kills per test; `POLYPATH_CRASH_ROUNDS` says otherwise.
const ROUNDS: u64 = 5;

/// A back-end that is started again and again with the same command.
pub struct Again {
    dir: TempDir,
    paths: Vec<PathBuf>,
    args: Vec<String>,
    server: Option<Server>,
}

impl Again {
    pub fn start(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let dir = tempfile::Builder::new().prefix("again-").tempdir().unwrap();
        let mut again = Self { dir, paths: paths.into_iter().collect(), args: Vec::new(), server: None };
        again.restart();
        again
    }

    /// The next starts have these arguments as well.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn command(&self) -> Builder {
        let command = Server::polypath().paths(&self.paths).num_queues(QUEUES.into()).socket(self.socket());
        self.args.iter().fold(command, Builder::arg)
    }

    pub fn restart(&mut self) {
        self.server = Some(self.command().start().unwrap());
    }

    pub fn server(&mut self) -> &mut Server {
        self.server.as_mut().unwrap()
    }

    /// A disk whose requests are tracked.
    pub fn disk(&self) -> (Disk, Kept) {
        let disk = Disk::at(self.socket()).queues(QUEUES).connect().unwrap();
        let inflight = disk.track().unwrap();
        disk.start().unwrap();
        let kept = Kept::of(&disk, Some(inflight)).unwrap();
        (disk, kept)
    }
}

fn rounds() -> u64 {
    std::env::var("POLYPATH_CRASH_ROUNDS").map_or(ROUNDS, |n| n.parse().expect("a number"))
}

/// Ends the back-end as `end` does, at random moments under a load that checks all its data. Gives how many queues had
/// something to take up again.
fn under_load(resume: Resume, end: impl Fn(&mut Server)) -> usize {
    let image = Image::empty(16 * MIB);
    let mut again = Again::start([image.path.clone()]);
    let (mut disk, kept) = again.disk();
    let progress = Progress::of(&disk);
    let mut verifiers = Verifier::share(image.sectors(), QUEUES.into(), 7);
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), depth: 64, flush_percent: 3, ..Plan::default() };
    let mut rng = Rng::new(7);
    let mut nr_again = 0;
    std::thread::scope(|scope| {
        let Disk { session, queues, .. } = &mut disk;
        let loads: Vec<_> = queues
            .iter_mut()
            .zip(&mut verifiers)
            .map(|(q, verifier)| {
                q.timeout = Duration::from_secs(30);
                let plan = &plan;
                scope.spawn(move || verifier.run(q, plan).inspect_err(|e| eprintln!("load: {e:#}")))
            })
            .collect();
        let stop_at_end = SetAtEnd(&stop);
        for round in 0..rounds() {
            progress.wait(30, SOON * 3).unwrap_or_else(|e| panic!("round {round}: {e:#}"));
            std::thread::sleep(Duration::from_micros(rng.below(20_000)));
            end(again.server());
            again.restart();
            *session = kept.reconnect(&again.socket(), resume, SOON).unwrap();
            nr_again += again.server().count_log("requests taken up again");
        }
        progress.wait(30, SOON * 3).unwrap();
        drop(stop_at_end);
        for load in loads {
            load.join().unwrap().unwrap_or_else(|e| panic!("{resume:?}: {e:#}"));
        }
    });
    println!("{} rounds, {nr_again} queues with requests taken up again", rounds());
    for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
        assert_eq!(q.nr_pending(), 0);
        verifier.check_all(q).unwrap();
        q.flush().unwrap();
        verifier.check_file(&image.path).unwrap();
    }
    nr_again
}

#[test]
fn f07_killed_under_load_and_resumed_at_the_used_index() {
    assert_ne!(under_load(Resume::Used, |server| server.kill()), 0, "no kill hit a request");
}

#[test]
fn f07_killed_under_load_and_resumed_at_the_available_index() {
    assert_ne!(under_load(Resume::Available, |server| server.kill()), 0, "no kill hit a request");
}

#[test]
fn f07_ended_in_peace_under_load_and_started_again() {
    for resume in [Resume::Used, Resume::Available] {
        under_load(resume, |server| assert_eq!(server.terminate(SOON).unwrap(), 0));
    }
}

/// 64 reads and writes are with a path that holds them when the back-end is killed.
#[test]
fn f07_killed_with_64_requests_on_a_path() {
    need!(faulty);
    for resume in [Resume::Used, Resume::Available] {
        let image = Image::filled(4 * MIB);
        let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
        let mut again = Again::start([fs.path("a")]);
        let (mut disk, kept) = again.disk();
        for q in &mut disk.queues {
            // Some that are answered before, so that the indices are not at the start.
            assert!(q.read(8, 8).unwrap() == filled(8, 8));
        }
        fs.rule("a", Rule::hold());
        for (nr, q) in (0..).zip(&mut disk.queues) {
            for i in 0..8 {
                let sector = 64 + nr * 1024 + i * 64;
                q.stage(&Op::read(sector, 8)).unwrap();
                q.stage(&Op::write(sector + 32, filled(sector + 32, 8))).unwrap();
            }
            q.kick();
        }
        fs.wait_held("a", 64, SOON).unwrap();
        again.server().kill();
        // The new one does nothing before the path has given back what the old one has there.
        fs.release("a");
        again.restart();
        disk.session = kept.reconnect(&again.socket(), resume, SOON).unwrap();
        for (nr, q) in (0..).zip(&mut disk.queues) {
            for (i, done) in (0..).zip(q.drain().unwrap()) {
                assert_eq!(done.status, OK);
                let sector = 64 + nr * 1024 + i / 2 * 64;
                assert!(i % 2 == 1 || done.data == filled(sector, 8), "{resume:?}: read {i} of queue {nr}");
            }
            assert!(q.read(16, 8).unwrap() == filled(16, 8));
            assert!(q.done_now().unwrap().is_none(), "answered twice");
        }
        let lines = again.server().count_log("requests taken up again");
        assert_eq!(lines, usize::from(QUEUES), "{}", again.server().stderr());
        image.assert_filled(0..image.sectors());
    }
}

/// A kill between the connection and the start of the rings changes nothing.
#[test]
fn f07_killed_before_anything_ran() {
    let image = Image::filled(4 * MIB);
    let mut again = Again::start([image.path.clone()]);
    let mut disk = Disk::at(again.socket()).queues(QUEUES).connect().unwrap();
    let kept = Kept::of(&disk, Some(disk.track().unwrap())).unwrap();
    for q in &mut disk.queues {
        q.stage(&Op::read(8, 8)).unwrap();
        q.kick();
    }
    again.server().kill();
    again.restart();
    disk.session = kept.reconnect(&again.socket(), Resume::Available, SOON).unwrap();
    for q in &mut disk.queues {
        assert!(q.done().unwrap().data == filled(8, 8));
        assert!(q.read(16, 8).unwrap() == filled(16, 8));
    }
}

#[test]
fn f16_write_through_is_kept_over_a_crash() {
    need!(faulty);
    let image = Image::empty(MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let mut again = Again::start([fs.path("a")]);
    // The guest is started again after its choice: it finds it, and its area is another.
    let (disk, _kept) = again.disk();
    disk.session.set_config(WRITEBACK_OFFSET, &[0]).unwrap();
    drop(disk);
    let (mut disk, kept) = again.disk();
    for round in 0..3_u64 {
        let fsyncs = fs.counts("a").fsyncs;
        disk.q().write(round * 16, &filled(round * 16, 8)).unwrap();
        assert!(fs.counts("a").fsyncs > fsyncs, "start {round}: the guest did not take its choice back");
        again.server().kill();
        again.restart();
        disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
    }
    disk.session.set_config(WRITEBACK_OFFSET, &[1]).unwrap();
    again.server().kill();
    again.restart();
    disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
    let fsyncs = fs.counts("a").fsyncs;
    disk.q().write(512, &filled(512, 8)).unwrap();
    assert_eq!(fs.counts("a").fsyncs, fsyncs, "it did in the end");
}
