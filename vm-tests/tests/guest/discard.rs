//! Space given back.

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::Vm;

use crate::support::{Image, MIB, serve, stop};

const MARK: u8 = 0xA5;

/// An image that is full of marks.
fn marked(mib: u64) -> Result<Image> {
    let image = Image::new(mib)?;
    for at in 0..mib {
        image.write(at * MIB, &[MARK; 1 << 20])?;
    }
    Ok(image)
}

fn is_all(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|&byte| byte == value)
}

#[test]
fn discard_gives_space_back_and_keeps_the_rest() -> Result<()> {
    let image = marked(32)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    let before = image.allocated()?;
    vm.sh("blkdiscard -o $((8 << 20)) -l $((16 << 20)) /dev/vda")?;
    let freed = before.saturating_sub(image.allocated()?);
    ensure!(freed >= 15 * MIB, "freed {freed} bytes");
    ensure!(is_all(&image.read(0, 8 << 20)?, MARK) && is_all(&image.read(24 * MIB, 8 << 20)?, MARK));
    // The whole disk, in as many requests as the limits ask for; its size stays.
    vm.sh("blkdiscard /dev/vda")?;
    ensure!(image.allocated()? <= MIB);
    ensure!(std::fs::metadata(image.path())?.len() == 32 * MIB);
    stop(server)
}

#[test]
fn zeroed_ranges_read_back_as_zeroes() -> Result<()> {
    let image = marked(32)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    vm.sh("blkdiscard -z -o $((4 << 20)) -l $((8 << 20)) /dev/vda")?;
    // One sector in the midst of marks.
    vm.sh("blkdiscard -z -o $((20 << 20)) -l 512 /dev/vda")?;
    vm.sh("dd if=/dev/vda bs=1M skip=4 count=8 iflag=direct 2>/dev/null | cmp -n $((8 << 20)) - /dev/zero")?;
    ensure!(is_all(&image.read(4 * MIB, 8 << 20)?, 0));
    ensure!(is_all(&image.read(20 * MIB, 512)?, 0));
    for (offset, len) in [(0, 4 << 20), (12 * MIB, 8 << 20), (20 * MIB + 512, 11 << 20)] {
        ensure!(is_all(&image.read(offset, len)?, MARK), "marks from {offset} on are damaged");
    }
    stop(server)
}

#[test]
fn trim_of_a_file_system_gives_space_back() -> Result<()> {
    let image = Image::new(256)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /usr/bin/fio /mnt/kept")?;
    vm.sh("dd if=/dev/urandom of=/mnt/big bs=1M count=40 conv=fsync 2>&1")?;
    let full = image.allocated()?;
    vm.sh("rm /mnt/big && sync && fstrim -v /mnt")?;
    let freed = full.saturating_sub(image.allocated()?);
    ensure!(freed >= 36 * MIB, "freed {freed} bytes");
    vm.sh(
        "echo 3 >/proc/sys/vm/drop_caches; cmp /usr/bin/fio /mnt/kept && umount /mnt && e2fsck -fn /dev/vda",
    )?;
    stop(server)
}
