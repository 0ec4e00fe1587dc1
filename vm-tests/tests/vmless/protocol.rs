//! vhost-user messages: what is offered, and what odd front-ends send.

use std::time::Duration;

use polypath_vm_tests::front_end::config::{CONFIG_BYTES, WRITEBACK_OFFSET};
use polypath_vm_tests::front_end::dirty::F_LOG_ALL;
use polypath_vm_tests::front_end::session::{F_PROTOCOL_FEATURES, config_head};
use polypath_vm_tests::front_end::wire::{NO_FD, proto, req};
use polypath_vm_tests::front_end::{Config, Disk, OK, Op, Region, Session, feature};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled, serve};

fn polypath(image: &Image) -> Server {
    Server::polypath().path(&image.path).num_queues(4).start().unwrap()
}

/// The process lives and serves a new front-end.
fn assert_serves(server: &mut Server, what: &str) {
    assert!(server.is_alive(), "{what}: {}", server.stderr());
    let mut disk = Disk::open(server.socket()).unwrap_or_else(|e| panic!("after {what}: {e:#}"));
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "after {what}");
}

#[test]
fn offers_what_it_serves_and_nothing_else() {
    let image = Image::filled(MIB);
    let server = polypath(&image);
    let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
    let protocol = session.get_u64(req::GET_PROTOCOL_FEATURES).unwrap();
    let wanted = proto::MQ
        | proto::CONFIG
        | proto::REPLY_ACK
        | proto::BACKEND_REQ
        | proto::CONFIGURE_MEM_SLOTS
        | proto::INFLIGHT_SHMFD
        | proto::LOG_SHMFD
        | proto::RESET_DEVICE;
    assert_eq!(protocol & wanted, wanted, "{protocol:#x}");
    assert_eq!(protocol & proto::STATUS, 0, "QEMU would send SET_STATUS, which nothing here answers");
    assert_eq!(session.offered & feature::RING_PACKED, 0);
    let wanted = feature::ALL & !(feature::RO | feature::SIZE_MAX);
    assert_eq!(session.offered & wanted, wanted, "{:#x}", session.offered);
    assert_eq!(session.offered & feature::RO, 0);
    assert_ne!(session.offered & F_LOG_ALL, 0);
    assert_eq!(session.get_u64(req::GET_QUEUE_NUM).unwrap(), 4);
    assert!(session.get_u64(req::GET_MAX_MEM_SLOTS).unwrap() >= 8);
}

/// What another host has in its page cache, and we have in ours, nobody keeps the same: front-ends refuse to move.
#[test]
fn no_move_is_offered_through_a_page_cache() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).arg("--direct").arg("off").start().unwrap();
    let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
    assert_eq!(session.get_u64(req::GET_PROTOCOL_FEATURES).unwrap() & proto::LOG_SHMFD, 0);
    assert_eq!(session.offered & F_LOG_ALL, 0);
}

#[test]
fn the_config_space_is_right() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(4).queue_size(256).start().unwrap();
    let disk = Disk::open(server.socket()).unwrap();
    let config = disk.config;
    assert_eq!(config.capacity, image.sectors());
    assert_eq!((config.seg_max, config.num_queues), (256 - 2, 4), "{config:?}");
    assert_eq!(config.writeback, 1);
    assert!(config.blk_size >= 512 && config.blk_size.is_power_of_two(), "{config:?}");
    let physical = config.blk_size << config.physical_block_exp;
    assert!((config.blk_size..=65536).contains(&physical), "{config:?}");
    assert!(config.min_io_size >= 1, "{config:?}");
    assert!(!disk.has(feature::SIZE_MAX) || config.size_max > 0, "{config:?}");
    assert_eq!(config.write_zeroes_may_unmap, 1);
}

