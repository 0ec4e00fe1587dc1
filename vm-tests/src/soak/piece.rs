//! A piece of the soak as a test.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Runs the program with `args` and fails when it finds something, after it has shown the log. Gives what it has printed.
///
/// `POLYPATH_SOAK_SECONDS` and `POLYPATH_SOAK_SEED` make it longer and choose what happens.
pub fn run(program: &Path, args: &[&str]) -> Result<String> {
    let out = tempfile::tempdir()?;
    let mut command = Command::new(program);
    command.args(args).arg("--out").arg(out.path());
    for (variable, option) in [("POLYPATH_SOAK_SECONDS", "--seconds"), ("POLYPATH_SOAK_SEED", "--seed")] {
        if let Ok(value) = std::env::var(variable) {
            command.args([option, &value]);
        }
    }
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    let [text, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{text}");
    if !output.status.success() {
        for entry in std::fs::read_dir(out.path())? {
            let path = entry?.path();
            if path.extension().is_some_and(|suffix| suffix == "log") {
                println!("{}", std::fs::read_to_string(path)?);
            }
        }
    }
    ensure!(output.status.success(), "the soak found something: {errors}");
    ensure!(text.contains("result: nothing was found"), "no result");
    Ok(text)
}
