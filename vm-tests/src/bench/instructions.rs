//! Instructions per request by number of paths and of queues, counted by callgrind: the same on every machine.
//!
//! What is run is `backend/examples/route.rs`, the whole route of a request without a kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::host;
use super::options::Options;

const SELECTORS: [&str; 6] = [
    "round-robin",
    "queue-length",
    "service-time",
    "historical-service-time",
    "io-affinity",
    "learned-service-time",
];
/// Paths and queues.
const CASES: [(u64, u64); 6] = [(1, 1), (8, 1), (64, 1), (1, 8), (1, 64), (64, 64)];
/// Kicks of two runs: the difference is free of what the start and the first kicks cost.
const KICKS: (u64, u64) = (64, 320);
const REQUESTS_PER_KICK: u64 = 64;
/// Between the cheapest and the dearest case of a selector, in per cent.
const LIMIT_PERCENT: f64 = 5.0;

/// Prints a table; with `--check`, the cost may not grow with paths and queues.
pub(super) fn measure(options: &Options) -> Result<()> {
    println!("Instructions per request of 4 KiB, paths x queues, no kernel:\n");
    let cases = CASES.map(|(paths, queues)| format!("{paths} x {queues}"));
    println!("| selector | {} | spread % |", cases.join(" | "));
    println!("|---|{}", "--:|".repeat(CASES.len() + 1));
    let mut widest = 0.0_f64;
    for selector in SELECTORS {
        let mut costs = Vec::new();
        for (paths, queues) in CASES {
            host::check_stopped()?;
            let kicks = |nr| count(selector, paths, queues, nr);
            let more = kicks(KICKS.1)?.saturating_sub(kicks(KICKS.0)?);
            costs.push(more as f64 / ((KICKS.1 - KICKS.0) * REQUESTS_PER_KICK) as f64);
        }
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = costs.iter().copied().fold(0.0, f64::max);
        let spread = (most / least - 1.0) * 100.0;
        widest = widest.max(spread);
        let costs: Vec<_> = costs.iter().map(|cost| format!("{cost:.0}")).collect();
        println!("| {selector} | {} | {spread:.1} |", costs.join(" | "));
    }
    ensure!(
        !options.check || widest <= LIMIT_PERCENT,
        "the cost differs by {widest:.1} %, at most {LIMIT_PERCENT} % were expected"
    );
    Ok(())
}

fn route() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("release/examples/route")
}

/// Instructions of a whole run.
fn count(selector: &str, paths: u64, queues: u64, kicks: u64) -> Result<u64> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(route()).arg(selector);
    let output =
        command.args([paths, queues, kicks].map(|nr| nr.to_string())).output().context("run valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind: {text}");
    let number = text.lines().find_map(|line| line.split_once("Collected : ")?.1.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no count from valgrind: {text}"))
}
