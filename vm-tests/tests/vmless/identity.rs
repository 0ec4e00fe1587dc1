//! A path that leads to another disk is not used: at the start, when it is added, when it comes back.

use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::verify::Plan;
use polypath_vm_tests::loopdev::LoopDev;
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, controlled, under_load};

/// A file that nothing may be written to.
struct Stranger {
    path: PathBuf,
    contents: Vec<u8>,
}

impl Stranger {
    /// Of the same size as `image`: a copy of it, but for sectors that differ.
    fn beside(image: &Image, name: &str, differing: std::ops::Range<u64>) -> Self {
        let path = image.dir().join(name);
        std::fs::copy(&image.path, &path).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for sector in differing {
            file.write_all_at(&[0xDD; 512], sector * 512).unwrap();
        }
        Self { contents: std::fs::read(&path).unwrap(), path }
    }

    fn assert_untouched(&self) {
        assert!(
            std::fs::read(&self.path).unwrap() == self.contents,
            "{} was written to",
            self.path.display()
        );
    }
}

/// Fails a path and keeps it out of the way until it leads elsewhere.
fn take_out(rig: &Rig, name: &str) {
    rig.fs.rule(name, Rule::errno(libc::ENODEV));
    let path = rig.fs.path(name);
    rig.wait_status("the path to be out and at rest", |status| {
        !status.is_active(&path) && status.path(&path)["in_flight"] == 0
    });
}

/// Waits until a path was refused, with the reason.
fn refused(rig: &Rig, name: &str) -> String {
    let path = rig.fs.path(name);
    let status = rig.wait_status("a refusal", |status| {
        status.path(&path)["last_error"].as_str().is_some_and(|e| !e.contains("os error"))
    });
    assert!(!status.is_active(&path));
    let dev = rig.dev(name);
    let line = rig
        .server
        .stderr()
        .lines()
        .rfind(|line| line.contains("refused") && line.contains(&dev))
        .map(str::to_owned);
    line.unwrap_or_else(|| panic!("nothing in the log: {}", rig.server.stderr()))
}

#[test]
fn f05_a_path_that_comes_back_as_another_file_is_left_out() {
    need!(faulty);
    let rig = Rig::start(Image::empty(8 * MIB), &["a", "b", "c"], &[]);
    rig.fs.logging(false);
    let mut disk = rig.disk(4);
    // The rule is there before the load, or the name would lead elsewhere with requests on their way.
    let report = under_load(&mut disk, &rig.image, Plan { depth: 16, ..Plan::default() }, |progress| {
        // Of other contents; and a copy, which is another file all the same.
        for differing in [0..16384, 0..0] {
            take_out(&rig, "c");
            let stranger = Stranger::beside(&rig.image, "stranger", differing.clone());
            rig.fs.set_backing("c", &stranger.path);
            rig.fs.set_inode("c", 77);
            // No file becomes another one while it is open: a probe that opened it as it was has read in vain by then.
            std::thread::sleep(Duration::from_millis(200));
            rig.fs.clear("c");
            let why = refused(&rig, "c");
            assert!(why.contains("77") && why.contains("4242"), "both values: {why}");
            progress.wait(100, SOON).unwrap();
            rig.tell("reinstate_path", "c");
            progress.wait(100, SOON).unwrap();
            assert!(!rig.is_active("c"), "an operator cannot talk it in");
            stranger.assert_untouched();
            rig.fs.rule("c", Rule::errno(libc::ENODEV));
            rig.fs.set_backing("c", &rig.image.path);
            rig.fs.set_inode("c", 4242);
            rig.fs.clear("c");
            rig.tell("reinstate_path", "c");
            rig.wait_active("c", true);
            rig.wait_used("c", 50);
        }
    });
    assert_eq!(report.errors, 0);
}

#[test]
fn f05_a_refusal_is_said_once() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    rig.tell("fail_path", "b");
    rig.fs.set_inode("b", 77);
    rig.tell("reinstate_path", "b");
    refused(&rig, "b");
    // Several more probes come.
    let opens = rig.fs.counts("b").opens;
    wait_until("more probes", SOON, || rig.fs.counts("b").opens > opens + 2).unwrap();
    assert_eq!(rig.server.count_log("refused"), 1, "{}", rig.server.stderr());
}

#[test]
fn f05_a_name_that_leads_to_another_file() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let (stranger, link) = (Stranger::beside(&image, "stranger", 100..101), image.dir().join("link"));
    symlink(fs.path("b"), &link).unwrap();
    let builder = Server::polypath().path(fs.path("a")).path(&link);
    let rig = Rig::start_with(image, fs, builder);
    let mut disk = rig.disk(1);
    let point = |to: &Path| {
        std::fs::remove_file(&link).unwrap();
        symlink(to, &link).unwrap();
    };
    point(&stranger.path);
    // What is open goes on.
    for i in 0..8 {
        disk.q().write(i * 8, &filled(i * 8, 8)).unwrap();
    }
    let mut control = rig.control();
    control.run(&format!("fail_path {}", link.display())).unwrap();
    control.run(&format!("reinstate_path {}", link.display())).unwrap();
    rig.server.wait_for_log("refused", SOON).unwrap();
    for i in 0..8 {
        disk.q().write(i * 8, &filled(i * 8, 8)).unwrap();
    }
    assert!(!rig.status().is_active(&link));
    stranger.assert_untouched();
    point(&rig.fs.path("b"));
    rig.wait_status("the path to come back", |status| status.is_active(&link));
}

