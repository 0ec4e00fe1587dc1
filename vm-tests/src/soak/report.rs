//! What a soak leaves: Markdown for people, JSON for programs, and after a finding the log.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::Options;
use super::drift::{self, Drift, Sample};
use super::events::Events;

/// All that came of it so far.
#[derive(Debug, Default)]
pub struct Record {
    /// How often each kind of event happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Requests by kind.
    pub requests: BTreeMap<&'static str, u64>,
    /// Other numbers, in the order in which they are shown.
    pub facts: Vec<(&'static str, u64)>,
    /// What has to be said beside the numbers.
    pub remarks: Vec<String>,
    /// Number of the process that serves, of those that served one after the other.
    pub process: usize,
    /// Looks at the processes.
    pub samples: Vec<Sample>,
    /// What happened last.
    pub last: Vec<String>,
    /// What all sides logged last, after a finding.
    pub log: String,
}

impl Record {
    /// Adds to one of the facts.
    pub fn count(&mut self, fact: &'static str, more: u64) {
        match self.facts.iter_mut().find(|(name, _)| *name == fact) {
            Some((_, number)) => *number += more,
            None => self.facts.push((fact, more)),
        }
    }

    /// Takes over what happened in a life.
    pub fn take(&mut self, events: &mut Events) {
        for (kind, number) in std::mem::take(&mut events.counts) {
            *self.counts.entry(kind).or_default() += number;
        }
        self.last = events.history().map(str::to_owned).collect();
    }
}

/// All results.
#[derive(Debug)]
pub struct Report {
    command: String,
    seed: u64,
    hours: f64,
    name: String,
    record: Record,
    drifts: Vec<Drift>,
    finding: Option<String>,
}

impl Report {
    pub(super) fn new(
        options: &Options,
        took: Duration,
        mut record: Record,
        finding: Option<anyhow::Error>,
    ) -> Self {
        let drifts = drift::judge(&record.samples);
        let drifted: Vec<_> =
            drifts.iter().filter(|drift| drift.is_found()).map(|drift| drift.name).collect();
        let drifted = (!drifted.is_empty()).then(|| format!("drift of: {}", drifted.join("; ")));
        if finding.is_none() {
            record.last.clear();
        }
        record.count("samples", record.samples.len() as u64);
        Self {
            command: options.command(),
            seed: options.seed,
            hours: took.as_secs_f64() / 3600.0,
            name: format!("soak{}-{}", if options.guest { "-guest" } else { "" }, options.seed),
            record,
            drifts,
            finding: finding.map(|error| format!("{error:#}")).or(drifted),
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
        for (name, number) in &self.record.facts {
            let _ = writeln!(text, "- {name}: {number}");
        }
        for remark in &self.record.remarks {
            let _ = writeln!(text, "- {remark}");
        }
        for (title, counts) in
            [("Requests", &self.record.requests), ("Faults and events", &self.record.counts)]
        {
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
        if !self.record.last.is_empty() {
            let _ = writeln!(text, "\n## The last events\n\n```\n{}\n```", self.record.last.join("\n"));
        }
        text
    }

    fn json(&self) -> Value {
        let facts: BTreeMap<_, _> = self.record.facts.iter().copied().collect();
        json!({
            "command": self.command,
            "seed": self.seed,
            "hours": self.hours,
            "finding": self.finding,
            "facts": facts,
            "remarks": self.record.remarks,
            "requests": self.record.requests,
            "events": self.record.counts,
            "drift": self.drifts,
            "samples": self.record.samples,
            "last_events": self.record.last,
        })
    }

    /// Writes the files and says where they are.
    pub fn write(&self, out: &Path) -> Result<()> {
        std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
        let json = serde_json::to_string(&self.json())?.replace("},{", "},\n{");
        let mut files = vec![("md", self.text()), ("json", json)];
        if self.finding.is_some() {
            files.push(("log", self.record.log.clone()));
        }
        for (suffix, contents) in files {
            let file = out.join(format!("{}.{suffix}", self.name));
            std::fs::write(&file, contents).with_context(|| format!("write {}", file.display()))?;
            println!("{}", file.display());
        }
        Ok(())
    }
}
