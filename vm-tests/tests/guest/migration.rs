//! A guest moves from one back-end to another under load, and back.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::guest::{Fio, Guest, Qemu, SCRIPT_TIMEOUT, Vm};
use polypath_vm_tests::server::{Server, wait_until};
use polypath_vm_tests::skip::skip;

use crate::support::{Image, serves_polypath, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Writes blocks with checksums and reads them back.
fn load() -> Fio {
    Fio::new("/dev/vda", "randwrite").jobs(2, "4m").with("offset_increment", "16m").verify()
}

fn wait_more(vm: &Guest, more: u64) -> Result<()> {
    let done = vm.requests_done("vda")?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > done + more))
        .with_context(|| format!("the load says: {:?}", vm.failed_passes()))
}

/// Moves there and back; `POLYPATH_MIGRATION_ROUNDS` says otherwise.
fn rounds() -> Result<usize> {
    std::env::var("POLYPATH_MIGRATION_ROUNDS").map_or(Ok(2), |n| Ok(n.parse()?))
}

/// One that can do it; without any, the test is skipped.
fn qemu_for(test: &str) -> Option<Qemu> {
    Qemu::for_moves().map_err(|why| skip(test, why)).ok()
}

/// Moves a guest under load; `machine` describes it, by the number of the move that brings it there.
fn move_there_and_back(machine: impl Fn(usize) -> Vm, rounds: usize) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut vm = machine(0).boot()?;
    vm.start_passes(&load(), 1)?;
    wait_more(&vm, 300)?;

    // The first one is called off half way; the guest goes on where it is.
    let socket = dir.path().join("cancelled");
    let unused = machine(1).incoming(&socket).start()?;
    vm.move_and_cancel(&socket, || wait_more(&vm, 300))?;
    unused.kill();
    wait_more(&vm, 300)?;

    for round in 0..rounds {
        let socket = dir.path().join(format!("move{round}"));
        let next = machine(round + 1).incoming(&socket).start()?;
        vm.move_to(&socket).with_context(|| format!("move {round}: {}", next.qemu_log()))?;
        vm = next;
        wait_more(&vm, 300).with_context(|| format!("after move {round}"))?;
    }
    let passes = vm.end_passes(SCRIPT_TIMEOUT)?;
    ensure!(passes.result.reads == passes.result.writes, "not all was read back: {passes:?}");
    println!("{rounds} moves and a cancelled one, {passes:?}");
    vm.power_off()
}

/// The control: QEMU, guest, load and moves as below, and no back-end. Where this fails, the other's failure says nothing.
#[test]
fn control_a_guest_with_qemus_own_disk_moves() -> Result<()> {
    let Some(qemu) = qemu_for("migration::control_a_guest_with_qemus_own_disk_moves") else { return Ok(()) };
    let image = Image::new(64)?;
    move_there_and_back(|_| Vm::new().qemu(qemu).cpus(2).own_disk(&image.path()), rounds()?)
}

#[test]
fn f49_moved_under_load_there_and_back() -> Result<()> {
    ensure!(serves_polypath(), "moves between two servers of one program");
    let Some(qemu) = qemu_for("migration::f49_moved_under_load_there_and_back") else { return Ok(()) };
    // One disk; the hosts need not reach it by as many paths.
    let image = Image::new(64)?;
    let link = image.hard_link("link.img")?;
    let start = |paths: &[PathBuf]| Server::polypath().paths(paths).num_queues(2).start();
    let servers = [start(&[image.path(), link])?, start(&[image.path()])?];
    let machine = |at: usize| Vm::new().qemu(qemu).cpus(2).disk(&servers[at % 2]).queues(2);
    move_there_and_back(machine, rounds()?)?;
    servers.into_iter().try_for_each(stop)
}
