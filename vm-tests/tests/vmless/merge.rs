//! Requests that arrive together and touch or overlap.

use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::request::UNMAP;
use polypath_vm_tests::front_end::verify::Rng;
use polypath_vm_tests::front_end::{Cut, Disk, Framing, IOERR, OK, Op, Segment, UNSUPP};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled, need, serve, statuses};

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
        let used = queue.wait(Duration::from_secs(60)).unwrap();
        assert_eq!(u64::from(used.len), len + 1);
    }
    assert!(heads.iter().all(|(_, status)| status.bytes() == [OK]));
    assert!(data.bytes().iter().all(|&b| b == 0), "holes read as zeros");
    assert_eq!(server.count_log("path failed"), 0);
}

/// First sectors of reads of 4 KiB each, four streams by turns.
fn four_streams() -> Vec<u64> {
    (0..8).flat_map(|i| (0..4).map(move |stream| stream * 512 + i * 8)).collect()
}

#[test]
fn adjacent_requests_of_one_kick_become_one_io_each_stream_for_itself() {
    need!(faulty);
    let image = Image::filled(MIB);
    for (merge_max, nr_expected) in [("512", 4), ("16", 8), ("0", 32)] {
        let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
        let server = Server::polypath().path(fs.path("a")).arg("--merge-max").arg(merge_max).start().unwrap();
        let mut disk = Disk::at(server.socket()).queue_size(256).open().unwrap();
        let before = fs.counts("a").reads;
        let ops: Vec<_> = four_streams().into_iter().map(|sector| Op::read(sector, 8)).collect();
        for (sector, done) in four_streams().into_iter().zip(disk.q().run_all(&ops).unwrap()) {
            assert!(done.status == OK && done.data == filled(sector, 8), "sector {sector}");
        }
        // A probe may have come in between.
        let nr = fs.counts("a").reads - before;
        assert!((nr_expected..=nr_expected + 1).contains(&nr), "--merge-max {merge_max}: {nr} reads");
    }
}

#[test]
fn what_waits_for_a_full_path_merges() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let server = Server::polypath().path(fs.path("a")).arg("--path-depth").arg("1").start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(256).open().unwrap();
    fs.rule("a", Rule::hold().reads());
    disk.q().stage(&Op::read(1024, 8)).unwrap();
    disk.q().kick();
    fs.wait_held("a", 1, SOON).unwrap();
    // One kick each, in an order that nobody would choose.
    for i in [3, 0, 7, 5, 1, 6, 2, 4] {
        disk.q().stage(&Op::read(i * 8, 8)).unwrap();
        disk.q().kick();
    }
    // Time to take them all in.
    std::thread::sleep(Duration::from_millis(50));
    let before = fs.counts("a").reads;
    fs.clear("a");
    fs.release("a");
    let done = disk.q().drain().unwrap();
    assert!(done.len() == 9 && done.iter().all(|done| done.status == OK));
    let nr = fs.counts("a").reads - before;
    assert!((1..=2).contains(&nr), "{nr} reads");
}

