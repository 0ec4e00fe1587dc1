//! Disks that come and go while the guest runs.

use std::time::Duration;

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::{Disk, Fio, Vm};
use polypath_vm_tests::server::wait_until;

use crate::support::{Image, serve, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn unplugged_and_plugged_again_while_idle() -> Result<()> {
    let image = Image::new(32)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k conv=fsync 2>&1")?;
    let mut at = 0;
    for _ in 0..3 {
        vm.unplug(at)?;
        ensure!(vm.disks()?.is_empty());
        let name;
        (at, name) = vm.plug(&Disk::new(&server).queues(2))?;
        vm.sh(&format!("cmp -n $(stat -c %s /usr/bin/fio) /usr/bin/fio /dev/{name}"))?;
    }
    stop(server)
}

#[test]
fn unplugged_under_load_and_plugged_again() -> Result<()> {
    let image = Image::new(64)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randrw").depth(32).jobs(2, "16m").seconds(60))?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    vm.unplug(0)?;
    // Its disk is gone: the load must fail, and must not hang.
    ensure!(load.wait().is_err(), "a load went on without a disk");
    let (_, name) = vm.plug(&Disk::new(&server).queues(2))?;
    vm.fio(&crate::verify::small_load(&format!("/dev/{name}")))?;
    stop(server)
}
