//! `polypath check`.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser as _;

use super::Failure;
use super::format::{self, Colours, Paint, Table};
use crate::check::{self, Finding, Weight};
use crate::cli::Options;
use crate::config::Launch;

pub(super) fn run(file: &Path, json: bool) -> Result<(), Failure> {
    let refused = |why: String| Failure::Refused(why);
    let mut options = Options::try_parse_from(["polypath"]).map_err(|error| refused(error.to_string()))?;
    options.config = Some(file.to_owned());
    let launch = Launch { options, given: BTreeSet::new() };
    let (options, spec) = launch.resolve().map_err(|error| refused(format!("{error:#}")))?;
    let findings = check::check(&options, &spec).0;
    if json {
        findings.iter().try_for_each(|finding| format::print(&format!("{}\n", finding.json())))?;
    } else {
        format::print(&text(&findings))?;
    }
    match findings.iter().filter(|finding| finding.weight == Weight::Error).count() {
        0 => Ok(()),
        n => Err(refused(format!("{}: {n} errors: a start would fail", file.display()))),
    }
}

fn text(findings: &[Finding]) -> String {
    let mut table = Table::default();
    for finding in findings {
        let (word, paint) = match finding.weight {
            Weight::Ok => ("ok", Paint::Green),
            Weight::Warning => ("warning", Paint::Yellow),
            Weight::Error => ("ERROR", Paint::Red),
        };
        table.row([
            (word.to_owned(), paint),
            (finding.about.clone(), Paint::Plain),
            (finding.text.clone(), Paint::Plain),
        ]);
    }
    table.text("", Colours::of_stdout())
}
