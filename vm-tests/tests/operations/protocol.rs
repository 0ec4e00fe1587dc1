//! Every command of the control protocol: what it does, and what wrong input gets.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::Duration;

use polypath_vm_tests::control::{Control, Socket};
use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::{Op, Segment};
use polypath_vm_tests::server::{Server, exit_code, wait_until};
use serde_json::{Value, json};

use crate::common::{Image, MIB, SOON, need};
use crate::rig::Rig;
use crate::run::told;

fn show(control: &mut Control) -> Value {
    control.result(json!({ "command": "show" })).unwrap()
}

/// The path of this name in an answer to `show`.
fn path_of(show: &Value, device: &str) -> Value {
    let groups = show["groups"].as_array().unwrap();
    let mut paths = groups.iter().flat_map(|group| group["paths"].as_array().unwrap());
    paths.find(|path| path["device"] == device).cloned().unwrap_or(Value::Null)
}

/// The reason of a refusal, with its code.
#[track_caller]
fn refused(control: &mut Control, question: &Value, code: &str) -> String {
    let answer = control.ask_json(question).unwrap();
    assert_eq!((&answer["ok"], &answer["version"]), (&json!(false), &json!(1)), "{question}: {answer}");
    assert_eq!(answer["error"]["code"], code, "{question}: {answer}");
    answer["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn show_tells_everything() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--serial", "disk7", "--num-queues", "5"]);
    let mut control = rig.control();
    let before = show(&mut control);
    assert_eq!(
        (&before["state"], &before["nr_paths"], &before["nr_active"]),
        (&json!("ok"), &json!(2), &json!(2))
    );
    assert_eq!(before["disk"]["size_bytes"], MIB);
    assert_eq!((&before["disk"]["serial"], &before["disk"]["nr_queues"]), (&json!("disk7"), &json!(5)));
    assert!(before["disk"]["identity"].as_str().unwrap().contains("inode"), "{before}");
    assert_eq!(before["program"]["pid"], rig.server.pid());
    assert_eq!(before["front_end"]["socket"], rig.server.socket().to_str().unwrap());
    assert_eq!(before["front_end"]["connected"], false);
    assert_eq!(before["settings"]["path_timeout_ms"], 10_000);
    assert_eq!(before["differs_from_configuration"], json!([]));
    assert_eq!(before["no_path_retry"], 60);
    let disk = rig.disk(2);
    assert_eq!(show(&mut control)["front_end"]["connected"], true);
    drop(disk);
    assert_eq!(show(&mut control)["queues"].as_array().unwrap().len(), 2);
    wait_until("the front-end to have gone", SOON, || show(&mut control)["front_end"]["connected"] == false)
        .unwrap();
    assert_eq!(show(&mut control)["front_end"]["nr_connects"], 1);
    // A path that is out: since when, and why.
    rig.tell("fail_path", "a");
    let now = show(&mut control);
    let a = path_of(&now, &rig.dev("a"));
    assert_eq!((&now["state"], &now["nr_active"]), (&json!("degraded"), &json!(1)));
    assert_eq!((&a["state"], &a["failed_by_operator"]), (&json!("failed"), &json!(true)));
    assert_eq!(a["reason"], "by the operator");
    assert!(
        a["state_age_ms"].as_u64().unwrap() < path_of(&now, &rig.dev("b"))["state_age_ms"].as_u64().unwrap(),
        "{now}"
    );
    assert!(a["since"].as_str().unwrap().ends_with('Z'), "{a}");
}

#[test]
fn a_failed_path_says_why_and_what_is_held() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    for name in ["a", "b"] {
        rig.fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
    }
    disk.q().submit(&Op::read(0, 8)).unwrap();
    rig.wait_status("both to fail and the request to wait", |status| {
        status.nr_active() == 0 && status.nr_held() == 1
    });
    let mut control = rig.control();
    wait_until("a reason", SOON, || {
        let now = show(&mut control);
        let a = path_of(&now, &rig.dev("a"));
        now["state"] == "no_path" && a["reason"].as_str().is_some_and(|why| !why.is_empty())
    })
    .unwrap();
    let now = show(&mut control);
    assert_eq!(now["held"]["nr_requests"], 1, "{now}");
    assert!(now["held"]["time_left_ms"].as_u64().unwrap() <= 60_000, "{now}");
    assert!(now["no_path_ms"].is_u64(), "{now}");
    for name in ["a", "b"] {
        rig.fs.clear(name);
    }
    assert_eq!(disk.q().done().unwrap().status, 0);
}

