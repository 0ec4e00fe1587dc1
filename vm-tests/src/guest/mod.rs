//! A real Linux guest under QEMU, whose disks come from a vhost-user-blk back-end.
//!
//! ```no_run
//! # use polypath_vm_tests::{guest::Vm, server::Server};
//! # fn main() -> anyhow::Result<()> {
//! let server = Server::polypath().path("/tmp/disk").start()?;
//! let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
//! vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt")?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Vm`] describes a machine, [`Guest`] is one that runs. A guest dies with its test, its sockets and logs are in a
//! directory of its own, and nothing here waits without a deadline. `images/build` must have run before.

mod agent;
mod base64;
mod fio;
mod hotplug;
mod images;
mod migrate;
mod passes;
mod qmp;
mod running;
mod vm;

pub use fio::{Fio, FioResult, Load};
pub use images::{Accel, Qemu, boot_disk, check_boot_disk};
pub use passes::Passes;
pub use running::{Guest, Job};
pub use vm::{Disk, Endpoint, Vm};

use std::time::Duration;

/// How long a boot may take; under emulation on a busy machine it is some seconds.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a script may run unless the test says otherwise.
pub const SCRIPT_TIMEOUT: Duration = Duration::from_secs(120);
