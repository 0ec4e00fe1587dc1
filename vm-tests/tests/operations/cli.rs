//! The command line for people.

use std::time::Duration;

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::Op;
use polypath_vm_tests::server::{Process, Server, polypath_bin, wait_until};
use serde_json::Value;

use crate::common::{Image, MIB, SOON, need};
use crate::rig::Rig;
use crate::run::{polypath, told};

#[test]
fn a_failed_path_is_seen_at_once_with_what_to_do() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let socket = rig.socket.path();
    let show = || told(&socket, &["show"]).ok();
    let good = show();
    assert!(good.lines().next().unwrap().ends_with("ok, 2 of 2 paths active"), "{good}");
    assert!(!good.contains("what to do") && !good.contains('\x1b'), "{good}");
    // By hand: the command that undoes it is spelled out, and works.
    told(&socket, &["fail-path", &rig.dev("a")]).ok();
    let text = show();
    assert!(text.lines().next().unwrap().ends_with("DEGRADED, 1 of 2 paths failed"), "{text}");
    let line = text.lines().find(|line| line.contains(&rig.dev("a"))).unwrap();
    assert!(line.contains("failed") && line.contains("by the operator"), "{text}");
    let advice = text.lines().find_map(|line| line.trim().strip_prefix("polypath ")).unwrap();
    polypath(&advice.split(' ').collect::<Vec<_>>()).ok();
    rig.wait_active("a", true);
    // By the storage: why, and what is held.
    let mut disk = rig.disk(1);
    for name in ["a", "b"] {
        rig.fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
    }
    disk.q().submit(&Op::read(0, 8)).unwrap();
    rig.wait_status("the request to wait", |status| status.nr_held() == 1);
    wait_until("the reason", SOON, || show().contains("error")).unwrap();
    let text = show();
    assert!(text.lines().next().unwrap().ends_with("NO PATH, all 2 failed"), "{text}");
    assert!(text.contains("held") && text.contains("1 requests, 4 KiB"), "{text}");
    assert!(text.contains(&format!("polypath no-path-retry --control {} queue", socket.display())), "{text}");
    ["a", "b"].iter().for_each(|name| rig.fs.clear(name));
    assert_eq!(disk.q().done().unwrap().status, 0);
    // For programs.
    let json: Value = serde_json::from_str(&told(&socket, &["show", "--json"]).ok()).unwrap();
    assert_eq!(json["control"], socket.to_str().unwrap());
    assert_eq!(json["nr_paths"], 2);
}

#[test]
fn every_command_of_the_line() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = polypath_vm_tests::faulty::FaultyFs::mount(&image.path, &["a", "b", "c"]).unwrap();
    let mut rig = Rig::start_on(image, fs, &["a", "b"], &["--selector", "service-time"]);
    let socket = rig.socket.path();
    let run = |args: &[&str]| told(&socket, args).ok();
    let [a, b, c] = ["a", "b", "c"].map(|name| rig.dev(name));
    run(&["fail-path", &a]);
    assert!(!rig.is_active("a"));
    run(&["reinstate-path", &a]);
    rig.wait_active("a", true);
    run(&["path", "add", &c, "--group", "2", "1", "5"]);
    assert_eq!(rig.status().path(&rig.fs.path("c"))["args"], serde_json::json!(["1", "5"]));
    run(&["path", "weight", &c, "6"]);
    assert_eq!(rig.status().path(&rig.fs.path("c"))["args"], serde_json::json!(["1", "6"]));
    run(&["path", "args", &c, "1", "7"]);
    assert_eq!(rig.status().path(&rig.fs.path("c"))["args"], serde_json::json!(["1", "7"]));
    run(&["switch-group", "2"]);
    assert_eq!(rig.status().current_group(), Some(2));
    run(&["disable-group", "2"]);
    assert_eq!(rig.status().group_state(2), "disabled");
    run(&["enable-group", "2"]);
    assert_eq!(rig.status().group_state(2), "enabled");
    run(&["selector", "1", "historical-service-time", "970"]);
    assert_eq!(rig.status().0["groups"][0]["selector"], "historical-service-time");
    run(&["path", "move", &b, "2"]);
    let removed = run(&["path", "remove", &c]);
    assert!(removed.contains("last request"), "{removed}");
    assert!(!rig.status().has(&rig.fs.path("c")));
    run(&["no-path-retry", "queue"]);
    assert_eq!(rig.status().0["no_path_retry"], "queue");
    run(&["message", "fail_if_no_path"]);
    run(&["message", "fail_path", &b]);
    assert!(!rig.is_active("b"));
    run(&["log-level", "warn"]);
    let dm = run(&["dump", "--dm"]);
    assert!(dm.starts_with("0 2048 multipath ") && dm.contains(&b), "{dm}");
    assert!(run(&["dump", "--dm-status"]).contains(&format!("{b} F")));
    let toml = run(&["dump"]);
    assert!(toml.contains(&format!("device = \"{a}\"")), "{toml}");
    assert!(run(&["events", "--last", "3"]).lines().count() == 3);
    let event: Value = serde_json::from_str(&run(&["events", "--last", "1", "--json"])).unwrap();
    assert!(event["event"].is_string());
    run(&["shutdown"]);
    rig.server.wait_exit(SOON).unwrap();
    // What the dump says is what a start takes.
    let file = rig.image.dir().join("dumped.toml");
    std::fs::write(&file, toml).unwrap();
    Server::polypath().arg("--config").arg(&file).start().unwrap();
}

