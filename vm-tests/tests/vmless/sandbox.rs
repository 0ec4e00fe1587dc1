//! The confined program as the kernel shows it, and the helper beside it.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::server::{Process, Server, polypath_bin, wait_until};
use polypath_vm_tests::skip::skip;

use crate::common::{Image, MIB, SOON, filled};
use crate::rig::controlled;

/// `CAP_IPC_LOCK` (linux/capability.h): kept where the limit on locked memory cannot be raised.
const IPC_LOCK: u64 = 1 << 14;

/// A line of `/proc/.../status`.
fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

/// What the kernel says of each thread.
fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // One may have ended in between.
    tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok()).collect()
}

/// Whether a process is a helper that lives.
fn is_helper(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.contains("Name:\tpolypath-helper\n") && !status.contains("State:\tZ")
}

/// The helper of a process, if it has one that lives.
fn helper_of(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().filter_map(|word| word.parse().ok()).find(|child| is_helper(*child))
}

/// The helper of a server that has started.
fn helper(server: &Process) -> u32 {
    server.wait_for_log("listening", SOON).unwrap();
    helper_of(server.pid()).expect("a helper")
}

fn kill(pid: u32) {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
}

/// Whether landlock and seccomp are all there: containers and old kernels may lack some.
fn is_whole(server: &Process) -> bool {
    server.wait_for_log("listening", SOON).unwrap();
    server.count_log("sandbox: on") == 1
}

#[test]
fn every_thread_of_a_running_disk_is_confined() {
    let image = Image::filled(MIB);
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics");
    let (server, socket) =
        controlled(Server::polypath().path(&image.path).num_queues(2).arg("--metrics").arg(&metrics));
    if !is_whole(&server) {
        return skip("sandbox::every_thread_of_a_running_disk_is_confined", server.stderr());
    }
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    socket.connect().unwrap().run("status").unwrap();
    let statuses = threads(server.pid());
    let names: Vec<String> = statuses.iter().map(|status| field(status, "Name")).collect();
    for name in ["polypath", "session", "vq0", "metrics"] {
        assert!(names.iter().any(|known| known == name), "{names:?}");
    }
    for status in &statuses {
        let name = field(status, "Name");
        assert_eq!(field(status, "Seccomp"), "2", "{name}");
        assert_eq!(field(status, "NoNewPrivs"), "1", "{name}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            let capabilities = u64::from_str_radix(&field(status, set), 16).unwrap();
            assert_eq!(capabilities & !IPC_LOCK, 0, "{name}: {set}");
        }
        // Two for all, the control loop's, then one for each thread in the line of those that began it.
        let nr_filters = match name.as_str() {
            "polypath" => 3,
            "session" => 4,
            name if name.starts_with("vq") => 5,
            _ => continue,
        };
        assert_eq!(field(status, "Seccomp_filters"), nr_filters.to_string(), "{name}");
    }
}

#[test]
fn guest_memory_is_in_no_core() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    let maps = fs::read_to_string(format!("/proc/{}/smaps", server.pid())).unwrap();
    let (mut is_shared, mut nr_guest) = (false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some(range), Some(rights)) if range.contains('-') && rights.len() == 4 => {
                // The in-flight area, and rings of io_uring, are shared as well.
                let is_ours = line.contains("polypath-inflight") || line.contains("io_uring");
                is_shared = rights.ends_with('s') && !is_ours;
            }
            (Some("VmFlags:"), _) if is_shared => {
                nr_guest += 1;
                assert!(line.split_whitespace().any(|flag| flag == "dd"), "{line}");
            }
            _ => {}
        }
    }
    assert!(nr_guest > 0, "{maps}");
}

