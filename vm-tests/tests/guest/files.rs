//! A file system on the disk.

use anyhow::{Result, ensure};
use polypath_vm_tests::guest::Vm;

use crate::support::{Image, serve, stop};

#[test]
fn file_system_keeps_what_is_copied_to_it() -> Result<()> {
    let image = Image::new(256)?;
    let server = serve(&image.path()).num_queues(2).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt")?;
    // Large and small files, holes, names by the hundred.
    vm.sh("cp -a /usr /lib /bin /mnt/ && mkdir /mnt/many && \
         for i in $(seq 300); do echo $i >/mnt/many/$i; done && \
         dd if=/dev/urandom of=/tmp/noise bs=1M count=20 2>&1 && cp /tmp/noise /mnt/noise && \
         dd if=/tmp/noise of=/mnt/sparse bs=1M count=1 seek=90 2>&1 && \
         rm -r /mnt/many/*7* && sync")?;
    vm.sh("umount /mnt && echo 3 >/proc/sys/vm/drop_caches && mount /dev/vda /mnt")?;
    vm.sh(
        "for tree in usr lib bin; do (cd /$tree && find . -type f -exec cmp {} /mnt/$tree/{} \\;) || exit 1; done && \
         cmp /tmp/noise /mnt/noise && \
         cmp -n 1048576 /tmp/noise /mnt/sparse 0 94371840 && \
         [ $(ls /mnt/many | wc -l) = $(seq 300 | grep -vc 7) ] && [ \"$(cat /mnt/many/299)\" = 299 ]",
    )?;
    let differing = vm.sh("cd /usr && find . -type f -exec cmp {} /mnt/usr/{} \\; 2>&1")?;
    ensure!(differing.is_empty(), "{differing}");
    vm.sh("umount /mnt && e2fsck -fn /dev/vda")?;
    vm.power_off()?;
    stop(server)
}

/// What was synced before the machine is switched off is there afterwards.
#[test]
fn synced_files_survive_a_power_cut() -> Result<()> {
    let image = Image::new(64)?;
    let server = serve(&image.path()).start()?;
    let vm = Vm::new().disk(&server).boot()?;
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /usr/bin/fio /mnt/ && sync")?;
    vm.kill();
    let vm = Vm::new().disk(&server).boot()?;
    vm.sh("mount /dev/vda /mnt && cmp /usr/bin/fio /mnt/fio && umount /mnt && e2fsck -fn /dev/vda")?;
    stop(server)
}
