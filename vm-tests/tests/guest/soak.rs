//! A piece of the soak with a guest (`vm-tests/soak --guest`): fio over four queues, faults of all kinds, and polypath killed,
//! restarted and left.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::faulty;
use polypath_vm_tests::guest::Qemu;
use polypath_vm_tests::skip::skip;
use polypath_vm_tests::soak::piece;

/// The number behind a name in the report.
fn number(report: &str, name: &str) -> Result<u64> {
    let lines = report.lines().filter_map(|line| {
        let line = line.strip_prefix("- ").or(line.strip_prefix("| "))?;
        line.strip_prefix(name)?.strip_prefix(": ").or(line.strip_prefix(name)?.strip_prefix(" | "))
    });
    let text = lines.map(|rest| rest.trim_end_matches(" |")).next();
    text.and_then(|text| text.parse().ok()).with_context(|| format!("no {name} in the report"))
}

#[test]
fn a_guest_notices_nothing_of_random_events() -> Result<()> {
    if let Err(why) = faulty::available() {
        skip("soak::a_guest_notices_nothing_of_random_events", why);
        return Ok(());
    }
    let program = Path::new(env!("CARGO_BIN_EXE_polypath-soak"));
    let report = piece::run(program, &["--guest", "--seconds", "40", "--seed", "7"])?;
    ensure!(number(&report, "blocks written, read back and compared")? > 1000);
    // Killed twice, once with requests that hang.
    ensure!(number(&report, "kill -9")? >= 2 && number(&report, "restart")? >= 1);
    ensure!(number(&report, "path error")? > 0 && number(&report, "path hangs")? > 0);
    match Qemu::for_moves() {
        Ok(_) => ensure!(number(&report, "moves to another QEMU")? >= 1),
        Err(_) => ensure!(report.contains("the guest was not moved: ")),
    }
    Ok(())
}
