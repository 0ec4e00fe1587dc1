//! What a flush promises.

use polypath_vm_tests::faulty::{FaultyFs, Kind, Op as FsOp, Rule};
use polypath_vm_tests::front_end::config::WRITEBACK_OFFSET;
use polypath_vm_tests::front_end::{Disk, IOERR, OK, Op, feature};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled, need, serve_faulty, status};

/// The log with reads of no interest taken out.
fn changes(fs: &FaultyFs) -> Vec<FsOp> {
    fs.log().into_iter().filter(|op| matches!(op.kind, Kind::Write | Kind::Fsync)).collect()
}

#[test]
fn f16_a_flush_comes_behind_the_writes_that_were_answered() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a"]);
    fs.clear_log();
    disk.q().write(0, &[1; 4096]).unwrap();
    disk.q().write(64, &[2; 4096]).unwrap();
    disk.q().flush().unwrap();
    let log = changes(&fs);
    let fsync = log.iter().find(|op| op.kind == Kind::Fsync).expect("a real fsync");
    for write in log.iter().filter(|op| op.kind == Kind::Write) {
        assert!(write.done.unwrap() < fsync.order, "{log:#?}");
    }
    assert_eq!(log.iter().filter(|op| op.kind == Kind::Write).count(), 2);
}

#[test]
fn f16_a_flush_reaches_every_path_that_carried_a_write() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a", "b"]);
    fs.write_back("a", true);
    fs.write_back("b", true);
    for i in 0..16 {
        disk.q().write(i * 64, &filled(i * 64, 8)).unwrap();
    }
    assert!(fs.counts("a").writes > 0 && fs.counts("b").writes > 0, "both carry writes");
    disk.q().flush().unwrap();
    fs.forget_unsynced("a");
    fs.forget_unsynced("b");
    for i in 0..16 {
        image.assert_filled(i * 64..i * 64 + 8);
    }
}

/// Another host wrote, and its guest comes here before it has flushed: nothing was written by this process meanwhile.
#[test]
fn f16_a_flush_covers_what_the_guest_wrote_on_another_host() {
    need!(faulty);
    let image = Image::empty(MIB);
    let fs = FaultyFs::mount(&image.path, &["there", "here"]).unwrap();
    let serve = |name| Server::polypath().path(fs.path(name)).start().unwrap();
    let (there, here) = (serve("there"), serve("here"));
    let mut disk = Disk::open(here.socket()).unwrap();
    disk.q().write(0, &[1; 4096]).unwrap();
    disk.q().flush().unwrap();
    let fsyncs = fs.counts("here").fsyncs;
    disk.q().flush().unwrap();
    assert_eq!(fs.counts("here").fsyncs, fsyncs, "nothing to cover");
    drop(disk);
    Disk::open(there.socket()).unwrap().q().write(64, &[2; 4096]).unwrap();
    Disk::open(here.socket()).unwrap().q().flush().unwrap();
    assert!(fs.counts("here").fsyncs > fsyncs, "the disk's cache is not told");
}

#[test]
fn f16_a_flush_on_one_queue_covers_writes_on_another() {
    need!(faulty);
    let image = Image::empty(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(2).open().unwrap();
    fs.write_back("a", true);
    fs.write_back("b", true);
    for round in 0..8_u64 {
        for i in 0..3 {
            let sector = round * 128 + i * 16;
            disk.queues[0].write(sector, &filled(sector, 8)).unwrap();
        }
        disk.queues[1].flush().unwrap();
        fs.forget_unsynced("a");
        fs.forget_unsynced("b");
        for i in 0..3 {
            let sector = round * 128 + i * 16;
            image.assert_filled(sector..sector + 8);
        }
    }
}

#[test]
fn f16_writes_and_a_flush_in_one_kick_are_all_answered() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a", "b"]);
    for _ in 0..10 {
        let mut ops: Vec<_> = (0..32).map(|i| Op::write(i * 8, filled(i * 8, 8))).collect();
        ops.push(Op::Flush);
        for done in disk.q().run_all(&ops).unwrap() {
            assert_eq!((done.status, done.used_len), (OK, 1));
        }
        // The fsync covers at least what was answered before the flush was; the rest is the next flush's.
        disk.q().flush().unwrap();
        image.assert_filled(0..256);
    }
    assert!(fs.counts("a").fsyncs + fs.counts("b").fsyncs > 0);
}

