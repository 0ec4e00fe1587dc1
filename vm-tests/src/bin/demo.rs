//! What polypath is for, in half a minute: a guest works on its disk, and does not notice that one of two paths is lost.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::guest::{Accel, Fio, Guest, Load, Vm};
use polypath_vm_tests::server::{Server, wait_for};

const DISK_MIB: u64 = 256;
const NR_JOBS: u32 = 2;
/// Bytes that each job writes, then reads back.
const JOB_MIB: u64 = 48;
const BLOCK: u64 = 4096;
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Prints a line under a heading of fixed width.
macro_rules! tell {
    ($what:literal, $($text:tt)*) => {
        println!("{:<11}{}", $what, format_args!($($text)*))
    };
}

/// What was done up to a moment.
struct Mark {
    when: Instant,
    by_guest: u64,
    by_path: [u64; 2],
}

impl Mark {
    fn now(vm: &Guest, fs: &FaultyFs) -> Result<Self> {
        let by_path = ["a", "b"].map(|name| fs.counts(name).data() - fs.counts(name).refused);
        Ok(Self { when: Instant::now(), by_guest: vm.requests_done("vda")?, by_path })
    }

    /// Waits until the guest has done so many requests more.
    fn after(&self, nr: u64, vm: &Guest, fs: &FaultyFs, load: &Load<'_>) -> Result<Self> {
        wait_for("the load to go on", STEP_TIMEOUT, || {
            let mark = Self::now(vm, fs).ok()?;
            (mark.by_guest >= self.by_guest + nr || load.is_done()).then_some(mark)
        })
    }

    /// Requests per second since an earlier mark, and the share of each path.
    fn since(&self, earlier: &Self) -> String {
        let seconds = (self.when - earlier.when).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52, for a person to read")]
        let rate = (self.by_guest - earlier.by_guest) as f64 / seconds;
        // A refusal is counted a moment after the request that it belongs to.
        let [a, b] = [0, 1].map(|at| self.by_path[at].saturating_sub(earlier.by_path[at]));
        format!("{rate:.0} IOPS over {seconds:.1} s: {a} requests by path a, {b} by path b")
    }
}

fn main() -> Result<()> {
    let begin = Instant::now();
    let dir = tempfile::Builder::new().prefix("polypath-demo-").tempdir()?;
    let disk = dir.path().join("disk.img");
    File::create(&disk)?.set_len(DISK_MIB << 20)?;
    let fs = FaultyFs::mount(&disk, &["a", "b"])?;
    fs.logging(false);
    tell!("disk", "{DISK_MIB} MiB, reached by two paths, each of which the demo can cut off:");
    for path in fs.paths(&["a", "b"]) {
        tell!("", "{}", path.display());
    }

    let mut server =
        Server::polypath().paths(fs.paths(&["a", "b"])).num_queues(NR_JOBS).serial("demo").start()?;
    tell!("polypath", "process {} listens on {}", server.pid(), server.socket().display());

    let accel = if Accel::best() == Accel::Kvm { "KVM" } else { "emulated processors" };
    let booting = Instant::now();
    let vm = Vm::new().cpus(NR_JOBS).disk(&server).queues(NR_JOBS).boot()?;
    let kernel = vm.sh("uname -r")?;
    tell!("guest", "Linux {} on {accel}, up after {:.1} s", kernel.trim(), booting.elapsed().as_secs_f64());
    let sees = vm.sh(
        "cd /sys/block/vda && echo $(($(cat size) / 2048)) MiB, serial $(cat serial), $(ls mq | wc -l) queues, \
         $(cat cache_type)",
    )?;
    tell!("guest", "sees /dev/vda: {}", sees.trim());

    let nr_blocks = u64::from(NR_JOBS) * (JOB_MIB << 20) / BLOCK;
    let size = format!("{JOB_MIB}m");
    tell!(
        "fio",
        "random writes of 4 KiB, {NR_JOBS} jobs of 16 at a time, then every block read back and checked"
    );
    let load = vm.start_fio(&Fio::new("/dev/vda", "randwrite").jobs(NR_JOBS, &size).verify())?;
    let first = Mark::now(&vm, &fs)?.after(nr_blocks / 20, &vm, &fs, &load)?;
    let before = first.after(nr_blocks * 3 / 10, &vm, &fs, &load)?;
    tell!("before", "{}", before.since(&first));

    ensure!(!load.is_done(), "the load was over before a path could be lost");
    fs.rule("a", Rule::errno(libc::EIO));
    tell!("path lost", "after {:.1} s: every request by path a now fails", begin.elapsed().as_secs_f64());
    let line = server.wait_for_log("path failed", STEP_TIMEOUT)?;
    let line = line.find("path failed").map_or(line.as_str(), |at| &line[at..]);
    tell!("polypath", "logs: {line}");
    let failed = Mark::now(&vm, &fs)?;
    let after = failed.after(nr_blocks * 3 / 10, &vm, &fs, &load)?;
    tell!("after", "{}", after.since(&failed));

    let result = load.wait().context("the guest noticed the lost path")?;
    ensure!(result.writes == nr_blocks && result.reads == nr_blocks, "{result:?}");
    let retried = fs.counts("a").refused;
    tell!(
        "fio",
        "{} blocks written, {} read back and checked, errors: {}",
        result.writes,
        result.reads,
        result.errors
    );
    tell!("path a", "{retried} requests failed there and were sent again by path b");

    vm.power_off()?;
    let code = server.terminate(STOP_TIMEOUT)?;
    ensure!(code == 0, "polypath ended with code {code}: {}", server.stderr());
    tell!(
        "end",
        "guest powered off, polypath stopped by SIGTERM with code 0, {:.0} s in all",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}
