//! A front-end that says anything: the session ends or goes on, and leaves nothing behind.

mod files;
mod front;

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use polypath::cli::Options;
use polypath::disk::Disk;
use polypath::{session, setup};
use polypath_paths::text::TableSpec;
use polypath_selector::Kind;
use rustix::fs::{Mode, OFlags, RawDir};

use crate::guest::{NEXT, WRITE, descriptor};
use crate::input::{Input, ignore_broken_pipes};
use files::Files;
use front::{Front, MEMORY_BYTES, input_size};

const STEPS_MAX: u32 = 24;

pub fn run(bytes: &[u8]) {
    ignore_broken_pipes();
    let mut input = Input::new(bytes);
    let before = nr_open();
    let disk = Arc::new(disk());
    let features = disk.features() | 1 << 30 | 1 << 26;
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let serving = {
        let disk = Arc::clone(&disk);
        std::thread::spawn(move || session::serve(disk, theirs))
    };
    let mut front = Front { stream: ours, files: Files::new(MEMORY_BYTES), features, is_over: false };
    lay_rings(&front);
    for _ in 0..STEPS_MAX {
        front.step(&mut input);
        if input.is_empty() || front.is_over {
            break;
        }
    }
    front.hang_up();
    serving.join().expect("the session's thread panicked");
    drop(disk);
    assert_eq!(nr_open(), before, "descriptors are left open");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let left = maps.lines().find(|line| line.contains("fuzz-memory") || line.contains("polypath-inflight"));
    assert_eq!(left, None, "memory is left mapped");
}

fn disk() -> Disk {
    let mut options = polypath::fuzzing::read_config("").expect("options");
    options.num_queues = 4;
    options.poll_us = 0;
    let spec = TableSpec::one_group(Kind::RoundRobin, ["null:1M,inline"]);
    let options = Options { ..options };
    setup::make_disk(&options, &spec, || {}).expect("disk")
}

/// A few requests on each ring, for when it is started.
fn lay_rings(front: &Front) {
    use std::os::unix::fs::FileExt as _;
    let put = |bytes: &[u8], at: u64| front.files.memory.write_all_at(bytes, at).expect("memory");
    for index in 0..4 {
        let ring = Front::ring(index, 1 << (1 + input_size(index)));
        let data = ring.end().next_multiple_of(512);
        let kind = [0_u8, 1, 4, 8][index as usize];
        put(&[kind], data);
        let direction = if kind == 1 { 0 } else { WRITE };
        let parts = [(0, 16, NEXT, 1), (512, 1024, NEXT | direction, 2), (2048, 1, WRITE, 0)];
        for (at, (offset, len, flags, next)) in (0..).zip(parts) {
            let raw = (Front::address(data + offset), len, flags, next);
            put(&descriptor(raw), ring.descriptors + 16 * at);
        }
        put(&[0, 0, 1, 0, 0, 0], ring.available);
    }
}

/// Descriptors of this process.
fn nr_open() -> usize {
    let dir =
        rustix::fs::open("/proc/self/fd", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).expect("proc");
    let mut space = [std::mem::MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&dir, &mut space);
    let mut nr = 0;
    while let Some(Ok(_)) = entries.next() {
        nr += 1;
    }
    nr
}
