//! Probing a path: an aligned read of its first block, on a thread of its own, since it may hang for ever.
//!
//! At most one thread per path is out: the checker does not begin another probe before the last one has answered.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Weak, mpsc};

use polypath_paths::{Identity, OpenOptions, Path, Seed, prove};

use crate::helper;
use crate::sandbox::{self, Kind};

/// What a probe found.
#[derive(Debug)]
pub(crate) struct ProbeResult {
    /// The number that the probe was given.
    pub id: u64,
    /// The path's name.
    pub name: PathBuf,
    /// The path, opened anew if that was asked for; or why it does not work.
    pub found: Result<Option<Arc<Path>>, String>,
    /// The size that it shows, if it could be asked.
    pub size_bytes: Option<u64>,
}

/// What a path says of its size: its name, and the bytes or why it does not say.
pub(crate) type SizeResult = (PathBuf, Result<u64, String>);

/// What a path that is opened has to prove.
#[derive(Debug)]
pub(crate) struct Expected {
    /// The disk that it must lead to; None: it is trusted.
    pub identity: Option<Identity>,
    /// Size of the disk.
    pub size_bytes: u64,
    /// A path to compare contents with where identifiers do not tell.
    pub reference: Option<Weak<Path>>,
}

impl Expected {
    /// Opens a path and has it proved; by the helper, if there is one.
    fn open(&self, seed: Seed) -> Result<Path, String> {
        if let Some(helper) = helper::client() {
            let reference =
                self.reference.as_ref().and_then(Weak::upgrade).map(|path| path.name().to_owned());
            let (name, size_bytes) = (seed.name().to_owned(), self.size_bytes);
            let opened = helper.open(name, seed.options(), size_bytes, reference)?;
            return Ok(seed.grow(opened));
        }
        let path = seed.open().map_err(|error| error.to_string())?;
        read_block(&path)?;
        self.check(&path)?;
        Ok(path)
    }

    fn check(&self, path: &Path) -> Result<(), String> {
        match &self.identity {
            Some(identity) => {
                // Taken hold of only if it is needed: the path may be on its way out while this one hangs.
                let differs = path.identity() != identity;
                let reference = self.reference.as_ref().filter(|_| differs).and_then(Weak::upgrade);
                prove(path, identity, self.size_bytes, reference.as_deref())
                    .map_err(|error| format!("refused: {error}"))
            }
            None => Ok(()),
        }
    }
}

/// Probes `path` on its own descriptor, or, if `reopen` says what to expect, on a new one. The answer goes into `results`, then `done` is
/// called.
pub(crate) fn probe(
    id: u64,
    path: Arc<Path>,
    reopen: Option<Expected>,
    results: mpsc::Sender<ProbeResult>,
    done: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    spawn(move || {
        let name = path.name().to_owned();
        let mut size_bytes = None;
        let found = if let Some(expected) = reopen {
            // The old descriptor is not kept open for the sake of the probe.
            let seed = path.seed();
            drop(path);
            expected.open(seed).map(|new| {
                size_bytes = Some(new.limits().size_bytes);
                Some(Arc::new(new))
            })
        } else {
            // A size that cannot be asked is no reason to leave a path out that reads.
            read_block(&path).map(|()| size_bytes = path.shown_size_bytes().ok()).map(|()| None)
        };
        let _ = results.send(ProbeResult { id, name, found, size_bytes });
        done();
    })
}

/// Opens a path that is to be added. The answer goes into `results`, then `done` is called.
pub(crate) fn open(
    id: u64,
    name: PathBuf,
    options: OpenOptions,
    nr_workers: usize,
    expected: Expected,
    results: mpsc::Sender<ProbeResult>,
    done: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    spawn(move || {
        let found =
            expected.open(Seed::new(name.clone(), options, nr_workers)).map(|path| Some(Arc::new(path)));
        let _ = results.send(ProbeResult { id, name, found, size_bytes: None });
        done();
    })
}

/// Asks a path for its size. The answer goes into `results`, then `done` is called.
pub(crate) fn size(
    path: Arc<Path>,
    results: mpsc::Sender<SizeResult>,
    done: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    spawn(move || {
        let name = path.name().to_owned();
        let found = path.shown_size_bytes().map_err(|error| error.to_string());
        drop(path);
        let _ = results.send((name, found));
        done();
    })
}

/// Closes a path that nothing else uses: the file system may have to be asked. `done` is called afterwards.
pub(crate) fn close(path: Arc<Path>, done: impl FnOnce() + Send + 'static) -> io::Result<()> {
    spawn(move || {
        drop(path);
        done();
    })
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name("probe".into())
        .stack_size(128 << 10)
        .spawn(move || {
            sandbox::confine(Kind::Probe);
            run();
        })
        .map(drop)
}

pub(crate) fn read_block(path: &Path) -> Result<(), String> {
    let limits = path.limits();
    if limits.kind.is_null() {
        return Ok(());
    }
    let len = limits.logical_block_bytes as usize;
    let align = (limits.mem_align_bytes as usize).max(len);
    let mut buffer = vec![0; len + align];
    let start = buffer.as_ptr().align_offset(align);
    let block = buffer.get_mut(start..start + len).ok_or("no aligned buffer")?;
    match path.file().read_at(block, 0) {
        Ok(moved) if moved == len => Ok(()),
        Ok(moved) => Err(format!("short read: {moved} of {len} bytes")),
        Err(error) => Err(error.to_string()),
    }
}
