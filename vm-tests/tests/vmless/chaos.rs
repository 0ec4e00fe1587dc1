//! Rings filled with noise, and indices that run wild or wrap.

use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use polypath_vm_tests::front_end::queue::{INDIRECT, NEXT, WRITE, eventfd};
use polypath_vm_tests::front_end::request::{header, kind};
use polypath_vm_tests::front_end::verify::{Plan, Rng, Verifier};
use polypath_vm_tests::front_end::wire::{poll_in, req};
use polypath_vm_tests::front_end::{Buf, Desc, Disk, Op};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled};

const QUEUE_SIZE: u16 = 32;
/// Sectors that the noise may write.
const PLAYGROUND: std::ops::Range<u64> = 1024..2048;

/// A descriptor of any kind, with a leaning towards what nearly makes sense.
fn noise(rng: &mut Rng, heads: &[Buf], data: &[Buf], tables: &[Buf], outside: u64) -> Desc {
    let pick = |rng: &mut Rng, bufs: &[Buf]| bufs[rng.below(bufs.len() as u64) as usize].addr;
    let addr = match rng.below(20) {
        0 => outside,
        1 => outside - 8,
        2 => rng.next_u64(),
        3..=8 => pick(rng, heads),
        9 | 10 => pick(rng, tables),
        _ => pick(rng, data) + if rng.percent(20) { rng.below(512) } else { 0 },
    };
    let len = match rng.below(20) {
        0 => 0,
        1 => u32::MAX,
        2 => rng.next_u64() as u32,
        3..=8 => 16,
        9..=11 => 1,
        12 => 513,
        13 | 14 => 48,
        _ => 512 * (1 + rng.below(8) as u32),
    };
    let mut flags = 0;
    flags |= if rng.percent(60) { NEXT } else { 0 };
    flags |= if rng.percent(50) { WRITE } else { 0 };
    flags |= if rng.percent(8) { INDIRECT } else { 0 };
    flags |= if rng.percent(2) { rng.next_u64() as u16 } else { 0 };
    let next = if rng.percent(95) { rng.below(QUEUE_SIZE.into()) } else { rng.below(1 << 16) } as u16;
    Desc { addr, len, flags, next }
}

#[test]
fn f20_f25_noise_in_the_table_comes_back_head_by_head() {
    let image = Image::filled(2 * MIB);
    let mut server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(QUEUE_SIZE).open().unwrap();
    let memory = disk.memory.clone();
    let [heads, data, tables] = [(16, 16), (16, 8192), (8, 1024)]
        .map(|(nr, len)| (0..nr).map(|_| memory.alloc(len)).collect::<Vec<_>>());
    let threads = server.stats().threads;
    let mut rng = Rng::new(2025);
    for round in 0..400 {
        for (i, head) in (0_u64..).zip(&heads) {
            let sector = PLAYGROUND.start + rng.below(PLAYGROUND.end - PLAYGROUND.start - 64);
            let kind = [kind::IN, kind::OUT, kind::IN, kind::FLUSH, kind::GET_ID, 77][(i % 6) as usize];
            head.put(&header(kind, sector));
        }
        let desc = |rng: &mut Rng| noise(rng, &heads, &data, &tables, memory.end());
        for table in &tables {
            let entries: Vec<u8> = (0..64).flat_map(|_| desc(&mut rng).bytes()).collect();
            table.put(&entries);
        }
        let queue = &mut disk.q().queue;
        for at in 0..QUEUE_SIZE {
            queue.put_desc(at, desc(&mut rng));
        }
        let mut sent = 0;
        for head in 0..QUEUE_SIZE {
            if rng.percent(50) {
                queue.stage_head(head, Vec::new());
                sent += 1;
            }
        }
        queue.kick();
        for _ in 0..sent {
            queue.wait(SOON).unwrap_or_else(|e| panic!("round {round}: {e:#}\n{}", server.stderr()));
        }
        assert!(server.is_alive(), "round {round}");
    }
    assert_eq!(server.stats().threads, threads);
    assert!(server.stderr().len() < 100_000, "a guest can fill the log");
    image.assert_filled(0..PLAYGROUND.start);
    image.assert_filled(PLAYGROUND.end..image.sectors());
    assert_eq!(image.file().metadata().unwrap().len(), image.bytes);
    drop(disk);
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
}

