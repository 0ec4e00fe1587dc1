//! Tables, messages and configuration files as text: whatever it is, it is read or refused in one line; what was read is
//! printed as the same.

use std::fmt::Write as _;

use polypath::fuzzing::read_config;
use polypath_paths::text::{Message, NoPathRetry, TableSpec};

use crate::input::Input;

const WORDS: [&str; 46] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "64",
    "100",
    "1024",
    "1025",
    "2048",
    "4294967295",
    "18446744073709551615",
    "-1",
    "multipath",
    "queue_if_no_path",
    "retain_attached_hw_handler",
    "pg_init_retries",
    "pg_init_delay_msecs",
    "queue_mode",
    "bio",
    "rq",
    "mq",
    "alua",
    "round-robin",
    "queue-length",
    "service-time",
    "historical-service-time",
    "io-affinity",
    "learned-service-time",
    "/dev/sda",
    "/dev/sdb",
    "8:16",
    "a\\ b",
    "\"",
    "'",
    "\\",
    "0x3",
    "fail_path",
    "reinstate_path",
    "switch_group",
    "disable_group",
    "enable_group",
    "fail_if_no_path",
    "ü",
    "\u{2028}",
];

/// Lines of a file, of which some fit.
const LINES: [&str; 24] = [
    "[table]",
    "[[table.group]]",
    "[[table.group.path]]",
    "length_sectors = ",
    "no_path_retry = ",
    "initial_group = ",
    "retain_attached_hw_handler = true",
    "pg_init_retries = ",
    "pg_init_delay_msecs = ",
    "queue_mode = ",
    "hw_handler = ",
    "selector = ",
    "selector_args = ",
    "device = ",
    "weight = ",
    "args = ",
    "socket_path = ",
    "num_queues = ",
    "queue_size = ",
    "serial = ",
    "failback = ",
    "cpus = ",
    "metrics = ",
    "log_level = ",
];

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.below(6) {
        0 => text(input.rest(), line),
        1 => text(input.rest(), file),
        2 => text(input.rest(), message),
        3 => line(&any_line(&mut input)),
        4 => file(&any_file(&mut input)),
        _ => message(&any_words(&mut input, 4)),
    }
}

fn text(bytes: &[u8], read: fn(&str)) {
    read(&String::from_utf8_lossy(bytes));
}

fn is_one_line(error: &impl ToString) {
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "an error with control characters: {text:?}");
    assert!(text.len() < 10_000, "an error of {} bytes", text.len());
}

fn line(line: &str) {
    match TableSpec::parse_dm(line) {
        Ok(spec) => {
            let again = spec.to_dm().expect("a line has a length");
            assert_eq!(TableSpec::parse_dm(&again).as_ref(), Ok(&spec), "{again}");
            same_in_toml(&spec);
        }
        Err(error) => is_one_line(&error),
    }
}

fn same_in_toml(spec: &TableSpec) {
    assert_eq!(spec.check(), Ok(()));
    let toml = spec.to_toml();
    assert_eq!(TableSpec::parse_toml(&toml).as_ref(), Ok(spec), "{toml}");
}

fn file(source: &str) {
    match TableSpec::parse_toml(source) {
        Ok(spec) => {
            same_in_toml(&spec);
            if let Ok(again) = spec.to_dm() {
                let read = TableSpec::parse_dm(&again).expect("its own line");
                let queues = spec.no_path_retry.is_some_and(|retry| retry != NoPathRetry::Fail);
                let no_path_retry = queues.then_some(NoPathRetry::Queue);
                assert_eq!(read, TableSpec { no_path_retry, ..spec }, "{again}");
            }
        }
        Err(error) => is_one_line(&error),
    }
    if let Err(error) = read_config(source) {
        is_one_line(&format!("{error:#}"));
    }
}

fn message(line: &str) {
    match line.parse::<Message>() {
        Ok(message) => assert_eq!(message.to_string().parse().as_ref(), Ok(&message)),
        Err(error) => is_one_line(&error),
    }
    match line.trim().parse::<NoPathRetry>() {
        Ok(retry) => assert_eq!(retry.to_string().parse(), Ok(retry)),
        Err(error) => is_one_line(&error),
    }
}

fn word(input: &mut Input<'_>) -> String {
    match input.below(8) {
        0 => String::from_utf8_lossy(input.bytes(6)).into_owned(),
        1 => input.u64().to_string(),
        2 => format!("{:#x}", input.u16()),
        _ => input.pick(&WORDS).to_owned(),
    }
}

fn any_words(input: &mut Input<'_>, most: u32) -> String {
    let words: Vec<String> = (0..input.below(most) + 1).map(|_| word(input)).collect();
    words.join(input.pick(&[" ", "  ", "\t"]))
}

/// A line as the grammar has it, with a wrong word now and then.
fn any_line(input: &mut Input<'_>) -> String {
    let mut words: Vec<String> = vec!["0".into(), (1 + input.u16() as u64).to_string(), "multipath".into()];
    let features = input.pick(&[
        "0",
        "1 queue_if_no_path",
        "2 pg_init_retries 5",
        "3 queue_if_no_path queue_mode bio",
        "3 retain_attached_hw_handler pg_init_delay_msecs 2000",
    ]);
    words.push(features.into());
    words.push(input.pick(&["0", "1 alua", "2 emc 1"]).into());
    let nr_groups = input.below(4);
    words.push(nr_groups.to_string());
    words.push(if nr_groups == 0 { 0 } else { 1 + input.below(nr_groups) }.to_string());
    for _ in 0..nr_groups {
        let selector = input.below(6);
        let (head, nr_args) = match selector {
            0 => ("round-robin 0", input.below(2)),
            1 => ("queue-length 0", input.below(2)),
            2 => ("service-time 0", input.below(3)),
            3 => (
                input.pick(&["historical-service-time 0", "historical-service-time 2 100 200"]),
                input.below(2),
            ),
            4 => ("io-affinity 0", 1),
            _ => (input.pick(&["learned-service-time 0", "learned-service-time 1 50"]), input.below(2)),
        };
        words.push(head.into());
        let nr_paths = 1 + input.below(3);
        words.extend([nr_paths.to_string(), nr_args.to_string()]);
        for _ in 0..nr_paths {
            words.push(if input.rarely(4) {
                word(input)
            } else {
                input.pick(&["a", "b", "c\\ d", "/dev/e"]).into()
            });
            for _ in 0..nr_args {
                let arg = if selector == 4 {
                    format!("{:#x}", 1 + input.u8() as u16)
                } else {
                    (1 + input.below(100)).to_string()
                };
                words.push(arg);
            }
        }
    }
    for _ in 0..input.below(5).saturating_sub(2) {
        let at = input.index(words.len());
        words[at] = word(input);
    }
    words.join(" ")
}

fn any_file(input: &mut Input<'_>) -> String {
    let mut text = String::from(if input.below(4) == 3 { "" } else { "[table]\n" });
    for _ in 0..input.below(16) {
        let line = input.pick(&LINES);
        let value = match input.below(8) {
            _ if !line.ends_with("= ") => String::new(),
            0 => input.u64().to_string(),
            1 => input.below(130).to_string(),
            2 => format!("[\"{}\"]", word(input)),
            3 => format!("['{}', {}]", word(input), input.below(10)),
            4 => String::from_utf8_lossy(input.bytes(8)).into_owned(),
            5 => format!("\"\"\"{}\"\"\"", word(input)),
            _ => format!("\"{}\"", word(input)),
        };
        let _ = writeln!(text, "{line}{value}");
    }
    text
}
