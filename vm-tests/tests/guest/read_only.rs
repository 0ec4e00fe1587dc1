//! A disk that is only to be read.

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::{Fio, Vm};

use crate::support::{Image, serve, stop};

#[test]
fn read_only_disk_is_read_and_never_written() -> Result<()> {
    let image = Image::new(16)?;
    image.write(4096, b"what was there before")?;
    let before = image.read(0, 16 << 20)?;
    let server = serve(&image.path()).read_only().start()?;
    let vm = Vm::new().disk(&server).boot()?;
    ensure!(vm.sh("blockdev --getro /dev/vda")?.trim() == "1");
    ensure!(
        vm.sh("dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -c 21")? == "what was there before"
    );
    vm.fio(&Fio::new("/dev/vda", "randread").size("4m").with("loops", 2))?;
    ensure!(vm.sh("dd if=/dev/zero of=/dev/vda bs=4096 count=1 oflag=direct 2>&1").is_err());
    ensure!(vm.sh("blkdiscard -f /dev/vda 2>&1").is_err());
    ensure!(vm.sh("blkdiscard -f -z /dev/vda 2>&1").is_err());
    vm.sh("dd if=/dev/vda of=/dev/null bs=64k iflag=direct 2>&1")?;
    ensure!(image.read(0, 16 << 20)? == before, "a read-only disk was written to");
    stop(server)
}
