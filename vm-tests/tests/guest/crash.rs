//! The back-end is killed under a guest: the guest sees a pause and nothing else.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::guest::{Fio, Guest, Qemu, Vm};
use polypath_vm_tests::server::{Server, wait_until};

use crate::support::{Image, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(20);

/// Kills per test; `POLYPATH_CRASH_ROUNDS` says otherwise.
const ROUNDS: u64 = 3;

fn wait_more(vm: &Guest, more: u64) -> Result<()> {
    let done = vm.requests_done("vda")?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > done + more))
}

fn killed_and_started_again(qemu: Qemu) -> Result<()> {
    let rounds = std::env::var("POLYPATH_CRASH_ROUNDS").map_or(Ok(ROUNDS), |n| n.parse())?;
    let image = Image::new(64)?;
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("sock");
    let start = || Server::polypath().path(image.path()).num_queues(2).socket(&socket).start();
    let mut server = start()?;
    let vm = Vm::new().qemu(qemu).cpus(2).disk(&server).queues(2).reconnect().boot()?;
    let mut nr_again = 0;
    for round in 0..rounds {
        let load =
            vm.start_fio(&Fio::new("/dev/vda", "randwrite").depth(32).jobs(2, "16m").verify().lasting())?;
        wait_more(&vm, 300)?;
        server.kill();
        ensure!(!load.is_done(), "the load was over before the kill: {:?}", load.wait());
        server = start()?;
        let result =
            load.wait().with_context(|| format!("round {round}, the new one: {}", server.stderr()))?;
        ensure!(result.writes >= 2 * 4096, "{result:?}");
        nr_again += server.count_log("requests taken up again");
    }
    println!("{rounds} kills, {nr_again} queues with requests taken up again");
    // What the guest's kernel says of its disk: nothing.
    let complaints = vm.disk_complaints()?;
    ensure!(complaints.is_empty(), "{complaints}");
    // And the guest boots anew over it.
    vm.reboot()?;
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    stop(server)
}

#[test]
fn f07_killed_under_load_and_started_again() -> Result<()> {
    killed_and_started_again(Qemu::Stable)
}

#[test]
fn f07_killed_under_load_and_started_again_with_a_newer_front_end() -> Result<()> {
    if let Err(why) = Qemu::Backports.program() {
        polypath_vm_tests::skip::skip("crash::f07_killed_under_load_with_a_newer_front_end", why);
        return Ok(());
    }
    killed_and_started_again(Qemu::Backports)
}
