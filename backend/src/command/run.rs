//! Does what a command in JSON asks for.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{COMMANDS, Command, Context, Done, Form, VERSION, Word, show, words};
use crate::events::What;

/// Does it. What takes time is answered later, under `token`.
pub(crate) fn run(command: Command, context: &mut Context<'_>, token: u64) -> anyhow::Result<Done> {
    let now_ns = context.now_ns;
    let monitor = &mut *context.monitor;
    match command {
        Command::Hello {} => return Ok(Done::Value(hello())),
        Command::Show {} => return Ok(Done::Text(show::show(context)?)),
        Command::Message { message } => words::message(&message, monitor, now_ns)?,
        Command::FailPath { path } => monitor.fail_path(Path::new(&path), now_ns)?,
        Command::ReinstatePath { path } => monitor.reinstate_path(Path::new(&path), now_ns)?,
        Command::SwitchGroup { group } => monitor.switch_group(group)?,
        Command::DisableGroup { group } => monitor.disable_group(group)?,
        Command::EnableGroup { group } => monitor.enable_group(group)?,
        Command::AddPath { path, group, args } => {
            let current = monitor.disk().map().current_group().map_or(1, |group| group + 1);
            let args = texts(&args);
            monitor.add_path(PathBuf::from(path), group.unwrap_or(current), &refs(&args), token, now_ns)?;
            return Ok(Done::Later);
        }
        Command::RemovePath { path } => {
            monitor.remove_path(Path::new(&path), token, now_ns)?;
            return Ok(Done::Later);
        }
        Command::SetPathArgs { path, args } => {
            monitor.set_path_args(Path::new(&path), &refs(&texts(&args)))?;
        }
        Command::SetPathWeight { path, weight } => monitor.set_path_weight(Path::new(&path), weight)?,
        Command::MovePath { path, group } => monitor.regroup_path(Path::new(&path), group)?,
        Command::SetSelector { group, selector, args } => {
            monitor.set_selector(group, selector.parse()?, &refs(&texts(&args)))?;
        }
        Command::Resize { shrink } => {
            monitor.resize(shrink, token, now_ns)?;
            return Ok(Done::Later);
        }
        Command::SetNoPathRetry { value } => monitor.set_no_path_retry(value),
        Command::SetLogLevel { level } => {
            log::set_max_level(level.filter());
            let value = level.filter().to_string().to_lowercase();
            monitor.events().note(What::SettingChanged { setting: "log_level".into(), value });
        }
        Command::Dump { format } => {
            let status = monitor.status(now_ns);
            let text = match format {
                Form::Toml => status.spec().to_toml(),
                Form::Dm => status.dmsetup_table(),
                Form::DmStatus => status.dmsetup_status(),
            };
            return Ok(Done::Value(json!({ "text": text.trim_end() })));
        }
        Command::Events { last, follow } => {
            let events: Vec<Value> = monitor.events().last(last).map(|event| event.json()).collect();
            let value = json!({ "events": events });
            return Ok(if follow { Done::Follow(value) } else { Done::Value(value) });
        }
        Command::Counters {} => return Ok(Done::Text(context.running.counters(monitor)?)),
        Command::ResetCounters {} => context.running.reset_counters(monitor),
        Command::Reload {} => {
            context.running.reload(context.monitor, Some(token), now_ns).context("nothing was changed")?;
            return Ok(Done::Later);
        }
        Command::Shutdown {} => context.running.stop_asked = true,
    }
    Ok(Done::Value(json!({})))
}

fn hello() -> Value {
    json!({
        "program": "polypath",
        "program_version": env!("CARGO_PKG_VERSION"),
        "protocol_version": VERSION,
        "pid": std::process::id(),
        "commands": COMMANDS,
    })
}

fn texts(args: &[Word]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

fn refs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}
