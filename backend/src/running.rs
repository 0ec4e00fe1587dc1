//! The running program beside its paths: its options and where they come from, the front-end, what commands ask of the
//! program as a whole.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use polypath_paths::text::{TableSpec, TableStatus};
use serde_json::{Value, json};

use crate::cli::Options;
use crate::clock;
use crate::config::Launch;
use crate::counters::Counters;
use crate::events::What;
use crate::helper;
use crate::monitor::{Monitor, Outcome};
use crate::sandbox::{self, Kind};

/// How long reading the configuration may take.
const READ_NS_MAX: u64 = 10_000_000_000;

/// The token under which the monitor answers to a reload.
pub const RELOAD_TOKEN: u64 = u64::MAX;

type Resolved = anyhow::Result<(Options, TableSpec)>;

/// What there is to know of the program.
pub struct Running {
    /// The options in force.
    pub options: Options,
    launch: Launch,
    /// Name of the socket for front-ends.
    pub socket: String,
    /// When it started, by the system's clock and by ours.
    pub started: jiff::Timestamp,
    /// The same in ns of the program's clock.
    pub started_ns: u64,
    /// Since when a front-end is connected.
    pub front_end_since: Option<(u64, jiff::Timestamp)>,
    /// How many front-ends have come so far.
    pub nr_front_ends: u64,
    /// A client has asked for the end.
    pub stop_asked: bool,
    /// What the counters were when they were last reset, and when that was in ns.
    counters_then: Option<(u64, Counters)>,
    reload: Option<Reload>,
    bell: Arc<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The settings as they are now, in their JSON form.
#[derive(Debug, serde::Serialize)]
#[allow(missing_docs)] // the options' names
pub struct Settings<'a> {
    pub config: Option<&'a Path>,
    pub control: Option<&'a Path>,
    pub path_timeout_ms: u64,
    pub failback: String,
    pub no_path_retry: String,
    pub trust_paths: bool,
    pub direct: bool,
    pub queue_size: u16,
    pub path_depth: u32,
    pub merge_max_kib: u32,
    pub poll_us: u64,
    pub cpus: Option<String>,
    pub register_memory: bool,
    pub sqpoll_idle_ms: u32,
    pub metrics: Option<String>,
    pub event_command: Option<&'a Path>,
    pub sandbox: &'static str,
    pub log_level: String,
}

/// A reload on its way: first the files are read, then the table is changed.
struct Reload {
    token: Option<u64>,
    until_ns: u64,
    reading: mpsc::Receiver<Resolved>,
    /// What is to be in force when the table is.
    options: Option<Box<Options>>,
}

impl Running {
    /// Just started with `options`, made from `launch`. `bell` makes the control loop call [`Self::tick`].
    pub fn new(launch: Launch, options: Options, socket: &str, bell: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self {
            options,
            launch,
            socket: socket.to_owned(),
            started: jiff::Timestamp::now(),
            started_ns: clock::now_ns(),
            front_end_since: None,
            nr_front_ends: 0,
            stop_asked: false,
            counters_then: None,
            reload: None,
            bell,
        }
    }

    /// A front-end has come.
    pub fn front_end_came(&mut self, monitor: &mut Monitor) {
        self.front_end_since = Some((clock::now_ns(), jiff::Timestamp::now()));
        self.nr_front_ends += 1;
        monitor.events().note(What::FrontEndConnected);
    }

    /// The front-end has gone.
    pub fn front_end_went(&mut self, monitor: &mut Monitor) {
        if self.front_end_since.take().is_some() {
            monitor.events().note(What::FrontEndDisconnected);
        }
    }

    /// What was done since the start, or since the counters were reset, as JSON text.
    pub fn counters(&self, monitor: &Monitor) -> serde_json::Result<String> {
        let now = Counters::read(monitor.disk(), &monitor.disk().table().load());
        let (since_ns, counters) = match &self.counters_then {
            Some((since_ns, then)) => (*since_ns, now.since(then)),
            None => (self.started_ns, now),
        };
        serde_json::to_string(&counters.view(clock::now_ns().saturating_sub(since_ns) / 1_000_000))
    }

    /// Counts from here on. The metrics, which only ever grow, do not mind.
    pub fn reset_counters(&mut self, monitor: &Monitor) {
        let now = Counters::read(monitor.disk(), &monitor.disk().table().load());
        self.counters_then = Some((clock::now_ns(), now));
    }

    /// Reads the configuration again and brings its changes in. If somebody waits for it, the answer comes under `token`.
    pub fn reload(&mut self, monitor: &mut Monitor, token: Option<u64>, now_ns: u64) -> anyhow::Result<()> {
        let _ = monitor;
        if self.launch.file().is_none() {
            anyhow::bail!(
                "there is no file to reload: polypath was started without --config and --table-file"
            );
        }
        if self.reload.is_some() {
            anyhow::bail!("a reload is under way already");
        }
        let (sender, reading) = mpsc::channel();
        let (launch, bell) = (self.launch.clone(), Arc::clone(&self.bell));
        // Files, and names of users and groups, may take their time.
        std::thread::Builder::new().name("reload".into()).spawn(move || {
            sandbox::confine(Kind::Reload);
            // Who may not read files has it done by who may.
            let resolved = match helper::client() {
                Some(helper) => helper.configuration(),
                None => launch.resolve(),
            };
            let _ = sender.send(resolved);
            bell();
        })?;
        self.reload = Some(Reload { token, until_ns: now_ns + READ_NS_MAX, reading, options: None });
        Ok(())
    }

