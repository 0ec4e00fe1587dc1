//! Where the results go: the terminal, Markdown, JSON and SVG files, and the project's documents.

use std::fs;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::disk::DiskKind;
use super::host::{self, Cores};
use super::measured::{self, CPU, KIOPS, MERGED, Measure, Measured, Row};
use super::options::Options;
use super::{plots, publish, tables};

/// All runs, and what is known of the machine.
pub(super) struct Report<'a> {
    options: &'a Options,
    facts: Vec<(&'static str, String)>,
    runs: Vec<Measured>,
    begun: Instant,
}

impl<'a> Report<'a> {
    pub(super) fn new(options: &'a Options, cores: Cores) -> Result<Self> {
        let mut facts = host::describe();
        facts.push(("cores", format!("client on {}, server on {}", cores.client, cores.server)));
        facts.push(("rounds", format!("{} of {:?}, interleaved", options.rounds, options.time)));
        facts.push(("disk", format!("{} MiB", options.disk_bytes >> 20)));
        fs::create_dir_all(&options.out).with_context(|| format!("make {}", options.out.display()))?;
        Ok(Self { options, facts, runs: Vec::new(), begun: Instant::now() })
    }

    pub(super) fn add(&mut self, measured: Measured) {
        self.runs.push(measured);
    }

    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        measured::rows(&self.runs)
    }

    /// Prints the tables and writes the files.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.facts.push(("took", format!("{} s", self.begun.elapsed().as_secs())));
        let rows = self.rows();
        let text = self.text(&rows);
        print!("{text}");
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let name = format!("bench-{seconds}");
        for file in self.write(&rows, &self.options.out, &name, true)? {
            println!("{}", self.options.out.join(file).display());
        }
        if self.options.publish {
            let documents = publish::documents();
            let plots = self.write(&rows, &documents.join("benchmark"), "run", false)?;
            publish::readme(&documents.join("../README.md"), &self.facts, &rows, &plots)?;
        }
        Ok(())
    }

    /// Writes all files under this name and returns theirs.
    fn write(&self, rows: &[Row<'_>], out: &Path, name: &str, has_runs: bool) -> Result<Vec<String>> {
        fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
        let mut files = Vec::new();
        for disk in &self.options.disks {
            let rows: Vec<_> = rows.iter().filter(|row| row.disk == *disk).collect();
            let measures = [
                ("iops", KIOPS, true),
                ("merged", MERGED, *disk == DiskKind::Loop),
                ("cpu", CPU, disk.has_device()),
            ];
            for (what, measure, _) in measures.into_iter().filter(|(.., is_there)| *is_there) {
                let file = format!("{name}-{}-{what}.svg", disk.name());
                plots::bars(&out.join(&file), &rows, &measure)?;
                files.push(file);
            }
        }
        let mut text = self.text(rows);
        for plot in &files {
            text += &format!("\n![{plot}]({plot})\n");
        }
        text += &format!("\n## Everything\n\n{}", tables::details(rows));
        let json = serde_json::to_string(&self.json(rows, has_runs))?.replace("},{", "},\n{");
        for (suffix, contents) in [("md", text), ("json", json)] {
            let file = format!("{name}.{suffix}");
            fs::write(out.join(&file), contents).with_context(|| format!("write {file}"))?;
            files.push(file);
        }
        Ok(files)
    }

    fn text(&self, rows: &[Row<'_>]) -> String {
        let mut text = "# Benchmark\n\n".to_owned();
        self.facts.iter().for_each(|(name, fact)| text += &format!("- {name}: {fact}\n"));
        for &disk in &self.options.disks {
            text += &format!("\n## {}\n\n{}", disk.name(), tables::of_disk(disk, rows));
        }
        text + "\n" + &tables::notes(rows)
    }

    /// Medians, and every run if wanted.
    fn json(&self, rows: &[Row<'_>], has_runs: bool) -> Value {
        let facts: serde_json::Map<_, _> =
            self.facts.iter().map(|(name, fact)| ((*name).to_owned(), json!(fact))).collect();
        let numbers = |mut line: Value, of: &dyn Fn(&Measure) -> f64| {
            for measure in &measured::ALL {
                // Rounded: what is below is noise. What is not a number becomes null.
                line[format!("{}, {}", measure.name, measure.unit)] =
                    json!((of(measure) * 1e4).round() / 1e4);
            }
            line
        };
        let mut medians = Vec::new();
        for row in rows {
            for line in &row.lines {
                let names = json!({
                    "disk": row.disk.name(), "workload": row.workload.name, "program": line.program.name(),
                });
                medians.push(numbers(names, &|measure| line.median(measure)));
            }
        }
        let run = |run: &Measured| {
            let names = json!({
                "disk": run.disk.name(),
                "workload": run.workload.name,
                "program": run.program.name(),
                "round": run.round,
                "requests": run.sample.requests,
                "elapsed_s": run.sample.elapsed.as_secs_f64(),
                "polls": run.sample.polls,
                "empty_polls": run.sample.empty_polls,
            });
            numbers(names, &|measure| (measure.of)(run))
        };
        let runs: Vec<_> = if has_runs { self.runs.iter().map(run).collect() } else { Vec::new() };
        json!({ "facts": facts, "medians": medians, "runs": runs })
    }
}
