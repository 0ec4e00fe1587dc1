//! Instructions per request by number of paths and of queues, counted by callgrind: the same on every machine.
//!
//! What is run is `backend/examples/route.rs`, the whole route of a request without a kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::host;
use super::options::Options;

/// Name, and whether it looks at one path only. The others compare all paths of a group by what is under way on them, as
/// dm's do, so that their cost has to grow with the paths, but not with the queues.
const SELECTORS: [(&str, bool); 6] = [
    ("round-robin", true),
    ("io-affinity", true),
    ("queue-length", false),
    ("service-time", false),
    ("historical-service-time", false),
    ("learned-service-time", false),
];
/// Paths and queues.
const CASES: [(u64, u64); 6] = [(1, 1), (8, 1), (64, 1), (1, 8), (1, 64), (64, 64)];
/// Kicks of two runs: the difference is free of what the start and the first kicks cost.
const KICKS: (u64, u64) = (64, 320);
const REQUESTS_PER_KICK: u64 = 64;
/// Between the cheapest and the dearest case that should cost the same, in per cent.
const LIMIT_PERCENT: f64 = 5.0;

/// Prints a table; with `--check`, the cost may not grow with queues, nor with paths where it need not.
pub(super) fn measure(options: &Options) -> Result<()> {
    println!("Instructions per request of 4 KiB, paths x queues, no kernel:\n");
    let cases = CASES.map(|(paths, queues)| format!("{paths} x {queues}"));
    println!("| selector | {} | more with queues % | more with paths % |", cases.join(" | "));
    println!("|---|{}", "--:|".repeat(CASES.len() + 2));
    let mut widest = 0.0_f64;
    for (selector, is_flat) in SELECTORS {
        let mut costs = Vec::new();
        for (paths, queues) in CASES {
            host::check_stopped()?;
            let kicks = |nr| count(selector, paths, queues, nr);
            let more = kicks(KICKS.1)?.saturating_sub(kicks(KICKS.0)?);
            costs.push(more as f64 / ((KICKS.1 - KICKS.0) * REQUESTS_PER_KICK) as f64);
        }
        let of_paths = |wanted: Option<u64>| {
            let cases = CASES.iter().zip(&costs);
            let costs = cases
                .filter(|((paths, _), _)| wanted.is_none_or(|wanted| wanted == *paths))
                .map(|(_, cost)| *cost);
            let (least, most) =
                costs.fold((f64::INFINITY, 0.0_f64), |(low, high), cost| (low.min(cost), high.max(cost)));
            (most / least - 1.0) * 100.0
        };
        let (with_queues, with_paths) = (of_paths(Some(1)), of_paths(None));
        widest = widest.max(if is_flat { with_paths } else { with_queues });
        let costs: Vec<_> = costs.iter().map(|cost| format!("{cost:.0}")).collect();
        println!("| {selector} | {} | {with_queues:.1} | {with_paths:.1} |", costs.join(" | "));
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
