//! Legal framings: VERSION_1 lets a driver cut a request into descriptors wherever it likes.

use polypath_vm_tests::front_end::request::{UNTOUCHED, header, kind};
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::{BlkQueue, Chain, Cut, Disk, Framing, IOERR, OK, Op, Segment, feature};
use polypath_vm_tests::server::{Program, Server};

use crate::common::{Image, MIB, SOON, filled, serve};

fn cut(out: &[usize], into: &[usize]) -> Cut {
    Cut { out: out.to_vec(), into: into.to_vec(), ..Cut::default() }
}

/// Writes, reads back and asks for the identity in this framing.
fn round(q: &mut BlkQueue, framing: &Framing, fill: u8) {
    let data: Vec<u8> = (0..4096_usize).map(|i| fill.wrapping_add((i % 251) as u8)).collect();
    let done = q.run_framed(&Op::write(8, data.clone()), framing).unwrap();
    assert_eq!((done.status, done.used_len), (OK, 1), "write in {framing:?}");
    let done = q.run_framed(&Op::read(8, 8), framing).unwrap();
    assert_eq!((done.status, done.used_len), (OK, 4097), "read in {framing:?}");
    assert!(done.data == data, "read in {framing:?}");
    let done = q.run_framed(&Op::GetId, framing).unwrap();
    assert_eq!((done.status, done.used_len), (OK, 21), "identity in {framing:?}");
    let done = q.run_framed(&Op::Flush, framing).unwrap();
    assert_eq!((done.status, done.used_len), (OK, 1), "flush in {framing:?}");
    let done = q.run_framed(&Op::WriteZeroes(vec![Segment::new(64, 8)]), framing).unwrap();
    assert_eq!((done.status, done.used_len), (OK, 1), "write-zeroes in {framing:?}");
}

fn odd_cuts() -> Vec<Cut> {
    let mut cuts = vec![
        // Header and data in one descriptor; data and status in one.
        cut(&[], &[]),
        cut(&[16], &[4096]),
        // The header byte by byte, or cut in the middle of a field.
        cut(&[1; 16], &[4096]),
        cut(&[5, 7, 4], &[1; 20]),
        cut(&[8, 8, 2048], &[100, 1948, 2048]),
        // Pieces that straddle the header's end and are no whole sectors.
        cut(&[20, 1000, 1], &[1000, 1, 511, 513]),
        cut(&[15, 2], &[4095]),
        cut(&[17, 511, 512, 513], &[3, 5, 7, 11, 13]),
    ];
    for i in 0..cuts.len() {
        for misalign in [1, 3, 512] {
            cuts.push(Cut { misalign, ..cuts[i].clone() });
        }
        cuts.push(Cut { indirect: true, ..cuts[i].clone() });
        cuts.push(Cut { indirect: true, misalign: 7, ..cuts[i].clone() });
    }
    cuts
}

#[test]
fn any_cut_of_header_data_and_status_is_understood() {
    let image = Image::filled(MIB);
    let (server, mut disk) = serve(&image);
    for (i, cut) in odd_cuts().into_iter().enumerate() {
        // A status that shares its descriptor with data is legal, but not every back-end takes it.
        round(disk.q(), &Framing::Cut(cut), u8::try_from(i).unwrap());
    }
    image.assert_filled(0..8);
    image.assert_filled(16..64);
    assert_eq!(server.count_log("path failed"), 0);
}

#[test]
fn f25_a_header_in_the_queue_and_the_rest_in_a_table() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    for direct_pieces in [1, 2] {
        let cut = Cut { indirect: true, direct_pieces, ..cut(&[16, 2048], &[2048, 2048]) };
        round(disk.q(), &Framing::Cut(cut), 3);
    }
}

