//! Draws `top`'s screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use serde_json::Value;

use super::state::{Rates, State, number, text};
use crate::client::format::{bytes, duration};

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let height = |rows: usize| u16::try_from(rows).unwrap_or(u16::MAX);
    let [head, facts, paths, queues, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(height(state.paths().len() + 2)),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(headline(state)), head);
    frame.render_widget(Paragraph::new(facts_of(&state.show)), facts);
    frame.render_widget(table(state), paths);
    frame.render_widget(queue_table(state), queues);
    frame.render_widget(Paragraph::new(footer(state)), foot);
}

fn headline(state: &State) -> Line<'_> {
    let (all, active) = (number(&state.show, "nr_paths"), number(&state.show, "nr_active"));
    let (colour, words) = match state.show["state"].as_str().unwrap_or_default() {
        "ok" => (Color::Green, format!("ok, {all} of {all} paths active")),
        "degraded" => (Color::Yellow, format!("DEGRADED, {} of {all} paths failed", all - active)),
        _ => (Color::Red, format!("NO PATH, all {all} failed")),
    };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    Line::from(vec![Span::styled(format!("{}  ", state.name), bold), Span::styled(words, bold.fg(colour))])
}

fn facts_of(show: &Value) -> Vec<Line<'_>> {
    let front_end = match show["front_end"]["connected_ms"].as_u64() {
        Some(ms) => format!("connected for {}", duration(ms)),
        None => "none".to_owned(),
    };
    let held = &show["held"];
    let nr_held = number(held, "nr_requests");
    let mut line = vec![Span::raw(format!(
        "front-end {front_end}   up {}   group {}",
        duration(number(&show["program"], "uptime_ms")),
        show["current_group"].as_u64().map_or_else(|| "none".to_owned(), |group| group.to_string()),
    ))];
    if nr_held != 0 {
        let left = held["time_left_ms"]
            .as_u64()
            .map_or_else(String::new, |ms| format!(", fail in {}", duration(ms)));
        let words = format!("   HELD {nr_held} requests, {}{left}", bytes(number(held, "bytes")));
        line.push(Span::styled(words, Style::new().fg(Color::Red)));
    }
    vec![Line::from(line), Line::default()]
}

fn table(state: &State) -> Table<'_> {
    let head = [
        "PATH",
        "GROUP",
        "STATE",
        "FOR",
        "IOPS",
        "PER SECOND",
        "MERGED",
        "p50",
        "p99",
        "FAILED",
        "IN FLIGHT",
        "",
    ];
    let head = Row::new(head.map(Cell::from)).style(Style::new().add_modifier(Modifier::BOLD));
    let mut rows = Vec::new();
    for group in state.show["groups"].as_array().into_iter().flatten() {
        for path in group["paths"].as_array().into_iter().flatten() {
            let row = row(path, number(group, "group"), state.rates.get(&text(path, "device")));
            let is_selected = rows.len() == state.selected;
            rows.push(if is_selected {
                row.style(Style::new().add_modifier(Modifier::REVERSED))
            } else {
                row
            });
        }
    }
    let widths = [
        Constraint::Fill(1),
        Constraint::Length(5),
        Constraint::Length(6),
        Constraint::Length(12),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(6),
        Constraint::Length(9),
        Constraint::Length(20),
    ];
    Table::new(rows, widths).header(head)
}

fn row<'a>(path: &Value, group: u64, rates: Option<&Rates>) -> Row<'a> {
    let is_active = path["state"] == "active";
    let colour = if is_active { Color::Green } else { Color::Red };
    let rates = rates.cloned().unwrap_or_default();
    let mut cells = vec![
        Cell::from(text(path, "device")),
        Cell::from(group.to_string()),
        Cell::from(Span::styled(text(path, "state"), Style::new().fg(colour))),
        Cell::from(duration(number(path, "state_age_ms"))),
    ];
    cells.extend(work(&rates));
    cells.extend([
        Cell::from(format!("{}x", number(path, "fail_count"))),
        Cell::from(number(path, "in_flight").to_string()),
        Cell::from(graph(&rates)),
    ]);
    Row::new(cells)
}

