//! What the program may run out of: descriptors, room for its log, memory.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::request::{UNTOUCHED, header};
use polypath_vm_tests::front_end::{Chain, Disk, IOERR, OK, Session, feature};
use polypath_vm_tests::server::{Process, Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::malformed::{assert_nothing_left, baseline};
use crate::rig::controlled;

/// From now on so many descriptors may be open.
fn limit_descriptors(server: &Process, nr: usize) {
    let pid = server.pid().cast_signed();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the first call writes the limit, the second reads it, both before they are back.
    let set = unsafe {
        libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit);
        limit.rlim_cur = (nr as libc::rlim_t).min(limit.rlim_max);
        libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut())
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// Wherever descriptors run out while a front-end comes, nothing of it goes on afterwards: a worker that did would serve
/// the ring together with the next one's.
#[test]
fn f45_f62_a_front_end_that_gets_too_few_descriptors_leaves_nothing() {
    let image = Image::filled(MIB);
    let mut server = Server::polypath().path(&image.path).num_queues(2).start().unwrap();
    let before = baseline(&mut server);
    let mut nr_served = 0;
    for more in 0..48 {
        limit_descriptors(&server, before.0 + more);
        // A connection that cannot even be accepted gets no answer.
        let served = more > 4 && Disk::at(server.socket()).queues(2).open().is_ok();
        nr_served += usize::from(served);
        assert_nothing_left(&server, before, &format!("{more} descriptors, served: {served}"));
    }
    assert!((1..40).contains(&nr_served), "{nr_served}");
    limit_descriptors(&server, 1 << 10);
    assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
}

/// Who cannot be accepted waits, and is served when there are descriptors again; the log has a few words about it.
#[test]
fn f45_connections_beyond_the_descriptors_wait_in_silence() {
    let image = Image::filled(MIB);
    let (server, socket) = controlled(Server::polypath().path(&image.path));
    let mut first = socket.connect().unwrap();
    first.run("status").unwrap();
    limit_descriptors(&server, server.stats().fds);
    let mut clients: Vec<_> = (0..8).map(|_| socket.connect().unwrap()).collect();
    let front_end = UnixStream::connect(server.socket()).unwrap();
    let said = |what: &str| server.count_log(&format!("cannot accept a {what}"));
    wait_until("word of both", SOON, || said("client") != 0 && said("front-end") != 0).unwrap();
    // Who is connected is served meanwhile.
    for _ in 0..200 {
        first.run("status").unwrap();
    }
    assert!(said("client") + said("front-end") <= 30, "{}", server.stderr());
    drop(front_end);
    limit_descriptors(&server, 1 << 10);
    clients.iter_mut().for_each(|client| drop(client.run("status").unwrap()));
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
}

/// The soft limit is what a shell or a service manager gives to programs that use select(2).
#[test]
fn f62_the_soft_limit_on_descriptors_is_raised() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let [soft, hard] = [3, 4].map(|at| line.split_whitespace().nth(at).unwrap().parse().unwrap_or(u64::MAX));
    assert_eq!(soft, hard.min(1 << 16).max(soft), "{line}");
}

/// A log of one page that nobody reads.
fn pipe() -> (File, File) {
    let mut fds = [0; 2];
    // SAFETY: the two descriptors are written to the array and are nobody else's.
    let [reader, writer] = unsafe {
        assert_eq!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), 0);
        fds.map(|fd| <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd))
    };
    // SAFETY: plain numbers.
    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    (reader.into(), writer.into())
}

/// Fills a pipe, by another open file of it that does not wait.
fn fill(writer: &File) {
    let name = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let mut full = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(name).unwrap();
    while full.write(&[b'.'; 1]).is_ok() {}
}

/// A pipe whose reader has stopped, a terminal that is held: who logs does not wait for them, be it the worker that finds
/// a path failed or the loop that is told to stop.
#[test]
fn f10_f61_a_log_that_nobody_reads_holds_up_nothing() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let (mut reader, writer) = pipe();
    let log = Server::polypath().paths(fs.paths(&["a", "b"])).log_level(None).pass_fd(writer.as_raw_fd(), 2);
    let (mut server, socket) = controlled(log);
    let mut control = socket.connect().unwrap();
    control.run("status").unwrap();
    fill(&writer);
    for _ in 0..4 {
        // Each says that it came and went.
        drop(Session::negotiate(server.socket(), feature::ALL).unwrap());
    }
    let mut disk = Disk::open(server.socket()).unwrap();
    fs.rule("a", Rule::errno(libc::EIO));
    for sector in 0..16 {
        assert!(disk.q().read(sector * 8, 8).unwrap() == filled(sector * 8, 8));
    }
    wait_until("path a to be failed", SOON, || control.json().unwrap().nr_active() == 1).unwrap();
    drop(disk);
    // Read again, it says what is missing.
    let mut text = vec![0; 4096];
    assert_eq!(reader.read(&mut text).unwrap(), 4096);
    fs.clear("a");
    control.run(&format!("reinstate_path {}", fs.path("a").display())).unwrap();
    wait_until("path a to be active", SOON, || control.json().unwrap().nr_active() == 2).unwrap();
    fill(&writer);
    assert_eq!(server.terminate(Duration::from_secs(20)).unwrap(), 0);
    drop((server, writer));
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(text.contains("lines of the log left out, since nobody read them: "), "{text}");
}

/// The most that was resident of a process, without what it shares.
fn most_memory(server: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// A guest of little memory names it again and again, at addresses that direct I/O does not take: what is bounced for it
/// would be as much as the disk is long.
#[test]
fn f62_f20_bounced_requests_do_not_use_up_the_hosts_memory() {
    const PIECE: u32 = 16 << 20;
    let image = Image::empty(16 << 30);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).memory_bytes(128 * MIB).open().unwrap();
    let memory = disk.memory.clone();
    let (head, data) = (memory.alloc_with(&header(0, 0)), memory.alloc(PIECE as usize + 1));
    let mut read = |nr_requests: usize, nr_pieces: usize| -> Vec<u8> {
        let queue = &mut disk.queues[0].queue;
        let statuses: Vec<_> = (0..nr_requests).map(|_| memory.alloc_with(&[UNTOUCHED])).collect();
        let tables: Vec<_> = statuses.iter().map(|_| memory.alloc((nr_pieces + 2) * 16)).collect();
        for (status, table) in statuses.iter().zip(&tables) {
            let chain = (0..nr_pieces)
                .fold(Chain::new().readable(head.addr, 16), |chain, _| chain.writable(data.addr | 1, PIECE))
                .writable(status.addr, 1)
                .indirect(table.addr);
            queue.stage(&chain).unwrap();
        }
        queue.publish();
        queue.kick();
        for _ in 0..nr_requests {
            queue.wait(Duration::from_secs(120)).unwrap();
        }
        statuses.iter().map(|status| status.bytes()[0]).collect()
    };
    // More than any driver asks for in one: refused.
    assert_eq!(read(1, 96), [IOERR]);
    assert!(most_memory(&server) < 256 * MIB, "{} bytes", most_memory(&server));
    // Many that are large: one after the other.
    assert_eq!(read(24, 4), [OK; 24]);
    assert!(most_memory(&server) < 640 * MIB, "{} bytes", most_memory(&server));
}
