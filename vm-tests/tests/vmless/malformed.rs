//! Messages that no proper front-end sends, and what they must not leave behind.

use std::os::fd::AsRawFd as _;
use std::time::Duration;

use polypath_vm_tests::front_end::wire::{NEED_REPLY, REPLY, VERSION, encode, proto, req};
use polypath_vm_tests::front_end::{Disk, Memory, Session, feature};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled};

fn polypath(image: &Image) -> Server {
    Server::polypath().path(&image.path).num_queues(2).start().unwrap()
}

fn assert_serves(server: &mut Server, what: &str) {
    assert!(server.is_alive(), "{what}: {}", server.stderr());
    let mut disk = Disk::open(server.socket()).unwrap_or_else(|e| panic!("after {what}: {e:#}"));
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "after {what}");
}

/// Descriptors, mappings and threads when no front-end is there.
pub fn at_rest(server: &Server) -> (usize, usize, usize) {
    let stats = server.stats();
    (stats.fds, stats.mappings, stats.threads)
}

/// Runs some sessions, so that everything made at first use is there, and looks at what the process has at rest.
pub fn baseline(server: &mut Server) -> (usize, usize, usize) {
    for _ in 0..3 {
        assert_serves(server, "the start");
    }
    // At rest is what stays the same for a while after the last session.
    let (mut last, mut same) = (at_rest(server), 0);
    wait_until("a process at rest", SOON, || {
        std::thread::sleep(Duration::from_millis(20));
        let now = at_rest(server);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same >= 5
    })
    .unwrap();
    last
}

pub fn assert_nothing_left(server: &Server, before: (usize, usize, usize), what: &str) {
    let fits = || {
        let now = at_rest(server);
        // Allocator arenas come and go by a few mappings; a leak in hundreds of rounds is far more.
        now.0 <= before.0 && now.1 <= before.1 + 12 && now.2 <= before.2
    };
    if wait_until("what is left", SOON, fits).is_err() {
        panic!(
            "{what}: (fds, mappings, threads) {before:?} before, {:?} after\n{:#?}",
            at_rest(server),
            server.open_files()
        );
    }
}

#[test]
fn nonsense_ends_the_connection_not_the_process() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("an unknown message", encode(999, VERSION, &[])),
        ("message 0", encode(0, VERSION, &[])),
        ("version 0", encode(req::GET_FEATURES, 0, &[])),
        ("version 2", encode(req::GET_FEATURES, 2, &[])),
        ("an answer", encode(req::GET_FEATURES, VERSION | REPLY, &[])),
        ("reserved flags", encode(req::GET_FEATURES, VERSION | 0xFFFF_FF00, &[])),
        (
            "a payload of 4 GiB announced",
            [9_u32, VERSION, u32::MAX].iter().flat_map(|w| w.to_le_bytes()).collect(),
        ),
        ("a payload too short", encode(req::SET_VRING_NUM, VERSION, &[0; 4])),
        ("a payload too long", encode(req::SET_VRING_NUM, VERSION, &[0; 64])),
        ("an empty memory table", encode(req::SET_MEM_TABLE, VERSION, &[0; 8])),
        (
            "a memory table without descriptors",
            encode(req::SET_MEM_TABLE, VERSION, &[1, 0, 0, 0, 0, 0, 0, 0]),
        ),
        ("a queue that is not there", encode(req::SET_VRING_NUM, VERSION, &[200, 0, 0, 0, 128, 0, 0, 0])),
        (
            "a base for a queue that is not there",
            encode(req::GET_VRING_BASE, VERSION, &[200, 0, 0, 0, 0, 0, 0, 0]),
        ),
        ("a queue size of 0", encode(req::SET_VRING_NUM, VERSION, &[0; 8])),
        (
            "a queue size that is no power of two",
            encode(req::SET_VRING_NUM, VERSION, &[0, 0, 0, 0, 100, 0, 0, 0]),
        ),
        ("a queue size of 65536", encode(req::SET_VRING_NUM, VERSION, &[0, 0, 0, 0, 0, 0, 1, 0])),
        (
            "ring addresses nowhere",
            encode(req::SET_VRING_ADDR, VERSION, &[&[0; 8][..], &[0xFF; 32]].concat()),
        ),
        ("STATUS, which was not offered", encode(req::SET_STATUS, VERSION, &[7, 0, 0, 0, 0, 0, 0, 0])),
        ("in-flight, which may not be there", encode(req::GET_INFLIGHT_FD, VERSION, &[0xFF; 20])),
        ("features that were not offered", encode(req::SET_FEATURES, VERSION, &[0xFF; 8])),
        ("half a header", vec![1, 0, 0, 0, 1]),
        ("noise", (0..200).map(|i| i as u8 ^ 0x5A).collect()),
    ];
    for (what, bytes) in &cases {
        for acked in [false, true] {
            let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
            let mut bytes = bytes.clone();
            if acked && bytes.len() > 4 {
                bytes[4] |= NEED_REPLY as u8;
            }
            session.channel.send_bytes(&bytes, &[]).unwrap();
            session.channel.shut_down();
            drop(session);
            assert_serves(&mut server, what);
        }
    }
}

