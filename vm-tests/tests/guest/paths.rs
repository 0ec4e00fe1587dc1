//! Several paths to one disk, some of which do not last.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::faulty::{self, FaultyFs, Rule};
use polypath_vm_tests::guest::{Fio, Vm};
use polypath_vm_tests::loopdev::{self, LoopDev};
use polypath_vm_tests::server::{Server, wait_until};
use polypath_vm_tests::skip::skip;

use crate::support::{Image, stop};

const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
const LOG_TIMEOUT: Duration = Duration::from_secs(5);

/// Skips the calling test when this machine lacks what it needs.
macro_rules! needs {
    ($available:expr, $test:literal) => {
        if let Err(why) = $available {
            skip($test, why);
            return Ok(());
        }
    };
}

/// A checked load over two paths, one of which begins to fail after some hundred requests.
fn loses_a_path_under_load(fault: Rule, fails_by: &str, reads_succeed: bool) -> Result<()> {
    let image = Image::new(64)?;
    let fs = FaultyFs::mount(&image.path(), &["a", "b"])?;
    fs.logging(false);
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randrw").depth(16).jobs(2, "8m").verify().lasting())?;
    wait_until("a load on both paths", LOAD_TIMEOUT, || {
        fs.counts("a").data() > 200 && fs.counts("b").data() > 200
    })?;
    fs.rule("a", fault);
    let line = server.wait_for_log("path failed", LOG_TIMEOUT)?;
    ensure!(line.contains(&format!("path={}", fs.path("a").display())) && line.contains(fails_by), "{line}");
    ensure!(!load.is_done(), "the load was over before the path was lost");
    let result = load.wait().context("the guest must not notice a lost path")?;
    ensure!(result.reads + result.writes >= 4096, "{result:?}");
    ensure!(fs.counts("a").refused > 0);
    // A probe reads; a path whose reads succeed may be tried again, one that fails them must be left alone.
    let late = fs.counts("a").writes;
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    ensure!(reads_succeed || fs.counts("a").writes == late, "a failed path still gets the guest's requests");
    stop(server)
}

#[test]
fn path_that_fails_everything_is_left_out() -> Result<()> {
    needs!(faulty::available(), "path_that_fails_everything_is_left_out");
    loses_a_path_under_load(Rule::errno(libc::EIO), "errno=EIO", false)
}

#[test]
fn path_that_fails_only_writes_is_left_out() -> Result<()> {
    needs!(faulty::available(), "path_that_fails_only_writes_is_left_out");
    loses_a_path_under_load(Rule::errno(libc::ENOLINK).writes(), "errno=ENOLINK", true)
}

/// The file server behind all paths is killed, and nothing is to be waited for: the guest gets errors, and nobody hangs.
#[test]
fn loss_of_all_paths_gives_errors_and_no_hang() -> Result<()> {
    needs!(faulty::available(), "loss_of_all_paths_gives_errors_and_no_hang");
    let image = Image::new(64)?;
    let fs = FaultyFs::mount(&image.path(), &["a", "b"])?;
    fs.logging(false);
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).num_queues(2);
    let mut server = server.arg("--no-path-retry").arg("fail").start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randread").depth(16).jobs(2, "16m").seconds(60))?;
    wait_until("a load on both paths", LOAD_TIMEOUT, || {
        fs.counts("a").data() > 200 && fs.counts("b").data() > 200
    })?;
    fs.kill();
    ensure!(load.wait().is_err(), "a load went on without a path");
    ensure!(server.is_alive());
    drop(vm);
    stop(server)
}

/// With no usable path for a moment the guest waits, and goes on unharmed when one returns.
#[test]
fn load_waits_until_a_path_returns() -> Result<()> {
    needs!(faulty::available(), "load_waits_until_a_path_returns");
    let image = Image::new(64)?;
    let fs = FaultyFs::mount(&image.path(), &["a", "b"])?;
    fs.logging(false);
    let server = Server::polypath().paths(fs.paths(&["a", "b"])).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randwrite").jobs(2, "8m").verify().lasting())?;
    wait_until("a load on both paths", LOAD_TIMEOUT, || {
        fs.counts("a").data() > 200 && fs.counts("b").data() > 200
    })?;
    fs.rule("a", Rule::errno(libc::EIO));
    fs.rule("b", Rule::errno(libc::EIO));
    server.wait_for_log("active=0", LOG_TIMEOUT)?;
    ensure!(!load.is_done(), "the load was over before the paths were lost");
    fs.clear("a");
    load.wait().context("the guest must only have waited")?;
    server.wait_for_log("path reinstated", LOG_TIMEOUT)?;
    stop(server)
}

#[test]
fn two_loop_devices_on_one_file_verify() -> Result<()> {
    needs!(loopdev::available(), "two_loop_devices_on_one_file_verify");
    let image = Image::new(64)?;
    // Direct, so that the two devices do not each have a cache of their own.
    let [one, two] = [(); 2].map(|()| LoopDev::on(&image.path()).direct_io(true).attach());
    let (one, two) = (one?, two?);
    let server = Server::polypath().path(one.path()).path(two.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.fio(&Fio::new("/dev/vda", "randwrite").jobs(2, "8m").verify())?;
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /usr/bin/fio /mnt/ && umount /mnt")?;
    vm.sh("mount /dev/vda /mnt && cmp /usr/bin/fio /mnt/fio && umount /mnt && e2fsck -fn /dev/vda")?;
    vm.sh("blkdiscard -z -o 0 -l $((1 << 20)) /dev/vda && blkdiscard /dev/vda")?;
    vm.power_off()?;
    stop(server)
}

/// A block device fails as a file does: its reads and writes give the errors of what is below it.
#[test]
fn block_device_that_fails_is_left_out() -> Result<()> {
    needs!(loopdev::available().and(faulty::available()), "block_device_that_fails_is_left_out");
    let image = Image::new(64)?;
    let fs = FaultyFs::mount(&image.path(), &["a", "b"])?;
    fs.logging(false);
    let [one, two] = ["a", "b"].map(|name| LoopDev::on(&fs.path(name)).direct_io(true).attach());
    let (one, two) = (one?, two?);
    let server = Server::polypath().path(one.path()).path(two.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    let load = vm.start_fio(&Fio::new("/dev/vda", "randrw").jobs(2, "8m").verify().lasting())?;
    wait_until("a load on both paths", LOAD_TIMEOUT, || {
        fs.counts("a").data() > 200 && fs.counts("b").data() > 200
    })?;
    fs.rule("a", Rule::errno(libc::EIO));
    let line = server.wait_for_log("path failed", LOG_TIMEOUT)?;
    ensure!(line.contains(&format!("path={}", one.path().display())), "{line}");
    load.wait().context("the guest must not notice a lost path")?;
    stop(server)
}

#[test]
fn hard_links_are_paths_to_one_disk() -> Result<()> {
    let image = Image::new(32)?;
    let link = image.hard_link("second-name")?;
    let server = Server::polypath().path(image.path()).path(link).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    vm.fio(&crate::verify::small_load("/dev/vda"))?;
    stop(server)
}
