//! Paths that become larger and smaller: the guest sees a size that all of them have, and is told when it changes.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::wire::{poll_in, req};
use polypath_vm_tests::front_end::{Disk, IOERR, OK, Op};
use polypath_vm_tests::server::wait_until;

use crate::common::{Image, MIB, SOON, filled, need, status};
use crate::rig::Rig;

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

/// The channel on which the front-end is told of changes.
struct BackChannel(UnixStream);

impl BackChannel {
    fn of(disk: &Disk) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        disk.session.set(req::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]).unwrap();
        Self(ours)
    }

    /// Whether a message comes within this time.
    fn is_told(&mut self, within: Duration) -> bool {
        let deadline = std::time::Instant::now() + within;
        if !poll_in(self.0.as_raw_fd(), deadline).unwrap() {
            return false;
        }
        let mut message = [0; 12];
        self.0.read_exact(&mut message).unwrap();
        // Config change, version 1, no answer wanted, no payload.
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        true
    }
}

/// A disk of 4 MiB by these names, whose file has become 8 MiB without any name showing it.
fn enlarged(names: &[&str]) -> (Rig, Disk, BackChannel) {
    let rig = Rig::start(Image::filled(4 * MIB), names, &[]);
    let disk = rig.disk(1);
    names.iter().for_each(|name| rig.fs.set_size(name, Some(4 * MIB)));
    rig.image.file().set_len(8 * MIB).unwrap();
    let back = BackChannel::of(&disk);
    (rig, disk, back)
}

fn capacity(disk: &mut Disk) -> u64 {
    disk.reload_config().unwrap().capacity * 512
}

fn resize(rig: &Rig) {
    rig.control().run("resize").unwrap();
}

#[test]
fn f33_the_guest_sees_a_size_that_all_paths_have() {
    need!(faulty);
    let (rig, mut disk, mut back) = enlarged(&["a", "b"]);
    resize(&rig);
    assert_eq!(capacity(&mut disk), 4 * MIB, "nothing has changed yet");
    rig.fs.set_size("a", Some(8 * MIB));
    resize(&rig);
    assert_eq!(capacity(&mut disk), 4 * MIB, "one path is not there yet");
    assert_eq!(status(disk.q(), &Op::read(4 * MIB / 512, 8)), IOERR);
    assert!(!back.is_told(MOMENT));
    rig.fs.set_size("b", Some(8 * MIB));
    resize(&rig);
    assert!(back.is_told(SOON));
    assert_eq!(capacity(&mut disk), 8 * MIB);
    for i in 0..16 {
        let sector = 4 * MIB / 512 + i * 64;
        disk.q().write(sector, &filled(sector, 8)).unwrap();
        assert!(disk.q().read(sector, 8).unwrap() == filled(sector, 8));
    }
    assert_eq!(status(disk.q(), &Op::read(8 * MIB / 512, 8)), IOERR);
    resize(&rig);
    assert!(!back.is_told(MOMENT), "told of nothing");
    // A path that failed before and returns has the new size to prove.
    rig.tell("fail_path", "a");
    rig.fs.set_size("a", Some(4 * MIB));
    rig.tell("reinstate_path", "a");
    wait_until("a refusal", SOON, || rig.server.stderr().contains("refused")).unwrap();
    rig.fs.set_size("a", None);
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    assert_eq!(rig.server.count_log("path failed"), 1, "{}", rig.server.stderr());
}

/// Without any command: the probes see it.
#[test]
fn f33_growth_is_seen_by_itself() {
    need!(faulty);
    let (rig, mut disk, mut back) = enlarged(&["a", "b"]);
    ["a", "b"].iter().for_each(|name| rig.fs.set_size(name, Some(8 * MIB)));
    assert!(back.is_told(Duration::from_secs(30)), "{}", rig.server.stderr());
    assert_eq!(capacity(&mut disk), 8 * MIB);
    disk.q().read(8 * MIB / 512 - 8, 8).unwrap();
}

#[test]
fn f33_smaller_only_by_command_and_no_path_fails() {
    need!(faulty);
    let rig = Rig::start(Image::filled(4 * MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    let mut back = BackChannel::of(&disk);
    // With requests in flight above the new end.
    rig.fs.rule("a", Rule::hold().reads());
    rig.fs.rule("b", Rule::hold().reads());
    for i in 0..8 {
        disk.q().stage(&Op::read(3 * MIB / 512 + i * 64, 8)).unwrap();
    }
    disk.q().kick();
    let nr_held = || ["a", "b"].iter().map(|name| rig.fs.counts(name).held).sum::<u64>();
    wait_until("reads to be held", SOON, || nr_held() != 0).unwrap();
    ["a", "b"].iter().for_each(|name| rig.fs.set_size(name, Some(2 * MIB)));
    let why = rig.control().refused("resize").unwrap();
    assert!(why.contains("shrink") && why.contains(&(2 * MIB).to_string()), "{why}");
    assert_eq!(capacity(&mut disk), 4 * MIB);
    rig.control().run("resize shrink").unwrap();
    assert!(back.is_told(SOON));
    assert_eq!(capacity(&mut disk), 2 * MIB);
    ["a", "b"].iter().for_each(|name| rig.fs.release(name));
    for done in disk.q().drain().unwrap() {
        assert!(matches!(done.status, OK | IOERR), "{}", done.status);
    }
    assert_eq!(status(disk.q(), &Op::read(3 * MIB / 512, 8)), IOERR);
    assert_eq!(status(disk.q(), &Op::write(2 * MIB / 512, vec![1; 4096])), IOERR);
    assert!(disk.q().read(2 * MIB / 512 - 8, 8).unwrap() == filled(2 * MIB / 512 - 8, 8));
    assert_eq!(rig.status().nr_active(), 2, "{}", rig.server.stderr());
    rig.image.assert_filled(0..rig.image.sectors());
}

#[test]
fn f34_a_size_that_cannot_be_asked_changes_nothing() {
    need!(faulty);
    let (rig, mut disk, mut back) = enlarged(&["a", "b"]);
    // A path that is out is not asked; the one that is left shows what it showed.
    rig.tell("fail_path", "a");
    resize(&rig);
    assert_eq!(capacity(&mut disk), 4 * MIB);
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    // The question fails on a path that is in use.
    rig.fs.set_size("b", Some(8 * MIB));
    rig.fs.rule("a", Rule::errno(libc::EIO).on(&[Kind::Stat]));
    let why = rig.control().refused("resize").unwrap();
    assert!(why.contains("the size stays 4194304 bytes"), "{why}");
    assert_eq!(capacity(&mut disk), 4 * MIB);
    assert!(!back.is_told(MOMENT));
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    rig.fs.set_size("a", Some(0));
    rig.fs.set_size("b", Some(0));
    rig.fs.clear("a");
    assert!(rig.control().refused("resize shrink").unwrap().contains("the size stays"));
    assert_eq!(capacity(&mut disk), 4 * MIB);
}

/// A front-end that comes back and does not ask for the config space is told to.
#[test]
fn a_front_end_that_comes_back_is_told_to_look() {
    need!(faulty);
    let (rig, disk, _back) = enlarged(&["a"]);
    let kept = polypath_vm_tests::front_end::Kept::of(&disk, None).unwrap();
    disk.session.channel.shut_down();
    rig.fs.set_size("a", Some(8 * MIB));
    resize(&rig);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let _session = kept
        .reconnect_with(rig.server.socket(), polypath_vm_tests::front_end::Resume::Used, SOON, |session| {
            session.set(req::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()])
        })
        .unwrap();
    assert!(BackChannel(ours).is_told(SOON));
}
