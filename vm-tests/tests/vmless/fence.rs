//! A process is killed while a path keeps what it has asked for: nothing of that may come late.

use std::time::Duration;

use polypath_vm_tests::control::Socket;
use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::memory::anonymous_file;
use polypath_vm_tests::front_end::verify::pattern;
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, Inflight, Kept, OK, Op, Resume};
use polypath_vm_tests::server::wait_until;

use crate::common::{Image, MIB, SOON, filled, need};
use crate::crash::Again;

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

/// What the log says while requests wait.
const WAIT: &str = "rings wait: an earlier process has I/O";

fn data(sector: u64, generation: u32) -> Vec<u8> {
    (sector..sector + 8).flat_map(|sector| pattern(sector, generation)).collect()
}

/// A killed process whose request is with path `a` still, and the one after it.
struct Killed {
    // Before the server in the order of drops: what it holds is given back then.
    fs: FaultyFs,
    again: Again,
    disk: Disk,
    kept: Kept,
    image: Image,
}

/// The first request is `op`, and the path keeps it.
fn killed_with(op: &Op, hold: Rule, args: &[&str]) -> Killed {
    let image = Image::filled(4 * MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let mut again = Again::start([fs.path("a")]).args(args);
    let (mut disk, kept) = again.disk();
    fs.rule("a", hold.next(1));
    disk.q().stage(op).unwrap();
    disk.q().kick();
    fs.wait_held("a", 1, SOON).unwrap();
    // No thread of the kernel's is in the path for it, so the process ends at once.
    again.server().kill();
    again.restart();
    disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
    Killed { fs, again, disk, kept, image }
}

#[test]
fn f02_a_late_write_of_a_killed_process_does_not_destroy_a_newer_one() {
    need!(faulty);
    let Killed { fs, mut again, mut disk, image, .. } =
        killed_with(&Op::write(104, data(104, 2)), Rule::hold().writes(), &[]);
    again.server().wait_for_log(WAIT, SOON).unwrap();
    // Served now, it would be answered, and the guest write something newer before the first copy lands.
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "served while the first copy is under way");
    assert!(image.at(104, 8) == filled(104, 8), "the first copy was under way");
    fs.release("a");
    assert_eq!(disk.q().done().unwrap().status, OK);
    disk.q().write(104, &data(104, 3)).unwrap();
    assert!(disk.q().read(104, 8).unwrap() == data(104, 3));
    std::thread::sleep(MOMENT);
    assert!(image.at(104, 8) == data(104, 3), "an old write came back");
    assert_eq!(fs.counts("a").writes, 3, "once by the killed one, once more, and the newer one");
    again.server().wait_for_log("rings are served", SOON).unwrap();
    assert_eq!(again.server().count_log("requests taken up again"), 1);
}

#[test]
fn f18_a_late_read_of_a_killed_process_does_not_fill_a_buffer_in_use() {
    need!(faulty);
    let Killed { fs, mut again, mut disk, .. } = killed_with(&Op::read(104, 8), Rule::hold().reads(), &[]);
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "served while the first copy is under way");
    fs.release("a");
    let done = disk.q().done().unwrap_or_else(|e| panic!("{e:#}\n{}", again.server().stderr()));
    assert!(done.data == filled(104, 8));
    // Whatever the guest puts there now stays.
    let memory = &disk.memory;
    let region = &memory.regions()[0];
    let before = memory.read_vec(region.guest, 8 << 20);
    std::thread::sleep(MOMENT);
    assert!(memory.read_vec(region.guest, 8 << 20) == before, "memory changed later");
}

/// A reset does not make the old requests harmless: they may hit the next guest.
#[test]
fn f18_a_reset_does_not_open_the_gate() {
    need!(faulty);
    let Killed { fs, again, disk, .. } = killed_with(&Op::read(104, 8), Rule::hold().reads(), &[]);
    let mut disk = disk;
    disk.session.set(req::RESET_DEVICE, &[], &[]).unwrap();
    disk.q().reset();
    disk.session.set_features(disk.session.features).unwrap();
    disk.track().unwrap();
    disk.start().unwrap();
    disk.q().stage(&Op::read(8, 8)).unwrap();
    disk.q().kick();
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "the new guest is served too early");
    // Nor does another front-end, in whatever memory.
    drop(disk);
    let mut disk = Disk::at(again.socket()).open().unwrap();
    disk.q().stage(&Op::read(8, 8)).unwrap();
    disk.q().kick();
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "the next front-end is served too early");
    fs.release("a");
    assert!(disk.q().done().unwrap().data == filled(8, 8));
}