#[test]
fn every_command_does_what_it_says() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = polypath_vm_tests::faulty::FaultyFs::mount(&image.path, &["a", "b", "c", "d"]).unwrap();
    let rig = Rig::start_on(image, fs, &["a", "b"], &["--selector", "service-time"]);
    let mut control = rig.control();
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| rig.dev(name));
    let mut tell = |question: Value| {
        control.result(question).unwrap_or_else(|e| panic!("{e:#}\n{}", rig.server.stderr()))
    };

    let hello = tell(json!({ "command": "hello", "version": 1 }));
    assert_eq!((&hello["program"], &hello["protocol_version"]), (&json!("polypath"), &json!(1)));
    assert!(hello["commands"].as_array().unwrap().contains(&json!("add_path")));

    tell(json!({ "command": "fail_path", "path": a }));
    assert!(!rig.is_active("a"));
    tell(json!({ "command": "reinstate_path", "path": a }));
    rig.wait_active("a", true);

    assert!(tell(json!({ "command": "add_path", "path": c, "group": 2 }))["took_ms"].is_u64());
    assert_eq!(rig.status().paths().map(|(group, _)| group).collect::<Vec<_>>(), [1, 1, 2]);
    assert!(tell(json!({ "command": "add_path", "path": d, "args": [1, "7"] }))["took_ms"].is_u64());
    assert_eq!(rig.status().path(&rig.fs.path("d"))["args"], json!(["1", "7"]));
    tell(json!({ "command": "set_path_weight", "path": d, "weight": 3 }));
    assert_eq!(rig.status().path(&rig.fs.path("d"))["args"], json!(["1", "3"]));
    tell(json!({ "command": "set_path_args", "path": d, "args": [1, 4] }));
    assert_eq!(rig.status().path(&rig.fs.path("d"))["args"], json!(["1", "4"]));
    tell(json!({ "command": "move_path", "path": d, "group": 2 }));
    assert_eq!(rig.status().paths().map(|(group, _)| group).collect::<Vec<_>>(), [1, 1, 2, 2]);
    assert_eq!(rig.status().path(&rig.fs.path("d"))["args"], json!(["1", "4"]), "a move keeps them");
    assert!(tell(json!({ "command": "remove_path", "path": d }))["drained_ms"].is_u64());
    assert!(!rig.server.open_files().contains(&d));

    tell(json!({ "command": "switch_group", "group": 2 }));
    assert_eq!(rig.status().current_group(), Some(2));
    tell(json!({ "command": "disable_group", "group": 2 }));
    assert_eq!(rig.status().group_state(2), "disabled");
    tell(json!({ "command": "enable_group", "group": 2 }));
    assert_eq!(rig.status().group_state(2), "enabled");
    tell(
        json!({ "command": "set_selector", "group": 2, "selector": "historical-service-time", "args": [970, 3] }),
    );
    let now = rig.status();
    assert_eq!(now.0["groups"][1]["selector"], "historical-service-time");
    assert_eq!(now.0["groups"][1]["selector_args"], json!(["970", "3"]));

    for (value, shown) in
        [(json!("queue"), json!("queue")), (json!(7), json!(7)), (json!("fail"), json!("fail"))]
    {
        tell(json!({ "command": "set_no_path_retry", "value": value }));
        assert_eq!(rig.status().0["no_path_retry"], shown);
    }
    for (message, check) in [
        ("queue_if_no_path".to_owned(), json!("queue")),
        ("fail_if_no_path".to_owned(), json!("fail")),
        (format!("fail_path {b}"), json!("fail")),
        (format!("reinstate_path {b}"), json!("fail")),
        ("switch_group 1".to_owned(), json!("fail")),
        ("disable_group 2".to_owned(), json!("fail")),
        ("enable_group 2".to_owned(), json!("fail")),
    ] {
        tell(json!({ "command": "message", "message": message }));
        assert_eq!(rig.status().0["no_path_retry"], check, "{message}");
    }
    rig.wait_active("b", true);

    tell(json!({ "command": "set_log_level", "level": "error" }));
    tell(json!({ "command": "fail_path", "path": a }));
    assert_eq!(rig.server.count_log(&format!("path={a} reason=operator")), 1, "{}", rig.server.stderr());
    tell(json!({ "command": "set_log_level", "level": "debug" }));
    tell(json!({ "command": "fail_path", "path": a }));
    assert_eq!(rig.server.count_log(&format!("path={a} reason=operator")), 2, "{}", rig.server.stderr());

    let text = |form: Value| form["text"].as_str().unwrap().to_owned();
    let dm = text(tell(json!({ "command": "dump", "format": "dm" })));
    assert!(dm.starts_with("0 2048 multipath 0 0 2 ") && dm.contains(&b), "{dm}");
    let dm_status = text(tell(json!({ "command": "dump", "format": "dm_status" })));
    assert!(dm_status.contains(&format!("{a} F")), "{dm_status}");
    let toml = text(tell(json!({ "command": "dump" })));
    assert!(toml.contains("[[table.group.path]]") && toml.contains(&c), "{toml}");

    let events = tell(json!({ "command": "events", "last": 1000 }));
    assert!(
        events["events"].as_array().unwrap().iter().any(|event| event["event"] == "path_removed"),
        "{events}"
    );
    let differs = tell(json!({ "command": "show" }))["differs_from_configuration"].to_string();
    assert!(
        differs.contains(&c) && differs.contains("no_path_retry") && differs.contains("log_level"),
        "{differs}"
    );
}

