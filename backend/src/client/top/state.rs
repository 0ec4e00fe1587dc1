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
#[derive(Debug, Default, Clone)]
pub(super) struct Sample {
    nr_requests: u64,
    nr_merged: u64,
    bytes: u64,
    /// I/Os by the upper bound of their latency in ns.
    latencies: BTreeMap<u64, u64>,
}

impl Sample {
    /// Of an entry of the answer to `counters`: the sum of its kinds.
    fn of(entry: &Value) -> Self {
        let mut sample = Self::default();
        for kind in ["read", "write", "flush", "discard"].map(|kind| &entry[kind]) {
            sample.nr_requests += number(kind, "nr_ios") + number(kind, "nr_merged");
            sample.nr_merged += number(kind, "nr_merged");
            sample.bytes += number(kind, "bytes");
            for pair in kind["latency_ns"].as_array().into_iter().flatten() {
                *sample.latencies.entry(pair[0].as_u64().unwrap_or(0)).or_default() +=
                    pair[1].as_u64().unwrap_or(0);
            }
        }
        sample
    }
}

/// What a path or queue does.
#[derive(Debug, Default, Clone)]
pub(super) struct Rates {
    /// The last sample, and when it was taken.
    pub last: Option<(Instant, Sample)>,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes: f64,
    /// Requests that are not answered yet (of a queue).
    pub in_flight: u64,
    /// Share of the requests that went with another, in percent.
    pub merged_percent: f64,
    /// Latencies between the last two samples.
    pub p50_ns: Option<u64>,
    /// As `p50_ns`.
    pub p99_ns: Option<u64>,
    /// Requests per second in the last samples, oldest first.
    pub graph: VecDeque<u64>,
}

impl Rates {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates are for people, and none is negative"
    )]
    fn take(&mut self, sample: Sample, now: Instant) {
        if let Some((then, last)) = &self.last {
            let seconds = now.saturating_duration_since(*then).as_secs_f64().max(1e-3);
            // Counters that were reset make no negative rate.
            let more = |now: u64, last: u64| now.saturating_sub(last) as f64;
            let nr_requests = more(sample.nr_requests, last.nr_requests);
            self.iops = nr_requests / seconds;
            self.bytes = more(sample.bytes, last.bytes) / seconds;
            self.merged_percent = 100.0 * more(sample.nr_merged, last.nr_merged) / nr_requests.max(1.0);
            let classes: Vec<(u64, u64)> = sample
                .latencies
                .iter()
                .map(|(end, nr)| (*end, nr.saturating_sub(last.latencies.get(end).copied().unwrap_or(0))))
                .collect();
            (self.p50_ns, self.p99_ns) = (quantile(&classes, 0.5), quantile(&classes, 0.99));
        }
        self.last = Some((now, sample));
        if self.graph.len() == GRAPH_SAMPLES {
            self.graph.pop_front();
        }
        self.graph.push_back(self.iops as u64);
    }
}

/// The upper bound that this share of the I/Os did not pass.
#[expect(clippy::cast_precision_loss, reason = "numbers of a second")]
fn quantile(classes: &[(u64, u64)], share: f64) -> Option<u64> {
    let nr: u64 = classes.iter().map(|(_, nr)| nr).sum();
    let mut left = nr as f64 * share;
    classes.iter().filter(|(_, nr)| *nr != 0).find_map(|(end, nr)| {
        left -= *nr as f64;
        (left <= 0.0).then_some(*end)
    })
}

/// Everything that the screen shows.
#[derive(Debug)]
pub(super) struct State {
    pub name: String,
    pub show: Value,
    /// By the path's name.
    pub rates: BTreeMap<String, Rates>,
    /// By the queue's number.
    pub queues: BTreeMap<u64, Rates>,
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
            queues: BTreeMap::new(),
            selected: 0,
            asked: None,
            message: String::new(),
        }
    }

    /// Takes new answers to `show` and `counters`.
    pub(super) fn take(&mut self, show: Value, counters: &Value, now: Instant) {
        self.show = show;
        let names: Vec<String> = self.paths().into_iter().map(|path| text(path, "device")).collect();
        for path in counters["paths"].as_array().into_iter().flatten() {
            self.rates.entry(text(path, "path")).or_default().take(Sample::of(path), now);
        }
        self.rates.retain(|name, _| names.contains(name));
        for queue in counters["queues"].as_array().into_iter().flatten() {
            let rates = self.queues.entry(number(queue, "queue")).or_default();
            rates.take(Sample::of(queue), now);
            rates.in_flight = number(queue, "in_flight");
        }
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

    fn show() -> Value {
        let path = |device: &str| json!({ "device": device, "state": "active", "in_flight": 3 });
        json!({ "groups": [{ "group": 1, "paths": [path("a"), path("b")] }] })
    }

    fn counters(nr: u64) -> Value {
        let kind = json!({ "nr_ios": nr, "nr_merged": nr, "bytes": nr * 4096, "latency_ns": [[1000, nr - nr / 10], [8000, nr / 10]] });
        json!({ "paths": [{ "path": "a", "read": kind }, { "path": "b" }], "queues": [{ "queue": 5, "in_flight": 9, "write": kind }] })
    }

    #[test]
    fn rates_are_differences_by_time() {
        let (mut state, start) = (State::new("disk".into()), Instant::now());
        state.take(show(), &counters(100), start);
        assert_eq!(state.rates["a"].iops, 0.0);
        state.take(show(), &counters(300), start + Duration::from_secs(2));
        for rates in [&state.rates["a"], &state.queues[&5]] {
            assert_eq!((rates.iops, rates.bytes, rates.merged_percent), (200.0, 409_600.0, 50.0));
            assert_eq!((rates.p50_ns, rates.p99_ns), (Some(1000), Some(8000)));
        }
        assert_eq!(state.queues[&5].in_flight, 9);
        assert_eq!((state.rates["b"].iops, state.rates["b"].p50_ns), (0.0, None));
        // A counter that was reset makes no negative rate.
        state.take(show(), &counters(0), start + Duration::from_secs(3));
        assert_eq!(state.rates["a"].iops, 0.0);
        assert_eq!(state.rates["a"].graph, [0, 200, 0]);
    }

    #[test]
    fn a_key_that_changes_something_asks_first() {
        let mut state = State::new("disk".into());
        state.take(show(), &Value::Null, Instant::now());
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
        state.take(show(), &Value::Null, Instant::now());
        for _ in 0..5 {
            state.key(KeyCode::Down);
        }
        assert_eq!(state.selected, 1);
        state.take(json!({ "groups": [] }), &Value::Null, Instant::now());
        assert_eq!(state.selected, 0);
        state.key(KeyCode::Char('f'));
        assert_eq!(state.asked, None);
    }
}
