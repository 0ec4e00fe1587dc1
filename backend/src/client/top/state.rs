//! What `top` shows, and what its keys do. No terminal in here.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use ratatui::crossterm::event::KeyCode;
use serde_json::Value;

/// Samples that a little graph shows.
pub(super) const GRAPH_SAMPLES: usize = 20;

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Act {
    Quit,
    /// A command about a path.
    Tell {
        command: &'static str,
        path: String,
    },
}

/// Counters of one path or queue, as they were at one moment.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Sample {
    pub nr_requests: u64,
    pub bytes: u64,
}

/// What a path or queue does per second.
#[derive(Debug, Default, Clone)]
pub(super) struct Rates {
    /// The last sample, and when it was taken.
    pub last: Option<(Instant, Sample)>,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes: f64,
    /// Of the last samples, oldest first.
    pub graph: VecDeque<u64>,
}

impl Rates {
    fn take(&mut self, sample: Sample, now: Instant, in_flight: u64) {
        if let Some((then, last)) = self.last {
            let seconds = now.saturating_duration_since(then).as_secs_f64().max(1e-3);
            let per_second = |now: u64, last: u64| now.saturating_sub(last) as f64 / seconds;
            self.iops = per_second(sample.nr_requests, last.nr_requests);
            self.bytes = per_second(sample.bytes, last.bytes);
        }
        self.last = Some((now, sample));
        if self.graph.len() == GRAPH_SAMPLES {
            self.graph.pop_front();
        }
        self.graph.push_back(in_flight);
    }
}

/// Everything that the screen shows.
#[derive(Debug)]
pub(super) struct State {
    pub name: String,
    pub show: Value,
    pub rates: BTreeMap<String, Rates>,
    /// Number of the path that keys are about.
    pub selected: usize,
    /// A command that waits for a yes.
    pub asked: Option<(&'static str, String)>,
    pub message: String,
}

impl State {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            show: Value::Null,
            rates: BTreeMap::new(),
            selected: 0,
            asked: None,
            message: String::new(),
        }
    }

    /// Takes a new answer to `show`.
    pub(super) fn take(&mut self, show: Value, now: Instant) {
        self.show = show;
        let mut names = Vec::new();
        for path in self.paths().into_iter().cloned().collect::<Vec<_>>() {
            let name = text(&path, "device");
            let counters = path.get("counters").cloned().unwrap_or_default();
            let sample =
                Sample { nr_requests: number(&counters, "nr_requests"), bytes: number(&counters, "bytes") };
            self.rates.entry(name.clone()).or_default().take(sample, now, number(&path, "in_flight"));
            names.push(name);
        }
        self.rates.retain(|name, _| names.contains(name));
        self.selected = self.selected.min(names.len().saturating_sub(1));
    }

    /// All paths, in table order.
    pub(super) fn paths(&self) -> Vec<&Value> {
        let groups = self.show["groups"].as_array().into_iter().flatten();
        groups.flat_map(|group| group["paths"].as_array().into_iter().flatten()).collect()
    }

    /// A line for the operator.
    pub(super) fn said(&mut self, message: String) {
        self.message = message;
    }

    /// Does what a key asks for; what changes the disk only after a yes.
    pub(super) fn key(&mut self, code: KeyCode) -> Option<Act> {
        if let Some((command, path)) = self.asked.take() {
            self.message.clear();
            return match code {
                KeyCode::Char('y' | 'Y') => Some(Act::Tell { command, path }),
                _ => None,
            };
        }
        self.message.clear();
        let nr_paths = self.paths().len();
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return Some(Act::Quit),
            KeyCode::Down | KeyCode::Char('j') => {
                self.selected = (self.selected + 1).min(nr_paths.saturating_sub(1))
            }
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Char('f') => self.ask("fail_path"),
            KeyCode::Char('r') => self.ask("reinstate_path"),
            _ => {}
        }
        None
    }

    fn ask(&mut self, command: &'static str) {
        let path = self.paths().get(self.selected).map(|path| text(path, "device"));
        self.asked = path.map(|path| (command, path));
    }
}

pub(super) fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_default().to_owned()
}

pub(super) fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    fn show(nr_requests: u64) -> Value {
        let path = |device: &str| {
            json!({ "device": device, "state": "active", "in_flight": 3,
            "counters": { "nr_requests": nr_requests, "bytes": nr_requests * 4096 } })
        };
        json!({ "groups": [{ "group": 1, "paths": [path("a"), path("b")] }] })
    }

    #[test]
    fn rates_are_differences_by_time() {
        let (mut state, start) = (State::new("disk".into()), Instant::now());
        state.take(show(100), start);
        assert_eq!(state.rates["a"].iops, 0.0);
        state.take(show(300), start + Duration::from_secs(2));
        assert_eq!((state.rates["a"].iops, state.rates["a"].bytes), (100.0, 409_600.0));
        // A counter that was reset makes no negative rate.
        state.take(show(0), start + Duration::from_secs(3));
        assert_eq!(state.rates["b"].iops, 0.0);
        assert_eq!(state.rates["b"].graph, [3, 3, 3]);
    }

    #[test]
    fn a_key_that_changes_something_asks_first() {
        let mut state = State::new("disk".into());
        state.take(show(0), Instant::now());
        assert_eq!(state.key(KeyCode::Down), None);
        assert_eq!(state.key(KeyCode::Char('f')), None);
        assert_eq!(state.asked, Some(("fail_path", "b".to_owned())));
        assert_eq!(state.key(KeyCode::Char('n')), None);
        assert_eq!(state.asked, None);
        assert_eq!(state.key(KeyCode::Char('r')), None);
        let act = state.key(KeyCode::Char('y'));
        assert_eq!(act, Some(Act::Tell { command: "reinstate_path", path: "b".into() }));
        assert_eq!(state.key(KeyCode::Char('q')), Some(Act::Quit));
    }

    #[test]
    fn the_selection_stays_on_a_path_that_is_there() {
        let mut state = State::new("disk".into());
        state.take(show(0), Instant::now());
        for _ in 0..5 {
            state.key(KeyCode::Down);
        }
        assert_eq!(state.selected, 1);
        state.take(json!({ "groups": [] }), Instant::now());
        assert_eq!(state.selected, 0);
        state.key(KeyCode::Char('f'));
        assert_eq!(state.asked, None);
    }
}