#[test]
fn errors_say_what_to_do_and_exit_codes_what_kind_they_are() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let socket = rig.socket.path();
    // 1: refused by the program, with its reason.
    for (args, word) in [
        (&["fail-path", "/nowhere"][..], "/nowhere"),
        (&["reinstate-path", "/nowhere"], "/nowhere"),
        (&["path", "add", "/nowhere"], "No such file"),
        (&["path", "remove", "/nowhere"], "/nowhere"),
        (&["path", "weight", "/nowhere", "1"], "/nowhere"),
        (&["path", "move", "/nowhere", "1"], "/nowhere"),
        (&["path", "args", "/nowhere", "1"], "/nowhere"),
        (&["switch-group", "9"], "no group 9"),
        (&["disable-group", "9"], "no group 9"),
        (&["enable-group", "9"], "no group 9"),
        (&["selector", "1", "best"], "round-robin"),
        (&["message", "dance"], "dance"),
        (&["reload"], "--config"),
    ] {
        let line = told(&socket, args).refused(1);
        assert!(line.starts_with("polypath: ") && line.contains(word), "{args:?}: {line}");
    }
    // 2: not a command.
    for args in [
        &["no-path-retry", "often"][..],
        &["log-level", "loud"],
        &["switch-group", "x"],
        &["path", "weight", "a", "999"],
        &["path"],
        &["dance"],
        &["show", "--speed"],
        &["show", "--socket-path", "s"],
    ] {
        assert_eq!(told(&socket, args).code, 2, "{args:?}");
    }
    // 3: nobody there.
    let dir = tempfile::tempdir().unwrap();
    let dead = dir.path().join("dead.control");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    assert!(told(&dead, &["show"]).refused(3).contains("start it again"));
    assert!(told(&dir.path().join("absent"), &["fail-path", "x"]).refused(3).contains("no such socket"));
    let run_dir = dir.path().join("nothing");
    assert!(polypath(&["show", "--run-dir", run_dir.to_str().unwrap()]).refused(3).contains("--control"));
    // 4: somebody who does not answer.
    let mute = dir.path().join("mute.control");
    let _listener = std::os::unix::net::UnixListener::bind(&mute).unwrap();
    let line = told(&mute, &["show", "--timeout", "1"]).refused(4);
    assert!(line.contains("no answer within 1 s"), "{line}");
}

#[test]
fn every_answer_can_be_had_as_json() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--selector", "service-time"]);
    let (socket, a) = (rig.socket.path(), rig.dev("a"));
    for (args, member) in [
        (&["show"][..], "nr_paths"),
        (&["fail-path", &a], ""),
        (&["reinstate-path", &a], ""),
        (&["path", "weight", &a, "4"], ""),
        (&["path", "args", &a, "1", "5"], ""),
        (&["path", "move", &a, "1"], ""),
        (&["switch-group", "1"], ""),
        (&["disable-group", "1"], ""),
        (&["enable-group", "1"], ""),
        (&["selector", "1", "round-robin"], ""),
        (&["no-path-retry", "queue"], ""),
        (&["message", "fail_if_no_path"], ""),
        (&["log-level", "info"], ""),
        (&["counters"], "since_ms"),
        (&["counters", "--reset"], ""),
        (&["resize"], "size_bytes"),
        (&["dump"], "text"),
        (&["dump", "--dm"], "text"),
        (&["events", "--last", "1"], "event"),
        (&["path", "remove", &a], "drained_ms"),
        (&["path", "add", &a], "took_ms"),
        (&["shutdown"], ""),
    ] {
        let text = told(&socket, &[args, &["--json"]].concat()).ok();
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}: {text}"));
        assert!(answer.is_object() && text.lines().count() == 1, "{args:?}: {text}");
        assert!(member.is_empty() || !answer[member].is_null(), "{args:?}: {text}");
    }
    // An error as well, with the word for its exit code.
    let line = polypath(&["fail-path", "x", "--json", "--control", "/nowhere/s"]).refused(3);
    let error: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(error["error"]["code"], "not_there", "{line}");
    assert!(error["error"]["message"].as_str().unwrap().contains("no such socket"), "{line}");
}

