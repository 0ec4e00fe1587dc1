//! The command line, the socket file, the start and the end.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use polypath_vm_tests::front_end::{
    Disk, IOERR, OK, Op, Segment, UNSUPP, feature, request::UNMAP, wire::req,
};
use polypath_vm_tests::server::{Builder, Exited, Server, exit_code, is_listening, wait_until};

use crate::common::{Image, MIB, SOON, filled, status};

/// Refused before the socket exists, with one line that holds `words`.
fn assert_refused(exited: &Exited, words: &[&str]) {
    assert!(exited.code > 0, "{exited:?}");
    assert!(!exited.socket_left, "{exited:?}");
    let lines: Vec<_> =
        exited.stderr.lines().filter(|line| !line.contains("WARN") && !line.contains("INFO")).collect();
    assert_eq!(lines.len(), 1, "one line: {exited:?}");
    for word in words {
        assert!(lines[0].contains(word), "{word:?} is missing: {exited:?}");
    }
    assert!(!exited.stderr.contains("panicked"), "{exited:?}");
}

fn refused(builder: Builder, words: &[&str]) {
    assert_refused(&builder.run_to_exit(SOON).unwrap(), words);
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn f62_bad_options_are_named() {
    let image = Image::empty(MIB);
    let start = || Server::polypath().path(&image.path);
    for (option, values) in [
        ("--num-queues", &["0", "65", "257", "1000000", "-1", "two", ""][..]),
        ("--queue-size", &["0", "3", "100", "2048", "100000", "x"]),
        ("--serial", &["123456789012345678901"]),
        ("--selector", &["", "no-such", "Round-Robin"]),
        ("--fd", &["x", "-1"]),
        ("--no-such-option", &["1"]),
    ] {
        for value in values {
            let builder = if option == "--fd" { Server::polypath().path(&image.path) } else { start() };
            refused(builder.arg(format!("{option}={value}")), &[option]);
        }
    }
    refused(start().log_level(Some("loud")), &["--log-level"]);
    refused(start().arg("stray"), &["stray"]);
    refused(Server::polypath(), &["--path"]);
}

#[test]
fn f62_bad_paths_are_named() {
    let image = Image::empty(MIB);
    let missing = image.dir().join("missing");
    refused(Server::polypath().path(&missing), &[text(&missing), "No such file"]);
    refused(Server::polypath().path(&image.path).path(&missing), &[text(&missing)]);
    refused(Server::polypath().path(&missing).path(&image.path), &[text(&missing)]);
    refused(Server::polypath().path(image.dir()), &[text(image.dir())]);
    refused(Server::polypath().path("/dev/null"), &["/dev/null"]);
    refused(Server::polypath().path(""), &["--path"]);
    refused(Server::polypath().path(&image.path).path(&image.path), &[text(&image.path)]);
}

#[test]
fn f62_other_names_of_a_path_are_paths_to_the_same_file() {
    let image = Image::filled(MIB);
    let (link, hard) = (image.dir().join("link"), image.dir().join("hard"));
    symlink(&image.path, &link).unwrap();
    fs::hard_link(&image.path, &hard).unwrap();
    let server = Server::polypath().path(&image.path).path(&hard).start().unwrap();
    assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    // A symbolic link adds no redundancy: either refused or said.
    let server = Server::polypath().path(&image.path).path(&link).start();
    match server {
        Ok(server) => drop(server.wait_for_log("WARN", SOON).unwrap()),
        Err(e) => assert!(format!("{e:#}").contains(text(&link)), "{e:#}"),
    }
}

#[test]
fn f33_f05_paths_that_are_not_one_disk_are_refused() {
    let (a, b) = (Image::filled(MIB), Image::filled(MIB));
    refused(Server::polypath().path(&a.path).path(&b.path), &[text(&b.path), text(&a.path)]);
    a.assert_filled(0..8);
}

#[test]
fn f39_selectors_by_name() {
    let image = Image::filled(MIB);
    let exited = Server::polypath().path(&image.path).selector("no-such").run_to_exit(SOON).unwrap();
    assert_refused(&exited, &["--selector", "no-such"]);
    for name in ["round-robin", "queue-length", "service-time", "historical-service-time"] {
        assert!(exited.stderr.contains(name), "{name} is not listed: {}", exited.stderr);
    }
    // Every name that is listed either works or says at the start what it lacks; it must not fail when the guest comes.
    let list = exited.stderr.rsplit([':', '(']).next().unwrap();
    let listed =
        list.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').filter(|word| word.contains('-'));
    for name in listed {
        let server = match Server::polypath().path(&image.path).selector(name).start() {
            Ok(server) => server,
            Err(e) => {
                assert!(format!("{e:#}").contains("--selector"), "{name}: {e:#}");
                continue;
            }
        };
        assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8), "{name}");
        assert!(server.stderr().contains(&format!("selector={name}")), "{}", server.stderr());
    }
    let server = Server::polypath().path(&image.path).start().unwrap();
    assert!(server.stderr().contains("selector=round-robin"), "{}", server.stderr());
    refused(Server::polypath().path(&image.path).selector("ROUND-ROBIN"), &["--selector"]);
    refused(Server::polypath().path(&image.path).selector(""), &["--selector"]);
}