#[test]
fn wild_heads_and_indices_harm_no_other_queue() {
    let image = Image::filled(MIB);
    let mut server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    for head in [32_u16, 33, u16::MAX] {
        let mut disk = Disk::at(server.socket()).queues(2).queue_size(32).open().unwrap();
        disk.q().queue.stage_head(head, Vec::new());
        disk.q().queue.kick();
        assert!(disk.queues[1].read(0, 8).unwrap() == filled(0, 8), "head {head}");
        // Whether it comes back or the queue stops is the device's choice, as the driver is broken.
        let _ = disk.q().queue.wait(Duration::from_millis(50));
        assert!(server.is_alive(), "head {head}");
    }
    for jump in [33_u16, 1000, 1 << 15, u16::MAX] {
        let mut disk = Disk::at(server.socket()).queues(2).queue_size(32).open().unwrap();
        let error = eventfd().unwrap();
        disk.session.set_vring_fd(req::SET_VRING_ERR, 0, &error).unwrap();
        disk.q().queue.put_avail_index(jump);
        disk.q().queue.kick_always();
        assert!(poll_in(error.as_raw_fd(), Instant::now() + SOON).unwrap(), "index {jump}: nobody is told");
        assert!(disk.queues[1].read(0, 8).unwrap() == filled(0, 8), "index {jump}");
        std::thread::sleep(Duration::from_millis(50));
        let cpu = server.stats().cpu;
        std::thread::sleep(Duration::from_millis(200));
        let cpu = server.stats().cpu.checked_sub(cpu).unwrap();
        assert!(cpu < Duration::from_millis(100), "index {jump}: {cpu:?} of CPU in 200 ms");
        assert!(server.is_alive(), "index {jump}");
        assert!(disk.queues[1].read(8, 8).unwrap() == filled(8, 8), "index {jump}");
        // A reset makes the queue good again.
        disk.session.stop(0).unwrap();
        disk.q().reset();
        disk.session.start(&disk.queues[0].queue, 0).unwrap();
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "after index {jump}");
    }
    assert!(server.stderr().len() < 20_000, "a guest can fill the log");
}

#[test]
fn indices_wrap_around() {
    let image = Image::empty(2 * MIB);
    let server = Server::any().path(&image.path).start().unwrap();
    for event_idx in [true, false] {
        let without = if event_idx { 0 } else { polypath_vm_tests::front_end::feature::EVENT_IDX };
        let mut disk = Disk::at(server.socket()).without(without).queue_size(64).connect().unwrap();
        let base = u16::MAX - 200;
        disk.q().queue.reset_to(base);
        disk.session.start(&disk.queues[0].queue, base).unwrap();
        disk.q().write_zeroes(0, 4096, 0).unwrap();
        let mut verifier = Verifier::new(0..4096, 16);
        let plan = Plan { requests: 1000, depth: 20, ..Plan::default() };
        verifier.run(disk.q(), &plan).unwrap_or_else(|e| panic!("event_idx {event_idx}: {e:#}"));
        assert!(disk.q().queue.next_avail() < base);
        assert_eq!(disk.session.stop(0).unwrap(), disk.q().queue.next_avail());
    }
}

#[test]
fn the_same_buffer_and_the_same_sectors_in_all_requests() {
    let image = Image::filled(MIB);
    let server = Server::any().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let ops: Vec<_> =
        (0..40).map(|i| if i % 4 == 0 { Op::write(64, filled(64, 8)) } else { Op::read(64, 8) }).collect();
    for _ in 0..50 {
        for done in disk.q().run_all(&ops).unwrap() {
            assert!(done.status == 0 && (done.data.is_empty() || done.data == filled(64, 8)));
        }
    }
}