#[test]
fn f41_config_can_be_read_in_parts_and_with_more_than_there_is() {
    let image = Image::filled(MIB);
    let server = polypath(&image);
    let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
    let whole = session.get_config(0, CONFIG_BYTES).unwrap();
    // The parts that front-ends ask for: QEMU old and new, Cloud Hypervisor, Firecracker, and single fields.
    for (offset, size) in [(0, 8), (0, 36), (0, 48), (0, 57), (0, 60), (20, 4), (32, 1), (34, 2), (59, 1)] {
        let part = session.get_config(offset, size).unwrap_or_else(|e| panic!("{offset}+{size}: {e:#}"));
        let end = (offset + size) as usize;
        assert_eq!(part, whole[offset as usize..end.min(60)], "{offset}+{size}");
    }
    for (offset, size) in [(0, 96), (0, 256), (56, 16), (60, 4)] {
        let part = session.get_config(offset, size).unwrap_or_else(|e| panic!("{offset}+{size}: {e:#}"));
        let known = whole.get(offset as usize..).unwrap_or_default();
        let known = &known[..known.len().min(part.len())];
        assert_eq!(&part[..known.len()], known, "{offset}+{size}");
        assert!(part[known.len()..].iter().all(|&b| b == 0), "{offset}+{size}: {part:x?}");
    }
    // Older Cloud Hypervisor asks at 256: an answer of the size asked for, or a refusal, but an answer.
    let part = session.get_config_raw(256, 60, 60).unwrap();
    assert!(part.is_empty() || part.len() == 60, "{part:x?}");
    assert_eq!(session.get_config(0, CONFIG_BYTES).unwrap(), whole, "the session goes on");
}

#[test]
fn f41_nonsense_asked_of_the_config_harms_nothing() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    for (offset, size, carried) in [
        (0, 0, 0),
        (256, 0, 0),
        (u32::MAX, 60, 60),
        (u32::MAX - 10, 200, 200),
        (4000, 200, 200),
        (0, 60, 0),
        (0, 60, 59),
        (0, 8, 60),
        (0, u32::MAX, 8),
    ] {
        let mut session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        session.channel.timeout = Duration::from_secs(5);
        // An answer without contents, or the end of the connection; no answer at all would be the fault.
        match session.get_config_raw(offset, size, carried) {
            Ok(bytes) => assert!(bytes.len() <= 4096, "{offset}+{size}"),
            Err(e) => assert!(format!("{e:#}").contains("hung up"), "{offset}+{size}: {e:#}"),
        }
        assert!(server.is_alive(), "{offset}+{size}");
    }
    assert_serves(&mut server, "odd questions");
}

#[test]
fn f42_only_the_writeback_field_can_be_set() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
    let before = session.get_config(0, CONFIG_BYTES).unwrap();
    let writeback = || Config::parse(&session.get_config(0, CONFIG_BYTES).unwrap()).unwrap().writeback;
    for value in [0, 1, 0] {
        session.set_config(WRITEBACK_OFFSET, &[value]).unwrap();
        assert_eq!(writeback(), value);
    }
    for value in [2, 255] {
        session.set_config(WRITEBACK_OFFSET, &[value]).unwrap();
        assert!(writeback() <= 1, "{value}");
    }
    session.set_config(WRITEBACK_OFFSET, &[1]).unwrap();
    session.set_config(0, &[9]).unwrap();
    session.set_config(0, &[0xFF; 60]).unwrap();
    let mut after = session.get_config(0, CONFIG_BYTES).unwrap();
    after[WRITEBACK_OFFSET as usize] = 1;
    assert_eq!(after, before, "only the writeback byte can change");
    drop(session);
    for (offset, bytes) in [(0_u32, &[][..]), (1000, &[1][..]), (u32::MAX, &[1; 60][..]), (33, &[1; 4][..])] {
        let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        let _ = session.set_config(offset, bytes);
        assert!(server.is_alive(), "SET_CONFIG at {offset}");
    }
    // Fewer bytes than announced.
    let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
    let _ = session.try_set(req::SET_CONFIG, &config_head(0, 60, 0), &[]);
    drop(session);
    assert_serves(&mut server, "odd settings");
}

