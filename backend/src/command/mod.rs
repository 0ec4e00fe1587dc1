//! Commands on the control socket: what can be asked, and the frame of questions and answers. `docs/control.md` is the
//! manual of it.
//!
//! A line that begins with `{` is a JSON object, everything else a command in words ([`words`]). Both are run on the
//! control loop, which never waits: what takes time is answered later.

mod run;
mod show;
pub(crate) mod words;

use polypath_paths::text::NoPathRetry;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::Level;
use crate::monitor::{Monitor, Outcome};
use crate::running::Running;

pub(crate) use run::run;

/// Version of the protocol. It grows when something that a client may rely on changes; new commands and new members of
/// answers do not count.
pub const VERSION: u64 = 1;

/// What commands act on.
pub(crate) struct Context<'a> {
    pub monitor: &'a mut Monitor,
    pub running: &'a mut Running,
    pub now_ns: u64,
}

/// A command with its arguments, as the members of the object beside `version` and `id`.
#[derive(Debug, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Command {
    /// Program, protocol, commands.
    Hello {},
    /// Everything about the disk.
    Show {},
    /// A message in dm's words.
    Message {
        message: String,
    },
    FailPath {
        path: String,
    },
    ReinstatePath {
        path: String,
    },
    SwitchGroup {
        group: usize,
    },
    DisableGroup {
        group: usize,
    },
    EnableGroup {
        group: usize,
    },
    AddPath {
        path: String,
        /// Default: the group in use.
        group: Option<usize>,
        #[serde(default)]
        args: Vec<Word>,
    },
    RemovePath {
        path: String,
    },
    SetPathArgs {
        path: String,
        args: Vec<Word>,
    },
    SetPathWeight {
        path: String,
        weight: u8,
    },
    MovePath {
        path: String,
        group: usize,
    },
    SetSelector {
        group: usize,
        selector: String,
        #[serde(default)]
        args: Vec<Word>,
    },
    /// Asks the paths for their size and takes it over; a smaller one only if `shrink`.
    Resize {
        #[serde(default)]
        shrink: bool,
    },
    SetNoPathRetry {
        value: NoPathRetry,
    },
    SetLogLevel {
        level: Level,
    },
    Dump {
        #[serde(default)]
        format: Form,
    },
    /// The last events, and, if `follow`, all that come.
    Events {
        #[serde(default)]
        last: usize,
        #[serde(default)]
        follow: bool,
    },
    /// What was done since the start, or since they were reset.
    Counters {},
    ResetCounters {},
    Reload {},
    Shutdown {},
}

/// Names of all commands, for who asks what there is.
pub(crate) const COMMANDS: [&str; 23] = [
    "hello",
    "show",
    "message",
    "fail_path",
    "reinstate_path",
    "switch_group",
    "disable_group",
    "enable_group",
    "add_path",
    "remove_path",
    "set_path_args",
    "set_path_weight",
    "move_path",
    "set_selector",
    "resize",
    "set_no_path_retry",
    "set_log_level",
    "dump",
    "events",
    "counters",
    "reset_counters",
    "reload",
    "shutdown",
];

/// A word of a table line; a number will do.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Word {
    Text(String),
    Number(u64),
}

impl std::fmt::Display for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => number.fmt(f),
        }
    }
}

/// A form that the running table is written in.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Form {
    /// A configuration file.
    #[default]
    Toml,
    /// dm's table line.
    Dm,
    /// dm's status line.
    DmStatus,
}

/// Why a command has no result, in one word for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// The line is not a question of this protocol.
    BadRequest,
    /// It was understood and cannot be done.
    Refused,
    /// It takes longer than it may.
    TimedOut,
}

impl Code {
    fn name(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
        }
    }
}

/// What became of a command.
#[derive(Debug)]
pub(crate) enum Done {
    Value(Value),
    /// The same as JSON text.
    Text(String),
    /// The answer comes later, under the token that was given.
    Later,
    /// Done, and events follow.
    Follow(Value),
}

/// A question in JSON: what the client calls it, and what it asks.
#[derive(Debug)]
pub(crate) struct Request {
    /// Comes back in the answer.
    pub id: Option<Value>,
    pub command: Result<Command, String>,
}

