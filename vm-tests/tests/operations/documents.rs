//! The manuals say what the program does: its options, its commands, its files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use polypath_vm_tests::control::Socket;
use polypath_vm_tests::server::Server;
use serde_json::json;

use crate::common::{Image, MIB};
use crate::run::polypath;

/// Two screens of a terminal.
const FIRST_LINES_MAX: usize = 100;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn text(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Words in a text that stand between these.
fn between<'a>(text: &'a str, before: &str, after: &str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(move |rest| rest.split(after).next())
}

/// A heading as a link names it: small letters, hyphens for spaces, and of other signs none but these.
fn anchor(heading: &str) -> String {
    let is_kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
    let name: String = heading.trim_matches(['#', ' ']).chars().filter(is_kept).collect();
    name.to_lowercase().replace(' ', "-")
}

/// Whether a document at `path` has a heading of this name.
fn has_heading(path: &Path, name: &str) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == name)
}

/// Every document of the project, by the folders that have some.
fn documents() -> Vec<PathBuf> {
    let mut folders = vec![root(), root().join("vm-tests"), root().join("docs")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() && folder.starts_with(root().join("docs")) {
                folders.push(entry);
            } else if entry.extension().is_some_and(|extension| extension == "md") {
                found.push(entry);
            }
        }
    }
    found
}

#[test]
fn every_link_leads_to_a_file_and_to_a_heading() {
    let documents = documents();
    assert!(documents.len() > 5, "{documents:?}");
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        for link in between(&text, "](", ")").filter(|link| !link.starts_with("http")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if file.is_empty() { document.clone() } else { document.parent().unwrap().join(file) };
            let leads = target.exists() && (heading.is_empty() || has_heading(&target, heading));
            assert!(leads, "{} leads to {link}", document.display());
        }
    }
}

#[test]
fn the_first_two_screens_of_the_readme() {
    let readme = text("README.md");
    let first = readme.lines().position(|line| line == "# Details").expect("a heading for the details");
    assert!(first <= FIRST_LINES_MAX, "{first} lines before the details");
    for script in ["vm-tests/demo", "vm-tests/run", "vm-tests/bench", "vm-tests/record"] {
        assert!(readme.contains(script) && root().join(script).exists(), "{script}");
    }
}

#[test]
fn every_option_is_in_the_readme_and_nothing_else() {
    let help = polypath(&["--help"]).ok();
    let options = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
        words.filter(|word| word.starts_with("--") && word.len() > 2).map(str::to_owned).collect()
    };
    // An option's own line begins with it.
    let of_help: BTreeSet<String> = help
        .lines()
        .filter(|line| line.trim_start().starts_with('-'))
        .flat_map(|line| options(line).into_iter().next())
        .filter(|option| option != "--help" && option != "--version")
        .collect();
    let readme = text("README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| `-"));
    let of_readme: BTreeSet<String> =
        rows.flat_map(|row| options(row.split('|').nth(1).unwrap_or_default())).collect();
    let lacks: Vec<_> = of_help.difference(&of_readme).collect();
    assert!(lacks.is_empty(), "not in README.md: {lacks:?}");
    let more: Vec<_> =
        of_readme.difference(&of_help).filter(|option| *option != "--print-capabilities").collect();
    assert!(more.is_empty(), "only in README.md: {more:?}");
}

#[test]
fn every_command_is_in_the_manual_of_the_control_socket() {
    let image = Image::empty(MIB);
    let socket = Socket::new().unwrap();
    let _server = Server::polypath().path(&image.path).arg("--control").arg(socket.path()).start().unwrap();
    let hello = socket.connect().unwrap().result(json!({ "command": "hello" })).unwrap();
    let commands: BTreeSet<&str> =
        hello["commands"].as_array().unwrap().iter().filter_map(|c| c.as_str()).collect();
    let manual = text("docs/control.md");
    let part = between(&manual, "## Commands", "## show").next().unwrap();
    let rows = part.lines().filter(|line| line.starts_with("| `"));
    let named: BTreeSet<&str> = rows
        .flat_map(|row| {
            between(row.split('|').nth(1).unwrap_or_default(), "`", "`").step_by(2).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(named, commands);
}
