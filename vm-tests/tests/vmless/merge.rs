//! Requests that arrive together and touch or overlap.

use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::{Cut, Disk, Framing, OK, Op};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, filled, serve, statuses};

fn write(sectors: std::ops::Range<u64>, byte: u8) -> (std::ops::Range<u64>, u8, Op) {
    let len = usize::try_from(sectors.end - sectors.start).unwrap() * 512;
    (sectors.clone(), byte, Op::write(sectors.start, vec![byte; len]))
}

#[test]
fn f04_overlapping_writes_are_done_one_after_the_other() {
    let image = Image::empty(MIB);
    let (_server, mut disk) = serve(&image);
    let cases = [
        vec![write(0..16, 0xAA), write(4..8, 0xBB)],
        vec![write(4..8, 0xBB), write(0..16, 0xAA)],
        vec![write(0..16, 0xAA), write(0..8, 0xBB)],
        vec![write(0..8, 0xBB), write(0..16, 0xAA)],
        vec![write(0..16, 0xAA), write(0..16, 0xBB)],
        vec![write(0..8, 0xAA), write(7..16, 0xBB)],
        vec![write(7..16, 0xBB), write(0..8, 0xAA)],
        vec![write(0..4, 0xAA), write(8..12, 0xBB), write(4..8, 0xCC)],
        vec![write(0..4, 0xAA), write(4..8, 0xBB), write(2..6, 0xCC), write(8..16, 0xDD)],
    ];
    for case in cases {
        for _ in 0..20 {
            disk.q().write(0, &[0; 16 * 512]).unwrap();
            let ops: Vec<_> = case.iter().map(|(_, _, op)| op.clone()).collect();
            assert_eq!(statuses(disk.q(), &ops), vec![OK; ops.len()]);
            let disk_bytes = disk.q().read(0, 16).unwrap();
            let what: Vec<_> = case.iter().map(|(range, byte, _)| (range, byte)).collect();
            for sector in 0..16_u64 {
                let bytes = &disk_bytes[sector as usize * 512..][..512];
                let may: Vec<u8> =
                    case.iter().filter(|(r, ..)| r.contains(&sector)).map(|&(_, b, _)| b).collect();
                let uniform = bytes.iter().all(|b| *b == bytes[0]);
                let right = if may.is_empty() { bytes[0] == 0 } else { may.contains(&bytes[0]) };
                assert!(uniform && right, "{what:?}: sector {sector} holds {:x?}", &bytes[..4]);
            }
            // Where the later request covers part of an earlier one, that part is of one piece: whole requests in some order.
            for (range, byte, _) in &case {
                let own: Vec<u64> = range
                    .clone()
                    .filter(|s| case.iter().filter(|(r, ..)| r.contains(s)).count() == 1)
                    .collect();
                for sector in own {
                    assert_eq!(disk_bytes[sector as usize * 512], *byte, "{what:?}: sector {sector}");
                }
            }
        }
    }
}

#[test]
fn f04_reads_and_writes_of_the_same_sectors_in_one_kick() {
    let image = Image::filled(MIB);
    let (_server, mut disk) = serve(&image);
    let mut rng = Rng::new(5);
    for _ in 0..100 {
        disk.q().write(0, &[1; 32 * 512]).unwrap();
        let mut ops = Vec::new();
        for _ in 0..12 {
            let (start, num) = (rng.below(24), 1 + rng.below(8));
            ops.push(if rng.percent(50) {
                Op::read(start, num as usize)
            } else {
                Op::write(start, vec![2; num as usize * 512])
            });
        }
        for (op, done) in ops.iter().zip(disk.q().run_all(&ops).unwrap()) {
            assert_eq!(done.status, OK, "{op:?}");
            for sector in done.data.chunks(512) {
                assert!(sector.iter().all(|b| *b == sector[0]), "a torn sector");
                assert!([1, 2].contains(&sector[0]), "{:x}", sector[0]);
            }
        }
    }
    image.assert_filled(32..image.sectors());
}

#[test]
fn f15_runs_of_more_pieces_than_one_call_takes() {
    let image = Image::empty(32 * MIB);
    let server = Server::polypath().path(&image.path).queue_size(1024).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(1024).memory_bytes(1 << 30).open().unwrap();
    // 128 adjacent requests of 126 pieces each, in indirect tables, in one kick.
    let (pieces, nr) = (126, 128_u64);
    let cut = Cut {
        out: std::iter::once(16).chain(vec![512; pieces]).collect(),
        into: vec![512; pieces],
        indirect: true,
        ..Cut::default()
    };
    let framing = Framing::Cut(cut);
    for write in [true, false] {
        let q = disk.q();
        for i in 0..nr {
            let sector = i * pieces as u64;
            let op = if write {
                Op::write(sector, filled(sector, pieces as u64))
            } else {
                Op::read(sector, pieces)
            };
            q.stage_framed(&op, &framing).unwrap();
        }
        q.kick();
        for (i, done) in q.drain().unwrap().into_iter().enumerate() {
            assert_eq!(done.status, OK, "request {i}, write: {write}");
            assert!(write || done.data == filled(i as u64 * pieces as u64, pieces as u64), "request {i}");
        }
    }
    image.assert_filled(0..64);
    assert_eq!(server.count_log("path failed"), 0);
}

#[test]
fn f15_adjacent_requests_that_pass_the_limit_of_one_call() {
    // The buffers are one page of guest memory over and over, so that 2 GiB of I/O need no 2 GiB of memory.
    let image = Image::empty(3 << 30);
    let server = Server::polypath().path(&image.path).queue_size(1024).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(1024).memory_bytes(64 * MIB).open().unwrap();
    let memory = disk.memory.clone();
    let data = memory.alloc(16 * MIB as usize);
    data.fill(0x77);
    let (len, nr) = (16 * MIB, 136_u64);
    let heads: Vec<_> = (0..nr)
        .map(|i| {
            let head = polypath_vm_tests::front_end::request::header(0, i * len / 512);
            (memory.alloc_with(&head), memory.alloc(1))
        })
        .collect();
    let queue = &mut disk.q().queue;
    for (head, status) in &heads {
        status.fill(0xEE);
        let chain = polypath_vm_tests::front_end::Chain::new()
            .readable(head.addr, 16)
            .writable(data.addr, len as u32)
            .writable(status.addr, 1);
        queue.stage(&chain).unwrap();
    }
    queue.kick();
    for _ in 0..nr {
        let used = queue.wait(std::time::Duration::from_secs(60)).unwrap();
        assert_eq!(u64::from(used.len), len + 1);
    }
    assert!(heads.iter().all(|(_, status)| status.bytes() == [OK]));
    assert!(data.bytes().iter().all(|&b| b == 0), "holes read as zeros");
    assert_eq!(server.count_log("path failed"), 0);
}
