//! `polypath check`: everything that a start needs is looked at, and nothing is changed.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path as StdPath, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath_paths::text::TableSpec;
use polypath_paths::{Path, prove};
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::cli::{Options, Switch};
use crate::engine::UringEngine;
use crate::setup;
use crate::vring::RING_SIZE_MAX;

/// Descriptors that clients, paths, regions of memory and the program itself need beside those of the queues.
const NR_FDS_BASE: u64 = 1024;

/// Descriptors of a queue: kick, call and error, each for the session and for the worker, three for the wake, the ring.
const NR_FDS_QUEUE: u64 = 10;

/// Memory of a queue's ring, which counts as locked for plain users on some kernels (Linux 6.18 does it).
const RING_BYTES: u64 = 128 << 10;

/// Longest socket path: `sun_path` with its terminating 0.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weight {
    /// As it should be.
    Ok,
    /// It works, but not as one may think.
    Warning,
    /// A start fails.
    Error,
}

/// What was looked at, and what was found.
#[derive(Debug)]
pub(crate) struct Finding {
    pub weight: Weight,
    pub about: String,
    pub text: String,
}

impl Finding {
    pub(crate) fn json(&self) -> Value {
        let weight = match self.weight {
            Weight::Ok => "ok",
            Weight::Warning => "warning",
            Weight::Error => "error",
        };
        json!({ "weight": weight, "about": self.about, "text": self.text })
    }
}

/// All that was found.
#[derive(Debug, Default)]
pub(crate) struct Findings(pub Vec<Finding>);

impl Findings {
    fn add(&mut self, weight: Weight, about: impl ToString, text: impl ToString) {
        self.0.push(Finding { weight, about: about.to_string(), text: text.to_string() });
    }

    fn result(&mut self, about: &str, result: Result<String, String>) {
        match result {
            Ok(text) => self.add(Weight::Ok, about, text),
            Err(text) => self.add(Weight::Error, about, text),
        }
    }
}

/// Looks at everything for a start with these options.
pub(crate) fn check(options: &Options, spec: &TableSpec) -> Findings {
    let mut findings = Findings::default();
    sockets(options, &mut findings);
    paths(options, spec, &mut findings);
    host(options, &mut findings);
    if let Some(program) = &options.event_command {
        let result = match std::fs::metadata(program) {
            Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => {
                Ok(format!("{} can be run", program.display()))
            }
            Ok(_) => Err(format!("{} is not a program that may be run: chmod +x", program.display())),
            Err(error) => Err(format!("{}: {error}", program.display())),
        };
        findings.result("event_command", result);
    }
    findings
}

fn sockets(options: &Options, findings: &mut Findings) {
    match (&options.socket_path, options.fd) {
        (Some(path), _) => findings.result("socket_path", socket(path)),
        (None, Some(fd)) => {
            findings.add(Weight::Ok, "fd", format!("descriptor {fd} has to be given at the start"))
        }
        (None, None) => findings.add(
            Weight::Warning,
            "socket_path",
            "not set: the start needs --socket-path, --fd or a socket from systemd",
        ),
    }
    match &options.control {
        Some(path) => findings.result("control", socket(path)),
        None => findings.add(
            Weight::Warning,
            "control",
            "not set: `polypath show` and all commands need it; control = \"/run/polypath/NAME.control\"",
        ),
    }
}

