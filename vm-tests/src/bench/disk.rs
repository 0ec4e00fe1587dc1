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

    /// Whether there is something that can be opened.
    pub(super) fn has_device(self) -> bool {
        matches!(self, Self::Tmpfs | Self::Loop)
    }
}

/// What a block device counts (Documentation/block/stat.rst), reads and writes together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceCounts {
    /// I/Os that the device has done.
    pub(super) ios: u64,
    /// Requests that the kernel joined to others before.
    pub(super) merges: u64,
    pub(super) bytes: u64,
}

impl DeviceCounts {
    /// Of the device `path`; None if it is no block device.
    fn of(path: &Path) -> Option<Self> {
        let stat =
            std::fs::read_to_string(Path::new("/sys/block").join(path.file_name()?).join("stat")).ok()?;
        let fields: Vec<u64> = stat.split_whitespace().map_while(|field| field.parse().ok()).collect();
        // Reads, merged, sectors, ticks, writes, merged, sectors.
        let both = |read: usize| Some(fields.get(read)? + fields.get(read + 4)?);
        Some(Self { ios: both(0)?, merges: both(1)?, bytes: both(2)? * 512 })
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            ios: self.ios - before.ios,
            merges: self.merges - before.merges,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// A disk that goes away on drop, its loop devices first.
pub(super) struct Disk {
    devices: Vec<LoopDev>,
    names: [PathBuf; 2],
    bytes: u64,
    _mount: Option<Mount>,
}

impl Disk {
    /// Two ways to a disk.
    pub(super) fn new(kind: DiskKind, bytes: u64) -> Result<Self> {
        if !kind.has_device() {
            let inline = if kind == DiskKind::NullInline { ",inline" } else { "" };
            // The number only tells them apart.
            let name = |nr: usize| format!("null:{bytes}{inline},{nr}").into();
            return Ok(Self { devices: Vec::new(), names: [name(1), name(2)], bytes, _mount: None });
        }
        // Metadata of the file system wants some room too.
        let mount = Mount::tmpfs(bytes + (16 << 20)).context("mount a tmpfs")?;
        let file = mount.path().join("disk");
        fill(&file, bytes).context("fill the disk")?;
        let (mut devices, names);
        if kind == DiskKind::Loop {
            devices = vec![LoopDev::on(&file).attach()?];
            devices.push(LoopDev::on(&file).attach()?);
            names = [devices[0].path().to_owned(), devices[1].path().to_owned()];
        } else {
            let link = mount.path().join("link");
            std::fs::hard_link(&file, &link).context("make a second name for the disk")?;
            (devices, names) = (Vec::new(), [file, link]);
        }
        Ok(Self { devices, names, bytes, _mount: Some(mount) })
    }

    /// What the devices have counted so far; None where nobody counts.
    pub(super) fn counts(&self) -> Option<DeviceCounts> {
        let mut sum = DeviceCounts::default();
        for device in &self.devices {
            let counts = DeviceCounts::of(device.path())?;
            sum.ios += counts.ios;
            sum.merges += counts.merges;
            sum.bytes += counts.bytes;
        }
        (!self.devices.is_empty()).then_some(sum)
    }

    /// The names of the disk, each a path of its own: two loop devices on one file, a file and a hard link to it.
    pub(super) fn names(&self) -> &[PathBuf; 2] {
        &self.names
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
