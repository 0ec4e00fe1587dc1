//! What the tests of several paths share: a served file under FUSE names, the command socket, load that goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use polypath_vm_tests::control::{Control, Socket, Status};
use polypath_vm_tests::faulty::FaultyFs;
use polypath_vm_tests::front_end::verify::{Plan, Report, Verifier};
use polypath_vm_tests::front_end::{BlkQueue, Disk, Memory, Region, Session};
use polypath_vm_tests::server::{Builder, Server, wait_for, wait_until};

use crate::common::{Image, MIB, SOON};

/// Every path of the rig, each a name of one mount.
pub struct Rig {
    // Before the server in the order of drops: a process cannot end while the kernel waits for what a path holds.
    pub fs: FaultyFs,
    pub server: Server,
    pub image: Image,
    pub socket: Socket,
}

impl Rig {
    /// Serves `names` on `image`, with these further arguments.
    pub fn start(image: Image, names: &[&str], args: &[&str]) -> Self {
        let fs = FaultyFs::mount(&image.path, names).unwrap();
        Self::start_on(image, fs, names, args)
    }

    /// The same on a mount that is there.
    pub fn start_on(image: Image, fs: FaultyFs, names: &[&str], args: &[&str]) -> Self {
        let builder = Server::polypath().paths(fs.paths(names));
        Self::start_with(image, fs, args.iter().fold(builder, Builder::arg))
    }

    /// The same with all options but the command socket in `builder`.
    pub fn start_with(image: Image, fs: FaultyFs, builder: Builder) -> Self {
        let (server, socket) = controlled(builder);
        Self { server, fs, image, socket }
    }

    /// A front-end with so many queues.
    pub fn disk(&self, queues: u16) -> Disk {
        Disk::at(self.server.socket()).queues(queues).open().unwrap()
    }

    /// A connection to the command socket.
    pub fn control(&self) -> Control {
        self.socket.connect().unwrap()
    }

    /// What is running.
    pub fn status(&self) -> Status {
        self.control().json().unwrap()
    }

    /// A command about one of the names, such as `fail_path`.
    pub fn tell(&self, command: &str, name: &str) {
        self.control().run(&format!("{command} {}", self.dev(name))).unwrap();
    }

    /// The file of a name, as a word.
    pub fn dev(&self, name: &str) -> String {
        self.fs.path(name).display().to_string()
    }

    pub fn is_active(&self, name: &str) -> bool {
        self.status().is_active(&self.fs.path(name))
    }

    /// Waits until a path is active, or is not.
    pub fn wait_active(&self, name: &str, active: bool) {
        let what = format!("path {name} to be {}", if active { "active" } else { "failed" });
        let mut control = self.control();
        let path = self.fs.path(name);
        wait_until(&what, SOON, || control.json().unwrap().is_active(&path) == active)
            .unwrap_or_else(|e| panic!("{e:#}\n{}", self.server.stderr()));
    }

    /// Waits until the status is as wanted.
    pub fn wait_status(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let mut control = self.control();
        let found = wait_for(what, SOON, || Some(control.json().unwrap()).filter(&wanted));
        found.unwrap_or_else(|e| {
            let now = control.json().unwrap();
            let line = control.run("status").unwrap();
            panic!("{e:#}\n{line}\nheld: {}\n{}", now.0["held"], self.server.stderr())
        })
    }

    /// Waits until so many more requests have come by a name.
    pub fn wait_used(&self, name: &str, more: u64) {
        let goal = self.fs.counts(name).data() + more;
        wait_until(&format!("{more} requests by {name}"), SOON, || self.fs.counts(name).data() >= goal)
            .unwrap_or_else(|e| panic!("{e:#}\n{}", self.server.stderr()));
    }

    /// Takes a path out and puts it back by hand, so that its failures of the past do not count.
    pub fn forgive(&self, name: &str) {
        self.tell("fail_path", name);
        self.tell("reinstate_path", name);
        self.wait_active(name, true);
    }
}

/// Starts polypath with a command socket.
pub fn controlled(builder: Builder) -> (Server, Socket) {
    let socket = Socket::new().unwrap();
    let server = builder.arg("--control").arg(socket.path()).start().unwrap();
    (server, socket)
}

/// Tells other threads to end, also when this one panics: or they would be waited for without end.
pub struct SetAtEnd<'a>(pub &'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How far each queue has come, seen from beside the threads that load them.
pub struct Progress {
    memory: Arc<Memory>,
    used: Vec<u64>,
}

impl Progress {
    pub fn of(disk: &Disk) -> Self {
        let region = &disk.memory.regions()[0];
        let guest = |user: u64| user - region.user() + region.guest;
        let used = disk.queues.iter().map(|q| guest(q.queue.user_addresses()[2])).collect();
        Self { memory: Arc::clone(&disk.memory), used }
    }

    /// The used index of each queue.
    fn indices(&self) -> Vec<u16> {
        self.used.iter().map(|used| self.memory.load_u16(used + 2)).collect()
    }

