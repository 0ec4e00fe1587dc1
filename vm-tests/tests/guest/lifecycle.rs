//! Guests, front-ends and the program itself come and go.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::guest::{Fio, Vm};
use polypath_vm_tests::server::{Server, wait_until};

use crate::support::{Image, serve, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(20);
/// A drained stop may take this long when the paths answer; twice the promised second, the machine may be busy.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

#[test]
fn guest_reboots_without_a_restart_of_the_back_end() -> Result<()> {
    let image = Image::new(64)?;
    let mut server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k conv=fsync 2>&1")?;
    let check = "cmp -n $(stat -c %s /usr/bin/fio) /usr/bin/fio /dev/vda";
    vm.reset()?;
    vm.sh(check)?;
    vm.reboot()?;
    vm.sh(check)?;
    // The reset button under load: requests in flight must not disturb what comes after.
    let load = Fio::new("/dev/vda", "randread").depth(32).seconds(60);
    let load = vm.start_fio(&load)?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    vm.reset()?;
    ensure!(load.wait().is_err(), "a load survived a reset");
    vm.sh(check)?;
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    ensure!(server.is_alive());
    stop(server)
}

/// A kernel that has crashed quiesces no device: its requests are in flight when the machine starts anew.
#[test]
fn f18_guest_crashes_under_load_and_boots_again() -> Result<()> {
    let image = Image::new(64)?;
    let mut server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k conv=fsync 2>&1")?;
    for rw in ["randread", "randwrite"] {
        // Writes go behind what is compared.
        let load = Fio::new("/dev/vda", rw).depth(32).with("offset", "32m").size("16m").seconds(60);
        let load = vm.start_fio(&load)?;
        wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
        vm.crash_reboot()?;
        ensure!(load.wait().is_err(), "a load survived a crash");
        vm.sh("cmp -n $(stat -c %s /usr/bin/fio) /usr/bin/fio /dev/vda")?;
        vm.fio(&crate::verify::small_load("/dev/vda").with("offset", "32m"))?;
    }
    ensure!(server.is_alive());
    stop(server)
}

/// The guest's driver lets go of the disk and takes it again, by itself and with its whole device.
#[test]
fn driver_is_unbound_and_bound_again() -> Result<()> {
    let image = Image::new(64)?;
    let mut server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("dd if=/usr/bin/fio of=/dev/vda bs=64k conv=fsync 2>&1")?;
    let mut name = "vda".to_owned();
    for under_load in [false, true, true, false] {
        for is_whole in [false, true] {
            let done = vm.requests_done(&name)?;
            let load = Fio::new(&format!("/dev/{name}"), "randread").depth(32).seconds(4);
            let load = under_load.then(|| vm.start_fio(&load)).transpose()?;
            if under_load {
                wait_until("the load to run", LOAD_TIMEOUT, || {
                    vm.requests_done(&name).is_ok_and(|nr| nr > done + 300)
                })?;
            }
            name = vm.rebind(&name, is_whole)?;
            vm.sh(&format!("cmp -n $(stat -c %s /usr/bin/fio) /usr/bin/fio /dev/{name}"))?;
            // A disk that is gone has no end to read up to: fio fails or finds nothing, and ends in any case.
            let _ = load.map(|load| load.wait());
        }
    }
    vm.fio(&crate::verify::small_load(&format!("/dev/{name}")))?;
    ensure!(server.is_alive());
    stop(server)
}

#[test]
fn front_ends_are_served_one_after_another() -> Result<()> {
    let image = Image::new(64)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let first = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    first.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /usr/bin/fio /mnt/ && umount /mnt")?;
    first.power_off()?;

    let second = Vm::new().disk(&server).boot()?;
    second.sh("mount /dev/vda /mnt && cmp /usr/bin/fio /mnt/fio && umount /mnt")?;
    // This one goes without a word, with requests in flight.
    let load = second.start_fio(&Fio::new("/dev/vda", "randread").depth(32).seconds(60))?;
    wait_until("the load to run", LOAD_TIMEOUT, || second.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    drop(load);
    second.kill();

    let third = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    third.sh("e2fsck -fn /dev/vda && mount /dev/vda /mnt && cmp /usr/bin/fio /mnt/fio")?;
    third.power_off()?;
    stop(server)
}

#[test]
fn second_front_end_at_the_same_time_is_refused_and_does_not_disturb() -> Result<()> {
    let image = Image::new(64)?;
    let server = Server::polypath().path(image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randwrite").size("16m").verify().lasting())?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    for _ in 0..3 {
        ensure!(Vm::new().disk(&server).start().is_err(), "two front-ends on one disk");
    }
    load.wait()?;
    stop(server)
}

#[test]
fn sigterm_under_load_drains_and_ends() -> Result<()> {
    let image = Image::new(64)?;
    let mut server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randrw").depth(32).size("32m").seconds(60))?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    let code = server.terminate(DRAIN_TIMEOUT)?;
    ensure!(code == 0, "exit code {code}: {}", server.stderr());
    ensure!(!server.socket().exists(), "the socket is still there");
    drop(load);
    Ok(())
}

/// A drained stop leaves nothing half done, so the guest goes on with the next start as if it had only been slow.
#[test]
fn load_goes_on_over_a_restart_by_sigterm() -> Result<()> {
    let image = Image::new(64)?;
    let mut server = Server::polypath().path(image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).reconnect().boot()?;
    let load =
        vm.start_fio(&Fio::new("/dev/vda", "randwrite").depth(32).jobs(2, "16m").verify().lasting())?;
    wait_until("the load to run", LOAD_TIMEOUT, || vm.requests_done("vda").is_ok_and(|nr| nr > 500))?;
    let socket = server.socket().to_owned();
    let code = server.terminate(DRAIN_TIMEOUT)?;
    ensure!(code == 0, "exit code {code}: {}", server.stderr());
    ensure!(!load.is_done(), "the load was over before the stop: {:?}", load.wait());
    let again = Server::polypath().path(image.path()).num_queues(2).socket(socket).start()?;
    let result =
        load.wait().with_context(|| format!("first: {}\nsecond: {}", server.stderr(), again.stderr()))?;
    ensure!(result.writes >= 2 * 4096, "{result:?}");
    stop(again)
}
