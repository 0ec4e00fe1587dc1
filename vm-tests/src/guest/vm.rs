//! The description of a machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::images::{Accel, Qemu, image};
use super::{BOOT_TIMEOUT, Guest};
use crate::server::Server;

/// Starts of a QEMU that dies of a fault of its own.
const STARTS_MAX: u32 = 3;

/// Kernel command line: quiet and quick; a panic stops the guest, so that it is seen and not booted over.
const KERNEL_ARGS: &str = "console=ttyS0 panic=0 quiet loglevel=3 mitigations=off tsc=reliable no_timer_check \
                           8250.nr_uarts=1 cryptomgr.notests random.trust_cpu=on";

/// Free PCI Express ports for disks plugged later.
pub(super) const NR_SPARE_PORTS: usize = 2;

/// Memory modules that can be plugged later.
const NR_MEMORY_SLOTS: u32 = 4;

/// Something that listens for a front-end.
pub trait Endpoint {
    /// The socket to connect to.
    fn socket(&self) -> &Path;
}

impl Endpoint for Server {
    fn socket(&self) -> &Path {
        Self::socket(self)
    }
}

impl Endpoint for Path {
    fn socket(&self) -> &Path {
        self
    }
}

/// A vhost-user-blk disk as the front-end is told to attach it.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(super) socket: PathBuf,
    pub(super) queues: Option<u32>,
    pub(super) queue_size: Option<u32>,
    pub(super) reconnect: bool,
    pub(super) boot: bool,
}

impl Disk {
    /// A disk with the front-end's own defaults.
    pub fn new(endpoint: &(impl Endpoint + ?Sized)) -> Self {
        Self {
            socket: endpoint.socket().into(),
            queues: None,
            queue_size: None,
            reconnect: false,
            boot: false,
        }
    }

    /// Number of virtqueues; the front-end's default is one per CPU.
    pub fn queues(mut self, nr: u32) -> Self {
        self.queues = Some(nr);
        self
    }

    /// Number of entries of each virtqueue.
    pub fn queue_size(mut self, size: u32) -> Self {
        self.queue_size = Some(size);
        self
    }

    /// Properties of the device, for the command line and for `device_add`.
    pub(super) fn properties(&self) -> Vec<(&'static str, u32)> {
        let boot_index = self.boot.then_some(0);
        [("num-queues", self.queues), ("queue-size", self.queue_size), ("bootindex", boot_index)]
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }
}

/// Describes a machine; [`Vm::boot`] makes a [`Guest`] of it.
#[derive(Clone, Debug)]
pub struct Vm {
    qemu: Qemu,
    accel: Option<Accel>,
    cpus: u32,
    memory_mib: u32,
    kernel_args: String,
    disks: Vec<Disk>,
    own_disk: Option<PathBuf>,
    firmware_boot: bool,
    incoming: Option<PathBuf>,
}

impl Default for Vm {
    fn default() -> Self {
        Self::new()
    }
}

impl Vm {
    /// One CPU, half a gigabyte, no disk.
    pub fn new() -> Self {
        Self {
            qemu: Qemu::Stable,
            accel: None,
            cpus: 1,
            memory_mib: 512,
            kernel_args: KERNEL_ARGS.into(),
            disks: Vec::new(),
            own_disk: None,
            firmware_boot: false,
            incoming: None,
        }
    }

    /// Another front-end.
    pub fn qemu(mut self, qemu: Qemu) -> Self {
        self.qemu = qemu;
        self
    }