    /// Waits until every queue has answered so many more requests.
    pub fn wait(&self, more: u16, timeout: Duration) -> anyhow::Result<()> {
        let before = self.indices();
        let more_of =
            |now: Vec<u16>| now.iter().zip(&before).map(|(n, b)| n.wrapping_sub(*b)).collect::<Vec<_>>();
        wait_until(&format!("{more} answers on each queue"), timeout, || {
            more_of(self.indices()).iter().all(|n| *n >= more)
        })
        .map_err(|e| e.context(format!("answered meanwhile: {:?}", more_of(self.indices()))))
    }
}

/// A load on each queue, with its own verifier.
pub fn start_loads<'scope>(
    scope: &'scope Scope<'scope, '_>,
    queues: &'scope mut [BlkQueue],
    verifiers: &'scope mut [Verifier],
    plan: &'scope Plan<'_>,
) -> Vec<ScopedJoinHandle<'scope, anyhow::Result<Report>>> {
    let start = |(q, verifier): (&'scope mut BlkQueue, &'scope mut Verifier)| {
        // Said at once: it may be why the events do not go as they should.
        scope.spawn(move || verifier.run(q, plan).inspect_err(|e| eprintln!("load: {e:#}")))
    };
    queues.iter_mut().zip(verifiers).map(start).collect()
}

/// Lets a region of guest memory come and go, by whole tables or by itself.
pub fn change_memory(session: &Session, memory: &Memory, by_tables: bool) {
    let region = memory.add(Region::new(memory.end() + MIB, MIB, 0).unwrap());
    if by_tables {
        session.set_mem_table(memory).unwrap();
        memory.remove(region.guest);
        session.set_mem_table(memory).unwrap();
    } else {
        session.add_region(&region).unwrap();
        session.remove_region(&region).unwrap();
        memory.remove(region.guest);
    }
}

/// Loads all queues, each on its own part of the disk, while `events` runs; then lets the load end and checks all data,
/// by the disk and in the file.
pub fn under_load(disk: &mut Disk, image: &Image, plan: Plan, events: impl FnOnce(&Progress)) -> Report {
    let mut verifiers = Verifier::share(image.sectors(), disk.queues.len(), image.sectors());
    let stop = AtomicBool::new(false);
    let plan = Plan { requests: u64::MAX, stop: Some(&stop), ..plan };
    let progress = Progress::of(disk);
    for q in &mut disk.queues {
        q.timeout = Duration::from_secs(30);
    }
    let mut sum = Report::default();
    std::thread::scope(|scope| {
        let loads = start_loads(scope, &mut disk.queues, &mut verifiers, &plan);
        let stop_at_end = SetAtEnd(&stop);
        progress.wait(50, SOON).unwrap();
        events(&progress);
        drop(stop_at_end);
        for load in loads {
            let report = load.join().unwrap().unwrap_or_else(|e| panic!("{e:#}"));
            sum.answered += report.answered;
            sum.writes += report.writes;
            sum.errors += report.errors;
            sum.latency_max = sum.latency_max.max(report.latency_max);
        }
    });
    for (q, verifier) in disk.queues.iter_mut().zip(&mut verifiers) {
        assert_eq!(q.nr_pending(), 0);
        verifier.check_all(q).unwrap();
        q.flush().unwrap();
        verifier.check_file(&image.path).unwrap();
    }
    sum
}

/// Two mounts of one file, `a` and `b`: their servers can be stopped one by one. They do not prove to be one disk, so the
/// program is told to trust them.
pub struct Two {
    // As in `Rig`.
    pub a: FaultyFs,
    pub b: FaultyFs,
    pub server: Server,
    pub socket: Socket,
    pub paths: [PathBuf; 2],
}

impl Two {
    pub fn start(image: &Image, args: &[&str]) -> Self {
        let mount = |name| FaultyFs::mount(&image.path, &[name]).unwrap();
        let (a, b) = (mount("a"), mount("b"));
        [&a, &b].iter().for_each(|fs| fs.logging(false));
        let paths = [a.path("a"), b.path("b")];
        let builder = Server::polypath().paths(&paths).arg("--trust-paths");
        let (server, socket) = controlled(args.iter().fold(builder, Builder::arg));
        Self { a, b, server, socket, paths }
    }

    /// A front-end with so many queues.
    pub fn disk(&self, queues: u16) -> Disk {
        Disk::at(self.server.socket()).queues(queues).open().unwrap()
    }

    /// Waits until path `a` is active, or is not.
    pub fn wait_a(&self, active: bool) {
        let mut control = self.socket.connect().unwrap();
        let what = format!("path a to be {}", if active { "active" } else { "failed" });
        wait_until(&what, SOON, || control.json().unwrap().is_active(&self.paths[0]) == active)
            .unwrap_or_else(|e| panic!("{e:#}\n{}", self.server.stderr()));
    }
}
