//! A piece of the soak (`vm-tests/soak`): load, faults of all kinds and power cuts, and no drift.
//!
//! `POLYPATH_SOAK_SECONDS` and `POLYPATH_SOAK_SEED` make it longer and choose what happens.

use std::process::Command;

use crate::common::need;

const SECONDS_DEFAULT: &str = "45";

#[test]
fn random_events_under_load() {
    need!(faulty);
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_polypath-soak"));
    let seconds = std::env::var("POLYPATH_SOAK_SECONDS").unwrap_or_else(|_| SECONDS_DEFAULT.to_owned());
    command.arg("--out").arg(out.path()).args(["--seconds", &seconds]);
    if let Ok(seed) = std::env::var("POLYPATH_SOAK_SEED") {
        command.args(["--seed", &seed]);
    }
    let output = command.output().unwrap();
    let [text, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{text}");
    if !output.status.success() {
        for entry in std::fs::read_dir(out.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|suffix| suffix == "log") {
                println!("{}", std::fs::read_to_string(path).unwrap());
            }
        }
        panic!("the soak found something: {errors}");
    }
    assert!(text.contains("result: nothing was found"));
}
