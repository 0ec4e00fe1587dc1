//! Mounted file systems that unmount themselves.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use super::LoopDev;

/// A mounted file system on a mount point of its own; unmounted on drop.
#[derive(Debug)]
pub struct Mount {
    dir: TempDir,
    // Behind `dir` in the order of drops: the device goes after the unmount.
    _device: Option<LoopDev>,
}

impl Mount {
    /// A tmpfs that can hold `bytes`.
    pub fn tmpfs(bytes: u64) -> Result<Self> {
        let dir = mount_point()?;
        mount("tmpfs", dir.path(), "tmpfs", &format!("size={bytes}"))?;
        Ok(Self { dir, _device: None })
    }

    /// The kernel's tracing files, of which systemd mounts another one at `/sys/kernel/tracing`.
    pub fn tracefs() -> Result<Self> {
        let dir = mount_point()?;
        mount("tracefs", dir.path(), "tracefs", "")?;
        Ok(Self { dir, _device: None })
    }

    /// Makes a file system of type `kind` (`ext4`, `xfs`, ...) on a loop device on `backing`, and mounts it.
    pub fn file_system(kind: &str, backing: &Path) -> Result<Self> {
        let device = LoopDev::on(backing).attach()?;
        let mkfs = Command::new(format!("mkfs.{kind}"))
            .arg("-q")
            .arg(device.path())
            .output()
            .with_context(|| format!("run mkfs.{kind}"))?;
        if !mkfs.status.success() {
            bail!("mkfs.{kind}: {}", String::from_utf8_lossy(&mkfs.stderr));
        }
        let dir = mount_point()?;
        let source = device.path().to_str().context("device name is not UTF-8")?;
        mount(source, dir.path(), kind, "")?;
        Ok(Self { dir, _device: Some(device) })
    }

    /// The root of the mounted file system.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        crate::faulty::unmount(self.dir.path());
    }
}

fn mount_point() -> Result<TempDir> {
    tempfile::Builder::new().prefix("mnt-").tempdir().context("make a mount point")
}

fn mount(source: &str, target: &Path, kind: &str, data: &str) -> Result<()> {
    let c_string = |bytes: &[u8]| CString::new(bytes).context("NUL in a mount argument");
    let (source, kind_c, data) =
        (c_string(source.as_bytes())?, c_string(kind.as_bytes())?, c_string(data.as_bytes())?);
    let target_c = c_string(target.as_os_str().as_bytes())?;
    // SAFETY: four valid C strings that live over the call.
    let done =
        unsafe { libc::mount(source.as_ptr(), target_c.as_ptr(), kind_c.as_ptr(), 0, data.as_ptr().cast()) };
    if done != 0 {
        return Err(io::Error::last_os_error())
            .with_context(|| format!("mount {kind} on {}", target.display()));
    }
    Ok(())
}