/// Owner of the process' files under `/proc`: root's, if nobody may look into it (proc(5)).
fn owner_when_run_as_nobody(core_bytes_max: libc::rlim_t) -> u32 {
    const NOBODY: u32 = 65534;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (bin, image, run) = (dir.path().join("polypath"), dir.path().join("image"), dir.path().join("run"));
    fs::copy(polypath_bin().unwrap(), &bin).unwrap();
    fs::set_permissions(&bin, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(&image, vec![1; 1 << 20]).unwrap();
    fs::create_dir(&run).unwrap();
    for name in [&image, &run] {
        std::os::unix::fs::chown(name, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let mut command = Command::new(&bin);
    let socket = run.join("s");
    command.arg("-s").arg(&socket).arg("--path").arg(&image).args(["--direct", "off", "--num-queues", "1"]);
    command.uid(NOBODY).gid(NOBODY);
    // SAFETY: setrlimit is async-signal-safe, and the closure touches nothing of the parent's.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: core_bytes_max, rlim_max: core_bytes_max };
            match libc::setrlimit(libc::RLIMIT_CORE, &limit) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let mut process = Process::spawn(command, dir.path(), "server").unwrap();
    wait_until("the socket", SOON, || {
        assert!(process.is_alive(), "{}", process.stderr());
        process.count_log("listening") == 1
    })
    .unwrap();
    fs::metadata(format!("/proc/{}/maps", process.pid())).unwrap().uid()
}

#[test]
fn nobody_looks_into_it_unless_cores_are_wanted() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 || !Path::new("/proc/self/coredump_filter").exists() {
        return skip("sandbox::nobody_looks_into_it_unless_cores_are_wanted", "not root");
    }
    assert_eq!(owner_when_run_as_nobody(0), 0);
    assert_eq!(owner_when_run_as_nobody(1 << 20), 65534);
}

#[test]
fn the_helper_opens_the_disk_and_nothing_else() {
    let image = Image::filled(MIB);
    let (link, dir) = (image.dir().join("link"), tempfile::tempdir().unwrap());
    fs::hard_link(&image.path, &link).unwrap();
    let other = dir.path().join("other");
    fs::copy(&image.path, &other).unwrap();
    let (server, socket) = controlled(Server::polypath().path(&image.path));
    let mut control = socket.connect().unwrap();
    // Never named at the start, in the table, and out and in again.
    let link = link.display();
    control.run(&format!("add_path 1 {link}")).unwrap();
    control.run(&format!("fail_path {link}")).unwrap();
    control.run(&format!("reinstate_path {link}")).unwrap();
    server.wait_for_log("path reinstated", SOON).unwrap();
    for name in [other.to_str().unwrap(), "/etc/passwd"] {
        let why = control.refused(&format!("add_path 1 {name}")).unwrap();
        assert!(why.contains("not the same disk") || why.contains("size"), "{why}");
    }
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
}

#[test]
fn without_its_helper_the_disk_is_served_and_the_log_says_what_is_amiss() {
    let image = Image::filled(MIB);
    let link = image.dir().join("link");
    fs::hard_link(&image.path, &link).unwrap();
    let (server, socket) = controlled(Server::polypath().path(&image.path));
    let mut disk = Disk::open(server.socket()).unwrap();
    kill(helper(&server));
    wait_until("the helper's end", SOON, || helper_of(server.pid()).is_none()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    let why = socket.connect().unwrap().refused(&format!("add_path 1 {}", link.display())).unwrap();
    assert!(why.contains("helper process"), "{why}");
}

#[test]
fn the_helper_ends_with_the_program_however_that_ends() {
    let image = Image::filled(MIB);
    for is_killed in [false, true] {
        let mut server = Server::polypath().path(&image.path).start().unwrap();
        let (helper, socket) = (helper(&server), server.socket().to_owned());
        // What is meant for the other one does not end it.
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            // SAFETY: no memory is passed.
            unsafe { libc::kill(helper.cast_signed(), signal) };
        }
        let mut disk = Disk::open(server.socket()).unwrap();
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
        assert!(is_helper(helper));
        drop(disk);
        if is_killed {
            kill(server.pid());
        } else {
            assert_eq!(server.terminate(SOON).unwrap(), 0, "{}", server.stderr());
            assert!(!socket.exists());
        }
        wait_until("the helper's end", SOON, || !is_helper(helper)).unwrap();
    }
}

#[test]
fn off_says_so_and_confines_nothing() {
    let image = Image::filled(MIB);
    let link = image.dir().join("link");
    fs::hard_link(&image.path, &link).unwrap();
    let (mut server, socket) = controlled(Server::polypath().path(&image.path).arg("--sandbox").arg("off"));
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(server.count_log("sandbox: off"), 1, "{}", server.stderr());
    server.wait_for_log("listening", SOON).unwrap();
    assert_eq!(helper_of(server.pid()), None);
    for status in threads(server.pid()) {
        assert_eq!(
            field(&status, "Seccomp"),
            field(&fs::read_to_string("/proc/self/status").unwrap(), "Seccomp")
        );
    }
    socket.connect().unwrap().run(&format!("add_path 1 {}", link.display())).unwrap();
    drop(disk);
    assert_eq!(server.terminate(SOON).unwrap(), 0, "{}", server.stderr());
    assert!(!server.socket().exists());
}

#[test]
fn strict_starts_where_all_is_confined_and_nowhere_else() {
    let image = Image::filled(MIB);
    let on = Server::polypath().path(&image.path).start().unwrap();
    let strict = Server::polypath().path(&image.path).arg("--sandbox").arg("strict");
    if is_whole(&on) {
        let server = strict.start().unwrap();
        assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    } else {
        let exited = strict.run_to_exit(SOON).unwrap();
        assert!(exited.code == 1 && exited.stderr.contains("--sandbox strict"), "{exited:?}");
        assert!(!exited.socket_left);
    }
}