    /// Goes on with what is on its way. An answer for a client, if there is one, and when to come back at the latest.
    pub fn tick(&mut self, monitor: &mut Monitor, now_ns: u64) -> (Option<(u64, Outcome)>, u64) {
        let Some(reload) = &mut self.reload else { return (None, u64::MAX) };
        if reload.options.is_some() {
            // The monitor answers in its own time.
            return (None, u64::MAX);
        }
        let outcome = match reload.reading.try_recv() {
            Err(mpsc::TryRecvError::Empty) if now_ns < reload.until_ns => return (None, reload.until_ns),
            Err(_) => {
                let s = Duration::from_nanos(READ_NS_MAX).as_secs();
                Outcome::TimedOut(format!(
                    "the configuration cannot be read within {s} s; nothing was changed"
                ))
            }
            Ok(Err(error)) => Outcome::Refused(format!("{error:#}; nothing was changed")),
            Ok(Ok((options, spec))) => {
                reload.options = Some(Box::new(options));
                match monitor.replace_table(spec, RELOAD_TOKEN, now_ns) {
                    Ok(()) => return (None, u64::MAX),
                    Err(error) => Outcome::Refused(format!("{error:#}; nothing was changed")),
                }
            }
        };
        (self.end_reload(monitor, outcome), u64::MAX)
    }

    /// The monitor has changed the table, or not. Gives the answer for the client who waits, if there is one.
    pub fn table_replaced(&mut self, monitor: &mut Monitor, outcome: Outcome) -> Option<(u64, Outcome)> {
        let outcome = match (outcome, self.reload.as_mut().and_then(|reload| reload.options.take())) {
            (Outcome::Done(table), Some(options)) => self.bring_in(monitor, *options, &table),
            (outcome, _) => outcome,
        };
        self.end_reload(monitor, outcome)
    }

    fn end_reload(&mut self, monitor: &mut Monitor, outcome: Outcome) -> Option<(u64, Outcome)> {
        let token = self.reload.take().and_then(|reload| reload.token);
        match &outcome {
            Outcome::Done(report) => {
                let texts = |name: &str| -> Vec<String> {
                    let all = report[name].as_array().into_iter().flatten();
                    all.filter_map(|text| text.as_str().map(str::to_owned)).collect()
                };
                log::info!("reloaded: changed=[{}]", texts("changed").join(", "));
                for option in texts("needs_restart") {
                    log::warn!("reloaded: {option} is changed in the file; that needs a restart");
                }
                monitor.events().note(What::Reloaded { changes: texts("changed") });
            }
            Outcome::Refused(why) | Outcome::TimedOut(why) => log::error!("not reloaded: {why}"),
        }
        token.map(|token| (token, outcome))
    }

    /// Puts in force what can change while the disk runs, and says what cannot.
    fn bring_in(&mut self, monitor: &mut Monitor, new: Options, table: &Value) -> Outcome {
        let mut changed: Vec<String> = Vec::new();
        for (what, name) in [("added", "path added"), ("removed", "path removed")] {
            let paths = table[what].as_array().into_iter().flatten().filter_map(Value::as_str);
            changed.extend(paths.map(|path| format!("{name}: {path}")));
        }
        if monitor.disk().map().no_path_retry()
            != monitor.spec().no_path_retry.unwrap_or(polypath_paths::text::NoPathRetry::Fail)
            && let Some(policy) = monitor.spec().no_path_retry
        {
            monitor.set_no_path_retry(policy);
            changed.push(format!("no_path_retry: {policy}"));
        }
        let old = &self.options;
        if new.path_timeout != old.path_timeout {
            monitor.set_path_timeout(Duration::from_millis(new.path_timeout));
            changed.push(format!("path_timeout: {}", new.path_timeout));
        }
        if new.failback != old.failback {
            monitor.set_failback(new.failback);
            changed.push(format!("failback: {}", new.failback));
        }
        if new.log_level != old.log_level {
            log::set_max_level(new.log_level.filter());
            changed.push(format!("log_level: {}", new.log_level.filter().to_string().to_lowercase()));
        }
        let mut fixed: Vec<&str> = Vec::new();
        macro_rules! fixed {
            ($($name:ident)*) => { $(if new.$name != old.$name { fixed.push(stringify!($name)); })* };
        }
        fixed!(
            socket_path fd socket_group read_only num_queues queue_size serial path_depth merge_max poll_us cpus
            register_memory sqpoll_idle_ms trust_paths control control_owner control_group direct metrics
            event_command sandbox
        );
        let report = json!({ "changed": changed, "needs_restart": fixed, "table": table });
        // What needs a restart is still as it was.
        self.options.path_timeout = new.path_timeout;
        self.options.failback = new.failback;
        self.options.log_level = new.log_level;
        Outcome::Done(report)
    }

