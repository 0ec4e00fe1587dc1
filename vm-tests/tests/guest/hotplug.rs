//! Disks and memory that come and go while the guest runs.

use std::time::Duration;

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::{Disk, Fio, Vm};
use polypath_vm_tests::server::wait_until;

use crate::support::{Image, serve, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(20);

/// Plugs per test; `POLYPATH_REPLUG_ROUNDS` says otherwise.
const ROUNDS: u64 = 3;

#[test]
fn unplugged_and_plugged_again_while_idle() -> Result<()> {
    let rounds = std::env::var("POLYPATH_REPLUG_ROUNDS").map_or(Ok(ROUNDS), |n| n.parse())?;
    let image = Image::new(32)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k conv=fsync 2>&1")?;
    let at_rest = || {
        let stats = server.stats();
        (stats.fds, stats.threads)
    };
    vm.unplug(0)?;
    let (at, _) = vm.plug(&Disk::new(&server).queues(2))?;
    vm.unplug(at)?;
    // Threads of sessions end a moment after their connections.
    std::thread::sleep(Duration::from_secs(1));
    let before = at_rest();
    for _ in 0..rounds {
        let (at, name) = vm.plug(&Disk::new(&server).queues(2))?;
        vm.sh(&format!("cmp -n $(stat -c %s /usr/bin/fio) /usr/bin/fio /dev/{name}"))?;
        vm.unplug(at)?;
        ensure!(vm.disks()?.is_empty());
    }
    wait_until("nothing to be left of the plugs", LOAD_TIMEOUT, || at_rest() == before)?;
    println!("{rounds} plugs, (fds, threads) {before:?} before and after");
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

/// The back-end's view of guest memory grows while it works there.
#[test]
fn memory_plugged_under_load() -> Result<()> {
    let image = Image::new(64)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randwrite").depth(32).jobs(2, "8m").verify().lasting())?;
    for module in ["one", "two"] {
        let done = vm.requests_done("vda")?;
        wait_until("the load to run", LOAD_TIMEOUT, || {
            vm.requests_done("vda").is_ok_and(|nr| nr > done + 500)
        })?;
        vm.plug_memory(module, 128)?;
    }
    ensure!(!load.is_done(), "the load was over before the memory was plugged");
    load.wait()?;
    // The guest puts it to use, and with the first memory filled up, what is read next goes there.
    let memory = "sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    vm.sh("for f in $(grep -l offline /sys/devices/system/memory/memory*/state); do echo online >$f || exit 1; done")?;
    let total_kib: u64 = vm.sh(memory)?.trim().parse()?;
    ensure!(total_kib > 600 << 10, "{total_kib} KiB of memory");
    vm.sh("mount -o remount,size=600m /tmp && dd if=/dev/vda of=/tmp/copy bs=1M iflag=direct 2>&1")?;
    vm.sh("dd if=/dev/zero of=/tmp/fill bs=1M count=400 2>&1; echo 3 >/proc/sys/vm/drop_caches; cmp /tmp/copy /dev/vda")?;
    stop(server)
}

/// And shrinks: what is taken out is let go of, while requests go on in the rest.
#[test]
fn f19_memory_plugged_and_unplugged_under_load() -> Result<()> {
    let image = Image::new(64)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let mapped = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.pid())).unwrap_or_default();
        maps.lines().filter(|line| line.contains("memory-backend-memfd")).count()
    };
    let before = mapped();
    ensure!(before > 0, "guest memory is not known by its name");
    let load =
        vm.start_fio(&Fio::new("/dev/vda", "randwrite").depth(32).jobs(2, "12m").verify().lasting())?;
    for module in ["one", "two"] {
        let done = vm.requests_done("vda")?;
        vm.plug_memory(module, 128)?;
        // Movable: the guest can give it back.
        vm.sh(
            "for f in $(grep -l offline /sys/devices/system/memory/memory*/state); do echo online_movable >$f || exit 1; done",
        )?;
        wait_until("the load to run", LOAD_TIMEOUT, || {
            vm.requests_done("vda").is_ok_and(|nr| nr > done + 300)
        })?;
        ensure!(mapped() > before, "the back-end was not told of the memory");
        vm.unplug_memory(module)?;
        wait_until("the back-end to let go of it", LOAD_TIMEOUT, || mapped() == before)?;
    }
    ensure!(!load.is_done(), "the load was over before the memory was unplugged");
    load.wait()?;
    stop(server)
}
