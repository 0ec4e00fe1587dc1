//! Events: on the control socket, for a command of the operator's, in the log.

use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use polypath_vm_tests::control::Control;
use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::Op;
use polypath_vm_tests::server::wait_until;
use serde_json::{Value, json};

use crate::common::{Image, MIB, SOON, need};
use crate::rig::Rig;
use crate::run::run_to_end;

/// Reads events until one of this kind comes.
#[track_caller]
fn wait_event(following: &mut Control, name: &str) -> Value {
    let start = Instant::now();
    let mut seen = Vec::new();
    while start.elapsed() < SOON {
        let Some(event) = following.object_within(SOON).unwrap() else { break };
        if event["event"] == name {
            return event;
        }
        seen.push(event["text"].clone());
    }
    panic!("no {name} in {seen:#?}");
}

#[test]
fn whoever_follows_is_told_of_everything_in_order() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &["--no-path-retry", "queue"]);
    let mut following = rig.control();
    following.result(json!({ "command": "events", "follow": true })).unwrap();
    let following = &mut following;
    let mut disk = rig.disk(1);
    wait_event(following, "front_end_connected");
    rig.control().result(json!({ "command": "remove_path", "path": rig.dev("c") })).unwrap();
    assert_eq!(wait_event(following, "table_published")["nr_paths"], 2);
    assert_eq!(wait_event(following, "path_removed")["path"], rig.dev("c"));
    assert_eq!(wait_event(following, "path_closed")["path"], rig.dev("c"));
    for name in ["a", "b"] {
        rig.fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
    }
    disk.q().submit(&Op::read(0, 8)).unwrap();
    let failed = wait_event(following, "path_failed");
    assert!(failed["reason"].as_str().is_some_and(|why| !why.is_empty()), "{failed}");
    assert_eq!((&failed["group"], &failed["nr_active"]), (&json!(1), &json!(1)));
    assert_eq!(wait_event(following, "path_failed")["nr_active"], 0);
    let switched = wait_event(following, "group_switched");
    assert_eq!((&switched["to"], &switched["nr_active"]), (&Value::Null, &json!(0)), "{switched}");
    assert_eq!(switched["reason"], "no path is active");
    assert_eq!(wait_event(following, "no_path")["no_path_retry"], "queue");
    assert_eq!(wait_event(following, "requests_held")["nr_requests"], 1);
    rig.fs.clear("a");
    let back = wait_event(following, "path_reinstated");
    assert_eq!((&back["path"], &back["nr_active"]), (&json!(rig.dev("a")), &json!(1)));
    assert!(back["failed_ms"].is_u64() && back["time"].is_string() && back["text"].is_string(), "{back}");
    wait_event(following, "held_released");
    assert_eq!(disk.q().done().unwrap().status, 0);
    drop(disk);
    wait_event(following, "front_end_disconnected");
    // The numbers have no gap, and the past can be asked for.
    let all = rig.control().result(json!({ "command": "events", "last": 1000 })).unwrap();
    let numbers: Vec<u64> =
        all["events"].as_array().unwrap().iter().map(|e| e["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    // As sentences for people.
    let text = crate::run::told(&rig.socket.path(), &["events", "--last", "1000"]).ok();
    assert!(text.contains(&format!("path {} of group 1 failed", rig.dev("a"))), "{text}");
}

#[test]
fn a_path_to_another_disk_is_an_event() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let other = Image::filled(MIB);
    let mut following = rig.control();
    following.result(json!({ "command": "events", "follow": true })).unwrap();
    let answer = rig.control().ask_json(&json!({ "command": "add_path", "path": other.path })).unwrap();
    assert_eq!(answer["ok"], false);
    let event = wait_event(&mut following, "identity_refused");
    assert_eq!(event["path"], other.path.to_str().unwrap(), "{event}");
}

#[test]
fn the_operators_command_is_run_for_each() {
    need!(faulty);
    let image = Image::filled(MIB);
    let (script, seen) = (image.dir().join("hook"), image.dir().join("seen"));
    let text = format!("#!/bin/sh\nread line\necho \"$1 $POLYPATH_EVENT $line\" >> {}\n", seen.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let hook = script.to_str().unwrap().to_owned();
    let rig = Rig::start(image, &["a", "b"], &["--event-command", &hook]);
    rig.tell("fail_path", "a");
    let line = || std::fs::read_to_string(&seen).unwrap_or_default();
    wait_until("the event command", SOON, || line().contains("path_failed path_failed {")).unwrap();
    let text = line();
    let json = text.lines().find_map(|line| line.strip_prefix("path_failed path_failed ")).unwrap();
    let event: Value = serde_json::from_str(json).unwrap();
    assert_eq!(event["path"], rig.dev("a"));
    // One that hangs delays nobody.
    std::fs::write(&script, "#!/bin/sh\nexec sleep 3\n").unwrap();
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    let mut control = rig.control();
    control.timeout = Duration::from_secs(2);
    for _ in 0..300 {
        control.result(json!({ "command": "set_no_path_retry", "value": "queue" })).unwrap();
    }
    rig.server.wait_for_log("events are left out", SOON).unwrap();
}

#[test]
fn in_the_journal_lines_carry_their_priority() {
    let image = Image::empty(MIB);
    let program = polypath_vm_tests::server::polypath_bin().unwrap();
    let mut command = std::process::Command::new("sh");
    let script = "JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) exec \"$0\" --path \"$1\" --path \"$1\" -s \"$2\"";
    command.args(["-c", script]).arg(&program).arg(&image.path).arg(image.dir().join("s"));
    let ran = run_to_end(command, "");
    // Refused before logging starts: plain text.
    assert!(ran.err.starts_with("polypath: "), "{ran:?}");
    let script =
        "JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) exec timeout 2 \"$0\" --path \"$1\" -s \"$2\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(&program).arg(&image.path).arg(image.dir().join("s"));
    let ran = run_to_end(command, "");
    assert!(ran.err.lines().any(|line| line.starts_with("<6>listening: ")), "{ran:?}");
}