#[test]
fn random_framings_give_the_right_bytes() {
    let image = Image::filled(MIB);
    let (_server, mut disk) = serve(&image);
    let mut rng = Rng::new(11);
    for round in 0..300_u64 {
        let sectors = 1 + rng.below(16);
        let sector = 256 + rng.below(256);
        let mut random = |total: u64| {
            let mut cuts = Vec::new();
            let mut left = total;
            while left > 0 && cuts.len() < 40 {
                let len = 1 + rng.below(left.min(900));
                cuts.push(usize::try_from(len).unwrap());
                left -= len;
            }
            cuts
        };
        let cut = Cut {
            out: random(16 + sectors * 512),
            into: random(sectors * 512 + 1),
            misalign: usize::try_from(round % 5).unwrap(),
            indirect: round % 2 == 0,
            direct_pieces: 0,
        };
        let framing = Framing::Cut(cut);
        let data: Vec<u8> = (0..sectors * 512).map(|i| (i * 7 + round) as u8).collect();
        let done = disk.q().run_framed(&Op::write(sector, data.clone()), &framing).unwrap();
        assert_eq!(done.status, OK, "{framing:?}");
        let done = disk.q().run_framed(&Op::read(sector, data.len() / 512), &framing).unwrap();
        assert_eq!((done.status, done.used_len as usize), (OK, data.len() + 1), "{framing:?}");
        assert!(done.data == data, "{framing:?}");
    }
    image.assert_filled(0..256);
}

#[test]
fn f21_status_is_one_byte() {
    let image = Image::filled(MIB);
    let (_server, mut disk) = serve(&image);
    let memory = disk.memory.clone();
    let queue = &mut disk.q().queue;
    let (head, data) = (memory.alloc_with(&header(kind::IN, 0)), memory.alloc(1024));

    let status = memory.alloc(16);
    status.fill(UNTOUCHED);
    let chain = Chain::new().readable(head.addr, 16).writable(data.addr, 512).writable(status.addr, 1);
    let sent = queue.send(&chain).unwrap();
    assert_eq!(queue.wait_head(sent, SOON).unwrap().len, 513);
    assert_eq!(status.bytes()[0], OK);
    assert!(status.bytes()[1..].iter().all(|&b| b == UNTOUCHED), "{:x?}", status.bytes());

    // The very last byte of guest memory.
    let last = memory.end() - 1;
    memory.fill(last - 3, 4, UNTOUCHED);
    let chain = Chain::new().readable(head.addr, 16).writable(data.addr, 512).writable(last, 1);
    let sent = queue.send(&chain).unwrap();
    assert_eq!(queue.wait_head(sent, SOON).unwrap().len, 513);
    assert_eq!(memory.read_vec(last - 3, 4), [UNTOUCHED, UNTOUCHED, UNTOUCHED, OK]);

    // Data and status in one descriptor.
    data.fill(UNTOUCHED);
    let chain = Chain::new().readable(head.addr, 16).writable(data.addr, 513);
    let sent = queue.send(&chain).unwrap();
    assert_eq!(queue.wait_head(sent, SOON).unwrap().len, 513);
    let bytes = data.bytes();
    assert!(bytes[..512] == filled(0, 1) && bytes[512] == OK);
    assert!(bytes[513..].iter().all(|&b| b == UNTOUCHED));
}

#[test]
fn f21_a_status_descriptor_of_four_bytes_gets_its_last_byte() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let memory = disk.memory.clone();
    let queue = &mut disk.q().queue;
    let head = memory.alloc_with(&header(kind::FLUSH, 0));
    let status = memory.alloc(8);
    status.fill(UNTOUCHED);
    let sent = queue.send(&Chain::new().readable(head.addr, 16).writable(status.addr, 4)).unwrap();
    let used = queue.wait_head(sent, SOON).unwrap();
    assert!((1..=4).contains(&used.len), "{used:?}");
    let bytes = status.bytes();
    assert_eq!(bytes[3], OK);
    assert!(bytes[..3].iter().chain(&bytes[4..]).all(|&b| b == UNTOUCHED), "{bytes:x?}");
}