#[test]
fn f48_there_are_queues_for_ordinary_vms() {
    let image = Image::filled(MIB);
    for (asked, there) in [(None, 64), (Some(1), 1), (Some(16), 16), (Some(64), 64)] {
        let mut builder = Server::polypath().path(&image.path);
        if let Some(num) = asked {
            builder = builder.num_queues(num);
        }
        let server = builder.start().unwrap();
        let mut disk = Disk::at(server.socket()).queues(there).open().unwrap();
        assert_eq!(disk.session.get_u64(req::GET_QUEUE_NUM).unwrap(), u64::from(there));
        assert_eq!(disk.config.num_queues, there);
        for q in &mut disk.queues {
            assert!(q.read(8, 8).unwrap() == filled(8, 8));
        }
        // One more than there are is refused, and the others work on.
        let state = polypath_vm_tests::front_end::session::state_bytes(there.into(), 128);
        let refused = disk.session.try_set(req::SET_VRING_NUM, &state, &[]);
        assert!(!matches!(refused, Ok(0)), "queue {there} of {there} was accepted");
    }
}

#[test]
fn f53_serials() {
    let image = Image::empty(MIB);
    for serial in ["x", "1234567890123456789", "12345678901234567890", "päth"] {
        let server = Server::polypath().path(&image.path).serial(serial).start().unwrap();
        assert_eq!(Disk::open(server.socket()).unwrap().q().get_id().unwrap(), serial);
    }
    let long = "x".repeat(100);
    for serial in ["123456789012345678901", &long, "aaaaaaaaaaaaaaaaaaaä"] {
        refused(Server::polypath().path(&image.path).serial(serial), &["--serial"]);
    }
    // The default is the same after a restart, and whatever the order of the paths.
    let hard = image.dir().join("hard");
    fs::hard_link(&image.path, &hard).unwrap();
    let id = |paths: [&std::path::Path; 2]| {
        let server = Server::polypath().paths(paths).start().unwrap();
        Disk::open(server.socket()).unwrap().q().get_id().unwrap()
    };
    let first = id([&image.path, &hard]);
    assert!(!first.is_empty());
    assert_eq!(first, id([&image.path, &hard]));
    assert_eq!(first, id([&hard, &image.path]));
}

