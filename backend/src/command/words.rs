//! Commands in words, a line each; every answer ends with a line `ok` or `error: ...`.
//!
//! | line | does |
//! |---|---|
//! | `fail_path DEV`, `reinstate_path DEV`, `switch_group N`, `disable_group N`, `enable_group N`, `queue_if_no_path`, `fail_if_no_path` | dm's messages |
//! | `status`, `table`, `toml`, `json` | show what is running |
//! | `no_path_retry fail\|queue\|SECONDS` | changes the policy |
//! | `add_path GROUP DEV [ARG ...]` | opens, proves and adds a path; GROUP may be the next new number |
//! | `remove_path DEV` | takes a path out; answers when its descriptor is closed |
//! | `path_args DEV ARG ...` | changes a path's arguments for its selector (service-time: repeat count, weight) |
//! | `regroup_path DEV GROUP` | moves a path |
//! | `resize`, `resize shrink` | asks the paths for their size and takes it over; a smaller one only with `shrink` |

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use polypath_paths::text::{Message, NoPathRetry};

use crate::monitor::{Monitor, Outcome};

/// Does what `line` says. The text of the answer; None: it comes later, under `token`.
pub(crate) fn run(
    line: &str,
    monitor: &mut Monitor,
    token: u64,
    now_ns: u64,
) -> anyhow::Result<Option<String>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let text = |text: String| Ok(Some(text));
    match words.as_slice() {
        [] => bail!("an empty line"),
        ["status"] => return text(monitor.status(now_ns).dmsetup_status()),
        ["table"] => return text(monitor.status(now_ns).dmsetup_table()),
        ["toml"] => return text(monitor.status(now_ns).spec().to_toml().trim_end().to_owned()),
        ["json"] => return text(monitor.status(now_ns).json().to_string()),
        ["no_path_retry", value] => monitor.set_no_path_retry(value.parse()?),
        ["add_path", group, device, args @ ..] => {
            let group = group.parse().with_context(|| format!("{group} is not a group number"))?;
            monitor.add_path(PathBuf::from(device), group, args, token, now_ns)?;
            return Ok(None);
        }
        ["remove_path", device] => {
            monitor.remove_path(Path::new(device), token, now_ns)?;
            return Ok(None);
        }
        ["resize"] | ["resize", "shrink"] => {
            monitor.resize(words.len() == 2, token, now_ns)?;
            return Ok(None);
        }
        ["path_args", device, args @ ..] => monitor.set_path_args(Path::new(device), args)?,
        ["regroup_path", device, group] => {
            let group = group.parse().with_context(|| format!("{group} is not a group number"))?;
            monitor.regroup_path(Path::new(device), group)?;
        }
        _ => message(line, monitor, now_ns)?,
    }
    text(String::new())
}

/// One of dm's messages.
pub(crate) fn message(line: &str, monitor: &mut Monitor, now_ns: u64) -> anyhow::Result<()> {
    match line.parse::<Message>()? {
        Message::QueueIfNoPath => monitor.set_no_path_retry(NoPathRetry::Queue),
        Message::FailIfNoPath => monitor.set_no_path_retry(NoPathRetry::Fail),
        Message::SwitchGroup { group } => monitor.switch_group(group)?,
        Message::DisableGroup { group } => monitor.disable_group(group)?,
        Message::EnableGroup { group } => monitor.enable_group(group)?,
        Message::FailPath { device } => monitor.fail_path(Path::new(&device), now_ns)?,
        Message::ReinstatePath { device } => monitor.reinstate_path(Path::new(&device), now_ns)?,
    }
    Ok(())
}

/// The lines of an answer.
pub(crate) fn answer(text: &str) -> String {
    if text.is_empty() { "ok".to_owned() } else { format!("{text}\nok") }
}

/// The lines of an answer that took time.
pub(crate) fn late_answer(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done(_) => answer(""),
        Outcome::Refused(why) | Outcome::TimedOut(why) => format!("error: {why}"),
    }
}
