//! The server side: a FUSE file system of one file under several names.

use std::collections::BinaryHeap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fuser::{
    Errno, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite,
};

use super::cache::Cache;
use super::names::{Fate, Name, read_full};
use super::power;
use super::rule::{Answer, Command, Kind, Op};

/// `st_ino` of every name at first.
pub(super) const SHARED_INO: u64 = 4242;
/// Node ids below this belong to the root.
pub(super) const FIRST_NODE: u64 = 2;
/// A log that nobody reads must not eat the machine.
const LOG_MAX: usize = 1_000_000;

/// Who waits for the outcome of a job.
#[derive(Debug)]
pub(super) enum Work {
    Read { size: usize, reply: ReplyData },
    Write { data: Vec<u8>, reply: ReplyWrite },
    Fsync { reply: ReplyEmpty },
    Fallocate { reply: ReplyEmpty },
    Open { reply: ReplyOpen },
    Stat { reply: ReplyAttr },
}

#[derive(Debug)]
pub(super) struct Job {
    pub kind: Kind,
    pub name: usize,
    pub offset: u64,
    pub len: u64,
    pub fh: u64,
    pub mode: i32,
    pub work: Work,
}

#[derive(Debug)]
pub(super) struct Kept {
    job: Job,
    fate: Fate,
    log: Option<(u64, usize)>,
    /// A sync covers what was written before it came.
    mark: u64,
    /// When the power last went: what came before is not done after.
    nr_cuts: u64,
}

#[derive(Debug)]
pub(super) struct Delayed {
    due: Instant,
    pub kept: Kept,
}

impl PartialEq for Delayed {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}
impl Eq for Delayed {}
impl PartialOrd for Delayed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Delayed {
    // The heap gives its greatest: that is the one due first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.due.cmp(&self.due)
    }
}

#[derive(Debug)]
pub(super) struct Core {
    pub names: Vec<Name>,
    pub next_fh: u64,
    order: u64,
    logging: bool,
    log: Vec<Op>,
    /// Grows with each clearing, so that a late completion does not mark an entry of the new log.
    log_age: u64,
    pub held: Vec<Kept>,
    pub delayed: BinaryHeap<Delayed>,
    pub cache: Option<Cache>,
    /// The storage has no power.
    pub is_off: bool,
    pub nr_cuts: u64,
}

impl Core {
    fn tick(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    fn find(&mut self, name: &str) -> Result<&mut Name, String> {
        self.names.iter_mut().find(|n| n.name == name).ok_or_else(|| format!("no name {name}"))
    }

    fn log_arrival(&mut self, job: &Job) -> Option<(u64, usize)> {
        let order = self.tick();
        if !self.logging || self.log.len() >= LOG_MAX {
            return None;
        }
        let name = self.names[job.name].name.clone();
        let Job { kind, offset, len, fh, mode, .. } = *job;
        self.log.push(Op { order, done: None, name, kind, offset, len, fh, mode, result: 0 });
        Some((self.log_age, self.log.len() - 1))
    }

    fn log_done(&mut self, log: Option<(u64, usize)>, result: i64) {
        let done = self.tick();
        if let Some((age, at)) = log
            && age == self.log_age
        {
            self.log[at].done = Some(done);
            self.log[at].result = result;
        }
    }
}

/// Everything that the file system's threads share.
#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    timer: Condvar,
    backing: PathBuf,
}

impl Shared {
    pub fn new(backing: PathBuf, names: Vec<String>) -> io::Result<Arc<Self>> {
        let file = Arc::new(File::options().read(true).write(true).open(&backing)?);
        let names = names.into_iter().map(|name| Name::new(name, Arc::clone(&file), SHARED_INO)).collect();
        let core = Core {
            names,
            next_fh: 1,
            order: 0,
            logging: true,
            log: Vec::new(),
            log_age: 0,
            held: Vec::new(),
            delayed: BinaryHeap::new(),
            cache: None,
            is_off: false,
            nr_cuts: 0,
        };
        let shared = Arc::new(Self { core: Mutex::new(core), timer: Condvar::new(), backing });
        let for_timer = Arc::clone(&shared);
        std::thread::Builder::new().name("delays".into()).spawn(move || for_timer.serve_delays())?;
        Ok(shared)
    }