impl Request {
    /// Reads a line that begins with `{`.
    pub fn parse(line: &str) -> Self {
        let mut members: Map<String, Value> = match serde_json::from_str(line) {
            Ok(members) => members,
            Err(error) => return Self { id: None, command: Err(format!("not a JSON object: {error}")) },
        };
        let id = members.remove("id");
        let command = match members.remove("version") {
            Some(version) if version != json!(VERSION) => {
                Err(format!("version {version} is not spoken here, only {VERSION}"))
            }
            _ if !members.contains_key("command") => {
                Err(format!("no command; there are: {}", COMMANDS.join(", ")))
            }
            _ => serde_json::from_value(Value::Object(members)).map_err(|error| error.to_string()),
        };
        Self { id, command }
    }
}

/// The answer to a command that was done.
pub(crate) fn answer(id: Option<&Value>, result: Value) -> String {
    frame(id, "ok", json!(true), "result", result)
}

/// The same, of a result that is text already.
pub(crate) fn text_answer(id: Option<&Value>, result: &str) -> String {
    let id = id.map(|id| format!("\"id\":{id},")).unwrap_or_default();
    format!("{{{id}\"ok\":true,\"result\":{result},\"version\":{VERSION}}}")
}

/// The answer to a command that was not done.
pub(crate) fn refusal(id: Option<&Value>, code: Code, message: &str) -> String {
    frame(id, "ok", json!(false), "error", json!({ "code": code.name(), "message": message }))
}

/// The answer to a command that took time.
pub(crate) fn late_answer(id: Option<&Value>, outcome: Outcome) -> String {
    match outcome {
        Outcome::Done(value) => answer(id, value),
        Outcome::Refused(why) => refusal(id, Code::Refused, &why),
        Outcome::TimedOut(why) => refusal(id, Code::TimedOut, &why),
    }
}

fn frame(id: Option<&Value>, ok: &str, is_ok: Value, name: &str, value: Value) -> String {
    let mut members = Map::new();
    members.insert("version".into(), json!(VERSION));
    members.extend(id.map(|id| ("id".to_owned(), id.clone())));
    members.insert(ok.into(), is_ok);
    members.insert(name.into(), value);
    Value::Object(members).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> String {
        Request::parse(line).command.unwrap_err()
    }

    #[test]
    fn every_command_is_known_by_its_name() {
        for name in COMMANDS {
            // Without its arguments it may lack some, but it is not unknown.
            if let Err(error) = Request::parse(&format!("{{\"command\":\"{name}\"}}")).command {
                assert!(error.contains("missing field"), "{name}: {error}");
            }
        }
        let unknown = error("{\"command\":\"make_coffee\"}");
        for name in COMMANDS {
            assert!(unknown.contains(name), "{unknown}");
        }
    }

    #[test]
    fn nothing_that_is_asked_is_ignored() {
        for (line, word) in [
            ("{", "JSON"),
            ("{}", "no command"),
            ("{\"command\":1}", "variant"),
            ("{\"version\":2,\"command\":\"show\"}", "version 2"),
            ("{\"command\":\"show\",\"verbose\":true}", "verbose"),
            ("{\"command\":\"fail_path\"}", "path"),
            ("{\"command\":\"fail_path\",\"path\":7}", "7"),
            ("{\"command\":\"fail_path\",\"path\":\"a\",\"group\":1}", "group"),
            ("{\"command\":\"switch_group\",\"group\":-1}", "-1"),
            ("{\"command\":\"set_path_weight\",\"path\":\"a\",\"weight\":256}", "256"),
            ("{\"command\":\"set_no_path_retry\",\"value\":\"often\"}", "often"),
            ("{\"command\":\"set_log_level\",\"level\":\"loud\"}", "loud"),
            ("{\"command\":\"dump\",\"format\":\"xml\"}", "xml"),
        ] {
            let error = error(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn the_clients_name_for_a_question_comes_back() {
        let request = Request::parse("{\"version\":1,\"id\":[7,\"x\"],\"command\":\"show\"}");
        assert!(matches!(request.command, Ok(Command::Show {})));
        let line = answer(request.id.as_ref(), json!({ "a": 1 }));
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value, json!({ "version": 1, "id": [7, "x"], "ok": true, "result": { "a": 1 } }));
        for id in [None, Some(json!([7, "x"]))] {
            let of_text: Value = serde_json::from_str(&text_answer(id.as_ref(), "{\"a\":1}")).unwrap();
            assert_eq!(
                of_text,
                serde_json::from_str::<Value>(&answer(id.as_ref(), json!({ "a": 1 }))).unwrap()
            );
        }
        let line = late_answer(None, Outcome::TimedOut("slow".into()));
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["error"], json!({ "code": "timed_out", "message": "slow" }));
        assert!(value.get("id").is_none());
    }
}
