//! Loads whose every block is checked.

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::{Fio, FioResult, Vm};
use polypath_vm_tests::server::{Builder, Server};

use crate::support::{Image, serve, stop};

/// Some seconds of random writes, checked.
pub fn small_load(disk: &str) -> Fio {
    Fio::new(disk, "randwrite").size("4m").verify()
}

#[test]
fn random_and_sequential_loads_verify() -> Result<()> {
    let image = Image::new(128)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let written = vm.fio(&Fio::new("/dev/vda", "randwrite").size("16m").verify())?;
    ensure!(written.writes == 4096 && written.reads == 4096, "{written:?}");
    vm.fio(&Fio::new("/dev/vda", "write").bs("128k").depth(8).size("64m").verify())?;
    vm.fio(&Fio::new("/dev/vda", "randrw").bs("16k").depth(32).size("16m").verify())?;
    vm.fio(&Fio::new("/dev/vda", "write").bs("4k").depth(64).size("8m").verify())?;
    vm.fio(&Fio::new("/dev/vda", "randwrite").bs("512").size("1m").verify())?;
    let read = vm.fio(&Fio::new("/dev/vda", "read").bs("64k").size("64m"))?;
    ensure!(read.reads == 1024, "{read:?}");
    vm.fio(&Fio::new("/dev/vda", "randread").depth(1).size("4m"))?;
    stop(server)
}

#[test]
fn several_jobs_verify_on_all_queues() -> Result<()> {
    let image = Image::new(128)?;
    let server = serve(&image.path()).num_queues(4).start()?;
    // More memory than fits below 4 GiB, so that the back-end is shown several regions of it.
    let vm = Vm::new().cpus(4).memory_mib(4096).disk(&server).queues(4).boot()?;
    let load = Fio::new("/dev/vda", "randwrite").depth(32).jobs(4, "4m").verify();
    let result = vm.fio(&load.clone().with("ioengine", "libaio"))?;
    ensure!(result.writes == 4096 && result.reads == 4096, "{result:?}");
    // Through the guest's page cache: large write-back of its own shape, then fsync.
    vm.fio(&load.with("direct", 0).with("ioengine", "psync").with("end_fsync", 1))?;
    vm.fio(&Fio::new("/dev/vda", "write").with("bs", "256k").depth(4).jobs(4, "16m").verify())?;
    stop(server)
}

#[test]
fn flushes_between_writes_verify() -> Result<()> {
    let image = Image::new(32)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().cpus(2).disk(&server).boot()?;
    vm.fio(&Fio::new("/dev/vda", "randwrite").size("2m").with("fsync", 8).verify())?;
    // Every write forced to the medium by itself.
    vm.fio(&Fio::new("/dev/vda", "randwrite").size("1m").with("ioengine", "psync").with("sync", 1).verify())?;
    stop(server)
}

/// The guest's driver then looks for completions itself and gives no call descriptor for some queues.
#[test]
fn polled_queues_verify() -> Result<()> {
    let image = Image::new(32)?;
    let server = Server::polypath().path(image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).kernel_arg("virtio_blk.poll_queues=1").disk(&server).queues(2).boot()?;
    ensure!(vm.sh("cat /sys/module/virtio_blk/parameters/poll_queues")?.trim() == "1");
    ensure!(vm.sh("cat /sys/block/vda/queue/io_poll")?.trim() == "1");
    vm.fio(&Fio::new("/dev/vda", "randwrite").size("4m").with("hipri", 1).verify())?;
    stop(server)
}

/// The yardstick: what passes here against one program and fails against the other is that program's fault.
fn same_load(builder: Builder) -> Result<FioResult> {
    let image = Image::new(128)?;
    let server = builder.path(image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let result = vm.fio(&Fio::new("/dev/vda", "randrw").depth(32).jobs(2, "8m").verify())?;
    vm.power_off()?;
    stop(server)?;
    Ok(result)
}

#[test]
fn same_load_verifies_on_polypath_and_on_the_storage_daemon() -> Result<()> {
    let theirs = same_load(Server::qsd())?;
    let ours = same_load(Server::polypath())?;
    println!("storage daemon: {theirs:?}\npolypath: {ours:?}");
    ensure!(ours.reads + ours.writes == theirs.reads + theirs.writes, "{ours:?} against {theirs:?}");
    Ok(())
}
