//! What both forms of the soak are served from: names of one file that fail on demand, the back-end's configuration and its
//! start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::control::Control;
use crate::faulty::{CacheModel, FaultyFs};
use crate::front_end::verify::Rng;
use crate::server::{Builder, Server};

/// Names of the storage, two in each group.
pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Anything that should happen at once, on a machine that has much else to do.
pub const SOON: Duration = Duration::from_secs(20);

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How the storage's cache behaves.
    pub model: CacheModel,
    /// Whether the guest has chosen write through.
    pub write_through: bool,
    /// Size of the disk.
    pub bytes: u64,
    /// How long a path may keep a request before it is taken out, in ms.
    pub path_timeout_ms: u64,
    pub(super) selectors: [&'static str; 2],
    pub(super) failback: &'static str,
}

impl Setup {
    /// Everything from a seed.
    pub fn random(rng: &mut Rng) -> Self {
        let mut pick =
            |words: &[&'static str]| words[usize::try_from(rng.below(words.len() as u64)).expect("small")];
        let selectors = [
            "round-robin",
            "queue-length",
            "service-time",
            "historical-service-time",
            "learned-service-time",
        ];
        let selectors = [pick(&selectors), pick(&selectors)];
        let failback = pick(&["manual", "immediate", "followover", "1"]);
        let model = if rng.percent(50) { CacheModel::Lun } else { CacheModel::Port };
        // With a cache for each port the storage must know of every path that is given up: none is for its slowness.
        let path_timeout_ms = if model == CacheModel::Lun { 200 } else { 60_000 };
        let write_through = rng.percent(20);
        Self { model, write_through, bytes: 8 << 20, path_timeout_ms, selectors, failback }
    }

    /// The configuration file of a back-end that is served by `fs`.
    pub fn config(&self, fs: &FaultyFs) -> String {
        let Self { path_timeout_ms, failback, .. } = self;
        let mut text = format!(
            "path_timeout = {path_timeout_ms}\nfailback = {failback:?}\n[table]\nno_path_retry = 600\n"
        );
        for (names, selector) in NAMES.chunks(2).zip(self.selectors) {
            text += &format!("[[table.group]]\nselector = {selector:?}\n");
            for name in names {
                text += &format!("[[table.group.path]]\ndevice = {:?}\n", fs.path(name));
            }
        }
        text
    }
}

/// Where a back-end listens: it moves between several places of one directory.
#[derive(Clone, Debug)]
pub struct Place {
    dir: PathBuf,
    number: usize,
}

impl Place {
    /// The first one of a directory, which also has the file `config`.
    pub fn first(dir: &Path) -> Self {
        Self { dir: dir.into(), number: 0 }
    }

    /// The one that it moves to.
    #[must_use]
    pub fn next(&self) -> Self {
        Self { dir: self.dir.clone(), number: 1 - self.number }
    }

    /// For front-ends.
    pub fn socket(&self) -> PathBuf {
        self.dir.join(format!("sock{}", self.number))
    }

    /// For commands.
    pub fn control(&self) -> PathBuf {
        self.dir.join(format!("control{}", self.number))
    }

    /// A back-end that is to listen here.
    pub fn back_end(&self, queues: u16) -> Builder {
        let builder = Server::polypath().socket(self.socket()).num_queues(queues.into());
        builder.arg("--control").arg(self.control()).arg("--config").arg(self.dir.join("config"))
    }
}

/// The paths, and whom to tell of them.
#[derive(Clone, Debug)]
pub struct Storage<'a> {
    /// The file under its names.
    pub fs: &'a FaultyFs,
    /// How its cache behaves.
    pub model: CacheModel,
    /// The back-end's command socket.
    pub control: PathBuf,
}

impl Storage<'_> {
    /// A connection to the command socket.
    pub fn control(&self) -> Result<Control> {
        Control::connect(&self.control)
    }

    /// The file of a name.
    pub fn dev(&self, name: &str) -> String {
        self.fs.path(name).display().to_string()
    }

    /// Nothing fails or hangs by a rule any more.
    pub fn mend(&self) {
        for name in NAMES {
            self.fs.clear(name);
            self.fs.release(name);
        }
    }

    /// Requests that came by any name so far.
    pub fn nr_requests(&self) -> u64 {
        NAMES.iter().map(|name| self.fs.counts(name).data()).sum()
    }
}