#[test]
fn f42_writeback_is_fixed_without_the_feature() {
    let image = Image::filled(MIB);
    let server = polypath(&image);
    let session = Session::negotiate(server.socket(), feature::ALL & !feature::CONFIG_WCE).unwrap();
    let before = session.get_config(0, CONFIG_BYTES).unwrap();
    let _ = session.set_config(WRITEBACK_OFFSET, &[0]);
    assert_eq!(session.get_config(0, CONFIG_BYTES).unwrap(), before);
}

#[test]
fn f08_a_kick_before_the_enable_is_not_lost() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).connect().unwrap();
    let pause = Duration::from_millis(100);
    disk.session.set_up(&disk.queues[0].queue, 0).unwrap();
    disk.q().stage(&Op::read(0, 8)).unwrap();
    disk.q().queue.publish();
    disk.q().queue.kick_always();
    assert!(disk.q().done_within(pause).is_err(), "a disabled queue must not be served");
    disk.session.enable(0, true).unwrap();
    let done = disk.q().done_within(Duration::from_secs(1)).unwrap();
    assert!(done.data == filled(0, 8));

    disk.session.enable(0, false).unwrap();
    disk.q().stage(&Op::read(8, 8)).unwrap();
    disk.q().queue.publish();
    disk.q().queue.kick_always();
    assert!(disk.q().done_within(pause).is_err(), "a disabled queue must not be served");
    disk.session.enable(0, true).unwrap();
    let done = disk.q().done_within(Duration::from_secs(1)).unwrap();
    assert!(done.data == filled(8, 8));
}

#[test]
fn rings_are_enabled_at_once_without_protocol_features() {
    let image = Image::filled(MIB);
    let server = polypath(&image);
    let mut disk = Disk::at(server.socket()).connect().unwrap();
    drop(disk.session);
    // A front-end of the oldest kind: no protocol features, so no enable message and no acknowledgements.
    disk.session = Session::raw(server.socket()).unwrap();
    disk.session.set_owner().unwrap();
    let offered = disk.session.get_u64(req::GET_FEATURES).unwrap();
    let features =
        offered & (feature::VERSION_1 | feature::FLUSH | feature::EVENT_IDX) & !F_PROTOCOL_FEATURES;
    disk.session.set_features(features).unwrap();
    disk.session.set_mem_table(&disk.memory).unwrap();
    disk.session.set_up(&disk.queues[0].queue, 0).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
}

#[test]
fn f43_bit_8_says_that_no_descriptor_comes() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    // Call and err without a descriptor: the guest polls, which is legal.
    let mut disk = Disk::at(server.socket()).queues(2).connect().unwrap();
    for index in [0_u16, 1] {
        let payload = (u64::from(index) | NO_FD).to_le_bytes();
        disk.session.set_up(&disk.queues[usize::from(index)].queue, 0).unwrap();
        disk.session.set(req::SET_VRING_CALL, &payload, &[]).unwrap();
        disk.session.set(req::SET_VRING_ERR, &payload, &[]).unwrap();
        disk.session.enable(index, true).unwrap();
        let q = &mut disk.queues[usize::from(index)];
        q.polling = true;
        assert!(q.read(0, 8).unwrap() == filled(0, 8), "queue {index}");
    }
    drop(disk);
    // Kick without a descriptor means that the device polls; refusing is fine, a crash is not.
    for index in [0_u64, 1] {
        let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        let _ = session.try_set(req::SET_VRING_KICK, &(index | NO_FD).to_le_bytes(), &[]);
    }
    assert_serves(&mut server, "bit 8");
}

