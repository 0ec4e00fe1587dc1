//! `polypath show`: in five seconds, what is wrong, since when, why, and what to type.

use std::path::Path;

use serde_json::{Value, json};

use super::connection::Connection;
use super::format::{self, Colours, Paint, Table, bytes, duration};
use super::{Failure, Target, find};

pub(super) fn run(target: &Target) -> Result<(), Failure> {
    let sockets = find::all(target)?;
    let is_one = sockets.len() == 1;
    let mut failure = None;
    for (at, socket) in sockets.iter().enumerate() {
        let shown = Connection::open(socket, target.timeout())
            .and_then(|mut connection| connection.ask(json!({ "command": "show" })));
        match shown {
            Ok(mut disk) if target.json => {
                disk["control"] = json!(socket);
                format::print(&format!("{disk}\n"))?;
            }
            Ok(disk) => {
                let gap = if at == 0 { "" } else { "\n" };
                let option = option_for(target, socket, is_one);
                format::print(&format!(
                    "{gap}{}",
                    text(&disk, &find::name(socket), &option, Colours::of_stdout())
                ))?;
            }
            Err(error) if is_one => return Err(error),
            // The others are shown all the same.
            Err(error) => {
                error.say(target.json);
                failure = Some(error);
            }
        }
    }
    failure.map_or(Ok(()), Err)
}

/// The option that a command needs to mean this disk.
fn option_for(target: &Target, socket: &Path, is_one: bool) -> String {
    match (&target.control, &target.disk) {
        (Some(socket), _) => format!(" --control {}", socket.display()),
        (None, Some(name)) => format!(" --disk {name}"),
        (None, None) if is_one => String::new(),
        (None, None) => format!(" --disk {}", find::name(socket)),
    }
}

/// The whole text for one disk.
fn text(disk: &Value, name: &str, option: &str, colours: Colours) -> String {
    let mut text = headline(disk, name, colours);
    text.push_str(&facts(disk, colours));
    text.push('\n');
    text.push_str(&paths(disk, colours));
    let advice = advice(disk, option);
    if !advice.is_empty() {
        text.push('\n');
        text.push_str(&format!("  {}\n", colours.paint(Paint::Bold, "what to do")));
        text.extend(advice.iter().map(|line| format!("    {line}\n")));
    }
    text
}

fn headline(disk: &Value, name: &str, colours: Colours) -> String {
    let (all, active) = (number(disk, "/nr_paths"), number(disk, "/nr_active"));
    let (paint, state) = match word(disk, "/state") {
        "ok" => (Paint::Green, format!("ok, {all} of {all} paths active")),
        "degraded" => (Paint::Yellow, format!("DEGRADED, {} of {all} paths failed", all - active)),
        _ => (Paint::Red, format!("NO PATH, all {all} failed")),
    };
    format!("{}  {}\n", colours.paint(Paint::Bold, name), colours.paint(paint, &state))
}

fn facts(disk: &Value, colours: Colours) -> String {
    let mut table = Table::default();
    let mut fact = |name: &str, paint: Paint, value: String| {
        table.row([(name.to_owned(), Paint::Plain), (value, paint)]);
    };
    let held = number(disk, "/held/nr_requests");
    if held != 0 || word(disk, "/state") == "no_path" {
        let left = match disk.pointer("/held/time_left_ms").and_then(Value::as_u64) {
            Some(ms) => format!(", fail in {}", duration(ms)),
            None if word(disk, "/settings/no_path_retry") == "queue" => ", however long it takes".to_owned(),
            None => String::new(),
        };
        let oldest = disk.pointer("/held/oldest_age_ms").and_then(Value::as_u64);
        let oldest = oldest.map_or_else(String::new, |ms| format!(", oldest {}", duration(ms)));
        let size = bytes(number(disk, "/held/bytes"));
        fact("held", Paint::Red, format!("{held} requests, {size}{oldest}{left}"));
    }
    if let Some(ms) = disk.pointer("/earlier_io_ms").and_then(Value::as_u64) {
        let since = duration(ms);
        fact("waiting", Paint::Red, format!("for {since}: an earlier process still has I/O with a path"));
    }
    let access =
        if disk.pointer("/disk/read_only") == Some(&json!(true)) { "read only" } else { "read and write" };
    fact(
        "disk",
        Paint::Plain,
        format!(
            "{}, blocks of {}, {access}, serial {}, {}",
            bytes(number(disk, "/disk/size_bytes")),
            number(disk, "/disk/block_bytes"),
            word(disk, "/disk/serial"),
            word(disk, "/disk/identity"),
        ),
    );
    let socket = word(disk, "/front_end/socket");
    fact(
        "front-end",
        Paint::Plain,
        match disk.pointer("/front_end/connected_ms").and_then(Value::as_u64) {
            Some(ms) => format!("connected for {} on {socket}", duration(ms)),
            None => format!("none connected on {socket}"),
        },
    );
    let used: Vec<String> = list(disk, "/queues").map(|queue| number(queue, "/queue").to_string()).collect();
    let used = if used.is_empty() { "none used yet".to_owned() } else { format!("used: {}", used.join(" ")) };
    fact("queues", Paint::Plain, format!("{} offered, {used}", number(disk, "/disk/nr_queues")));
    let retry = match word(disk, "/settings/no_path_retry") {
        "fail" => "requests fail at once".to_owned(),
        "queue" => "requests wait, however long it takes".to_owned(),
        seconds => format!("requests wait {seconds} s, then fail"),
    };
    fact("no path", Paint::Plain, retry);
    fact(
        "program",
        Paint::Plain,
        format!(
            "polypath {}, process {}, up {}",
            word(disk, "/program/version"),
            number(disk, "/program/pid"),
            duration(number(disk, "/program/uptime_ms")),
        ),
    );
    for difference in list(disk, "/differs_from_configuration").filter_map(Value::as_str) {
        fact("differs", Paint::Yellow, difference.to_owned());
    }
    table.text("  ", colours)
}