#[test]
fn f54_a_read_only_disk_cannot_be_changed() {
    let image = Image::filled(MIB);
    let mut mode = fs::metadata(&image.path).unwrap().permissions();
    mode.set_mode(0o444);
    fs::set_permissions(&image.path, mode).unwrap();
    let server = Server::polypath().path(&image.path).read_only().start().unwrap();
    let fd = server.open_files().into_iter().find(|file| *file == text(&image.path));
    assert!(fd.is_some(), "{:?}", server.open_files());
    for without in [0, feature::RO] {
        let mut disk = Disk::at(server.socket()).without(without).open().unwrap();
        assert_ne!(disk.session.offered & feature::RO, 0);
        assert_eq!(status(disk.q(), &Op::write(0, vec![1; 512])), IOERR);
        for op in [
            Op::Discard(vec![Segment::new(0, 8)]),
            Op::WriteZeroes(vec![Segment::new(0, 8)]),
            Op::WriteZeroes(vec![Segment::new(0, 8).flags(UNMAP)]),
        ] {
            assert!([IOERR, UNSUPP].contains(&status(disk.q(), &op)), "{op:?}");
        }
        assert_eq!(status(disk.q(), &Op::Flush), OK);
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    }
    image.assert_filled(0..image.sectors());
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
    let flags = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().flatten().find_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let info = format!("/proc/{}/fdinfo/{}", server.pid(), entry.file_name().to_str()?);
        (target == image.path).then(|| fs::read_to_string(info).unwrap())
    });
    let flags = flags.unwrap();
    let octal = flags.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
    let flags = i32::from_str_radix(octal, 8).unwrap();
    assert_eq!(flags & libc::O_ACCMODE, libc::O_RDONLY, "opened read-only");
    assert_ne!(flags & libc::O_DIRECT, 0, "around the page cache");
}

#[test]
fn f55_what_is_at_the_socket_path() {
    let image = Image::filled(MIB);
    let start = |socket: &std::path::Path| Server::polypath().path(&image.path).socket(socket);
    let socket = image.dir().join("sock");

    // A dead socket is replaced, also right after kill -9.
    let mut server = start(&socket).start().unwrap();
    server.kill();
    assert!(socket.exists());
    let mut server = start(&socket).start().unwrap();
    assert!(Disk::open(&socket).unwrap().q().read(0, 8).unwrap() == filled(0, 8));

    // A living one is not.
    let exited = start(&socket).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains(text(&socket)), "{exited:?}");
    wait_until("the server to go on", SOON, || Disk::open(&socket).is_ok()).unwrap();

    for signal in [libc::SIGTERM, libc::SIGINT] {
        server.signal(signal);
        assert_eq!(exit_code(server.wait_exit(SOON).unwrap()), 0);
        assert!(!socket.exists(), "the socket is left after signal {signal}");
        server = start(&socket).start().unwrap();
    }
    drop(server);
    fs::remove_file(&socket).unwrap();

    // Anything else is not touched.
    fs::write(&socket, "precious").unwrap();
    let exited = start(&socket).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains(text(&socket)), "{exited:?}");
    assert_eq!(fs::read_to_string(&socket).unwrap(), "precious");
    fs::remove_file(&socket).unwrap();
    fs::create_dir(&socket).unwrap();
    let exited = start(&socket).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains(text(&socket)), "{exited:?}");
    assert!(socket.is_dir());
}

#[test]
fn f55_long_and_missing_socket_paths() {
    let image = Image::filled(MIB);
    let of_length = |len: usize| {
        let room = len - text(image.dir()).len() - 1;
        image.dir().join("s".repeat(room))
    };
    let server = Server::polypath().path(&image.path).socket(of_length(107)).start().unwrap();
    assert!(Disk::open(server.socket()).is_ok());
    for len in [108, 200] {
        refused(Server::polypath().path(&image.path).socket(of_length(len)), &["--socket-path"]);
    }
    let nowhere = image.dir().join("nowhere/sock");
    refused(Server::polypath().path(&image.path).socket(&nowhere), &[text(&nowhere)]);
}

#[test]
fn f57_the_socket_is_not_open_to_all() {
    let image = Image::empty(MIB);
    for umask in [0o000, 0o022, 0o077] {
        let server = Server::polypath().path(&image.path).umask(umask).start().unwrap();
        let meta = fs::symlink_metadata(server.socket()).unwrap();
        assert!(meta.file_type().is_socket());
        let mode = meta.permissions().mode() & 0o777;
        assert_eq!(mode & 0o007, 0, "umask {umask:o} gives mode {mode:o}");
        assert_eq!(mode & 0o020, 0, "umask {umask:o} gives mode {mode:o} without a group named");
    }
    let server = Server::polypath().path(&image.path).arg("--socket-group").arg("nogroup").start().unwrap();
    let mode = fs::symlink_metadata(server.socket()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o660);
}

