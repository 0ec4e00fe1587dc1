//! Plugging disks and memory while the guest runs.

use std::sync::MutexGuard;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{Disk, Guest};

/// The guest has to agree to an unplug; under emulation and load that takes a moment.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);

impl Guest {
    fn ports(&self) -> MutexGuard<'_, Vec<bool>> {
        self.ports.lock().expect("no thread panics with the lock")
    }

    /// Asks the guest to give disk number `at` back and waits until the front-end has let go of its back-end.
    pub fn unplug(&self, at: usize) -> Result<()> {
        let id = format!("disk{at}");
        let mut qmp = self.qmp_lock();
        qmp.forget_events();
        qmp.execute("device_del", json!({ "id": id }))?;
        qmp.wait_event("DEVICE_DELETED", UNPLUG_TIMEOUT, |data| data["device"] == id.as_str())
            .with_context(|| format!("unplug {id}"))?;
        // The connection is a thing of its own, and stays until it is removed.
        qmp.execute("chardev-remove", json!({ "id": format!("char{at}") }))?;
        self.ports()[at] = false;
        Ok(())
    }

    /// Plugs a disk in and waits until the guest has it; gives its number and its name in the guest.
    pub fn plug(&self, disk: &Disk) -> Result<(usize, String)> {
        let at = {
            let mut ports = self.ports();
            let at = ports.iter().position(|taken| !taken).context("no free port")?;
            ports[at] = true;
            at
        };
        let before = self.disks()?;
        let address = json!({ "type": "unix", "data": { "path": disk.socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp("chardev-add", json!({ "id": format!("char{at}"), "backend": backend }))?;
        let mut device = json!({
            "driver": "vhost-user-blk-pci",
            "id": format!("disk{at}"),
            "chardev": format!("char{at}"),
            "bus": format!("port{at}"),
        });
        for (name, value) in disk.properties() {
            device[name] = value.into();
        }
        self.qmp("device_add", device)?;
        let known = before.join(" ");
        let name = self.sh_within(
            &format!(
                "while :; do for d in /sys/block/vd*; do n=$(basename $d); case ' {known} ' in *\" $n \"*) ;; \
                 *) [ -b /dev/$n ] && echo $n && exit 0 ;; esac; done; sleep 0.05; done"
            ),
            UNPLUG_TIMEOUT,
        )?;
        Ok((at, name.trim().to_owned()))
    }

    /// The guest's driver lets go of a disk and takes it again: virtio-blk's, or that of the whole device. Gives the disk's new
    /// name.
    pub fn rebind(&self, disk: &str, is_whole: bool) -> Result<String> {
        let (driver, up) = if is_whole {
            ("/sys/bus/pci/drivers/virtio-pci", "/..")
        } else {
            ("/sys/bus/virtio/drivers/virtio_blk", "")
        };
        let name = self.sh(&format!(
            "device=$(basename $(readlink -f /sys/block/{disk}/device{up})); echo $device >{driver}/unbind && \
             [ ! -e /sys/block/{disk} ] && echo $device >{driver}/bind && \
             while :; do n=$(ls /sys/block | grep ^vd) && [ -b /dev/$n ] && echo $n && break; sleep 0.05; done"
        ))?;
        Ok(name.trim().to_owned())
    }

    /// Plugs a memory module in: the back-end is told of a new region of guest memory.
    pub fn plug_memory(&self, id: &str, mib: u64) -> Result<()> {
        let backend = format!("mem-{id}");
        let object =
            json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": mib << 20, "share": true });
        self.qmp("object-add", object)?;
        self.qmp("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend })).map(drop)
    }

    /// Asks the guest to give a memory module back and waits until it is gone: the back-end is told of one region less.
    pub fn unplug_memory(&self, id: &str) -> Result<()> {
        let mut qmp = self.qmp_lock();
        qmp.forget_events();
        qmp.execute("device_del", json!({ "id": id }))?;
        qmp.wait_event("DEVICE_DELETED", UNPLUG_TIMEOUT, |data| data["device"] == id)
            .with_context(|| format!("unplug {id}"))?;
        qmp.execute("object-del", json!({ "id": format!("mem-{id}") })).map(drop)
    }

    /// Names of the virtio disks that the guest has.
    pub fn disks(&self) -> Result<Vec<String>> {
        let names = self.sh("ls /sys/block | grep ^vd || true")?;
        Ok(names.split_whitespace().map(str::to_owned).collect())
    }
}