fn paths(disk: &Value, colours: Colours) -> String {
    let mut table = Table::default();
    table.head(&[
        "GROUP",
        "STATE",
        "SELECTOR",
        "PATH",
        "STATE",
        "FOR",
        "SINCE",
        "FAILED",
        "IN FLIGHT",
        "WHY",
    ]);
    for group in list(disk, "/groups") {
        let state = word(group, "/state");
        let mut first =
            vec![number(group, "/group").to_string(), state.to_owned(), word(group, "/selector").to_owned()];
        for path in list(group, "/paths") {
            let is_active = word(path, "/state") == "active";
            let paint = if is_active { Paint::Green } else { Paint::Red };
            let mut cells: Vec<(String, Paint)> =
                first.iter().map(|cell| (cell.clone(), Paint::Plain)).collect();
            let plain = |text: String| (text, Paint::Plain);
            cells.push(plain(word(path, "/device").to_owned()));
            cells.push((word(path, "/state").to_owned(), paint));
            cells.push(plain(duration(number(path, "/state_age_ms"))));
            cells.push(plain(clock_time(word(path, "/since"))));
            cells.push(plain(format!("{}x", number(path, "/fail_count"))));
            cells.push(plain(number(path, "/in_flight").to_string()));
            cells.push((if is_active { String::new() } else { why(path) }, paint));
            table.row(cells);
            first = vec![String::new(); 3];
        }
    }
    table.text("  ", colours)
}

/// Why a path is out.
fn why(path: &Value) -> String {
    if path.pointer("/failed_by_operator") == Some(&json!(true)) {
        return "by the operator".to_owned();
    }
    let mut error = word(path, "/reason").to_owned();
    let last = word(path, "/last_error");
    if !last.is_empty() && last != error && !is_errno(&error, last) {
        error = format!("{error}; now: {last}");
    }
    match path.pointer("/quarantine_left_ms").and_then(Value::as_u64) {
        Some(ms) => format!("{error}; fails too often, held back for {}", duration(ms)),
        None => error,
    }
}

/// Whether an error in words is the one of this name (`EIO`).
fn is_errno(name: &str, words: &str) -> bool {
    let number =
        words.rsplit_once("(os error ").and_then(|(_, rest)| rest.trim_end_matches(')').parse().ok());
    number.is_some_and(|number| format!("{:?}", nix::errno::Errno::from_raw(number)) == name)
}

/// What an operator can do about it, in the words that he has to type.
fn advice(disk: &Value, option: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for path in list(disk, "/groups").flat_map(|group| list(group, "/paths")) {
        if word(path, "/state") == "active" {
            continue;
        }
        let device = word(path, "/device");
        if path.pointer("/failed_by_operator") == Some(&json!(true)) {
            lines.push(format!("{device}: was taken out by hand; to use it again:"));
            lines.push(format!("  polypath reinstate-path{option} {device}"));
        } else if path.pointer("/refused").is_some_and(|refused| !refused.is_null()) {
            lines.push(format!(
                "{device}: leads to another disk and is not used; to take it out of the table:"
            ));
            lines.push(format!("  polypath path remove{option} {device}"));
        } else if path.pointer("/quarantine_left_ms").is_some_and(|left| !left.is_null()) {
            lines.push(format!(
                "{device}: comes and goes; see to its cable, port or target; to use it at once:"
            ));
            lines.push(format!("  polypath reinstate-path{option} {device}"));
        } else {
            let next = path.pointer("/next_probe_ms").and_then(Value::as_u64).map(duration);
            let next = next.map_or_else(|| "is waited for".to_owned(), |next| format!("comes in {next}"));
            lines.push(format!("{device}: see to the device; it is put back by itself when a probe (the next {next}) finds it well"));
        }
    }
    if disk.pointer("/earlier_io_ms").is_some_and(|ms| !ms.is_null()) {
        lines.push("requests wait until a path answers, or fails, what an earlier process that was killed has asked of it;".to_owned());
        lines.push("see to that path: they go on by themselves".to_owned());
    }
    if word(disk, "/state") == "no_path" && word(disk, "/settings/no_path_retry") != "queue" {
        lines.push(
            "the guest gets I/O errors when its requests have waited long enough; to let them wait:"
                .to_owned(),
        );
        lines.push(format!("  polypath no-path-retry{option} queue"));
    }
    lines
}

/// The time of day in a time stamp.
fn clock_time(stamp: &str) -> String {
    let Ok(time) = stamp.parse::<jiff::Timestamp>() else { return stamp.to_owned() };
    let (time, now) = (time.to_zoned_datetime(jiff::tz::TimeZone::system()), jiff::ZonedDateTime::now());
    let form = if time.date() == now.date() { "%H:%M:%S" } else { "%Y-%m-%d %H:%M" };
    time.strftime(form).to_string()
}

fn word<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn number(value: &Value, pointer: &str) -> u64 {
    value.pointer(pointer).and_then(Value::as_u64).unwrap_or(0)
}

fn list<'a>(value: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    value.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_not_said_twice() {
        let path = |reason: &str, last: &str| why(&json!({ "reason": reason, "last_error": last }));
        assert_eq!(path("EIO", "Input/output error (os error 5)"), "EIO");
        assert_eq!(path("EIO", "No such device (os error 19)"), "EIO; now: No such device (os error 19)");
        assert_eq!(path("no answer", "no answer"), "no answer");
    }
}