#[test]
fn f22_used_lengths_are_right() {
    let image = Image::filled(MIB);
    let n = image.sectors();
    let (server, mut disk) = serve(&image);
    let used = |q: &mut BlkQueue, op: &Op| {
        let done = q.run(op).unwrap();
        (done.status, done.used_len)
    };
    assert_eq!(used(disk.q(), &Op::read(0, 8)), (OK, 4097));
    assert_eq!(used(disk.q(), &Op::write(0, filled(0, 8))), (OK, 1));
    assert_eq!(used(disk.q(), &Op::GetId), (OK, 21));
    assert_eq!(used(disk.q(), &Op::Flush), (OK, 1));
    let (status, len) = used(disk.q(), &Op::read(n, 8));
    assert_eq!(status, IOERR);
    if server.program() == Program::Polypath {
        assert!((1..=4097).contains(&len), "{len}");
    }
    // Members of a run that may be merged.
    let ops: Vec<_> = (0..32).map(|i| Op::read(i * 4, 4)).collect();
    for (i, done) in disk.q().run_all(&ops).unwrap().iter().enumerate() {
        assert_eq!((done.status, done.used_len), (OK, 2049), "read {i}");
        assert!(done.data == filled(i as u64 * 4, 4), "read {i}");
    }
    let ops: Vec<_> = (0..32).map(|i| Op::write(i * 4, filled(i * 4, 4))).collect();
    for done in disk.q().run_all(&ops).unwrap() {
        assert_eq!((done.status, done.used_len), (OK, 1));
    }
    image.assert_filled(0..n);
}

#[test]
fn f60_a_request_of_seg_max_pieces_works() {
    for queue_size in [4_u16, 16, 128, 256, 1024] {
        let image = Image::empty(8 * MIB);
        let server = Server::polypath().path(&image.path).queue_size(queue_size.into()).start().unwrap();
        let mut disk = Disk::at(server.socket()).queue_size(queue_size).open().unwrap();
        assert!(disk.has(feature::SEG_MAX));
        let seg_max = disk.config.seg_max;
        assert_eq!(seg_max, u32::from(queue_size) - 2, "queue size {queue_size}");
        for indirect in [false, true] {
            for pieces in [seg_max as usize, seg_max as usize + 1] {
                let cut = Cut {
                    out: std::iter::once(16).chain(vec![512; pieces]).collect(),
                    into: vec![512; pieces],
                    indirect,
                    ..Cut::default()
                };
                let data: Vec<u8> = (0..pieces).flat_map(|i| vec![i as u8; 512]).collect();
                let q = disk.q();
                let framing = Framing::Cut(cut);
                let what = format!("queue size {queue_size}, {pieces} pieces, indirect: {indirect}");
                if q.stage_framed(&Op::write(0, data.clone()), &framing).is_none() {
                    assert!(!indirect && pieces > seg_max as usize, "{what}");
                    continue;
                }
                q.kick();
                let write = q.done().unwrap();
                let read = q.run_framed(&Op::read(0, pieces), &framing).unwrap();
                if pieces == seg_max as usize || write.status == OK {
                    assert_eq!((write.status, read.status), (OK, OK), "{what}");
                    assert!(read.data == data, "{what}");
                } else {
                    assert_eq!((write.status, read.status), (IOERR, IOERR), "{what}");
                }
            }
        }
    }
}

#[test]
fn f53_the_identity_fits_any_buffer() {
    let image = Image::empty(MIB);
    let server = Server::polypath().path(&image.path).serial("0123456789abcdefghij").start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    assert_eq!(disk.q().get_id().unwrap(), "0123456789abcdefghij");
    let id = |len| Op::Other { kind: kind::GET_ID, sector: 0, out: vec![], in_len: len };
    let two_pieces = disk.q().run_framed(&Op::GetId, &Framing::Cut(cut(&[], &[10, 10]))).unwrap();
    assert_eq!((two_pieces.status, two_pieces.data.as_slice()), (OK, &b"0123456789abcdefghij"[..]));
    assert_eq!(two_pieces.used_len, 21);
    for len in [21, 512] {
        let done = disk.q().run(&id(len)).unwrap();
        assert_eq!(done.status, OK, "buffer of {len}");
        assert_eq!(&done.data[..20], b"0123456789abcdefghij");
    }
    // Too small: an error or the part that fits, but nothing beside it (the harness looks at that).
    for len in [0, 1, 19] {
        let done = disk.q().run(&id(len)).unwrap();
        if done.status == OK {
            assert_eq!(&done.data[..], &b"0123456789abcdefghij"[..len]);
        }
    }
}
