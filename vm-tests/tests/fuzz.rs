//! The fuzz targets' quick form: they build, what they have found before is right, and a few seconds more find nothing.

use std::io::Write as _;
use std::process::Command;

use polypath_vm_tests::skip;

/// How long each target runs.
const SECONDS: &str = "5";

#[test]
fn the_fuzz_targets_find_nothing() {
    if let Err(error) = Command::new("g++").arg("--version").output() {
        skip::skip("the_fuzz_targets_find_nothing", format!("g++: {error}"));
        return;
    }
    let command = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz");
    let output = Command::new(command).args(["--seconds", SECONDS, "--seed", "1"]).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // Shown although the test passes: it says how much was tried.
    writeln!(std::io::stdout(), "{}", text[0]).unwrap();
    assert!(output.status.success(), "{}\n{}", text[0], text[1]);
    let rows: Vec<Vec<&str>> = text[0].lines().map(|line| line.split_whitespace().collect()).collect();
    for target in ["control", "inflight", "ring", "session", "table_text"] {
        let row =
            rows.iter().find(|row| row.first() == Some(&target)).unwrap_or_else(|| panic!("no {target}"));
        let numbers: Vec<u64> = row[1..].iter().map(|word| word.parse().unwrap()).collect();
        assert!(numbers[0] > 20 && numbers[2] > 500, "{target} has done next to nothing: {numbers:?}");
    }
}
