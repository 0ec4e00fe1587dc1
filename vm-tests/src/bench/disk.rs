//! The disk under test: in memory, so that the way to it is measured and not the disk.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::loopdev::{LoopDev, Mount};

/// What kind of path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// A file on tmpfs: the kernel answers during the submission.
    Tmpfs,
    /// A loop device on a file on tmpfs: a real block device, answered later by a kernel thread.
    Loop,
    /// No device: answered at once, by way of io_uring where there is a choice.
    Null,
    /// No device, and answered by the server itself.
    NullInline,
}

impl DiskKind {
    /// As the options and the tables name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Loop => "loop",
            Self::Null => "null",
            Self::NullInline => "null-inline",
        }
    }
}

/// A disk that goes away on drop, its loop device first.
pub(super) struct Disk {
    device: Option<LoopDev>,
    file: PathBuf,
    bytes: u64,
    _mount: Option<Mount>,
}

impl Disk {
    pub(super) fn new(kind: DiskKind, bytes: u64) -> Result<Self> {
        if matches!(kind, DiskKind::Null | DiskKind::NullInline) {
            let inline = if kind == DiskKind::NullInline { ",inline" } else { "" };
            return Ok(Self {
                device: None,
                file: format!("null:{bytes}{inline}").into(),
                bytes,
                _mount: None,
            });
        }
        // Metadata of the file system wants some room too.
        let mount = Mount::tmpfs(bytes + (16 << 20)).context("mount a tmpfs")?;
        let file = mount.path().join("disk");
        fill(&file, bytes).context("fill the disk")?;
        let device = match kind {
            DiskKind::Tmpfs | DiskKind::Null | DiskKind::NullInline => None,
            DiskKind::Loop => Some(LoopDev::on(&file).attach()?),
        };
        Ok(Self { device, file, bytes, _mount: Some(mount) })
    }

    /// I/Os that the device has done so far, and bytes that it has moved; None where nobody counts them.
    pub(super) fn counters(&self) -> Option<(u64, u64)> {
        let name = self.device.as_ref()?.path().file_name()?.to_owned();
        let stat = std::fs::read_to_string(Path::new("/sys/block").join(name).join("stat")).ok()?;
        let fields: Vec<u64> = stat.split_whitespace().map_while(|field| field.parse().ok()).collect();
        // Documentation/block/stat.rst: reads, merged, sectors, ticks, writes, merged, sectors.
        Some((fields.first()? + fields.get(4)?, (fields.get(2)? + fields.get(6)?) * 512))
    }

    pub(super) fn path(&self) -> &Path {
        self.device.as_ref().map_or(&self.file, LoopDev::path)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Holes would be read without touching memory.
fn fill(path: &Path, bytes: u64) -> Result<()> {
    const CHUNK: u64 = 1 << 20;
    if bytes == 0 || !bytes.is_multiple_of(CHUNK) {
        bail!("the size of the disk must be whole MiB");
    }
    let mut file = File::create(path)?;
    let chunk = vec![0x5a; usize::try_from(CHUNK)?];
    for _ in 0..bytes / CHUNK {
        file.write_all(&chunk)?;
    }
    Ok(())
}
