//! Chains that break the rules: each comes back, and the good request behind it is served.

use polypath_vm_tests::front_end::chain::link;
use polypath_vm_tests::front_end::queue::{INDIRECT, NEXT, WRITE};
use polypath_vm_tests::front_end::request::{UNTOUCHED, header, kind};
use polypath_vm_tests::front_end::{Buf, Chain, Desc, Disk, IOERR, Op, Queue};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled};

/// Buffers for chains made by hand.
struct Parts {
    head: Buf,
    data: Buf,
    status: Buf,
    table: Buf,
    outside: u64,
}

impl Parts {
    fn new(disk: &Disk, request: u32, sector: u64) -> Self {
        let memory = &disk.memory;
        let parts = Self {
            head: memory.alloc_with(&header(request, sector)),
            data: memory.alloc(4096),
            status: memory.alloc(4),
            table: memory.alloc(1100 * 16),
            outside: memory.end() + (1 << 20),
        };
        parts.refresh();
        parts
    }

    fn refresh(&self) {
        self.data.fill(UNTOUCHED);
        self.status.fill(UNTOUCHED);
    }

    /// A good read or write of 512 bytes, as entries for a table.
    fn good(&self, data_flags: u16) -> [Desc; 3] {
        [
            Desc { addr: self.head.addr, len: 16, flags: 0, next: 0 },
            Desc { addr: self.data.addr, len: 512, flags: data_flags, next: 0 },
            Desc { addr: self.status.addr, len: 1, flags: WRITE, next: 0 },
        ]
    }
}

/// Puts `descs` at consecutive free places, with `next` counted from the first of them, and sends the first as head.
fn send_table(queue: &mut Queue, descs: &[Desc]) -> u16 {
    let places: Vec<u16> = descs.iter().map(|_| queue.take_desc().unwrap()).collect();
    for (place, desc) in places.iter().zip(descs) {
        let mut desc = *desc;
        if desc.flags & NEXT != 0
            && let Some(&next) = places.get(usize::from(desc.next))
        {
            desc.next = next;
        }
        queue.put_desc(*place, desc);
    }
    let head = places[0];
    queue.stage_head(head, places);
    queue.kick();
    head
}

fn open(queue_size: u16) -> (Image, Server, Disk) {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let disk = Disk::at(server.socket()).queue_size(queue_size).open().unwrap();
    (image, server, disk)
}

fn assert_serves(disk: &mut Disk, what: &str) {
    let read = disk.q().read(0, 8).unwrap_or_else(|e| panic!("after {what}: {e:#}"));
    assert!(read == filled(0, 8), "after {what}");
}

/// The chain comes back; with a status byte to be written it says IOERR and the length stays within what is writable.
fn assert_returned(
    disk: &mut Disk,
    parts: &Parts,
    head: u16,
    writable: u32,
    status_at: Option<u64>,
    what: &str,
) {
    let used = disk.q().queue.wait_head(head, SOON).unwrap_or_else(|e| panic!("{what}: {e:#}"));
    assert!(used.len <= writable, "{what}: {used:?} of {writable} writable bytes");
    match status_at {
        Some(at) => {
            assert_eq!(disk.memory.read_vec(at, 1), [IOERR], "{what}: status");
            assert!(used.len >= 1, "{what}: {used:?}");
        }
        None => {
            assert_eq!(used.len, 0, "{what}: nothing could be written");
            assert!(parts.status.bytes().iter().all(|&b| b == UNTOUCHED), "{what}: status was written");
        }
    }
    assert_serves(disk, what);
}

#[test]
fn f20_broken_chains_come_back() {
    let (image, mut server, mut disk) = open(128);
    let p = Parts::new(&disk, kind::IN, 0);
    let (h, d, s, out) = (p.head.addr, p.data.addr, p.status.addr, p.outside);
    let threads = server.stats().threads;
    let chain = Chain::new;
    // (what, chain, writable bytes, where the status must be)
    let cases: Vec<(&str, Chain, u32, Option<u64>)> = vec![
        ("only a header", chain().readable(h, 16), 0, None),
        ("a header of 15 bytes", chain().readable(h, 15).writable(d, 512).writable(s, 1), 513, Some(s)),
        ("a header of 0 bytes", chain().readable(h, 0).writable(s, 1), 1, Some(s)),
        ("no header at all", chain().writable(d, 512).writable(s, 1), 513, Some(s)),
        ("only a status", chain().writable(s, 1), 1, Some(s)),
        ("header outside memory", chain().readable(out, 16).writable(s, 1), 1, Some(s)),
        ("header across the end", chain().readable(disk.memory.end() - 8, 16).writable(s, 1), 1, Some(s)),
        ("data outside memory", chain().readable(h, 16).writable(out, 512).writable(s, 1), 513, Some(s)),
        (
            "data at the end of numbers",
            chain().readable(h, 16).writable(u64::MAX - 100, 512).writable(s, 1),
            513,
            Some(s),
        ),
        (
            "data of nearly 4 GiB",
            chain().readable(h, 16).writable(d, u32::MAX).writable(s, 1),
            u32::MAX,
            Some(s),
        ),
        ("status outside memory", chain().readable(h, 16).writable(d, 512).writable(out, 1), 513, None),
        ("only unreadable memory", chain().readable(out, 16), 0, None),
    ];
    for round in 0..50 {
        for (what, chain, writable, status) in &cases {
            if status.is_none() && *writable > 0 && round > 0 {
                continue;
            }
            p.refresh();
            let head = disk.q().queue.send(chain).unwrap();
            if status.is_none() && *writable > 0 {
                // The last writable byte cannot be reached: only the return is asked for.
                disk.q().queue.wait_head(head, SOON).unwrap_or_else(|e| panic!("{what}: {e:#}"));
                assert_serves(&mut disk, what);
                continue;
            }
            assert_returned(&mut disk, &p, head, *writable, *status, what);
        }
    }
    assert!(server.is_alive());
    assert_eq!(server.stats().threads, threads, "{}", server.stderr());
    image.assert_filled(0..image.sectors());
}