/// IOPS, bandwidth, merges, latencies.
fn work<'a>(rates: &Rates) -> [Cell<'a>; 5] {
    let latency = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), micros);
    [
        Cell::from(format!("{:.0}", rates.iops)),
        Cell::from(bytes(rounded(rates.bytes))),
        Cell::from(format!("{:.0} %", rates.merged_percent)),
        Cell::from(latency(rates.p50_ns)),
        Cell::from(latency(rates.p99_ns)),
    ]
}

fn queue_table(state: &State) -> Table<'_> {
    let head = ["QUEUE", "STATE", "IOPS", "PER SECOND", "MERGED", "p50", "p99", "IN FLIGHT", ""];
    let head = Row::new(head.map(Cell::from)).style(Style::new().add_modifier(Modifier::BOLD));
    let rows = state.queues.iter().map(|(queue, rates)| {
        let (state, colour) = match (rates.iops > 0.0, rates.in_flight) {
            (true, _) => ("works", Color::Green),
            (false, 0) => ("idle", Color::Reset),
            (false, _) => ("waits", Color::Red),
        };
        let mut cells =
            vec![Cell::from(queue.to_string()), Cell::from(Span::styled(state, Style::new().fg(colour)))];
        cells.extend(work(rates));
        cells.extend([Cell::from(rates.in_flight.to_string()), Cell::from(graph(rates))]);
        Row::new(cells)
    });
    let widths = [5, 6, 8, 10, 6, 8, 8, 9, 20].map(Constraint::Length);
    Table::new(rows, widths).header(head)
}

fn graph(rates: &Rates) -> String {
    let most = rates.graph.iter().copied().max().unwrap_or(0).max(1);
    let bar = |value: &u64| {
        let step = usize::try_from(value * 7 / most).unwrap_or(7);
        BARS.get(step).copied().unwrap_or('█')
    };
    rates.graph.iter().map(bar).collect()
}

fn micros(ns: u64) -> String {
    match ns {
        0..10_000_000 => format!("{} us", ns / 1000),
        _ => format!("{} ms", ns / 1_000_000),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is never negative, nor that large"
)]
fn rounded(rate: f64) -> u64 {
    // To a few digits: more would flicker.
    (rate / 1024.0).round() as u64 * 1024
}

fn footer(state: &State) -> Line<'_> {
    match &state.asked {
        Some((command, path)) => {
            let words = format!("{command} {path}? y: yes, any other key: no");
            Line::styled(words, Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD))
        }
        None if state.message.is_empty() => {
            Line::raw("up, down: choose a path   f: fail it   r: reinstate it   q: quit")
        }
        None => Line::raw(state.message.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;
    use std::time::Instant;

    fn drawn(state: &State) -> String {
        let mut terminal = Terminal::new(TestBackend::new(140, 10)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_failed_path_and_what_is_held_are_on_the_screen() {
        let mut state = State::new("disk0".into());
        let path = |device: &str, word: &str| json!({ "device": device, "state": word, "state_age_ms": 65_000, "fail_count": 2, "in_flight": 7 });
        state.take(
            json!({
                "state": "degraded", "nr_paths": 2, "nr_active": 1, "current_group": 1,
                "held": { "nr_requests": 3, "bytes": 12288, "time_left_ms": 41_000 },
                "groups": [{ "group": 1, "paths": [path("/dev/sda", "failed"), path("/dev/sdb", "active")] }],
            }),
            &json!({ "queues": [{ "queue": 3, "in_flight": 4 }] }),
            Instant::now(),
        );
        let screen = drawn(&state);
        for words in [
            "disk0  DEGRADED, 1 of 2 paths failed",
            "HELD 3 requests, 12 KiB, fail in 41 s",
            "/dev/sda",
            "1 min 5 s",
            "2x",
            "3     waits",
            "q: quit",
        ] {
            assert!(screen.contains(words), "{words}: {screen}");
        }
        state.key(ratatui::crossterm::event::KeyCode::Char('f'));
        assert!(drawn(&state).contains("fail_path /dev/sda? y: yes"));
    }

    #[test]
    fn a_graph_is_as_high_as_its_highest() {
        let rates = Rates { graph: [0, 1, 4, 8].into(), ..Rates::default() };
        assert_eq!(graph(&rates), "▁▁▄█");
    }
}
