//! The harness itself: what the other tests rely on.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{self, FaultyFs, Kind, Rule};
use polypath_vm_tests::loopdev::{self, LoopDev, Mount};
use polypath_vm_tests::server::Server;
use polypath_vm_tests::skip::skip;

const TIMEOUT: Duration = Duration::from_secs(10);

fn image(dir: &Path, bytes: u64) -> PathBuf {
    let path = dir.join("disk");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn errno(result: std::io::Result<()>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn faulty_names_are_one_file_and_fail_each_by_itself() {
    if let Err(why) = faulty::available() {
        return skip("faulty_names_are_one_file_and_fail_each_by_itself", why);
    }
    let dir = tempfile::tempdir().unwrap();
    let fs = FaultyFs::mount(&image(dir.path(), 1 << 20), &["a", "b"]).unwrap();
    let [a, b] = ["a", "b"].map(|n| File::options().read(true).write(true).open(fs.path(n)).unwrap());
    let [ma, mb] = [&a, &b].map(|f| f.metadata().unwrap());
    assert_eq!((ma.dev(), ma.ino(), ma.len()), (mb.dev(), mb.ino(), 1 << 20));

    fs.rule("a", Rule::errno(libc::ENODATA).reads().sectors(20..21).next(1));
    let mut buf = [0; 4096];
    a.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(errno(a.read_exact_at(&mut buf, 8192)), libc::ENODATA);
    a.read_exact_at(&mut buf, 8192).unwrap();
    b.read_exact_at(&mut buf, 8192).unwrap();

    fs.rule("a", Rule::short(1000).writes().next(1));
    assert_eq!(a.write_at(&[7; 4096], 0).unwrap(), 1000);
    b.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!((buf[999], buf[1000]), (7, 0), "what one name writes, the other reads");

    fs.write_back("a", true);
    a.write_all_at(&[9; 1024], 512).unwrap();
    b.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(buf[600], 7, "unsynced data shows only by its own name");
    fs.forget_unsynced("a");
    a.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(buf[600], 7, "forgotten");
    a.write_all_at(&[9; 1024], 512).unwrap();
    a.sync_all().unwrap();
    b.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!((buf[511], buf[512]), (7, 9), "synced");

    let log = fs.log();
    assert!(log.windows(2).all(|w| w[0].order < w[1].order));
    assert_eq!(fs.log_of("a", Kind::Fsync).len(), 1);
    assert_eq!(fs.counts("a").fsyncs, 1);
}

#[test]
fn faulty_holds_and_delays_block_only_their_name() {
    if let Err(why) = faulty::available() {
        return skip("faulty_holds_and_delays_block_only_their_name", why);
    }
    let dir = tempfile::tempdir().unwrap();
    let fs = FaultyFs::mount(&image(dir.path(), 1 << 20), &["a", "b"]).unwrap();
    let [a, b] = ["a", "b"].map(|n| File::options().read(true).write(true).open(fs.path(n)).unwrap());
    fs.rule("a", Rule::hold());
    std::thread::scope(|scope| {
        let held: Vec<_> = (0..8).map(|_| scope.spawn(|| a.read_exact_at(&mut [0; 512], 0))).collect();
        fs.wait_held("a", 8, TIMEOUT).unwrap();
        b.read_exact_at(&mut [0; 512], 0).unwrap();
        fs.release_with("a", libc::EREMOTEIO);
        for thread in held {
            assert_eq!(errno(thread.join().unwrap()), libc::EREMOTEIO);
        }
    });
    fs.rule("b", Rule::delay_ms(50));
    let start = Instant::now();
    b.read_exact_at(&mut [0; 512], 0).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
    a.read_exact_at(&mut [0; 512], 0).unwrap();
    fs.stop();
    fs.cont();
    a.read_exact_at(&mut [0; 512], 0).unwrap();
    fs.kill();
    assert!(a.read_exact_at(&mut [0; 512], 0).is_err());
}

#[test]
fn loop_devices_have_the_asked_sector_size_and_free_themselves() {
    if let Err(why) = loopdev::available() {
        return skip("loop_devices_have_the_asked_sector_size_and_free_themselves", why);
    }
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), 1 << 20);
    let disk = LoopDev::on(&image).sector_size(4096).direct_io(true).attach().unwrap();
    let name = disk.path().file_name().unwrap().to_str().unwrap().to_owned();
    let sys = |file: &str| std::fs::read_to_string(format!("/sys/block/{name}/{file}")).unwrap();
    assert_eq!(sys("queue/logical_block_size").trim(), "4096");
    assert_eq!(sys("size").trim(), "2048");
    disk.set_read_only(true).unwrap();
    let file = File::options().write(true).open(disk.path());
    assert!(file.is_err() || file.unwrap().write_all_at(&[0; 4096], 0).is_err());
    drop(disk);
    let backing = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).unwrap_or_default();
    assert!(!backing.contains(image.to_str().unwrap()), "still attached");
}

#[test]
fn mounts_unmount_themselves() {
    if let Err(why) = loopdev::available() {
        return skip("mounts_unmount_themselves", why);
    }
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), 32 << 20);
    let mounts = || std::fs::read_to_string("/proc/self/mounts").unwrap();
    for mount in [Mount::tmpfs(1 << 20).unwrap(), Mount::file_system("ext4", &image).unwrap()] {
        std::fs::write(mount.path().join("file"), b"x").unwrap();
        let path = mount.path().to_owned();
        assert!(mounts().contains(path.to_str().unwrap()));
        drop(mount);
        assert!(!mounts().contains(path.to_str().unwrap()));
        assert!(!path.exists());
    }
}

#[test]
fn the_storage_daemon_starts_and_ends() {
    if std::process::Command::new("qemu-storage-daemon").arg("--version").output().is_err() {
        return skip("the_storage_daemon_starts_and_ends", "no qemu-storage-daemon");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::qsd().path(image(dir.path(), 1 << 20)).num_queues(2).start().unwrap();
    let stats = server.stats();
    assert!(stats.threads > 0 && stats.fds > 3 && stats.mappings > 10 && stats.rss_kib > 0, "{stats:?}");
    assert_eq!(server.terminate(TIMEOUT).unwrap(), 0);
}