#[test]
fn f16_an_fsync_error_is_heard_and_not_hidden() {
    need!(faulty);
    let image = Image::empty(MIB);
    for failing in ["a", "b"] {
        for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
            let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
            for i in 0..8 {
                disk.q().write(i * 64, &[3; 4096]).unwrap();
            }
            fs.rule(failing, Rule::errno(errno).fsyncs().next(1));
            assert_eq!(status(disk.q(), &Op::Flush), IOERR, "errno {errno} by {failing}");
            fs.clear(failing);
            disk.q().write(0, &[4; 4096]).unwrap();
            assert_eq!(status(disk.q(), &Op::Flush), OK, "the next one, errno {errno} by {failing}");
            assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
        }
    }
}

#[test]
fn f03_what_one_path_wrote_the_other_reads_and_flushes() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
    for i in 0..16 {
        disk.q().write(i * 64, &filled(i * 64, 8)).unwrap();
        assert!(disk.q().read(i * 64, 8).unwrap() == filled(i * 64, 8));
        assert!(disk.q().read(i * 64, 8).unwrap() == filled(i * 64, 8), "by whichever path");
    }
    // The path goes away before the flush: the other one leads to the same file, so it flushes for both.
    fs.rule("a", Rule::errno(libc::ENOTCONN));
    let before = fs.counts("b").fsyncs;
    assert_eq!(status(disk.q(), &Op::Flush), OK);
    assert!(fs.counts("b").fsyncs > before, "no fsync reached the file");
    assert_eq!(server.count_log("path failed"), 1);
}

#[test]
fn write_through_makes_each_write_durable() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, server, mut disk) = serve_faulty(&image, &["a", "b"]);
    fs.write_back("a", true);
    fs.write_back("b", true);
    let forget = || {
        fs.forget_unsynced("a");
        fs.forget_unsynced("b");
    };
    disk.session.set_config(WRITEBACK_OFFSET, &[0]).unwrap();
    for i in 0..8 {
        disk.q().write(i * 16, &filled(i * 16, 8)).unwrap();
        forget();
        image.assert_filled(i * 16..i * 16 + 8);
    }
    disk.q().write_zeroes(0, 8, 0).unwrap();
    forget();
    assert_eq!(image.at(0, 8), [0; 4096]);
    // Back to write-back: a write alone is not durable, which shows that the fsyncs above were ours.
    disk.session.set_config(WRITEBACK_OFFSET, &[1]).unwrap();
    let fsyncs = fs.counts("a").fsyncs + fs.counts("b").fsyncs;
    disk.q().write(512, &filled(512, 8)).unwrap();
    assert_eq!(fs.counts("a").fsyncs + fs.counts("b").fsyncs, fsyncs);
    drop(disk);

    // A driver that agreed to neither FLUSH nor the switch has no way to flush: its writes are durable as well.
    let mut disk = Disk::at(server.socket()).without(feature::FLUSH | feature::CONFIG_WCE).open().unwrap();
    for i in 0..4 {
        let sector = 1024 + i * 16;
        disk.q().write(sector, &filled(sector, 8)).unwrap();
        forget();
        image.assert_filled(sector..sector + 8);
    }
}

#[test]
fn write_through_hears_of_fsync_errors() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a"]);
    disk.session.set_config(WRITEBACK_OFFSET, &[0]).unwrap();
    fs.rule("a", Rule::errno(libc::EIO).fsyncs().next(1));
    fs.clear_log();
    let first = status(disk.q(), &Op::write(0, vec![1; 512]));
    // A write that the path itself is told to make durable needs no fsync that could fail.
    let durable = fs.log_of("a", Kind::Write).iter().all(|write| write.mode & libc::O_DSYNC != 0);
    assert_eq!(first, if durable { OK } else { IOERR });
    assert_eq!(status(disk.q(), &Op::write(0, vec![1; 512])), OK);
    let fsyncs = fs.counts("a").fsyncs;
    assert!(durable || (2..=4).contains(&fsyncs), "{fsyncs} fsyncs for two writes");
}

#[test]
fn a_flush_waits_for_no_write_that_came_behind_it() {
    need!(faulty);
    let image = Image::empty(MIB);
    let (fs, _server, mut disk) = serve_faulty(&image, &["a"]);
    disk.q().write(0, &[1; 512]).unwrap();
    fs.rule("a", Rule::hold().fsyncs());
    disk.q().submit(&Op::Flush).unwrap();
    fs.wait_held("a", 1, SOON).unwrap();
    // While the flush is under way reads are served.
    disk.q().submit(&Op::read(64, 8)).unwrap();
    let read = disk.q().done().unwrap();
    assert_eq!((read.tag, read.status), (2, OK));
    fs.release("a");
    assert_eq!(disk.q().done().unwrap().status, OK);
}
