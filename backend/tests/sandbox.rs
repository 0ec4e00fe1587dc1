//! A process confined by the real filters: what each kind of thread must not do ends it, and what goes past the filters
//! fails all the same.
//!
//! Each case runs in a child, which is this program again with the case in its environment.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, Output};

use io_uring::{IoUring, opcode, types};
use polypath::cli::Sandbox;
use polypath::sandbox::{self, Kind};

/// Says what a child has to do.
const CASE: &str = "POLYPATH_SANDBOX_CASE";

/// A call with arguments that do no harm if it is let through.
type Call = (&'static str, libc::c_long, [libc::c_long; 4]);

/// Nobody's.
const NOBODYS: [Call; 12] = [
    ("execve", libc::SYS_execve, [0; 4]),
    ("clone", libc::SYS_clone, [0; 4]),
    ("socket", libc::SYS_socket, [libc::AF_UNIX as _, libc::SOCK_STREAM as _, 0, 0]),
    ("connect", libc::SYS_connect, [-1, 0, 0, 0]),
    ("bind", libc::SYS_bind, [-1, 0, 0, 0]),
    ("unlinkat", libc::SYS_unlinkat, [-1, 0, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [0; 4]),
    ("kill", libc::SYS_kill, [0; 4]),
    ("setuid", libc::SYS_setuid, [0; 4]),
    ("rt_sigaction", libc::SYS_rt_sigaction, [libc::SIGSYS as _, 0, 0, 8]),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as _, 1, 0, 0]),
    ("mmap", libc::SYS_mmap, [0, 4096, (libc::PROT_READ | libc::PROT_EXEC) as _, libc::MAP_PRIVATE as _]),
];

/// The session's and the control loop's, but not of those that have less to do.
const SESSIONS: [Call; 4] = [
    ("io_uring_setup", libc::SYS_io_uring_setup, [0; 4]),
    ("memfd_create", libc::SYS_memfd_create, [0; 4]),
    ("sched_setaffinity", libc::SYS_sched_setaffinity, [-1, 0, 0, 0]),
    ("ftruncate", libc::SYS_ftruncate, [-1, 0, 0, 0]),
];

/// Nor are these the worker's.
const OTHERS: [Call; 5] = [
    ("seccomp", libc::SYS_seccomp, [-1, 0, 0, 0]),
    ("recvmsg", libc::SYS_recvmsg, [-1, 0, 0, 0]),
    ("sendmsg", libc::SYS_sendmsg, [-1, 0, 0, 0]),
    ("socketpair", libc::SYS_socketpair, [0; 4]),
    ("fcntl", libc::SYS_fcntl, [-1, 0, 0, 0]),
];

fn forbidden(kind: Kind) -> Vec<Call> {
    let mut calls = NOBODYS.to_vec();
    if !matches!(kind, Kind::Control | Kind::Session) {
        calls.extend(SESSIONS);
    }
    if kind == Kind::Worker {
        calls.extend(OTHERS);
    }
    calls
}

