//! What a soak leaves: Markdown for people, JSON for programs, and after a finding the log.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::drift::{self, Drift, Sample};
use super::{Options, State};

/// All results.
#[derive(Debug)]
pub struct Report {
    command: String,
    seed: u64,
    hours: f64,
    counts: Vec<(&'static str, u64)>,
    requests: Vec<(&'static str, u64)>,
    facts: Vec<(&'static str, u64)>,
    drifts: Vec<Drift>,
    samples: Vec<Sample>,
    finding: Option<String>,
    last: Vec<String>,
    log: String,
}

impl Report {
    pub(super) fn new(
        options: &Options,
        took: Duration,
        state: &State,
        finding: Option<anyhow::Error>,
    ) -> Self {
        let drifts = drift::judge(&state.samples);
        let drifted: Vec<_> =
            drifts.iter().filter(|drift| drift.is_found()).map(|drift| drift.name).collect();
        let drifted = (!drifted.is_empty()).then(|| format!("drift of: {}", drifted.join("; ")));
        Self {
            command: options.command(),
            seed: options.seed,
            hours: took.as_secs_f64() / 3600.0,
            counts: state.counts.iter().map(|(kind, number)| (*kind, *number)).collect(),
            requests: state.tally.answered.iter().map(|(kind, number)| (*kind, *number)).collect(),
            facts: vec![
                ("lives", state.nr_lives),
                ("legs", state.nr_legs),
                ("requests verified", state.tally.total()),
                ("sectors read and compared", state.tally.sectors_checked),
                ("power cuts", state.nr_cuts),
                ("requests given up by power cuts", state.tally.given_up),
                ("sectors whose last version survived a cut", state.survived.last),
                ("sectors with a version in between", state.survived.between),
                ("sectors with what was flushed", state.survived.durable),
                ("samples", state.samples.len() as u64),
            ],
            drifts,
            samples: state.samples.clone(),
            finding: finding.map(|error| format!("{error:#}")).or(drifted),
            last: state.last.clone(),
            log: state.log.clone(),
        }
    }

    /// Whether nothing was found.
    pub fn is_good(&self) -> bool {
        self.finding.is_none()
    }

    /// As Markdown.
    pub fn text(&self) -> String {
        let mut text = format!("# Soak\n\n- command: `{}`\n- hours: {:.3}\n", self.command, self.hours);
        let _ = writeln!(text, "- result: {}", self.finding.as_deref().unwrap_or("nothing was found"));
        for (name, number) in &self.facts {
            let _ = writeln!(text, "- {name}: {number}");
        }
        for (title, counts) in [("Requests", &self.requests), ("Faults and events", &self.counts)] {
            let _ = writeln!(text, "\n## {title}\n\n| kind | number |\n|---|--:|");
            for (kind, number) in counts {
                let _ = writeln!(text, "| {kind} | {number} |");
            }
        }
        let _ = writeln!(
            text,
            "\n## Drift\n\nOf each process that served for {} samples or more: lowest value of the first and of the last part \
             of what is judged.\n\n| process | measure | first | last | at most | per hour | |\n|--:|---|--:|--:|--:|--:|---|",
            drift::NR_JUDGED_MIN
        );
        for drift in &self.drifts {
            let Drift { name, process, first, last, most, per_hour } = drift;
            // Of a few minutes a slope says nothing.
            let per_hour = if self.hours > 0.25 { format!("{per_hour:.0}") } else { "-".to_owned() };
            let verdict = if drift.is_found() { "DRIFT" } else { "" };
            let _ =
                writeln!(text, "| {process} | {name} | {first} | {last} | {most} | {per_hour} | {verdict} |");
        }
        if !self.last.is_empty() {
            let _ = writeln!(text, "\n## The last events\n\n```\n{}\n```", self.last.join("\n"));
        }
        text
    }

    fn json(&self) -> Value {
        let map = |counts: &[(&'static str, u64)]| -> Value {
            let map: serde_json::Map<_, _> =
                counts.iter().map(|(kind, number)| ((*kind).to_owned(), json!(number))).collect();
            Value::Object(map)
        };
        json!({
            "command": self.command,
            "seed": self.seed,
            "hours": self.hours,
            "finding": self.finding,
            "facts": map(&self.facts),
            "requests": map(&self.requests),
            "events": map(&self.counts),
            "drift": self.drifts,
            "samples": self.samples,
            "last_events": self.last,
        })
    }

    /// Writes the files and says where they are.
    pub fn write(&self, out: &Path) -> Result<()> {
        std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
        let json = serde_json::to_string(&self.json())?.replace("},{", "},\n{");
        let mut files = vec![("md", self.text()), ("json", json)];
        if self.finding.is_some() {
            files.push(("log", self.log.clone()));
        }
        for (suffix, contents) in files {
            let file = out.join(format!("soak-{}.{suffix}", self.seed));
            std::fs::write(&file, contents).with_context(|| format!("write {}", file.display()))?;
            println!("{}", file.display());
        }
        Ok(())
    }
}
