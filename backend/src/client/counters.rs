//! `polypath counters`: what was done, by path and by queue.

use serde_json::{Value, json};

use super::format::{self, Colours, Paint, Table};
use super::{Failure, Target};

const KINDS: [&str; 4] = ["read", "write", "flush", "discard"];

pub(super) fn run(target: &Target, reset: bool) -> Result<(), Failure> {
    let command = if reset { "reset_counters" } else { "counters" };
    let words = |answer: &Value| if reset { String::new() } else { text(answer, Colours::of_stdout()) };
    target.ask(json!({ "command": command }), words)
}

fn text(counters: &Value, colours: Colours) -> String {
    let since = format::duration(counters["since_ms"].as_u64().unwrap_or(0));
    let mut table = Table::default();
    table.head(&["WHERE", "WHAT", "I/OS", "MERGED", "BYTES", "AVERAGE", "P50", "P99", "ERRORS"]);
    let items = |list: &str| counters[list].as_array().cloned().unwrap_or_default();
    for path in items("paths") {
        rows(&mut table, path["path"].as_str().unwrap_or_default(), &path);
    }
    for queue in items("queues") {
        rows(&mut table, &format!("queue {}", queue["queue"]), &queue);
    }
    format!("counted for {since}\n{}", table.text("", colours))
}

/// A row for each kind of work that was done there, or one that says that there was none.
fn rows(table: &mut Table, name: &str, counters: &Value) {
    let mut was_there = false;
    for kind in KINDS {
        let number = |field: &str| counters[kind][field].as_u64().unwrap_or(0);
        let (nr, nr_errors) = (number("nr_ios"), number("nr_errors"));
        if nr == 0 && nr_errors == 0 {
            continue;
        }
        let us = |field: &str| match counters[kind][field].as_u64() {
            Some(ns) => format!("{} us", ns / 1000),
            None => "-".to_owned(),
        };
        was_there = true;
        let paint = if nr_errors == 0 { Paint::Plain } else { Paint::Red };
        table.row([
            (name.to_owned(), Paint::Plain),
            (kind.to_owned(), Paint::Plain),
            (nr.to_string(), Paint::Plain),
            (number("nr_merged").to_string(), Paint::Plain),
            (format::bytes(number("bytes")), Paint::Plain),
            (number("bytes").checked_div(nr).map_or_else(|| "-".to_owned(), format::bytes), Paint::Plain),
            (us("p50_ns"), Paint::Plain),
            (us("p99_ns"), Paint::Plain),
            (nr_errors.to_string(), paint),
        ]);
    }
    if !was_there {
        table.row([(name.to_owned(), Paint::Plain), ("nothing yet".to_owned(), Paint::Plain)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_what_was_done_and_a_word_where_nothing_was() {
        let done = json!({ "nr_ios": 4, "nr_merged": 12, "bytes": 65_536, "nr_errors": 1, "p50_ns": 81_920,
            "p99_ns": null });
        let counters = json!({ "since_ms": 65_000, "paths": [{ "path": "a", "write": done }],
            "queues": [{ "queue": 3 }] });
        let text = text(&counters, Colours::of_stdout());
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0].join(" "), "counted for 1 min 5 s");
        assert_eq!(lines[2].join(" "), "a write 4 12 64 KiB 16 KiB 81 us - 1");
        assert_eq!(lines[3].join(" "), "queue 3 nothing yet");
    }
}
