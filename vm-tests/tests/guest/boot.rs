//! The guest finds its disk, and the disk says what it is.

use std::time::Duration;

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::{Guest, Qemu, Vm, boot_disk, check_boot_disk};
use polypath_vm_tests::server::wait_until;
use polypath_vm_tests::skip::skip;

use crate::support::{Image, serve, serves_polypath, stop};

const FIRMWARE_TIMEOUT: Duration = Duration::from_secs(30);

fn number(vm: &Guest, file: &str) -> Result<u64> {
    Ok(vm.sh(&format!("cat /sys/block/vda/{file}"))?.trim().parse()?)
}

fn sees_its_disk(nr_queues: u32) -> Result<()> {
    let image = Image::new(64)?;
    let builder = serve(&image.path()).num_queues(4);
    let builder =
        if serves_polypath() { builder.serial("twenty-byte-serial-0").queue_size(256) } else { builder };
    let server = builder.start()?;
    let queue_size = if serves_polypath() { 256 } else { 128 };
    let vm = Vm::new().cpus(nr_queues).disk(&server).queues(nr_queues).queue_size(queue_size).boot()?;

    ensure!(number(&vm, "size")? == 64 * 2048);
    ensure!(number(&vm, "queue/logical_block_size")? == 512);
    ensure!(number(&vm, "queue/physical_block_size")? >= 512);
    ensure!(number(&vm, "ro")? == 0);
    ensure!(number(&vm, "queue/max_segments")? == u64::from(queue_size) - 2);
    ensure!(number(&vm, "queue/discard_max_bytes")? >= 1 << 20);
    ensure!(number(&vm, "queue/discard_granularity")? >= 512);
    ensure!(number(&vm, "queue/write_zeroes_max_bytes")? >= 1 << 20);
    let queues = vm.sh("ls /sys/block/vda/mq | wc -l")?;
    ensure!(queues.trim() == nr_queues.to_string(), "{queues} queues");
    if serves_polypath() {
        let serial = vm.sh("cat /sys/block/vda/serial")?;
        ensure!(serial.trim() == "twenty-byte-serial-0", "serial {serial:?}");
        let cache = vm.sh("cat /sys/block/vda/cache_type")?;
        ensure!(cache.trim() == "write back", "cache type {cache:?}");
    }
    // The first and the last sector are there, and nothing behind it.
    vm.sh("dd if=/dev/vda of=/dev/null bs=512 count=1 2>&1; dd if=/dev/vda of=/dev/null bs=512 skip=131071 2>&1")?;
    vm.power_off()?;
    stop(server)
}

#[test]
fn sees_its_disk_by_one_queue() -> Result<()> {
    sees_its_disk(1)
}

#[test]
fn sees_its_disk_by_two_queues() -> Result<()> {
    sees_its_disk(2)
}

#[test]
fn sees_its_disk_by_four_queues() -> Result<()> {
    sees_its_disk(4)
}

/// The front-end asks for a queue per CPU when it is told nothing.
#[test]
fn eight_cpus_start_with_defaults_on_both_sides() -> Result<()> {
    let image = Image::new(16)?;
    let builder = serve(&image.path());
    let server = if serves_polypath() { builder } else { builder.num_queues(8) }.start()?;
    let vm = Vm::new().cpus(8).disk(&server).boot()?;
    ensure!(vm.sh("ls /sys/block/vda/mq | wc -l")?.trim() == "8");
    // Each queue by the CPU that it belongs to.
    vm.sh("for cpu in 0 1 2 3 4 5 6 7; do taskset -c $cpu dd if=/dev/vda of=/dev/null bs=4k count=16 iflag=direct; done")?;
    stop(server)
}

/// The front-end must be told, and the next one must not feel it.
#[test]
fn more_queues_than_there_are_is_refused() -> Result<()> {
    let image = Image::new(16)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    for _ in 0..2 {
        let refused = Vm::new().cpus(4).disk(&server).start().expect_err("more queues than the back-end has");
        ensure!(format!("{refused:#}").contains("queues"), "{refused:#}");
    }
    Vm::new().cpus(2).disk(&server).boot()?.fio(&crate::verify::small_load("/dev/vda"))?;
    stop(server)
}

#[test]
fn cache_type_can_be_changed_both_ways() -> Result<()> {
    let image = Image::new(16)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    let script = "cd /sys/block/vda; for t in 'write through' 'write back' 'write through'; do \
                  echo \"$t\" >cache_type && [ \"$(cat cache_type)\" = \"$t\" ] || exit 1; \
                  dd if=/bin/busybox of=/dev/vda bs=64k conv=fsync 2>&1 || exit 2; done";
    vm.sh(script)?;
    stop(server)
}

#[test]
fn newer_front_end_is_served_too() -> Result<()> {
    if let Err(why) = Qemu::Backports.program() {
        skip("newer_front_end_is_served_too", why);
        return Ok(());
    }
    let image = Image::new(64)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().qemu(Qemu::Backports).cpus(2).disk(&server).queues(2).reconnect().boot()?;
    ensure!(number(&vm, "size")? == 64 * 2048);
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    vm.reset()?;
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    stop(server)
}

#[test]
fn firmware_boots_from_the_disk() -> Result<()> {
    let image = Image::new(0)?;
    let marker = boot_disk(&image.path(), 8 << 20)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).firmware_boots_it().start()?;
    vm.wait_console(marker, FIRMWARE_TIMEOUT)?;
    check_boot_disk(&image.path())?;
    // And once more on the same connection.
    image.write(2048 * 512, &[0; 16 * 512])?;
    vm.qmp("system_reset", serde_json::json!({}))?;
    wait_until("the second boot", FIRMWARE_TIMEOUT, || vm.console().matches(marker).count() == 2)?;
    check_boot_disk(&image.path())?;
    vm.kill();
    stop(server)
}
