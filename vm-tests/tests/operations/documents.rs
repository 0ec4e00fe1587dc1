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

#[test]
fn the_first_two_screens_of_the_readme_and_where_it_leads() {
    let readme = text("README.md");
    let first = readme.lines().position(|line| line == "# Details").expect("a heading for the details");
    assert!(first <= FIRST_LINES_MAX, "{first} lines before the details");
    for link in between(&readme, "](", ")").filter(|link| !link.starts_with(['#', 'h'])) {
        assert!(root().join(link).exists(), "README.md leads to {link}");
    }
    for heading in between(&readme, "](#", ")") {
        let is_it = |line: &str| {
            line.starts_with('#')
                && line.trim_start_matches(['#', ' ']).to_lowercase().replace(' ', "-") == heading
        };
        assert!(readme.lines().any(is_it), "README.md leads to #{heading}");
    }
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