#[test]
fn a_flush_keeps_what_comes_before_and_after_it_apart() {
    need!(faulty);
    let image = Image::empty(MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let server = Server::polypath().path(fs.path("a")).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(64).open().unwrap();
    let before = fs.counts("a");
    let write = |i: u64| Op::write(i * 8, filled(i * 8, 8));
    let ops = [write(0), write(1), Op::Flush, write(2), write(3)];
    assert_eq!(statuses(disk.q(), &ops), [OK; 5]);
    assert_eq!(fs.counts("a").writes - before.writes, 2);
    image.assert_filled(0..32);
}

#[test]
fn f09_an_error_in_a_merged_write_is_that_members_alone() {
    need!(faulty);
    let image = Image::empty(MIB);
    for errno in [libc::ENODATA, libc::EREMOTEIO, libc::ENOSPC, libc::EINVAL] {
        let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
        let server = Server::polypath().paths(fs.paths(&["a", "b"])).start().unwrap();
        let mut disk = Disk::at(server.socket()).queue_size(128).open().unwrap();
        for name in ["a", "b"] {
            fs.rule(name, Rule::errno(errno).writes().sectors(83..84));
        }
        let ops: Vec<_> = (0..16).map(|i| Op::write(i * 8, filled(i * 8, 8))).collect();
        let mut expected = [OK; 16];
        expected[10] = IOERR;
        assert_eq!(statuses(disk.q(), &ops), expected, "errno {errno}");
        image.assert_filled(0..80);
        image.assert_filled(88..128);
    }
}

/// Adjacent ranges of 4 KiB, one request each, in an order that nobody would choose.
fn ranges(discard: bool, flags: u32) -> Vec<Op> {
    let range = |i: u64| vec![Segment::new(i * 8, 8).flags(flags)];
    let all = [3, 0, 7, 5, 1, 6, 2, 4].into_iter().map(range);
    all.map(|range| if discard { Op::Discard(range) } else { Op::WriteZeroes(range) }).collect()
}

#[test]
fn discards_and_write_zeroes_merge_with_their_like() {
    need!(faulty);
    for (discard, flags) in [(true, 0), (false, 0), (false, UNMAP)] {
        for (merge_max, nr_expected) in [("512", 1), ("0", 8)] {
            let image = Image::filled(MIB);
            let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
            let server =
                Server::polypath().path(fs.path("a")).arg("--merge-max").arg(merge_max).start().unwrap();
            let mut disk = Disk::at(server.socket()).queue_size(64).open().unwrap();
            let before = fs.counts("a");
            assert_eq!(statuses(disk.q(), &ranges(discard, flags)), [OK; 8]);
            let nr = fs.counts("a").fallocates - before.fallocates;
            assert_eq!(nr, nr_expected, "discard {discard}, flags {flags}, --merge-max {merge_max}");
            assert_eq!(fs.counts("a").writes, before.writes);
            assert_eq!(disk.q().read(0, 64).unwrap(), vec![0; 64 * 512]);
            image.assert_filled(64..image.sectors());
        }
    }
    // Nothing of different kinds, and nothing across a flush.
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a"]).unwrap();
    let server = Server::polypath().path(fs.path("a")).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(64).open().unwrap();
    let before = fs.counts("a").fallocates;
    let zeroes = |i: u64, flags| Op::WriteZeroes(vec![Segment::new(i * 8, 8).flags(flags)]);
    let ops = [zeroes(0, 0), zeroes(1, UNMAP), Op::Discard(vec![Segment::new(16, 8)]), zeroes(3, 0)];
    assert_eq!(statuses(disk.q(), &ops), [OK; 4]);
    assert_eq!(fs.counts("a").fallocates - before, 4);
    assert_eq!(statuses(disk.q(), &[zeroes(4, 0), Op::Flush, zeroes(5, 0)]), [OK; 3]);
    assert_eq!(fs.counts("a").fallocates - before, 6);
    image.assert_filled(48..image.sectors());
}

#[test]
fn f09_merged_zeroes_that_the_path_has_to_be_written() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(64).open().unwrap();
    for name in ["a", "b"] {
        fs.rule(name, Rule::errno(libc::EOPNOTSUPP).fallocates());
        // A bad sector in the sixth range: that one fails, and no other.
        fs.rule(name, Rule::errno(libc::ENODATA).writes().sectors(43..44));
    }
    let mut expected = [OK; 8];
    expected[3] = IOERR;
    for flags in [0, UNMAP] {
        assert_eq!(statuses(disk.q(), &ranges(false, flags)), expected, "flags {flags}");
    }
    assert_eq!(disk.q().read(0, 40).unwrap(), vec![0; 40 * 512]);
    assert_eq!(disk.q().read(48, 16).unwrap(), vec![0; 16 * 512]);
    image.assert_filled(64..image.sectors());
    // No path can discard: each member hears so, and no path is at fault.
    assert_eq!(statuses(disk.q(), &ranges(true, 0)), [UNSUPP; 8]);
    assert_eq!(server.count_log("path failed"), 0);
}

#[test]
fn f02_merged_discards_move_on_when_their_path_fails() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).start().unwrap();
    let mut disk = Disk::at(server.socket()).queue_size(64).open().unwrap();
    fs.rule("a", Rule::errno(libc::ENOLINK).fallocates());
    fs.rule("b", Rule::errno(libc::ENOLINK).fallocates().next(1));
    for discard in [true, false] {
        assert_eq!(statuses(disk.q(), &ranges(discard, 0)), [OK; 8]);
    }
    assert_eq!(disk.q().read(0, 64).unwrap(), vec![0; 64 * 512]);
    image.assert_filled(64..image.sectors());
}