    pub fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().expect("no thread panics with the lock")
    }

    /// Index of a node id among the names.
    pub fn index(ino: INodeNo) -> Option<usize> {
        usize::try_from(ino.0.checked_sub(FIRST_NODE)?).ok()
    }

    pub fn lookup(&self, name: &OsStr) -> Option<usize> {
        self.core().names.iter().position(|n| OsStr::new(&n.name) == name && !n.gone)
    }

    /// Takes an operation in: the rules decide whether it is done now, later or never.
    pub fn arrive(&self, job: Job) {
        let mut core = self.core();
        let name = &mut core.names[job.name];
        name.count(job.kind);
        let fate = name.fate(job.kind, job.offset, job.len);
        let log = core.log_arrival(&job);
        let mark = core.cache.as_ref().map_or(0, Cache::mark);
        let kept = Kept { job, fate, log, mark, nr_cuts: core.nr_cuts };
        let next_fh = core.next_fh + 1;
        if let Some(cache) = &mut core.cache
            && (fate.errno.is_some() || fate.hold)
        {
            cache.lose(kept.job.name, next_fh);
        }
        if core.is_off {
            drop(core);
            self.perform(kept);
        } else if fate.hold {
            core.names[kept.job.name].counts.held += 1;
            core.held.push(kept);
        } else if fate.delay_ms > 0 {
            core.delayed.push(Delayed { due: Instant::now() + Duration::from_millis(fate.delay_ms), kept });
            self.timer.notify_one();
        } else {
            drop(core);
            self.perform(kept);
        }
    }

    fn serve_delays(&self) {
        let mut core = self.core();
        loop {
            let Some(first) = core.delayed.peek() else {
                core = self.timer.wait(core).expect("no thread panics with the lock");
                continue;
            };
            let wait = first.due.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                let kept = core.delayed.pop().expect("just seen").kept;
                drop(core);
                self.perform(kept);
                core = self.core();
            } else {
                core = self.timer.wait_timeout(core, wait).expect("no thread panics with the lock").0;
            }
        }
    }

    fn perform(&self, Kept { job, fate, log, mark, nr_cuts }: Kept) {
        let mut data = Vec::new();
        let outcome = match fate.errno {
            Some(errno) => Err(errno),
            None => self
                .execute(&job, fate.short, (mark, nr_cuts), &mut data)
                .map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)),
        };
        let attr = {
            let mut core = self.core();
            let name = &mut core.names[job.name];
            name.counts.refused += u64::from(fate.errno.is_some());
            name.counts.open += u64::from(job.kind == Kind::Open && outcome.is_ok());
            let attr = super::fs::attr(name);
            let result =
                outcome.map_or_else(|errno| -i64::from(errno), |n| i64::try_from(n).unwrap_or(i64::MAX));
            core.log_done(log, result);
            attr
        };
        let outcome = outcome.map_err(Errno::from_i32);
        match (job.work, outcome) {
            (Work::Read { reply, .. }, Ok(_)) => reply.data(&data),
            (Work::Read { reply, .. }, Err(e)) => reply.error(e),
            (Work::Write { reply, .. }, Ok(n)) => reply.written(u32::try_from(n).expect("a write fits")),
            (Work::Write { reply, .. }, Err(e)) => reply.error(e),
            (Work::Fsync { reply } | Work::Fallocate { reply }, Ok(_)) => reply.ok(),
            (Work::Fsync { reply } | Work::Fallocate { reply }, Err(e)) => reply.error(e),
            (Work::Open { reply }, Ok(_)) => {
                let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
                reply.opened(FileHandle(job.fh), flags);
            }
            (Work::Open { reply }, Err(e)) => reply.error(e),
            (Work::Stat { reply }, Ok(_)) => match attr {
                Ok(attr) => reply.attr(&Duration::ZERO, &attr),
                Err(e) => reply.error(e.into()),
            },
            (Work::Stat { reply }, Err(e)) => reply.error(e),
        }
    }

    fn execute(
        &self,
        job: &Job,
        short: Option<usize>,
        (mark, nr_cuts): (u64, u64),
        out: &mut Vec<u8>,
    ) -> io::Result<usize> {
        let mut core = self.core();
        if core.is_off || core.nr_cuts != nr_cuts {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        if core.cache.is_some() && !core.names[job.name].foreign {
            return power::execute(&mut core, job, short, mark, out);
        }
        let name = &mut core.names[job.name];
        let (cached, file) = (name.caches(), Arc::clone(&name.file));
        match &job.work {
            Work::Read { size, .. } => {
                out.resize((*size).min(short.unwrap_or(usize::MAX)), 0);
                let got = if cached {
                    name.read(job.offset, out)?
                } else {
                    drop(core);
                    read_full(&file, job.offset, out)?
                };
                out.truncate(got);
                Ok(got)
            }
            Work::Write { data, .. } => {
                let data = &data[..data.len().min(short.unwrap_or(usize::MAX))];
                if cached {
                    name.write(job.offset, data)?;
                    if job.mode & libc::O_DSYNC != 0 {
                        name.sync()?;
                    }
                } else {
                    drop(core);
                    file.write_all_at(data, job.offset)?;
                }
                Ok(data.len())
            }
            Work::Fsync { .. } => name.sync().map(|()| 0),
            Work::Fallocate { .. } => {
                name.sync()?;
                drop(core);
                let [offset, len] =
                    [job.offset, job.len].map(|n| libc::off_t::try_from(n).unwrap_or(libc::off_t::MAX));
                // SAFETY: plain numbers and a descriptor that `file` keeps open.
                match unsafe { libc::fallocate(file.as_raw_fd(), job.mode, offset, len) } {
                    0 => Ok(0),
                    _ => Err(io::Error::last_os_error()),
                }
            }
            Work::Open { .. } | Work::Stat { .. } => Ok(0),
        }
    }

    /// Carries out a line of the control protocol.
    pub fn command(&self, command: Command) -> Answer {
        self.try_command(command).unwrap_or_else(Answer::Failed)
    }

    fn try_command(&self, command: Command) -> Result<Answer, String> {
        let text = |e: io::Error| e.to_string();
        let mut core = self.core();
        match command {
            Command::Rule { name, rule } => core.find(&name)?.add_rule(rule),
            Command::ClearRules { name } => core.find(&name)?.clear_rules(),
            Command::Release { name, errno, nr } => {
                if nr.is_none() {
                    core.find(&name)?.clear_holds();
                }
                let free = take_held(&mut core, &name, nr.unwrap_or(usize::MAX));
                drop(core);
                for mut kept in free {
                    kept.fate.errno = errno.or(kept.fate.errno);
                    self.perform(kept);
                }
            }
            Command::Counts { name } => return Ok(Answer::Counts(core.find(&name)?.counts)),
            Command::Log => return Ok(Answer::Log(core.log.clone())),
            Command::ClearLog => {
                core.log.clear();
                core.log_age += 1;
            }
            Command::Logging(on) => core.logging = on,
            Command::WriteBack { name, on } => core.find(&name)?.set_write_back(on).map_err(text)?,
            Command::ForgetUnsynced { name } => core.find(&name)?.forget_unsynced(),
            Command::Cache { model } => core.cache = Some(Cache::new(model)),
            Command::PowerOff { seed } => {
                let kept = power::off(&mut core, seed)?;
                drop(core);
                kept.into_iter().for_each(|kept| self.perform(kept));
            }
            Command::PowerOn => core.is_off = false,
            Command::Size { name, size } => core.find(&name)?.size = size,
            Command::Inode { name, ino } => core.find(&name)?.ino = ino,
            Command::Backing { name, file } => {
                let foreign = file != self.backing;
                let file = File::options().read(true).write(true).open(file).map_err(text)?;
                let name = core.find(&name)?;
                (name.file, name.foreign) = (Arc::new(file), foreign);
            }
            Command::Add { name } => match core.find(&name) {
                Ok(old) => old.gone = false,
                Err(_) => {
                    let file = File::options().read(true).write(true).open(&self.backing).map_err(text)?;
                    core.names.push(Name::new(name, Arc::new(file), SHARED_INO));
                }
            },
            Command::Remove { name } => core.find(&name)?.gone = true,
        }
        Ok(Answer::Done)
    }
}

/// The oldest `nr` operations held on `name`, no longer held.
fn take_held(core: &mut Core, name: &str, nr: usize) -> Vec<Kept> {
    let Some(index) = core.names.iter().position(|n| n.name == name) else { return Vec::new() };
    let (mut free, mut rest) = (Vec::new(), Vec::new());
    for kept in core.held.drain(..) {
        if kept.job.name == index && free.len() < nr { free.push(kept) } else { rest.push(kept) }
    }
    core.held = rest;
    core.names[index].counts.held -= free.len() as u64;
    free
}

pub(super) fn entry_ok(reply: ReplyEntry, attr: io::Result<fuser::FileAttr>) {
    match attr {
        // No caching of names or attributes: each look reaches the server, as it would on a network file system.
        Ok(attr) => reply.entry_with_ttls(&Duration::ZERO, &Duration::ZERO, &attr, fuser::Generation(0)),
        Err(e) => reply.error(e.into()),
    }
}