#[test]
fn a_listening_socket_is_taken_over() {
    let image = Image::filled(MIB);
    let socket = image.dir().join("sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let start = || Server::polypath().path(&image.path).pass_fd(listener.as_raw_fd(), 3);
    let mut server = start().arg("--fd").arg("3").spawn().unwrap();
    assert!(Disk::open(&socket).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(server.terminate(SOON).unwrap(), 0);
    assert!(socket.exists(), "a socket that we did not make is not ours to remove");

    refused(
        Server::polypath().path(&image.path).arg("--fd").arg("77").pass_fd(listener.as_raw_fd(), 3),
        &["--fd"],
    );
    let file = fs::File::open(&image.path).unwrap();
    refused(
        Server::polypath().path(&image.path).arg("--fd").arg("3").pass_fd(file.as_raw_fd(), 3),
        &["--fd"],
    );
    refused(Server::polypath().path(&image.path).arg("--fd").arg("3"), &["--fd"]);
    refused(Server::polypath().path(&image.path).pass_fd(listener.as_raw_fd(), 3), &["--socket-path"]);
}

#[test]
fn systemd_style_activation_is_the_same() {
    let image = Image::filled(MIB);
    let socket = image.dir().join("sock");
    let listener = UnixListener::bind(&socket).unwrap();
    // LISTEN_PID has to be the program's own pid, which only a shell that becomes it can know.
    let program = polypath_vm_tests::server::polypath_bin().unwrap();
    let mut command = std::process::Command::new("sh");
    command
        .arg("-c")
        .arg("LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" --path \"$1\"")
        .arg(program)
        .arg(&image.path);
    let raw = listener.as_raw_fd();
    // SAFETY: dup2 and fcntl are async-signal-safe and the closure owns what it reads.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
            // Onto itself, dup2 would leave the descriptor to be closed by the exec.
            let done = if raw == 3 { libc::fcntl(raw, libc::F_SETFD, 0) } else { libc::dup2(raw, 3) };
            if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    let mut process = polypath_vm_tests::server::Process::spawn(command, image.dir(), "activated").unwrap();
    assert!(Disk::open(&socket).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(process.terminate(SOON).unwrap(), 0);
}

#[test]
fn qemu_conventions() {
    let image = Image::filled(MIB);
    let exited = Server::polypath().arg("--print-capabilities").run_to_exit(SOON).unwrap();
    assert_eq!(exited.code, 0, "{exited:?}");
    assert!(!exited.socket_left);
    let json: serde_json::Value = serde_json::from_str(&exited.stdout).unwrap();
    assert_eq!(json["type"], "block");
    for name in ["blk-file", "read-only"] {
        assert!(json["features"].as_array().unwrap().iter().any(|f| f == name), "{json}");
    }
    let server = Server::polypath().arg("--blk-file").arg(&image.path).start().unwrap();
    assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(server.stdout(), "", "stdout is not for logging");
}

#[test]
fn the_log_says_when_it_listens() {
    let image = Image::empty(MIB);
    let server = Server::polypath().path(&image.path).log_level(Some("info")).start().unwrap();
    let line = server.wait_for_log("listening: socket=", SOON).unwrap();
    assert!(line.contains(text(server.socket())), "{line}");
    assert!(is_listening(server.socket()));
    let server = Server::polypath().path(&image.path).log_level(Some("off")).start().unwrap();
    drop(Disk::open(server.socket()).unwrap());
    assert_eq!(server.stderr(), "");
}

#[test]
fn ends_within_a_second_and_does_not_wait_for_a_silent_front_end() {
    let image = Image::filled(MIB);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut server = Server::polypath().path(&image.path).start().unwrap();
        let mut disk = Disk::at(server.socket()).queues(4).open().unwrap();
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
        let start = Instant::now();
        server.signal(signal);
        assert_eq!(exit_code(server.wait_exit(SOON).unwrap()), 0);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert!(!server.socket().exists());
    }
    // Also one that has said nothing at all.
    let mut server = Server::polypath().path(&image.path).start().unwrap();
    let _silent = UnixStream::connect(server.socket()).unwrap();
    assert_eq!(server.terminate(Duration::from_secs(1)).unwrap(), 0);
}