#[test]
fn counters_count_by_path_and_by_queue_and_can_be_reset() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(2);
    let mut control = rig.control();
    for i in 0..10 {
        disk.queues[1].read(i * 16, 8).unwrap();
    }
    let counters = control.result(json!({ "command": "counters" })).unwrap();
    let sum = |list: &Value, kind: &str, name: &str| -> u64 {
        list.as_array().unwrap().iter().map(|entry| entry[kind][name].as_u64().unwrap()).sum()
    };
    for list in ["paths", "queues"] {
        assert_eq!(sum(&counters[list], "read", "bytes"), 10 * 4096, "{counters}");
        assert_eq!(sum(&counters[list], "write", "bytes"), 0, "{counters}");
    }
    assert_eq!(sum(&counters["queues"], "read", "nr_ios"), 10, "{counters}");
    let queue = counters["queues"].as_array().unwrap().iter().find(|queue| queue["queue"] == 1).unwrap();
    assert!(queue["read"]["p99_ns"].as_u64().unwrap() > 0 && queue["nr_calls"].is_u64(), "{queue}");
    let path =
        counters["paths"].as_array().unwrap().iter().find(|path| path["path"] == rig.dev("a")).unwrap();
    assert!(path["read"]["latency_ns"][0][1].as_u64().unwrap() > 0, "{path}");
    told(&rig.socket.path(), &["counters", "--reset"]).ok();
    let counters: Value =
        serde_json::from_str(&told(&rig.socket.path(), &["counters", "--json"]).ok()).unwrap();
    assert_eq!(
        sum(&counters["paths"], "read", "bytes") + sum(&counters["queues"], "read", "nr_ios"),
        0,
        "{counters}"
    );
    disk.queues[0].flush().unwrap();
    // Four adjacent ranges in one kick are one I/O; a range by itself is another.
    let ranges: Vec<_> = (0..4).map(|i| Op::Discard(vec![Segment::new(i * 8, 8)])).collect();
    disk.queues[0].run_all(&ranges).unwrap();
    disk.queues[1].write_zeroes(64, 16, 0).unwrap();
    let counters = control.result(json!({ "command": "counters" })).unwrap();
    assert_eq!(sum(&counters["queues"], "flush", "nr_ios"), 1, "{counters}");
    for list in ["paths", "queues"] {
        let of = |name| sum(&counters[list], "discard", name);
        assert_eq!((of("nr_ios"), of("nr_merged"), of("bytes")), (2, 3, 6 * 4096), "{list}: {counters}");
    }
}

