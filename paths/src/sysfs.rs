//! What the kernel says of a block device, read from `/sys/dev/block` (kernel `Documentation/ABI/stable/sysfs-block`).

use std::fs;
use std::path::PathBuf;

/// One block device (or partition) in sysfs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockDevice {
    rdev: u64,
}

/// The device that a name means in dm's numeric form (`major:minor`), as in `st_rdev`.
pub(crate) fn device_number(name: &std::path::Path) -> Option<u64> {
    let (major, minor) = name.to_str()?.split_once(':')?;
    let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?;
    Some(rustix::fs::makedev(number(major)?, number(minor)?))
}

/// The node of a block device that was named by its numbers; any other name as it is.
pub(crate) fn node(name: &std::path::Path) -> PathBuf {
    let node = device_number(name).and_then(|rdev| {
        let uevent = BlockDevice::new(rdev).text("uevent")?;
        uevent
            .lines()
            .find_map(|line| line.strip_prefix("DEVNAME="))
            .map(|name| PathBuf::from("/dev").join(name))
    });
    node.unwrap_or_else(|| name.to_owned())
}

impl BlockDevice {
    /// `rdev` as in `st_rdev`.
    pub(crate) fn new(rdev: u64) -> Self {
        Self { rdev }
    }

    fn dir(self) -> PathBuf {
        let (major, minor) = (rustix::fs::major(self.rdev), rustix::fs::minor(self.rdev));
        PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
    }

    fn text(self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.dir().join(name)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn whole(self, name: &str) -> String {
        let up = if self.is_partition() { "../" } else { "" };
        format!("{up}{name}")
    }

    fn is_partition(self) -> bool {
        self.dir().join("partition").exists()
    }

    /// A queue attribute of the whole disk, as a number.
    pub(crate) fn queue(self, name: &str) -> Option<u64> {
        self.text(&self.whole(&format!("queue/{name}")))?.parse().ok()
    }

    /// Requests that all hardware queues of the disk together have room for. A device that has no such queues (dm, for
    /// one) names no number, or one that means nothing.
    pub(crate) fn nr_requests(self) -> Option<u32> {
        let queues = fs::read_dir(self.dir().join(self.whole("mq"))).ok()?.count();
        let all = self.queue("nr_requests")?.checked_mul(u64::try_from(queues).ok()?)?;
        u32::try_from(all).ok().filter(|nr| *nr != 0)
    }

    /// The identifier that the storage gives the LUN: `wwid` of NVMe namespaces and SCSI devices. A partition's
    /// identifier is its disk's with the start sector.
    pub(crate) fn wwid(self) -> Option<String> {
        let wwid = ["wwid", "device/wwid"].iter().find_map(|name| self.text(&self.whole(name)))?;
        match self.is_partition().then(|| self.text("start")).flatten() {
            Some(start) => Some(format!("{wwid}+{start}")),
            None => Some(wwid),
        }
    }

    /// Name of the file behind a loop device, and the byte offset inside it where the device starts.
    pub(crate) fn loop_backing(self) -> Option<(PathBuf, u64)> {
        let file = self.text("loop/backing_file")?;
        let offset = self.text("loop/offset")?.parse().ok()?;
        // The kernel appends this when the name no longer leads to the file: nothing can be proved by that name.
        (!file.ends_with(" (deleted)")).then(|| (PathBuf::from(file), offset))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn names_by_numbers() {
        assert_eq!(device_number(Path::new("253:17")), Some(rustix::fs::makedev(253, 17)));
        for other in ["/dev/sda", "8", "8:", ":1", "8:1:2", "+8:1", "8: 1", "99999999999:1"] {
            assert_eq!(device_number(Path::new(other)), None, "{other}");
            assert_eq!(node(Path::new(other)), Path::new(other));
        }
    }
}
