//! Which LUN a path leads to, proved on the open descriptor.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use crate::sysfs::BlockDevice;

/// What two paths must have in common to be paths of one disk.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Identity {
    /// A regular file, or the file behind a loop device from `offset` bytes on.
    File {
        /// `st_dev` of the file.
        dev: u64,
        /// `st_ino` of the file.
        ino: u64,
        /// Byte offset of the disk's first sector in the file.
        offset: u64,
    },
    /// The storage's own identifier (SCSI VPD page 83h, NVMe NGUID/EUI-64), as sysfs shows it.
    Wwid(String),
    /// A block device without an identifier: only itself.
    Device {
        /// `st_rdev` of the device.
        rdev: u64,
    },
    /// No device at all.
    Null {
        /// Size in bytes.
        size_bytes: u64,
    },
}

impl Identity {
    /// Asks the open descriptor's metadata (never the name, which may lead elsewhere by now).
    pub(crate) fn of(meta: &fs::Metadata) -> Self {
        if !meta.file_type().is_block_device() {
            return Self::File { dev: meta.dev(), ino: meta.ino(), offset: 0 };
        }
        let device = BlockDevice::new(meta.rdev());
        if let Some((backing, offset)) = device.loop_backing()
            && let Ok(backing) = fs::metadata(backing)
        {
            return Self::File { dev: backing.dev(), ino: backing.ino(), offset };
        }
        match device.wwid() {
            Some(wwid) => Self::Wwid(wwid),
            None => Self::Device { rdev: meta.rdev() },
        }
    }

    /// A serial number for the guest: 20 bytes at most, the same for every path of the disk and at every start.
    pub fn serial(&self) -> String {
        match self {
            Self::File { dev, ino, offset: 0 } => clip(&format!("pp{dev:x}-{ino:x}")),
            Self::File { dev, ino, offset } => clip(&format!("pp{dev:x}-{ino:x}-{offset:x}")),
            Self::Wwid(wwid) => clip(wwid),
            Self::Device { rdev } => format!("ppdev{rdev:x}"),
            Self::Null { .. } => "null".to_owned(),
        }
    }
}

/// Keeps the last 20 bytes: identifiers differ at their end.
fn clip(text: &str) -> String {
    let ascii: String = text.chars().filter(char::is_ascii_graphic).collect();
    let from = ascii.len().saturating_sub(20);
    ascii.get(from..).unwrap_or_default().to_owned()
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null { size_bytes } => write!(f, "null, {size_bytes} bytes"),
            Self::File { dev, ino, offset } => {
                let (major, minor) = (rustix::fs::major(*dev), rustix::fs::minor(*dev));
                write!(f, "device {major}:{minor} inode {ino}")?;
                if *offset != 0 { write!(f, " offset {offset}") } else { Ok(()) }
            }
            Self::Wwid(wwid) => write!(f, "wwid {wwid}"),
            Self::Device { rdev } => {
                write!(f, "block device {}:{}", rustix::fs::major(*rdev), rustix::fs::minor(*rdev))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_is_at_most_20_bytes_and_keeps_the_end() {
        let long = Identity::Wwid("naa.60014059f1d3e8a7b5c4d2e1f0a9b8c7".into());
        assert_eq!(long.serial(), "a7b5c4d2e1f0a9b8c7".replace("a7", "e8a7").get(..20).unwrap());
        assert_eq!(Identity::Wwid("eui.00".into()).serial(), "eui.00");
        assert!(Identity::File { dev: u64::MAX, ino: u64::MAX, offset: u64::MAX }.serial().len() <= 20);
    }

    #[test]
    fn hard_links_are_one_file_and_copies_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("c"));
        fs::write(&a, b"x").unwrap();
        fs::hard_link(&a, &b).unwrap();
        fs::copy(&a, &c).unwrap();
        let id = |path| Identity::of(&fs::metadata(path).unwrap());
        assert_eq!(id(&a), id(&b));
        assert_ne!(id(&a), id(&c));
    }
}