#[test]
fn f43_messages_with_the_wrong_number_of_descriptors() {
    let image = Image::filled(MIB);
    let mut server = polypath(&image);
    Session::negotiate(server.socket(), feature::ALL).unwrap();
    let spare = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&spare);
    for request in [req::SET_VRING_CALL, req::SET_VRING_KICK, req::SET_VRING_ERR] {
        for fds in [&[][..], &[fd, fd][..]] {
            let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
            let _ = session.try_set(request, &0_u64.to_le_bytes(), fds);
            assert!(server.is_alive(), "message {request} with {} descriptors", fds.len());
        }
        // A queue that does not exist.
        for index in [4_u64, 63, 64, 255] {
            let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
            let refused = session.try_set(request, &index.to_le_bytes(), &[fd]);
            assert!(!matches!(refused, Ok(0)), "message {request} for queue {index} was accepted");
        }
    }
    assert_serves(&mut server, "wrong descriptors");
}

#[test]
fn f44_a_guest_that_polls_is_served() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).connect().unwrap();
    {
        let queue = &disk.queues[0].queue;
        disk.session.set_vring_state(req::SET_VRING_NUM, 0, queue.size().into()).unwrap();
        disk.session.set_vring_state(req::SET_VRING_BASE, 0, 0).unwrap();
        disk.session.set_vring_addr(queue).unwrap();
        disk.session.set_vring_fd(req::SET_VRING_KICK, 0, queue.kick_fd()).unwrap();
        disk.session.enable(0, true).unwrap();
    }
    disk.q().polling = true;
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "without a call descriptor");

    // Work that is done but not yet taken: a call descriptor given now is signalled for it.
    disk.q().queue.want_calls(true);
    disk.q().submit(&Op::read(8, 8)).unwrap();
    polypath_vm_tests::server::wait_until("the answer", SOON, || {
        let queue = &disk.queues[0].queue;
        queue.used_index() != queue.next_used()
    })
    .unwrap();
    disk.session.set_vring_fd(req::SET_VRING_CALL, 0, disk.queues[0].queue.call_fd()).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(disk.queues[0].queue.call_fd());
    let called = polypath_vm_tests::front_end::wire::poll_in(fd, std::time::Instant::now() + SOON).unwrap();
    assert!(called, "no call for work that was waiting");
    disk.q().polling = false;
    assert!(disk.q().done().unwrap().data == filled(8, 8));
    for i in 0..50 {
        assert!(disk.q().read(i, 8).unwrap() == filled(i, 8), "with the call descriptor");
        if i % 10 == 9 {
            disk.queues[0].queue.replace_call().unwrap();
            disk.session.set_vring_fd(req::SET_VRING_CALL, 0, disk.queues[0].queue.call_fd()).unwrap();
        }
    }
}

#[test]
fn memory_in_several_regions_and_at_an_offset_of_its_file() {
    let image = Image::filled(MIB);
    let (_server, mut disk) = serve(&image);
    let end = disk.memory.end();
    // Two regions that touch each other in the guest but not here, the second one not at the start of its file.
    let first = disk.memory.add(Region::new(end, 1 << 16, 0).unwrap());
    let second = disk.memory.add(Region::new(end + (1 << 16), 1 << 16, 8192).unwrap());
    disk.session.set_mem_table(&disk.memory).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "ring addresses stay valid");
    let memory = disk.memory.clone();
    let seam = second.guest - 2048;
    let head = memory.alloc_with(&polypath_vm_tests::front_end::request::header(0, 16));
    let status = memory.alloc(1);
    let chain = polypath_vm_tests::front_end::Chain::new()
        .readable(head.addr, 16)
        .writable(seam, 4096)
        .writable(status.addr, 1);
    let sent = disk.q().queue.send(&chain).unwrap();
    assert_eq!(disk.q().queue.wait_head(sent, SOON).unwrap().len, 4097);
    assert_eq!(status.bytes(), [OK]);
    assert_eq!(memory.read_vec(seam, 2048), filled(16, 4), "before the seam");
    assert_eq!(memory.read_vec(second.guest, 2048), filled(20, 4), "behind the seam");
    assert_eq!(first.guest, end);
}