#[test]
fn wrong_input_changes_nothing_and_is_answered_with_the_reason() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut control = rig.control();
    let before = rig.control().json().unwrap();
    let (a, absent) = (rig.dev("a"), "/nowhere/x");
    for (question, code, word) in [
        (json!({}), "bad_request", "add_path"),
        (json!({ "command": "show", "version": 9 }), "bad_request", "9"),
        (json!({ "command": "dance" }), "bad_request", "dance"),
        (json!({ "command": "show", "all": true }), "bad_request", "all"),
        (json!({ "command": "fail_path" }), "bad_request", "path"),
        (json!({ "command": "fail_path", "path": absent }), "refused", absent),
        (json!({ "command": "reinstate_path", "path": absent }), "refused", absent),
        (json!({ "command": "remove_path", "path": absent }), "refused", absent),
        (json!({ "command": "add_path", "path": absent }), "refused", absent),
        (json!({ "command": "add_path", "path": "/dev/null" }), "refused", "/dev/null"),
        (json!({ "command": "add_path", "path": a }), "refused", "already"),
        (json!({ "command": "add_path", "path": absent, "group": 3 }), "refused", "3"),
        (json!({ "command": "add_path", "path": absent, "group": "first" }), "bad_request", "first"),
        (json!({ "command": "set_path_weight", "path": a, "weight": 3 }), "refused", "service-time"),
        (json!({ "command": "set_path_weight", "path": absent, "weight": 3 }), "refused", absent),
        (json!({ "command": "set_path_weight", "path": a, "weight": -1 }), "bad_request", "-1"),
        (json!({ "command": "set_path_args", "path": a, "args": ["many"] }), "refused", "many"),
        (json!({ "command": "move_path", "path": a, "group": 2 }), "refused", "2"),
        (json!({ "command": "move_path", "path": absent, "group": 1 }), "refused", absent),
        (json!({ "command": "switch_group", "group": 0 }), "refused", "0"),
        (json!({ "command": "disable_group", "group": 2 }), "refused", "2"),
        (json!({ "command": "enable_group", "group": 1.5 }), "bad_request", "1.5"),
        (json!({ "command": "set_selector", "group": 1, "selector": "best" }), "refused", "round-robin"),
        (json!({ "command": "set_selector", "group": 2, "selector": "round-robin" }), "refused", "2"),
        (
            json!({ "command": "set_selector", "group": 1, "selector": "round-robin", "args": ["x"] }),
            "refused",
            "x",
        ),
        (json!({ "command": "set_no_path_retry", "value": "often" }), "bad_request", "often"),
        (json!({ "command": "set_log_level", "level": "loud" }), "bad_request", "loud"),
        (json!({ "command": "message", "message": "fail_path" }), "refused", "column 10"),
        (json!({ "command": "message", "message": "make_coffee" }), "refused", "make_coffee"),
        (json!({ "command": "dump", "format": "xml" }), "bad_request", "xml"),
        (json!({ "command": "events", "last": "all" }), "bad_request", "all"),
        (json!({ "command": "reload" }), "refused", "--config"),
    ] {
        let why = refused(&mut control, &question, code);
        assert!(why.contains(word), "{question}: {why}");
        assert_eq!(rig.control().json().unwrap(), before, "{question} changed something");
    }
    // What is no JSON at all, and what is no command in words either.
    for line in ["{", "{]", "{\"command\":\"show\"} x"] {
        control.send(line).unwrap();
        let answer = control.object_within(SOON).unwrap().unwrap();
        assert_eq!(answer["error"]["code"], "bad_request", "{line}: {answer}");
    }
    assert!(control.refused("[1]").unwrap().contains("[1]"));
}

#[test]
fn the_last_path_stays_and_ids_come_back() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a"], &[]);
    let mut control = rig.control();
    let why = refused(&mut control, &json!({ "command": "remove_path", "path": rig.dev("a") }), "refused");
    assert!(why.contains("only"), "{why}");
    // Several questions in one go, in JSON and in words.
    control
        .send_bytes(b"{\"id\":1,\"command\":\"hello\"}\nstatus\n{\"id\":\"two\",\"command\":\"nope\"}\n")
        .unwrap();
    assert_eq!(control.object_within(SOON).unwrap().unwrap()["id"], 1);
    assert!(control.answer_within(SOON).unwrap().unwrap().unwrap().contains("multipath"));
    let answer = control.object_within(SOON).unwrap().unwrap();
    assert_eq!((&answer["id"], &answer["ok"]), (&json!("two"), &json!(false)));
}