#[test]
fn messages_before_the_handshake_harm_nothing() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    for request in 1..=44 {
        let mut session = Session::raw(server.socket()).unwrap();
        session.channel.timeout = Duration::from_millis(50);
        let _ = session.channel.send(request, VERSION, &[0; 8], &[]);
        let _ = session.channel.recv();
        assert!(server.is_alive(), "message {request}");
    }
    assert_serves(&mut server, "early messages");
}

#[test]
fn f45_surplus_descriptors_are_closed() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    let before = baseline(&mut server);
    let spare = std::fs::File::open("/dev/null").unwrap();
    let fds = [spare.as_raw_fd(); 8];
    let memory = Memory::new(MIB).unwrap();
    let region = memory.regions()[0].clone();
    let table = |len: u64, offset: u64| {
        let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0];
        for word in [region.guest, len, region.user(), offset] {
            payload.extend(word.to_le_bytes());
        }
        payload
    };
    let messages = [
        (req::GET_FEATURES, vec![]),
        (req::SET_OWNER, vec![]),
        (req::GET_QUEUE_NUM, vec![]),
        (req::SET_VRING_NUM, vec![0, 0, 0, 0, 128, 0, 0, 0]),
        (req::SET_VRING_CALL, vec![0; 8]),
        (req::SET_MEM_TABLE, table(1 << 50, 0)),
        (req::SET_MEM_TABLE, table(MIB, u64::MAX - 4095)),
        (req::SET_MEM_TABLE, table(0, 0)),
        (req::ADD_MEM_REG, [vec![0; 8], table(1 << 50, 0)[8..].to_vec()].concat()),
        (req::GET_CONFIG, vec![0; 12]),
        (req::GET_INFLIGHT_FD, vec![0; 20]),
        (req::SET_INFLIGHT_FD, vec![0; 20]),
        (req::SET_BACKEND_REQ_FD, vec![]),
        (999, vec![]),
    ];
    for round in 0..20 {
        for (request, payload) in &messages {
            let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
            let _ = session.channel.send(*request, VERSION, payload, &fds[..1 + round % 8]);
        }
    }
    assert_serves(&mut server, "surplus descriptors");
    assert_nothing_left(&server, before, "surplus descriptors");
}

#[test]
fn f45_replaced_call_descriptors_are_closed() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    baseline(&mut server);
    let mut disk = Disk::open(server.socket()).unwrap();
    disk.q().read(0, 8).unwrap();
    let before = server.stats().fds;
    for i in 0..2000 {
        disk.queues[0].queue.replace_call().unwrap();
        disk.session.set_vring_fd(req::SET_VRING_CALL, 0, disk.queues[0].queue.call_fd()).unwrap();
        if i % 100 == 0 {
            assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
        }
    }
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    assert!(server.stats().fds <= before, "{} before, {} after", before, server.stats().fds);
}

#[test]
fn f45_f56_five_hundred_front_ends_leave_nothing() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    let before = baseline(&mut server);
    let rounds = 500;
    let start = std::time::Instant::now();
    for round in 0..rounds {
        match round % 5 {
            // In the middle of a header, of a payload, of the handshake, of a request.
            0 => Session::raw(server.socket()).unwrap().channel.send_bytes(&[1, 0, 0], &[]).unwrap(),
            1 => {
                let session = Session::raw(server.socket()).unwrap();
                session.channel.send_bytes(&encode(req::SET_FEATURES, VERSION, &[0; 8])[..15], &[]).unwrap();
            }
            2 => drop(Session::negotiate(server.socket(), feature::ALL).unwrap()),
            3 => {
                let mut disk = Disk::at(server.socket()).queues(2).open().unwrap();
                for i in 0..64 {
                    disk.queues[i % 2].stage(&polypath_vm_tests::front_end::Op::read(0, 8)).unwrap();
                }
                disk.queues.iter_mut().for_each(|q| q.kick());
            }
            _ => {
                let mut disk = Disk::open(server.socket()).unwrap();
                assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
                if round % 2 == 0 {
                    disk.stop().unwrap();
                }
            }
        }
    }
    let each = start.elapsed() / rounds;
    assert!(each < Duration::from_millis(100), "{each:?} for each front-end");
    assert_serves(&mut server, "500 front-ends");
    assert_nothing_left(&server, before, "500 front-ends");
}

#[test]
fn a_back_channel_is_taken_and_closed() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    let before = baseline(&mut server);
    for _ in 0..20 {
        let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        assert_ne!(session.protocol & proto::BACKEND_REQ, 0);
        let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        session.set(req::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()]).unwrap();
    }
    assert_serves(&mut server, "back-channels");
    assert_nothing_left(&server, before, "back-channels");
}