fn call((_, number, [a, b, c, d]): Call) -> io::Result<libc::c_long> {
    // SAFETY: none of these calls has memory of this program to write to.
    match unsafe { libc::syscall(number, a, b, c, d, -1, 0) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Runs this program again, for one case.
fn child(case: &str) -> Output {
    let exe = std::env::current_exe().unwrap();
    Command::new(exe).args(["--exact", "the_child", "--nocapture"]).env(CASE, case).output().unwrap()
}

/// Does what a child is to do, on a thread of that kind.
fn as_kind<T: Send>(kind: Kind, what: impl FnOnce() -> T + Send) -> T {
    sandbox::enter(Sandbox::On).unwrap();
    std::thread::scope(|scope| {
        let named = std::thread::Builder::new().name(format!("as {kind:?}"));
        let thread = named.spawn_scoped(scope, || {
            sandbox::confine(kind);
            what()
        });
        thread.unwrap().join().unwrap()
    })
}

/// Does nothing on its own: it is what the children run.
#[test]
fn the_child() -> ExitCode {
    let Ok(case) = std::env::var(CASE) else { return ExitCode::SUCCESS };
    let (kind, what) = case.split_once(' ').unwrap();
    let kind = Kind::ALL.into_iter().find(|known| format!("{known:?}") == kind).unwrap();
    match what {
        "files" => as_kind(kind, || {
            for name in ["/etc/passwd", "/proc/self/maps", "/dev/null"] {
                let error = std::fs::File::open(name).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{name}");
                assert_eq!(std::fs::metadata(name).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            }
        }),
        "ring" => as_kind(kind, past_the_filters),
        "panic" => as_kind(kind, || {
            let _ = std::panic::catch_unwind(|| panic!("to be read by somebody"));
        }),
        name => {
            let found = forbidden(kind).into_iter().find(|(known, ..)| *known == name).unwrap();
            as_kind(kind, || eprintln!("the call has returned: {:?}", call(found)));
        }
    }
    eprintln!("the case is over");
    ExitCode::SUCCESS
}

/// A ring of one's own, without restrictions, opens no file and reaches nobody: landlock forbids it.
fn past_the_filters() {
    let mut ring = IoUring::new(8).unwrap();
    let mut result_of = |entry: io_uring::squeue::Entry| {
        // SAFETY: what the entries point to lives until the completion, which is waited for.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    };
    let at = types::Fd(libc::AT_FDCWD);
    for name in [c"/etc/passwd", c"/etc/shadow", c"/proc/self/maps", c"/dev/null"] {
        let result = result_of(opcode::OpenAt::new(at, name.as_ptr()).flags(libc::O_RDONLY).build());
        assert_eq!(result, -libc::EACCES, "{name:?}");
    }
    let made = c"/tmp/polypath-sandbox-test";
    let result = result_of(
        opcode::OpenAt::new(at, made.as_ptr()).flags(libc::O_CREAT | libc::O_WRONLY).mode(0o600).build(),
    );
    assert_eq!(result, -libc::EACCES);
    let socket = result_of(opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build());
    assert!(socket >= 0, "{socket}");
    let address = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap(),
        sin_port: 9_u16.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, 1]).to_be() },
        sin_zero: [0; 8],
    };
    let size = u32::try_from(size_of_val(&address)).unwrap();
    let to = opcode::Connect::new(types::Fd(socket), (&raw const address).cast(), size).build();
    assert_eq!(result_of(to), -libc::EACCES);
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_call_that_is_not_the_threads_ends_the_process_and_is_named() {
    for kind in Kind::ALL {
        for (name, number, _) in forbidden(kind) {
            let output = child(&format!("{kind:?} {name}"));
            let said = text(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{kind:?} {name}: {output:?}");
            let line = said.lines().find(|line| line.contains("forbidden call")).unwrap_or_default();
            assert!(line.contains(&format!("number={number} ")), "{kind:?} {name}: {said}");
            assert!(line.contains(&format!("thread=as {kind:?};")), "{kind:?} {name}: {said}");
            assert!(!said.contains("has returned"), "{kind:?} {name}: {said}");
        }
    }
}

fn goes_well(case: &str) -> String {
    let output = child(case);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("the case is over"), "{case}: {output:?}");
    said
}

#[test]
fn opening_files_is_refused_and_ends_nothing() {
    for kind in Kind::ALL {
        goes_well(&format!("{kind:?} files"));
    }
}

#[test]
fn a_ring_that_goes_past_the_filters_reaches_no_file() {
    let said = goes_well("Session ring");
    assert!(!said.contains("not confined"), "{said}");
}

/// Who looks for a fault needs what a panic says, whatever the libraries try to find out for it.
#[test]
fn a_panic_is_told() {
    for kind in Kind::ALL {
        assert!(goes_well(&format!("{kind:?} panic")).contains("to be read by somebody"), "{kind:?}");
    }
}