/// What takes too long is answered with a time-out, and does not happen later.
#[test]
fn f61_commands_end_with_an_answer_while_paths_hang() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--path-timeout", "300"]);
    let mut disk = rig.disk(2);
    rig.fs.add_name("c");
    rig.fs.rule("c", Rule::hold().on(&[Kind::Open]));
    let mut adding = rig.control();
    adding.send(&json!({ "command": "add_path", "path": rig.dev("c"), "id": 5 }).to_string()).unwrap();
    rig.fs.wait_held("c", 1, SOON).unwrap();
    // Meanwhile the others are served, and the guest too.
    let mut control = rig.control();
    for command in ["hello", "show", "dump", "events"] {
        control.result(json!({ "command": command })).unwrap();
    }
    assert!(disk.q().read(0, 8).is_ok());
    let answer = adding.object_within(SOON).unwrap().expect("an answer");
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!("timed_out"), &json!(5)), "{answer}");
    rig.fs.release("c");
    // A removal whose requests do not end.
    rig.fs.rule("a", Rule::hold().reads());
    for i in 0..4 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("a", 1, SOON).unwrap();
    let answer = control.ask_json(&json!({ "command": "remove_path", "path": rig.dev("a") })).unwrap();
    assert_eq!(answer["error"]["code"], "timed_out", "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("out of the table"), "{answer}");
    rig.fs.release("a");
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == 0));
    let mut watching = rig.control();
    wait_until("the path to be closed", SOON, || {
        let events = watching.result(json!({ "command": "events", "last": 9 })).unwrap();
        events["events"].as_array().unwrap().iter().any(|event| event["event"] == "path_closed")
    })
    .unwrap();
}

#[test]
fn shutdown_is_answered_and_finishes_what_is_in_flight() {
    need!(faulty);
    let mut rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    for name in ["a", "b"] {
        rig.fs.rule(name, Rule::hold().reads());
    }
    disk.q().submit(&Op::read(8, 8)).unwrap();
    let in_flight = |name: &str| rig.fs.counts(name).held;
    wait_until("the request to be on its way", SOON, || in_flight("a") + in_flight("b") == 1).unwrap();
    let mut following = rig.control();
    following.result(json!({ "command": "events", "follow": true })).unwrap();
    rig.control().result(json!({ "command": "shutdown" })).unwrap();
    rig.server.wait_for_log("stopping", SOON).unwrap();
    for name in ["a", "b"] {
        rig.fs.release(name);
    }
    assert_eq!(disk.q().done().unwrap().status, 0);
    assert_eq!(exit_code(rig.server.wait_exit(SOON).unwrap()), 0);
    let mut seen = Vec::new();
    while let Ok(Some(event)) = following.object_within(SOON) {
        seen.push(event["event"].as_str().unwrap().to_owned());
    }
    assert!(seen.contains(&"stopping".to_owned()), "{seen:?}");
    assert!(!rig.socket.path().exists() && !rig.server.socket().exists());
}

#[test]
fn f57_the_socket_is_given_to_whom_the_operator_says() {
    let image = Image::filled(MIB);
    let socket = Socket::new().unwrap();
    let builder = || Server::polypath().path(&image.path).arg("--control").arg(socket.path()).umask(0);
    let meta = || std::fs::metadata(socket.path()).unwrap();
    let server = builder().start().unwrap();
    assert_eq!(meta().permissions().mode() & 0o777, 0o600);
    drop(server);
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        let server = builder()
            .arg("--control-owner")
            .arg("nobody")
            .arg("--control-group")
            .arg("nogroup")
            .start()
            .unwrap();
        assert_eq!((meta().permissions().mode() & 0o777, meta().uid(), meta().gid()), (0o660, 65534, 65534));
        drop(server);
    }
    for (option, value) in [("--control-owner", "no such user"), ("--control-group", "no such group")] {
        let exited = builder().arg(option).arg(value).run_to_exit(Duration::from_secs(10)).unwrap();
        assert!(exited.code > 0 && exited.stderr.contains(option), "{exited:?}");
    }
}
