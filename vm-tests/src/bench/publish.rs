//! The run that the project's documents show.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::disk::DiskKind;
use super::measured::{KIOPS, MERGED, Row};
use super::tables;

/// What is between these lines of the README is replaced.
const BEGIN: &str = "<!-- from here: written by vm-tests/bench --publish -->";
const END: &str = "<!-- to here -->";

/// What the README says before the facts.
const INTRODUCTION: &str = "\
From a real run, loop devices on tmpfs. What each column is, files on tmpfs, null paths, context switches, system calls, CPU time and
latencies are in [docs/benchmark](docs/benchmark/run.md).

";

/// Facts that readers need in order to compare.
const FACTS: [&str; 6] = ["machine", "kernel", "qsd", "load before", "rounds", "command"];

/// The project's folder of documents.
pub(super) fn documents() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../docs").into()
}

/// Shows the loop devices' rows in the README.
pub(super) fn readme(
    readme: &Path,
    facts: &[(&str, String)],
    rows: &[Row<'_>],
    plots: &[String],
) -> Result<()> {
    let of_loop: Vec<_> = rows.iter().filter(|row| row.disk == DiskKind::Loop).collect();
    let mut text = INTRODUCTION.to_owned();
    for (name, fact) in facts.iter().filter(|(name, _)| FACTS.contains(name)) {
        text +=
            &format!("- {name}: {}\n", if *name == "command" { format!("`{fact}`") } else { fact.clone() });
    }
    for table in [tables::pivot(&of_loop, &KIOPS), tables::pivot(&of_loop, &MERGED), tables::ratios(&of_loop)]
    {
        text += &format!("\n{table}");
    }
    if let Some(plot) = plots.iter().find(|plot| plot.contains("loop-iops")) {
        text += &format!("\n![IOPS on a loop device](docs/benchmark/{plot})\n");
    }
    let old = fs::read_to_string(readme).with_context(|| format!("read {}", readme.display()))?;
    let new = between(&old, &text).with_context(|| format!("no place for it in {}", readme.display()))?;
    fs::write(readme, new).with_context(|| format!("write {}", readme.display()))
}

/// `old` with `text` between the marks; None without them.
fn between(old: &str, text: &str) -> Option<String> {
    let (before, rest) = old.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{text}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let old = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = between(&old, "new\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(between(&new, "new\n").unwrap(), new);
        assert_eq!(between("a\n", "new\n"), None);
    }

    #[test]
    fn the_readme_has_a_place_for_it() {
        let readme = fs::read_to_string(documents().join("../README.md")).unwrap();
        assert!(between(&readme, "").is_some());
    }
}