#[test]
fn disks_are_found_by_their_sockets() {
    let image = Image::empty(MIB);
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().to_str().unwrap();
    let start = |name: &str| {
        let control = dir.path().join(format!("{name}.control"));
        Server::polypath().path(&image.path).arg("--control").arg(control).start().unwrap()
    };
    let _first = start("vm1");
    // The only one is meant.
    polypath(&["no-path-retry", "queue", "--run-dir", run_dir]).ok();
    let _second = start("vm2");
    let text = polypath(&["show", "--run-dir", run_dir]).ok();
    let heads: Vec<&str> = text.lines().filter(|line| !line.starts_with(' ') && !line.is_empty()).collect();
    assert!(heads.len() == 2 && heads[0].starts_with("vm1 ") && heads[1].starts_with("vm2 "), "{text}");
    let line = polypath(&["no-path-retry", "fail", "--run-dir", run_dir]).refused(1);
    assert!(line.contains("--disk vm1") && line.contains("--disk vm2"), "{line}");
    polypath(&["no-path-retry", "fail", "--run-dir", run_dir, "--disk", "vm2"]).ok();
    let text = polypath(&["show", "--run-dir", run_dir, "--disk", "vm2"]).ok();
    assert!(text.contains("requests fail at once") && !text.contains("vm1"), "{text}");
    // One that has died does not hide the others.
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("vm0.control")).unwrap());
    let ran = polypath(&["show", "--run-dir", run_dir]);
    assert!(ran.code == 3 && ran.err.contains("vm0") && ran.out.contains("vm2 "), "{ran:?}");
}

#[test]
fn events_are_followed_until_the_end() {
    let image = Image::empty(MIB);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("x.control");
    let mut server = Server::polypath().path(&image.path).arg("--control").arg(&socket).start().unwrap();
    let mut command = std::process::Command::new(polypath_bin().unwrap());
    command.args(["events", "--follow", "--control"]).arg(&socket);
    let mut following = Process::spawn(command, dir.path(), "events").unwrap();
    wait_until("events", SOON, || {
        told(&socket, &["no-path-retry", "queue"]).ok();
        following.stdout().contains("no_path_retry is now queue")
    })
    .unwrap();
    server.terminate(SOON).unwrap();
    assert_eq!(following.wait_exit(Duration::from_secs(10)).unwrap().code(), Some(3));
    assert!(following.stdout().contains("polypath stops"), "{}", following.stdout());
}

#[test]
fn completions_and_manual_pages_are_made_from_the_same_words() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(polypath(&["completions", shell]).ok().contains("fail-path"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    polypath(&["man", dir.path().to_str().unwrap()]).ok();
    let page = std::fs::read_to_string(dir.path().join("polypath.1")).unwrap();
    assert!(page.contains("num\\-queues") && page.contains("Exit codes"), "{page}");
    assert!(dir.path().join("polypath-show.1").exists());
    let help = polypath(&["--help"]).ok();
    for word in ["--socket-path", "show", "fail-path", "--config"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

/// In a pseudo-terminal, as a user has it.
#[test]
fn top_shows_the_disk_and_its_keys_ask_first() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let socket = rig.socket.path();
    assert!(told(&socket, &["top"]).refused(1).contains("terminal"));
    let dir = tempfile::tempdir().unwrap();
    let (keys, script) = (
        dir.path().join("keys"),
        "stty rows 20 cols 160; exec \"$TOP_PROGRAM\" top --interval 100 --control \"$TOP_SOCKET\"",
    );
    assert!(std::process::Command::new("mkfifo").arg(&keys).status().unwrap().success());
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "exec script -qfec \"$0\" /dev/null <\"$1\"", script]).arg(&keys);
    command.env("TOP_PROGRAM", polypath_bin().unwrap()).env("TOP_SOCKET", &socket).env("TERM", "xterm");
    let mut top = Process::spawn(command, dir.path(), "top").unwrap();
    let mut keys = std::fs::File::options().write(true).open(&keys).unwrap();
    let mut press = |key: &str| std::io::Write::write_all(&mut keys, key.as_bytes()).unwrap();
    let shows = |words: &str, top: &Process| {
        wait_until(&format!("{words} on the screen"), SOON, || top.stdout().contains(words))
            .unwrap_or_else(|e| panic!("{e:#}\n{}", top.stdout()));
    };
    shows("IN FLIGHT", &top);
    // No is no.
    press("fn");
    press("jf");
    shows("y: yes", &top);
    assert!(rig.is_active("a") && rig.is_active("b"));
    press("y");
    rig.wait_active("b", false);
    press("ry");
    rig.wait_active("b", true);
    assert!(rig.is_active("a"));
    press("q");
    assert_eq!(top.wait_exit(SOON).unwrap().code(), Some(0), "{}", top.stdout());
}