#[test]
fn f20_a_write_without_status_is_returned_and_nothing_is_written() {
    let (image, _server, mut disk) = open(128);
    let p = Parts::new(&disk, kind::OUT, 8);
    for chain in [
        Chain::new().readable(p.head.addr, 16).readable(p.data.addr, 512),
        Chain::new().readable(p.head.addr, 16).readable(p.data.addr, 512).writable(p.status.addr, 0),
    ] {
        p.refresh();
        let head = disk.q().queue.send(&chain).unwrap();
        assert_returned(&mut disk, &p, head, 0, None, "a write without status");
    }
    image.assert_filled(0..image.sectors());
}

#[test]
fn f20_heads_and_links_outside_the_table() {
    let (image, mut server, mut disk) = open(16);
    let p = Parts::new(&disk, kind::IN, 0);
    let good = p.good(WRITE);
    for next in [16_u16, 17, 1000, u16::MAX] {
        p.refresh();
        let mut descs = [good[0], good[1]];
        (descs[0].flags, descs[0].next) = (NEXT, 1);
        (descs[1].flags, descs[1].next) = (WRITE | NEXT, next);
        let head = send_table(&mut disk.q().queue, &descs);
        let used = disk.q().queue.wait_head(head, SOON).unwrap_or_else(|e| panic!("next {next}: {e:#}"));
        assert!(used.len <= 512, "{used:?}");
        assert_serves(&mut disk, &format!("next {next}"));
    }
    // A loop through the queue's own table.
    let mut descs = good;
    for (i, desc) in descs.iter_mut().enumerate() {
        desc.flags |= NEXT;
        desc.next = [1, 2, 1][i];
    }
    let head = send_table(&mut disk.q().queue, &descs);
    disk.q().queue.wait_head(head, SOON).expect("a loop comes back");
    assert_serves(&mut disk, "a loop");
    assert!(server.is_alive());
    image.assert_filled(0..image.sectors());
}

#[test]
fn f20_ten_thousand_bad_chains_cost_nothing() {
    let (_image, mut server, mut disk) = open(128);
    let p = Parts::new(&disk, kind::IN, 0);
    let chain = Chain::new().readable(p.head.addr, 7).writable(p.status.addr, 1);
    let run = |disk: &mut Disk, rounds: usize| {
        for _ in 0..rounds {
            let queue = &mut disk.q().queue;
            let heads: Vec<u16> = (0..50).map(|_| queue.stage(&chain).unwrap()).collect();
            queue.kick();
            for _ in heads {
                queue.wait(SOON).unwrap();
            }
        }
    };
    run(&mut disk, 10);
    let before = (server.stats().threads, server.stats().fds, server.stats().mappings, server.stderr().len());
    run(&mut disk, 200);
    let after = server.stats();
    assert_eq!((after.threads, after.fds), (before.0, before.1));
    assert!(after.mappings <= before.2 + 4, "{} mappings, {} before", after.mappings, before.2);
    let logged = server.stderr().len() - before.3;
    assert!(logged < 10_000, "a guest can fill the log: {logged} bytes");
    assert_serves(&mut disk, "10000 bad chains");
    assert!(server.is_alive());
}