    /// A given way of execution instead of the best one.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = Some(accel);
        self
    }

    /// Number of CPUs.
    pub fn cpus(mut self, nr: u32) -> Self {
        self.cpus = nr;
        self
    }

    /// Guest memory.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Adds to the kernel's command line, module parameters too.
    pub fn kernel_arg(mut self, arg: &str) -> Self {
        self.kernel_args += " ";
        self.kernel_args += arg;
        self
    }

    /// Adds a disk: the first is `/dev/vda`, the next `/dev/vdb`. What follows in the chain is about this disk.
    pub fn disk(self, endpoint: &(impl Endpoint + ?Sized)) -> Self {
        self.attach(Disk::new(endpoint))
    }

    /// Adds a disk that was described before.
    pub fn attach(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds a disk that QEMU serves by itself from a file: what goes wrong there as well is not a back-end's fault.
    pub fn own_disk(mut self, file: &Path) -> Self {
        self.own_disk = Some(file.into());
        self
    }

    fn last_disk(mut self, change: impl FnOnce(&mut Disk)) -> Self {
        change(self.disks.last_mut().expect("a disk comes first"));
        self
    }

    /// Number of virtqueues of the disk added last.
    pub fn queues(self, nr: u32) -> Self {
        self.last_disk(|disk| disk.queues = Some(nr))
    }

    /// Queue size of the disk added last.
    pub fn queue_size(self, size: u32) -> Self {
        self.last_disk(|disk| disk.queue_size = Some(size))
    }

    /// The front-end connects again, each second, when the back-end of the disk added last goes away.
    pub fn reconnect(self) -> Self {
        self.last_disk(|disk| disk.reconnect = true)
    }

    /// The firmware boots from the disk added last, instead of QEMU loading a kernel.
    pub fn firmware_boots_it(mut self) -> Self {
        self.firmware_boot = true;
        self.last_disk(|disk| disk.boot = true)
    }

    /// Does not boot: waits at this socket for a guest that moves here. To be started by [`Vm::start`].
    pub fn incoming(mut self, socket: &Path) -> Self {
        self.incoming = Some(socket.into());
        self
    }

    /// Starts the machine and waits until scripts can be run in it.
    pub fn boot(&self) -> Result<Guest> {
        self.boot_within(BOOT_TIMEOUT)
    }

    /// [`Vm::boot`] with a deadline of its own. A QEMU that dies of a fault of its emulator's before the guest says anything
    /// is started again.
    pub fn boot_within(&self, timeout: Duration) -> Result<Guest> {
        for _ in 1..STARTS_MAX {
            let guest = self.start()?;
            match guest.wait_ready(timeout) {
                Err(error) if guest.has_lost_its_place() => eprintln!("QEMU is started again: {error:#}"),
                ready => return ready.map(|()| guest),
            }
        }
        let guest = self.start()?;
        guest.wait_ready(timeout).map(|()| guest)
    }

    /// Starts the machine and does not wait for anything: for guests that boot from their disk, or not at all.
    pub fn start(&self) -> Result<Guest> {
        // A server that was spawned by a test writes its log beside its socket.
        let logs = self.disks.iter().map(|disk| disk.socket.with_file_name("server.stderr")).collect();
        Guest::start(self.qemu, logs, |dir| self.command(dir))
    }

    fn command(&self, dir: &Path) -> Result<Command> {
        let accel = self.accel.unwrap_or_else(Accel::best);
        let mut command = Command::new(self.qemu.program()?);
        // Room for plugging as much again.
        let size = format!("{0}M,slots={NR_MEMORY_SLOTS},maxmem={1}M", self.memory_mib, 2 * self.memory_mib);
        let memory = format!("memory-backend-memfd,id=mem,size={}M,share=on", self.memory_mib);
        command
            .args(accel.args())
            .args(["-M", "q35,memory-backend=mem", "-m", &size])
            .args(["-smp", &self.cpus.to_string(), "-object", &memory])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-serial", &format!("file:{}", dir.join("console").display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", dir.join("qmp").display())])
            .args(["-device", "virtio-serial-pci"])
            .args([
                "-chardev",
                &format!("socket,id=agent,path={},server=on,wait=off", dir.join("agent").display()),
            ])
            .args(["-device", "virtserialport,chardev=agent,name=agent"]);
        if !self.firmware_boot {
            command.arg("-kernel").arg(image("vmlinux")?).arg("-initrd").arg(image("initramfs")?);
            command.args(["-append", &self.kernel_args]);
        }
        for port in 0..self.disks.len() + NR_SPARE_PORTS {
            command.args(["-device", &format!("pcie-root-port,id=port{port},chassis={port},slot={port}")]);
        }
        for (at, disk) in self.disks.iter().enumerate() {
            let mut chardev = format!("socket,id=char{at},path={}", disk.socket.display());
            if disk.reconnect {
                // The option in seconds is deprecated in favour of one in milliseconds.
                chardev += if self.qemu.version()? >= (9, 2) { ",reconnect-ms=1000" } else { ",reconnect=1" };
            }
            let mut device = format!("vhost-user-blk-pci,id=disk{at},chardev=char{at},bus=port{at}");
            for (name, value) in disk.properties() {
                device += &format!(",{name}={value}");
            }
            command.args(["-chardev", &chardev, "-device", &device]);
        }
        if let Some(file) = &self.own_disk {
            let node = format!("driver=file,node-name=own,filename={},cache.direct=on", file.display());
            let device = format!("virtio-blk-pci,drive=own,num-queues={}", self.cpus);
            command.args(["-blockdev", &node, "-device", &device]);
        }
        if let Some(socket) = &self.incoming {
            command.arg("-incoming").arg(format!("unix:{}", socket.display()));
        }
        Ok(command)
    }
}
