//! Markdown, in the shape of the tables of the kernel's multipath threads: a row per load, a column per stack.

use std::fmt::Write as _;

use super::disk::DiskKind;
use super::measured::{self, KIOPS, Measure, Row};
use super::program::Program;

/// A table of one measure, loads down and programs across; empty if no program has it.
pub(super) fn pivot(rows: &[&Row<'_>], measure: &Measure) -> String {
    let has = |program: &Program| rows.iter().any(|row| !row.median(*program, measure).is_nan());
    let programs: Vec<_> = Program::ALL.into_iter().filter(has).collect();
    if programs.is_empty() {
        return String::new();
    }
    let mut text = format!("{}, {}:\n\n| load |", measure.name, measure.unit);
    programs.iter().for_each(|program| text += &format!(" {program} |"));
    text += &format!("\n|---|{}\n", "--:|".repeat(programs.len()));
    for row in rows {
        text += &format!("| {} |", row.workload.name);
        for &program in &programs {
            text += &format!(" {} |", number(row.median(program, measure), measure.digits));
        }
        text.push('\n');
    }
    text
}

/// What polypath makes of the same disk, against each of the others.
pub(super) fn ratios(rows: &[&Row<'_>]) -> String {
    type Ratio = (&'static str, fn(&Row<'_>) -> f64);
    fn polypath(row: &Row<'_>) -> f64 {
        row.median(Program::Polypath, &KIOPS)
    }
    let columns: [Ratio; 5] = [
        ("of io_uring", |row| polypath(row) / row.better(Program::is_direct)),
        ("of qsd", |row| polypath(row) / row.better(Program::is_polling_qsd)),
        ("of no-merge", |row| polypath(row) / row.median(Program::NoMerge, &KIOPS)),
        ("two paths, of one", |row| row.median(Program::TwoPaths, &KIOPS) / polypath(row)),
        ("depth 8: merging, of not", |row| {
            row.median(Program::Depth8, &KIOPS) / row.median(Program::Depth8NoMerge, &KIOPS)
        }),
    ];
    let has = |(_, of): &&Ratio| rows.iter().any(|row| !of(row).is_nan());
    let columns: Vec<_> = columns.iter().filter(has).collect();
    if columns.is_empty() {
        return String::new();
    }
    let mut text =
        "polypath's IOPS as a part of the others' (of two io_uring or qsd the better):\n\n| load |"
            .to_owned();
    columns.iter().for_each(|(name, _)| text += &format!(" {name} |"));
    text += &format!("\n|---|{}\n", "--:|".repeat(columns.len()));
    for row in rows {
        text += &format!("| {} |", row.workload.name);
        columns.iter().for_each(|(_, of)| text += &format!(" {} |", number(of(row), 2)));
        text.push('\n');
    }
    text
}

/// Median latency where one request is out at a time, against the daemon's: both polling, and both not.
pub(super) fn latencies(rows: &[&Row<'_>]) -> String {
    let mut text = String::new();
    for row in rows.iter().filter(|row| row.workload.depth == 1) {
        let us = |program| row.median(program, &measured::P50);
        let pairs = [(Program::Polypath, Program::Qsd), (Program::NoPoll, Program::QsdNoPoll)];
        let [polling, not] = pairs.map(|(own, other)| us(own) / us(other));
        if !(polling.is_nan() && not.is_nan()) {
            text += &format!("| {} | {} | {} |\n", row.workload.name, number(polling, 2), number(not, 2));
        }
    }
    if text.is_empty() {
        return text;
    }
    "polypath's median latency as a part of qsd's:\n\n| load | both polling | neither |\n|---|--:|--:|\n"
        .to_owned()
        + &text
}

/// A line per program and load, with everything.
pub(super) fn details(rows: &[Row<'_>]) -> String {
    let mut text = "| disk | load | program | +- % | best |".to_owned();
    for measure in &measured::ALL {
        text += &format!(" {}, {} |", measure.name, measure.unit);
    }
    text += &format!("\n|---|---|---|--:|--:|{}\n", "--:|".repeat(measured::ALL.len()));
    for row in rows {
        for line in &row.lines {
            let (disk, load) = (row.disk.name(), row.workload.name);
            let _ = write!(
                text,
                "| {disk} | {load} | {} | {:.0} | {:.1} |",
                line.program,
                line.spread(),
                line.best()
            );
            for measure in &measured::ALL {
                text += &format!(" {} |", number(line.median(measure), measure.digits));
            }
            text.push('\n');
        }
    }
    text
}

/// What has to be known to read the tables.
pub(super) fn notes(rows: &[Row<'_>]) -> String {
    let mut text = "\
Medians over the rounds, which are interleaved: each program in turn under each load, then again the other way round.

- The client is a front-end on the `virtio-driver` crate that polls on a core of its own; the server has another. CPU time, context
  switches and system calls are the server's (io_uring: the client's own). What a loop device's kernel threads use is nobody's.
- io_uring: the same client without a program in between; it waits in the kernel when nothing has come back, which leaves its core to
  a loop device's kernel thread. io_uring-poll looks at the completion queue in place of waiting, as the front-end looks at the used
  ring, and that thread has to find the other core. Which is faster depends on the load; the better one counts. On a file on tmpfs
  the I/O is done during the submission, so that there is one of them.
- qsd: qemu-storage-daemon with an iothread, aio=io_uring; qsd-native: aio=native. The better one counts. qsd-no-poll:
  poll-max-ns=0.
- no-merge: `--merge-max 0`; no-poll: `--poll-us 0`; sqpoll: `--sqpoll-idle-ms 10`, whose kernel thread runs on any core;
  no-inflight: the front-end keeps no record of what is in flight (all other polypaths write one); no-sandbox: `--sandbox off`;
  depth8: `--path-depth 8`, without merging too; two-paths: two loop devices on
  one file, a file and a hard link to it, or two nulls.
- NxM is N streams (12x32: jobs of random reads) of M requests each; 64x16 and 12x32 do not fit in one ring of 1024 descriptors with 3
  per request, and go by four queues, as from a guest with four processors.
- System calls are counted by a tracepoint during the warm-up, since it makes them slower.
"
    .to_owned();
    if rows.iter().flat_map(|row| &row.lines).all(|line| line.median(&measured::SYSCALLS).is_nan()) {
        text += "- System calls could not be counted here: the tracepoint raw_syscalls:sys_enter is not to be had.\n";
    }
    let at_limit = |row: &Row<'_>| {
        let busy = row.lines.iter().filter(|line| line.median(&measured::CLIENT_IDLE) < CLIENT_LIMIT);
        let names: Vec<_> = busy.map(|line| line.program.name()).collect();
        (!names.is_empty())
            .then(|| format!("{} {} ({})", row.disk.name(), row.workload.name, names.join(", ")))
    };
    let limited: Vec<_> = rows.iter().filter_map(at_limit).collect();
    if !limited.is_empty() {
        let _ = writeln!(
            text,
            "- The client's own core was the limit (less than {CLIENT_LIMIT} % of its time in polls that found nothing) in: {}.",
            limited.join("; ")
        );
    }
    text
}

/// Idle time of the client in per cent below which its core is named as the limit.
const CLIENT_LIMIT: f64 = 10.0;

/// The tables of one disk, without the details.
pub(super) fn of_disk(disk: DiskKind, rows: &[Row<'_>]) -> String {
    let rows: Vec<_> = rows.iter().filter(|row| row.disk == disk).collect();
    let mut text = String::new();
    let tables = [
        pivot(&rows, &KIOPS),
        ratios(&rows),
        latencies(&rows),
        pivot(&rows, &measured::MERGED),
        pivot(&rows, &measured::OWN_MERGED),
        pivot(&rows, &measured::DEVICE_KIB),
        pivot(&rows, &measured::SWITCHES),
        pivot(&rows, &measured::SYSCALLS),
        pivot(&rows, &measured::CPU),
        pivot(&rows, &measured::P50),
    ];
    for table in tables.iter().filter(|table| !table.is_empty()) {
        text += &format!("{table}\n");
    }
    text
}

fn number(value: f64, digits: usize) -> String {
    if value.is_nan() { "-".into() } else { format!("{value:.digits$}") }
}
