//! The benchmark's quick form: it runs, and ratios and limits with much room hold. No time is looked at.

use std::process::Command;
use std::sync::Mutex;

use polypath_vm_tests::loopdev::{self, Mount};
use polypath_vm_tests::skip;

/// What else the machine does hits all that is compared, but not always alike.
const NR_TRIES: usize = 3;

/// One at a time: they would take the processors from each other.
static TURN: Mutex<()> = Mutex::new(());

fn missing() -> Result<(), String> {
    loopdev::available()?;
    Mount::tmpfs(1 << 20).map_err(|e| format!("no tmpfs: {e}"))?;
    Command::new("qemu-storage-daemon")
        .arg("--version")
        .output()
        .map_err(|e| format!("qemu-storage-daemon: {e}"))?;
    let nr_cores = std::thread::available_parallelism().map_or(1, usize::from);
    if nr_cores < 2 { Err("two cores are needed".into()) } else { Ok(()) }
}

#[test]
fn loose_ratios_hold() {
    if let Err(why) = missing() {
        skip::skip("loose_ratios_hold", why);
        return;
    }
    let _turn = TURN.lock();
    let out = tempfile::tempdir().unwrap();
    for left in (0..NR_TRIES).rev() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polypath-bench"));
        let output = command.args(["--quick", "--check", "--out"]).arg(out.path()).output().unwrap();
        if output.status.success() {
            break;
        }
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert!(left > 0, "{}\n{}", text[0], text[1]);
    }
    let names = std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    for suffix in [".md", ".json", "-loop-iops.svg", "-loop-merged.svg", "-tmpfs-cpu.svg"] {
        assert!(names.iter().any(|name| name.ends_with(suffix)), "no {suffix} in {names:?}");
    }
}

#[test]
fn memory_is_in_proportion_to_queues_and_rings() {
    if let Err(why) = missing() {
        skip::skip("memory_is_in_proportion_to_queues_and_rings", why);
        return;
    }
    let _turn = TURN.lock();
    let output =
        Command::new(env!("CARGO_BIN_EXE_polypath-bench")).args(["--memory", "--check"]).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{}", text[0]);
    assert!(output.status.success(), "{}\n{}", text[0], text[1]);
}