#[test]
fn f05_f33_a_path_to_another_disk_is_not_added() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    let before = rig.server.stats().fds;
    for name in ["c", "d", "e"] {
        rig.fs.add_name(name);
    }
    let strangers = [("c", 0..2048), ("d", 0..0)].map(|(name, differing)| {
        let stranger = Stranger::beside(&rig.image, name, differing);
        rig.fs.set_backing(name, &stranger.path);
        rig.fs.set_inode(name, 77);
        let why = rig.control().refused(&format!("add_path 1 {}", rig.dev(name))).unwrap();
        assert!(why.contains("77") && why.contains("4242"), "{name}: {why}");
        stranger
    });
    rig.fs.set_size("e", Some(MIB - 4096));
    let why = rig.control().refused(&format!("add_path 1 {}", rig.dev("e"))).unwrap();
    assert!(why.contains("1044480") && why.contains("1048576"), "{why}");
    assert_eq!(rig.status().nr_active(), 2);
    for i in 0..32 {
        disk.q().write(i * 8, &filled(i * 8, 8)).unwrap();
    }
    strangers.iter().for_each(Stranger::assert_untouched);
    wait_until("what was opened to be closed", SOON, || rig.server.stats().fds <= before).unwrap();
}

#[test]
fn f33_f34_a_path_of_another_size_is_left_out_and_the_size_stays() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    for size in [MIB - 512, 512] {
        rig.tell("fail_path", "b");
        rig.fs.set_size("b", Some(size));
        rig.tell("reinstate_path", "b");
        let why = refused(&rig, "b");
        assert!(why.contains(&size.to_string()) && why.contains("1048576"), "{why}");
        assert_eq!(disk.reload_config().unwrap().capacity, 2048);
        rig.fs.set_size("b", None);
        rig.tell("reinstate_path", "b");
        rig.wait_active("b", true);
    }
    // A larger one has been enlarged before the others: it is used, and the smaller size holds.
    rig.tell("fail_path", "b");
    rig.fs.set_size("b", Some(2 * MIB));
    rig.tell("reinstate_path", "b");
    rig.wait_active("b", true);
    assert_eq!(disk.reload_config().unwrap().capacity, 2048);
    rig.fs.set_size("b", None);
    // Its size cannot be asked at all.
    rig.tell("fail_path", "b");
    rig.fs.rule("b", Rule::errno(libc::EIO).on(&[Kind::Stat]));
    rig.tell("reinstate_path", "b");
    rig.wait_status("an error", |status| status.path(&rig.fs.path("b"))["last_error"].is_string());
    assert_eq!(disk.reload_config().unwrap().capacity, 2048);
    assert!(disk.q().read(2040, 8).unwrap() == filled(2040, 8));
    rig.fs.clear("b");
    rig.wait_active("b", true);
}

#[test]
fn f05_a_loop_device_that_got_another_file() {
    need!(loopdev);
    let image = Image::filled(MIB);
    let stranger = Stranger::beside(&image, "stranger", 0..0);
    let [a, b] = [(); 2].map(|()| LoopDev::on(&image.path).direct_io(true).attach().unwrap());
    let other = LoopDev::on(&stranger.path).direct_io(true).attach().unwrap();
    let link = image.dir().join("link");
    symlink(b.path(), &link).unwrap();
    let (server, socket) = controlled(Server::polypath().path(a.path()).path(&link));
    let mut disk = polypath_vm_tests::front_end::Disk::open(server.socket()).unwrap();
    std::fs::remove_file(&link).unwrap();
    symlink(other.path(), &link).unwrap();
    let mut control = socket.connect().unwrap();
    control.run(&format!("fail_path {}", link.display())).unwrap();
    control.run(&format!("reinstate_path {}", link.display())).unwrap();
    server.wait_for_log("refused", SOON).unwrap();
    for i in 0..16 {
        disk.q().write(i * 8, &filled(i * 8, 8)).unwrap();
    }
    assert!(control.refused(&format!("add_path 1 {}", other.path().display())).is_ok());
    stranger.assert_untouched();
}

#[test]
fn paths_that_are_trusted_are_used_and_said_to_be() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a"], &["--trust-paths"]);
    assert_eq!(rig.server.count_log("trusted without proof"), 1, "{}", rig.server.stderr());
    rig.fs.add_name("b");
    rig.fs.set_inode("b", 77);
    rig.control().run(&format!("add_path 1 {}", rig.dev("b"))).unwrap();
    let mut disk = rig.disk(1);
    for i in 0..8 {
        assert!(disk.q().read(i * 8, 8).unwrap() == filled(i * 8, 8));
    }
    assert_eq!(rig.status().nr_active(), 2);
    // The size has to fit all the same.
    rig.fs.add_name("c");
    rig.fs.set_size("c", Some(2 * MIB));
    rig.control().refused(&format!("add_path 1 {}", rig.dev("c"))).unwrap();
}