/// It is said, more loudly when it takes long, and nothing else is held up by it: rings stop, the program ends.
#[test]
fn a_wait_for_a_killed_process_is_shown_and_can_be_stopped() {
    need!(faulty);
    let socket = Socket::new().unwrap();
    let control = socket.path().display().to_string();
    let args = ["--path-timeout", "400", "--control", &control];
    let Killed { fs, mut again, mut disk, kept, image } =
        killed_with(&Op::write(104, data(104, 2)), Rule::hold().writes(), &args);
    again.server().wait_for_log("rings still wait", SOON).unwrap();
    let mut control = socket.connect().unwrap();
    let shown = control.result(serde_json::json!({ "command": "show" })).unwrap();
    assert!(shown["earlier_io_ms"].as_u64().unwrap() >= 400, "{shown}");
    let events = control.result(serde_json::json!({ "command": "events", "last": 50 })).unwrap();
    assert!(events.to_string().contains("earlier_io_awaited"), "{events}");
    let base = disk.session.stop(0).unwrap();
    assert_eq!(base, 1, "one request was taken and is in flight");
    disk.session.start(&disk.queues[0].queue, base).unwrap();
    assert_eq!(again.server().terminate(SOON).unwrap(), 0);
    assert_eq!(disk.q().nr_pending(), 1);
    // The next one waits as well, and takes the request up.
    again.restart();
    disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
    std::thread::sleep(MOMENT);
    assert!(disk.q().done_now().unwrap().is_none(), "served while the first copy is under way");
    again.server().wait_for_log("rings still wait", SOON).unwrap();
    fs.release("a");
    assert_eq!(disk.q().done().unwrap().status, OK);
    again.server().wait_for_log("rings are served", SOON).unwrap();
    let mut control = socket.connect().unwrap();
    let shown = control.result(serde_json::json!({ "command": "show" })).unwrap();
    assert!(shown["earlier_io_ms"].is_null(), "{shown}");
    let mut ended = || {
        let events = control.result(serde_json::json!({ "command": "events", "last": 50 })).unwrap();
        events.to_string().contains("earlier_io_ended")
    };
    wait_until("the event", SOON, &mut ended).unwrap();
    assert!(image.at(104, 8) == data(104, 2));
}

/// Where nothing is under way any more, nobody waits: a new session, a new start, the same area again.
#[test]
fn nothing_is_waited_for_after_a_peaceful_end() {
    let image = Image::filled(4 * MIB);
    let mut again = Again::start([image.path.clone()]);
    let (mut disk, kept) = again.disk();
    for _ in 0..20 {
        assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
        kept.inflight().unwrap().set(&disk.session).unwrap();
        disk.session.channel.shut_down();
        disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
    }
    assert_eq!(again.server().count_log(WAIT), 0, "{}", again.server().stderr());
    for _ in 0..5 {
        assert_eq!(again.server().terminate(SOON).unwrap(), 0);
        again.restart();
        disk.session = kept.reconnect(&again.socket(), Resume::Used, SOON).unwrap();
        assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
        assert_eq!(again.server().count_log(WAIT), 0, "{}", again.server().stderr());
    }
}

/// An area that cannot carry the lock is used without it.
#[test]
fn an_area_in_a_file_on_disk_is_not_locked() {
    let image = Image::filled(4 * MIB);
    let mut again = Again::start([image.path.clone()]);
    let mut disk = Disk::at(again.socket()).connect().unwrap();
    let size = (16 + 16 * 128_u64).next_multiple_of(64);
    let path = image.dir().join("area");
    let on_disk = std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
    on_disk.set_len(size).unwrap();
    let is_tmpfs = |file: &std::fs::File| rustix::fs::fstatfs(file).unwrap().f_type == 0x0102_1994;
    let is_locked = is_tmpfs(&on_disk);
    for file in [on_disk, anonymous_file(size).unwrap()] {
        let area = Inflight { size, offset: 0, num_queues: 1, queue_size: 128, file };
        area.set(&disk.session).unwrap();
    }
    disk.start().unwrap();
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    let nr_warnings = again.server().count_log("will not be waited for");
    assert_eq!(nr_warnings, usize::from(!is_locked), "{}", again.server().stderr());
}