/// Whether a socket can be made there. Nobody connects to it: for a front-end's socket that would be a front-end.
fn socket(path: &StdPath) -> Result<String, String> {
    let name = path.display();
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        return Err(format!(
            "{name} is longer than {SOCKET_PATH_BYTES_MAX} bytes, which no socket's name may be"
        ));
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(StdPath::new("."));
    if let Err(error) = std::fs::metadata(dir) {
        return Err(format!(
            "{}: {error}; make the directory (RuntimeDirectory=polypath in a unit)",
            dir.display()
        ));
    }
    if let Err(error) = rustix::fs::access(dir, rustix::fs::Access::WRITE_OK) {
        return Err(format!("{}: {error}; this user cannot make a socket there", dir.display()));
    }
    match std::fs::symlink_metadata(path) {
        Err(_) => Ok(format!("{name} can be made")),
        Ok(meta) if !meta.file_type().is_socket() => {
            Err(format!("{name} exists and is not a socket; it will not be removed: choose another name"))
        }
        Ok(_) if is_served(path) => Err(format!("{name} is served by a living process; it has to end first")),
        Ok(_) => Ok(format!("{name} is a dead socket and will be replaced")),
    }
}

/// Whether some process listens there, by the kernel's table (`__SO_ACCEPTCON` is 0x10000).
fn is_served(path: &StdPath) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&"00010000") && fields.get(7).is_some_and(|name| StdPath::new(name) == path)
    })
}

fn paths(options: &Options, spec: &TableSpec, findings: &mut Findings) {
    let mut opened: Vec<Arc<Path>> = Vec::new();
    let mut names: Vec<PathBuf> = Vec::new();
    for path in spec.paths() {
        let name = PathBuf::from(&path.device);
        if names.contains(&name) {
            continue;
        }
        names.push(name.clone());
        let about = format!("path {}", name.display());
        match open(options, &name) {
            Ok(path) => {
                findings.add(Weight::Ok, &about, described(&path));
                opened.push(path);
            }
            Err(why) => findings.add(Weight::Error, &about, why),
        }
    }
    if let Some(first) = opened.first() {
        together(options, spec, first, &opened, findings);
    }
    if names.len() == 1 {
        findings.add(Weight::Warning, "table", "one path only: when it fails there is no other");
    }
    if options.direct == Switch::Off && names.len() > 1 {
        findings.add(
            Weight::Error,
            "direct",
            "off is for a single regular file: two page caches cannot be kept the same",
        );
    }
    for (index, name) in names.iter().enumerate() {
        let real = |name: &PathBuf| name.canonicalize().ok();
        if let Some(other) =
            names.iter().take(index).find(|other| real(other).is_some() && real(other) == real(name))
        {
            let text = format!("is the same file name as {}: no redundancy", other.display());
            findings.add(Weight::Warning, format!("path {}", name.display()), text);
        }
    }
}

/// Opens a path and reads its first block, which may take longer than anybody waits.
fn open(options: &Options, name: &StdPath) -> Result<Arc<Path>, String> {
    let (sender, receiver) = mpsc::channel();
    let (open, owned) = (setup::open_options(options), name.to_owned());
    let spawned = std::thread::Builder::new().name("check".into()).spawn(move || {
        let opened = Path::open(owned, open, 1).map_err(|error| explained(&error.to_string()));
        let _ = sender.send(opened.and_then(|path| crate::probe::read_block(&path).map(|()| path)));
    });
    spawned.map_err(|error| error.to_string())?;
    match receiver.recv_timeout(Duration::from_millis(options.path_timeout)) {
        Ok(opened) => opened.map(Arc::new),
        Err(_) => Err(format!(
            "gives no answer within {} ms (path_timeout): is its storage there?",
            options.path_timeout
        )),
    }
}

fn explained(error: &str) -> String {
    let advice = if error.contains("Permission denied") {
        "; this user needs to read and write it: a group (disk), an ACL, or User= in the unit"
    } else if error.contains("No such file") {
        "; is the device attached, and is this its name on this host? (/dev/disk/by-id and by-path stay the same)"
    } else if error.contains("busy") {
        "; something else holds it: multipathd (blacklist it there), LVM or a mount"
    } else {
        ""
    };
    format!("{error}{advice}")
}

fn described(path: &Path) -> String {
    let limits = path.limits();
    format!(
        "{} bytes, blocks of {} ({} physical), buffers aligned to {}, discard {}, {}",
        limits.size_bytes,
        limits.logical_block_bytes,
        limits.physical_block_bytes,
        limits.mem_align_bytes,
        if limits.discard { "yes" } else { "no" },
        path.identity(),
    )
}