    /// The settings as they are now.
    pub fn settings(&self, monitor: &Monitor) -> Settings<'_> {
        let options = &self.options;
        Settings {
            config: self.launch.file(),
            control: options.control.as_deref(),
            path_timeout_ms: u64::try_from(monitor.options().path_timeout.as_millis()).unwrap_or(u64::MAX),
            failback: monitor.options().failback.to_string(),
            no_path_retry: monitor.disk().map().no_path_retry().to_string(),
            trust_paths: options.trust_paths,
            direct: options.direct == crate::cli::Switch::On,
            queue_size: options.queue_size,
            path_depth: options.path_depth,
            merge_max_kib: options.merge_max,
            poll_us: options.poll_us,
            cpus: options.cpus.as_ref().map(ToString::to_string),
            register_memory: options.register_memory,
            sqpoll_idle_ms: options.sqpoll_idle_ms,
            metrics: options.metrics.as_ref().map(ToString::to_string),
            event_command: options.event_command.as_deref(),
            sandbox: options.sandbox.name(),
            log_level: log::max_level().to_string().to_lowercase(),
        }
    }

    /// In what the running disk differs from what it was configured as, a sentence each.
    pub fn differences(&self, monitor: &Monitor, status: &TableStatus) -> Vec<String> {
        let mut found = differences(monitor.spec(), status);
        let (asked, is) = (self.options.log_level.filter(), log::max_level());
        if asked != is {
            found.push(format!("log_level: configured {asked}, running {is}").to_lowercase());
        }
        found
    }
}

fn differences(spec: &TableSpec, status: &TableStatus) -> Vec<String> {
    let running = status.spec();
    let mut found = Vec::new();
    let lacks = |spec: &TableSpec, device: &str| !spec.paths().any(|path| path.device == device);
    for path in spec.paths().filter(|path| lacks(&running, &path.device)) {
        found.push(format!("path {}: configured, not in the running table", path.device));
    }
    for path in running.paths().filter(|path| lacks(spec, &path.device)) {
        found.push(format!("path {}: in the running table, not configured", path.device));
    }
    if let Some(asked) = spec.no_path_retry
        && asked != status.no_path_retry
    {
        found.push(format!("no_path_retry: configured {asked}, running {}", status.no_path_retry));
    }
    for (number, (asked, is)) in (1..).zip(spec.groups.iter().zip(&running.groups)) {
        if asked.selector != is.selector {
            found.push(format!("group {number}: configured {}, running {}", asked.selector, is.selector));
        } else if asked.args != is.args {
            found.push(format!("group {number}: other arguments of {} than configured", is.selector));
        }
        for path in &asked.paths {
            match is.paths.iter().find(|other| other.device == path.device) {
                None if !lacks(&running, &path.device) => {
                    found.push(format!(
                        "path {}: configured in group {number}, running in another",
                        path.device
                    ));
                }
                Some(other) if asked.selector == is.selector && other.args != path.args => {
                    found.push(format!("path {}: other arguments than configured", path.device));
                }
                _ => {}
            }
        }
    }
    let disabled = (1..).zip(&status.groups).filter(|(_, group)| group.bypassed);
    found.extend(disabled.map(|(number, _)| format!("group {number}: disabled by the operator")));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(line: &str) -> TableSpec {
        TableSpec::parse_dm(line).unwrap()
    }

    #[test]
    fn what_runs_as_configured_does_not_differ() {
        let spec = spec(
            "0 100 multipath 1 queue_if_no_path 0 2 1 service-time 0 2 2 a 1 1 b 1 4 round-robin 0 1 1 c 1",
        );
        assert_eq!(differences(&spec, &TableStatus::idle(&spec, 100)), Vec::<String>::new());
    }

    #[test]
    fn every_difference_is_named() {
        let asked = spec(
            "0 100 multipath 1 queue_if_no_path 0 2 1 service-time 0 2 2 a 1 1 b 1 4 round-robin 0 2 1 c 1 e 1",
        );
        let is = spec("0 100 multipath 0 0 2 1 service-time 0 3 2 b 1 2 d 1 1 e 1 1 queue-length 0 1 1 c 1");
        let mut status = TableStatus::idle(&is, 100);
        status.groups[1].bypassed = true;
        let found = differences(&asked, &status);
        for text in [
            "path a: configured, not in the running table",
            "path d: in the running table, not configured",
            "no_path_retry: configured queue, running fail",
            "path b: other arguments than configured",
            "group 2: configured round-robin, running queue-length",
            "path e: configured in group 2, running in another",
            "group 2: disabled by the operator",
        ] {
            assert!(found.iter().any(|f| f == text), "{text} is not in {found:#?}");
        }
        assert_eq!(found.len(), 7, "{found:#?}");
    }
}
