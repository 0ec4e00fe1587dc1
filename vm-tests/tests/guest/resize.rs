//! The disk grows under a running guest.

use std::fs::File;
use std::time::Duration;

use anyhow::{Result, ensure};
use polypath_vm_tests::control::Socket;
use polypath_vm_tests::guest::{Fio, Vm};
use polypath_vm_tests::server::{Server, wait_until};

use crate::support::{Image, MIB, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn f33_growth_reaches_a_running_guest() -> Result<()> {
    let image = Image::new(32)?;
    let socket = Socket::new()?;
    let dir = tempfile::tempdir()?;
    let at = dir.path().join("sock");
    let other = image.hard_link("other")?;
    let start = || {
        let server = Server::polypath().path(image.path()).path(&other);
        server.num_queues(2).socket(&at).arg("--control").arg(socket.path()).start()
    };
    let server = start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).reconnect().boot()?;
    let size = || -> Result<u64> { Ok(vm.sh("blockdev --getsize64 /dev/vda")?.trim().parse()?) };
    ensure!(size()? == 32 * MIB);
    let load = vm.start_fio(&Fio::new("/dev/vda", "randwrite").depth(16).size("16m").verify().lasting())?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 300))?;

    File::options().write(true).open(image.path())?.set_len(64 * MIB)?;
    socket.connect()?.run("resize")?;
    wait_until("64 MiB in the guest", LOAD_TIMEOUT, || size().is_ok_and(|size| size == 64 * MIB))?;
    load.wait()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k seek=768 count=16 conv=fsync 2>&1")?;
    vm.sh("dd if=/dev/vda bs=64k skip=768 count=16 2>/dev/null | cmp -n 1048576 - /usr/bin/fio")?;

    // While no back-end runs: the guest hears of it when the next one is there.
    let mut server = server;
    server.kill();
    File::options().write(true).open(image.path())?.set_len(96 * MIB)?;
    let server = start()?;
    wait_until("96 MiB in the guest", LOAD_TIMEOUT, || size().is_ok_and(|size| size == 96 * MIB))?;
    ensure!(vm.sh("dmesg")?.contains("new size"), "{}", vm.sh("dmesg")?);
    stop(server)
}