/// What holds among the paths.
fn together(options: &Options, spec: &TableSpec, first: &Path, all: &[Arc<Path>], findings: &mut Findings) {
    let size_bytes = first.limits().size_bytes;
    for path in all.iter().skip(1) {
        let about = format!("path {}", path.name().display());
        let proof = prove(path, first.identity(), size_bytes, Some(first));
        match proof {
            Ok(()) => {}
            Err(error) if options.trust_paths => {
                let text = format!(
                    "against {}: {error}; trust_paths lets it be used: if it is another disk, data will be destroyed",
                    first.name().display()
                );
                findings.add(Weight::Warning, about, text);
            }
            Err(error) => {
                findings.add(Weight::Error, about, format!("against {}: {error}", first.name().display()))
            }
        }
        if path.limits().logical_block_bytes != first.limits().logical_block_bytes {
            let text = "its blocks have another size than the first path's: the larger counts for the guest";
            findings.add(Weight::Warning, format!("path {}", path.name().display()), text);
        }
    }
    if all.iter().any(|path| path.limits().discard) && !all.iter().all(|path| path.limits().discard) {
        findings.add(Weight::Warning, "table", "not every path can discard: the guest is not offered it");
    }
    if let Some(sectors) = spec.length_sectors
        && sectors != size_bytes / 512
    {
        let text = format!("length_sectors is {sectors}, but the paths have {}", size_bytes / 512);
        findings.add(Weight::Error, "table", text);
    }
}

fn host(options: &Options, findings: &mut Findings) {
    let result = match UringEngine::probe(u32::from(RING_SIZE_MAX)) {
        Ok(()) => Ok("io_uring works with the largest ring".to_owned()),
        Err(error) => {
            let knob = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            let knob = knob.trim();
            Err(format!(
                "{error}; kernel.io_uring_disabled is {}, which has to be 0 (or 1 with CAP_SYS_ADMIN or the group of \
                 io_uring_group); a container's seccomp profile may forbid it as well",
                if knob.is_empty() { "not there (Linux before 6.6)" } else { knob }
            ))
        }
    };
    findings.result("io_uring", result);
    if options.sqpoll_idle_ms != 0 {
        let (weight, text) = match UringEngine::probe_polled(u32::from(RING_SIZE_MAX), options.sqpoll_idle_ms)
        {
            Ok(()) => (Weight::Ok, "a thread of the kernel's can send for a ring".to_owned()),
            Err(error) => {
                (Weight::Warning, format!("{error}; calls send in place of a thread of the kernel's"))
            }
        };
        findings.add(weight, "sqpoll_idle_ms", text);
    }
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let (memlock, rings) = (getrlimit(Resource::Memlock).current, RING_BYTES * u64::from(options.num_queues));
    match memlock {
        Some(limit) if limit < rings => findings.add(
            Weight::Warning,
            "memlock",
            format!(
                "{limit} bytes may be locked; where the kernel counts rings against that, {rings} are needed when all \
                 queues are used: ulimit -l, or LimitMEMLOCK= in the unit"
            ),
        ),
        _ => findings.add(Weight::Ok, "memlock", format!("{} bytes may be locked, {rings} at most are needed", shown(memlock))),
    }
    let needed = NR_FDS_BASE + NR_FDS_QUEUE * u64::from(options.num_queues);
    // The soft limit is raised at the start.
    let nofile = getrlimit(Resource::Nofile).maximum;
    match nofile {
        Some(limit) if limit < needed => findings.add(
            Weight::Warning,
            "nofile",
            format!("{limit} descriptors are allowed; {needed} may be needed: ulimit -Hn, or LimitNOFILE= in the unit"),
        ),
        _ => findings.add(Weight::Ok, "nofile", format!("{} descriptors are allowed, {needed} at most are needed", shown(nofile))),
    }
}
