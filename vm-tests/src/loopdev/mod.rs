//! Loop devices that free themselves, and file systems on them.
//!
//! ```no_run
//! # use polypath_vm_tests::loopdev::LoopDev;
//! # use std::path::Path;
//! let disk = LoopDev::on(Path::new("/tmp/disk")).sector_size(4096).attach().unwrap();
//! println!("{}", disk.path().display());
//! ```

mod mount;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub use mount::Mount;

const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4C07;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CLR_FD: libc::Ioctl = 0x4C01;
const BLKROSET: libc::Ioctl = 0x125D;

const FLAG_READ_ONLY: u32 = 1;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;

/// Requests that a loop device takes at a time (the driver's default, `drivers/block/loop.c`).
const NR_REQUESTS: u32 = 128;

/// Another process may take the free device between asking and attaching.
const NR_TRIES: usize = 50;

#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// Why loop devices cannot be had here, if so.
pub fn available() -> Result<(), String> {
    let control = File::options().read(true).write(true).open("/dev/loop-control");
    let control = control.map_err(|e| format!("/dev/loop-control: {e}"))?;
    free_device(&control).map(|_| ()).map_err(|e| format!("no free loop device: {e}"))
}

fn free_device(control: &File) -> io::Result<PathBuf> {
    // SAFETY: no argument; the result is a number.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PathBuf::from(format!("/dev/loop{number}")))
}

/// Options of a loop device.
#[derive(Clone, Debug)]
pub struct Builder {
    backing: PathBuf,
    sector_size: u32,
    direct_io: bool,
    read_only: bool,
    offset: u64,
    size_limit: u64,
}

impl Builder {
    /// Logical block size, 512 unless said otherwise.
    pub fn sector_size(mut self, bytes: u32) -> Self {
        self.sector_size = bytes;
        self
    }

    /// Whether the device itself does direct I/O on its file; off unless said otherwise.
    pub fn direct_io(mut self, on: bool) -> Self {
        self.direct_io = on;
        self
    }

    /// A device that refuses writes.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Only this part of the file; a size of 0 means up to its end.
    pub fn part(mut self, offset: u64, size: u64) -> Self {
        (self.offset, self.size_limit) = (offset, size);
        self
    }

    /// Attaches the next free device.
    pub fn attach(&self) -> Result<LoopDev> {
        let mut options = File::options();
        options.read(true).write(!self.read_only);
        let backing =
            options.open(&self.backing).with_context(|| format!("open {}", self.backing.display()))?;
        let control = File::options()
            .read(true)
            .write(true)
            .open("/dev/loop-control")
            .context("open /dev/loop-control")?;
        let mut flags = FLAG_AUTOCLEAR;
        flags |= if self.direct_io { FLAG_DIRECT_IO } else { 0 };
        flags |= if self.read_only { FLAG_READ_ONLY } else { 0 };
        let config = LoopConfig {
            fd: u32::try_from(backing.as_raw_fd()).expect("descriptors are positive"),
            block_size: self.sector_size,
            info: LoopInfo64 {
                device: 0,
                inode: 0,
                rdevice: 0,
                offset: self.offset,
                size_limit: self.size_limit,
                number: 0,
                encrypt_type: 0,
                encrypt_key_size: 0,
                flags,
                file_name: [0; 64],
                crypt_name: [0; 64],
                encrypt_key: [0; 32],
                init: [0; 2],
            },
            reserved: [0; 8],
        };
        let mut last = io::Error::other("never tried");
        for _ in 0..NR_TRIES {
            let path = free_device(&control).context("ask for a free loop device")?;
            let device = match open_device(&path) {
                Ok(device) => device,
                Err(e) => {
                    last = e;
                    continue;
                }
            };
            // SAFETY: `config` has the layout that the kernel reads, and lives over the call.
            if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
                let disk = LoopDev { path, device };
                // The kernel keeps this flag over a detach, also when a test was killed before it could clear it.
                disk.set_read_only(self.read_only).context("set the read-only flag")?;
                return Ok(disk);
            }
            last = io::Error::last_os_error();
            if last.raw_os_error() != Some(libc::EBUSY) {
                break;
            }
        }
        Err(last).with_context(|| format!("attach a loop device to {}", self.backing.display()))
    }
}

fn open_device(path: &Path) -> io::Result<File> {
    if let Ok(device) = File::options().read(true).write(true).open(path) {
        return Ok(device);
    }
    File::open(path)
}

/// An attached loop device; the kernel frees it when this and all other users have closed it.
#[derive(Debug)]
pub struct LoopDev {
    path: PathBuf,
    device: File,
}

impl LoopDev {
    /// A device on the file `backing`.
    pub fn on(backing: &Path) -> Builder {
        Builder {
            backing: backing.into(),
            sector_size: 512,
            direct_io: false,
            read_only: false,
            offset: 0,
            size_limit: 0,
        }
    }

    /// The device node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Shows a changed size of the backing file on this device.
    pub fn refresh_size(&self) -> io::Result<()> {
        // SAFETY: no argument.
        check(unsafe { libc::ioctl(self.device.as_raw_fd(), LOOP_SET_CAPACITY, 0) })
    }

    /// Makes writes fail with `EPERM` from now on, also through descriptors that are open; or allows them again.
    pub fn set_read_only(&self, on: bool) -> io::Result<()> {
        let on = libc::c_int::from(on);
        // SAFETY: the kernel reads one int.
        check(unsafe { libc::ioctl(self.device.as_raw_fd(), BLKROSET, &raw const on) })
    }

    /// Number of requests that the device takes at once.
    pub fn set_nr_requests(&self, nr: u32) -> io::Result<()> {
        let name = self.path.file_name().expect("a device has a name").to_string_lossy().into_owned();
        std::fs::write(format!("/sys/block/{name}/queue/nr_requests"), nr.to_string())
    }

    /// Largest request that the device takes, in KiB.
    pub fn set_max_sectors_kb(&self, kib: u32) -> io::Result<()> {
        let name = self.path.file_name().expect("a device has a name").to_string_lossy().into_owned();
        std::fs::write(format!("/sys/block/{name}/queue/max_sectors_kb"), kib.to_string())
    }

    /// Another descriptor of the device.
    pub fn reopen(&self) -> io::Result<File> {
        open_device(&self.path)
    }
}

impl Drop for LoopDev {
    fn drop(&mut self) {
        let _ = self.set_read_only(false);
        // Outlives what the device is attached to; 0 is the default.
        // These stay with the name: the next device of it would begin with them.
        let _ = self.set_max_sectors_kb(0);
        let _ = self.set_nr_requests(NR_REQUESTS);
        // Autoclear would do, but only after the last user; asked now, a user that hangs on sees the device go away at its
        // own close.
        // SAFETY: no argument.
        unsafe { libc::ioctl(self.device.as_raw_fd(), LOOP_CLR_FD, 0) };
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether `path` is a block device.
pub fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}