#[test]
fn f24_directions_are_checked() {
    let (image, _server, mut disk) = open(128);
    let read = Parts::new(&disk, kind::IN, 0);
    let write = Parts::new(&disk, kind::OUT, 8);
    let chain = Chain::new;
    let (h, d, s) = (read.head.addr, read.data.addr, read.status.addr);
    let (wh, wd, ws) = (write.head.addr, write.data.addr, write.status.addr);
    // (what, parts, chain, writable bytes, where the status must be)
    let cases = [
        ("status not writable", &read, chain().readable(h, 16).readable(s, 1), 0, None),
        ("read into read-only data", &read, chain().readable(h, 16).readable(d, 512).writable(s, 1), 1, None),
        (
            "write from write-only data",
            &write,
            chain().readable(wh, 16).writable(wd, 512).writable(ws, 1),
            513,
            Some(ws),
        ),
        (
            "readable behind writable",
            &read,
            chain().readable(h, 16).writable(d, 512).readable(wd, 512).writable(s, 1),
            513,
            Some(s),
        ),
        ("header writable", &read, chain().writable(h, 16).writable(d, 512).writable(s, 1), 529, Some(s)),
    ];
    for (what, p, chain, writable, status) in cases {
        p.refresh();
        let head = disk.q().queue.send(&chain).unwrap();
        if what == "read into read-only data" {
            // A read of nothing (what is behind the header is no place for data): either answer will do, if nothing is written.
            let used = disk.q().queue.wait_head(head, SOON).unwrap();
            assert!(used.len <= 1, "{used:?}");
            assert!(read.data.bytes().iter().all(|&b| b == UNTOUCHED), "a read-only buffer was written");
            assert_serves(&mut disk, what);
            continue;
        }
        assert_returned(&mut disk, p, head, writable, status, what);
    }
    assert_eq!(read.head.bytes(), header(kind::IN, 0), "the header was written");
    image.assert_filled(0..image.sectors());
}

#[test]
fn f25_illegal_indirect_tables_come_back() {
    let (image, mut server, mut disk) = open(16);
    let p = Parts::new(&disk, kind::IN, 0);
    let good = link(&p.good(WRITE));
    let table = |entries: &[Desc]| {
        let bytes: Vec<u8> = entries.iter().flat_map(Desc::bytes).collect();
        p.table.put(&bytes);
    };
    let point = |addr: u64, len: u32, flags: u16| Desc { addr, len, flags, next: 1 };
    let at = p.table.addr;
    let mut nested = good.clone();
    nested[1] = Desc { addr: at + 8192, len: 48, flags: INDIRECT | NEXT, next: 2 };
    let mut looped = good.clone();
    looped[2] = Desc { flags: WRITE | NEXT, next: 0, ..looped[2] };
    let mut beyond = good.clone();
    beyond[1].next = 3;
    let mut far = good.clone();
    far[1].next = u16::MAX;
    let long: Vec<Desc> = {
        let data = Desc { addr: p.data.addr, len: 1, flags: WRITE, next: 0 };
        let mut all = vec![good[0]];
        all.extend(vec![data; 1022]);
        all.push(good[2]);
        link(&all)
    };
    let cases: Vec<(&str, Vec<Desc>, Desc)> = vec![
        ("length 0", good.clone(), point(at, 0, INDIRECT)),
        ("length 47", good.clone(), point(at, 47, INDIRECT)),
        ("length 8", good.clone(), point(at, 8, INDIRECT)),
        ("a table in a table", nested, point(at, 48, INDIRECT)),
        ("a loop in the table", looped, point(at, 48, INDIRECT)),
        ("next just past the table", beyond, point(at, 48, INDIRECT)),
        ("next far past the table", far, point(at, 48, INDIRECT)),
        ("a table outside memory", good.clone(), point(p.outside, 48, INDIRECT)),
        ("a table across the end", good.clone(), point(disk.memory.end() - 32, 48, INDIRECT)),
        ("a table off by one address", good.clone(), point(u64::MAX - 15, 48, INDIRECT)),
        ("INDIRECT and NEXT", good.clone(), point(at, 48, INDIRECT | NEXT)),
        ("1024 entries in a queue of 16", long, point(at, 1024 * 16, INDIRECT)),
        ("a table of 4 GiB", good.clone(), point(at, !15, INDIRECT)),
    ];
    for (what, entries, pointer) in cases {
        p.refresh();
        table(&entries);
        let mut descs = vec![pointer];
        if pointer.flags & NEXT != 0 {
            descs.push(p.good(WRITE)[2]);
        }
        let head = send_table(&mut disk.q().queue, &descs);
        disk.q().queue.wait_head(head, SOON).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        assert_serves(&mut disk, what);
        assert!(server.is_alive(), "{what}");
    }
    image.assert_filled(0..image.sectors());
}

#[test]
fn f25_legal_indirect_tables_are_served() {
    let (_image, _server, mut disk) = open(16);
    let q = disk.q();
    // As many entries as the queue has, and one more (which a driver may not, but Linux did).
    for pieces in [14, 15] {
        let cut = polypath_vm_tests::front_end::Cut {
            into: vec![512; pieces],
            indirect: true,
            ..Default::default()
        };
        let done =
            q.run_framed(&Op::read(0, pieces), &polypath_vm_tests::front_end::Framing::Cut(cut)).unwrap();
        assert!(pieces == 15 || done.status == 0, "{pieces} pieces: status {}", done.status);
        if done.status == 0 {
            assert!(done.data == filled(0, pieces as u64));
        }
    }
}
