//! Starts on hosts that do not allow everything.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::server::{Process, is_listening, polypath_bin, wait_until};
use polypath_vm_tests::skip::skip;

use crate::common::{Image, MIB, SOON, filled};
use crate::run::{Ran, run_to_end};

/// `nobody`, on every Debian.
const NOBODY: u32 = 65534;

/// Has `io_uring_setup` fail with EPERM in the program, as containers' profiles do.
#[expect(clippy::cast_possible_truncation, reason = "the numbers are small")]
fn without_io_uring(command: &mut Command) {
    const LOAD_NUMBER: libc::sock_filter = libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };
    let is_setup = libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: libc::SYS_io_uring_setup as u32 };
    let refuse =
        libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::EPERM as u32 };
    let allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let mut filter = [LOAD_NUMBER, is_setup, refuse, allow];
    // SAFETY: prctl is async-signal-safe; the filter is owned by the closure and outlives the call.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            let done = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0;
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
}

fn run_without_io_uring(args: &[&Path]) -> Ran {
    let mut command = Command::new(polypath_bin().unwrap());
    command.args(args);
    without_io_uring(&mut command);
    run_to_end(command, "")
}

#[test]
fn f58_without_io_uring_a_start_is_refused_and_check_says_why() {
    let image = Image::filled(MIB);
    let (socket, file) = (image.dir().join("s"), image.dir().join("c.toml"));
    let ran = run_without_io_uring(&[Path::new("--path"), &image.path, Path::new("-s"), &socket]);
    assert!(ran.code > 0 && ran.err.lines().count() == 1 && !socket.exists(), "{ran:?}");
    for word in ["io_uring", "seccomp", "kernel.io_uring_disabled", "memlock"] {
        assert!(ran.err.contains(word), "{word}: {ran:?}");
    }
    let text = format!(
        "socket_path = {socket:?}\ncontrol = {:?}\npaths = [{:?}]\n",
        image.dir().join("c.control"),
        image.path
    );
    std::fs::write(&file, text).unwrap();
    let ran = run_without_io_uring(&[Path::new("check"), &file]);
    let line = ran.out.lines().find(|line| line.starts_with("ERROR")).unwrap_or_else(|| panic!("{ran:?}"));
    assert!(ran.code == 1 && line.contains("io_uring") && line.contains("seccomp"), "{ran:?}");
}

/// A locked-memory limit of 64 KiB is below what rings of 1024 entries take, where the kernel counts them against it (Linux
/// 6.18 does): then the start is refused, and says what to do. Where it does not, many copies are served.
#[test]
fn f58_a_plain_user_with_little_locked_memory_is_served_or_told_so_at_the_start() {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return skip(
            "limits::f58_a_plain_user_with_little_locked_memory",
            "needs root to become another user",
        );
    }
    let image = Image::filled(MIB);
    std::fs::set_permissions(image.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for path in [image.dir(), &image.path] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    // The program itself must be within reach of that user as well.
    let program = image.dir().join("polypath");
    std::fs::copy(polypath_bin().unwrap(), &program).unwrap();
    let start = |number: usize| {
        let socket = image.dir().join(format!("s{number}"));
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c"]);
        command.arg("ulimit -l 64 && exec \"$0\" --path \"$1\" -s \"$2\" --num-queues 16 --queue-size 1024");
        command.arg(&program).arg(&image.path).arg(&socket);
        (Process::spawn(command, image.dir(), &format!("server{number}")).unwrap(), socket)
    };
    let (mut first, socket) = start(100);
    wait_until("the socket or the end", SOON, || is_listening(&socket) || !first.is_alive()).unwrap();
    if !first.is_alive() {
        assert!(first.exited().and_then(|status| status.code()).is_some_and(|code| code > 0));
        let text = first.stderr();
        assert!(
            text.lines().count() == 1 && text.contains("memlock") && text.contains("ulimit -l"),
            "{text}"
        );
        assert!(!socket.exists());
        return;
    }
    let mut copies: Vec<_> = (0..20).map(start).collect();
    for (server, socket) in &mut copies {
        wait_until("the socket", SOON, || is_listening(socket))
            .unwrap_or_else(|e| panic!("{e:#}: {:?}\n{}", server.exited(), server.stderr()));
    }
    for (server, socket) in copies.iter_mut().take(3) {
        let mut disk = Disk::at(socket).queues(16).queue_size(1024).open().unwrap();
        for q in &mut disk.queues {
            assert!(q.read(8, 8).unwrap() == filled(8, 8), "{}", server.stderr());
        }
    }
    for (server, _) in &mut copies {
        assert_eq!(server.terminate(SOON).unwrap(), 0);
    }
}
