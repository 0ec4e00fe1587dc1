//! Commands while paths hang, and clients of the command socket that do not keep the rules.

use std::time::{Duration, Instant};

use polypath_vm_tests::control::{Control, Socket};
use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::{BlkQueue, OK, Op};
use polypath_vm_tests::server::{Server, wait_until};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, Two};

/// Well above what a command and a read take on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Reads on every queue, each in time.
fn reads_flow(queues: &mut [BlkQueue], what: &str) {
    for round in 0..4 {
        for q in &mut *queues {
            let index = q.queue.index();
            let tag = q.submit(&Op::read(8, 8)).unwrap();
            let done = q
                .done_within(AT_ONCE)
                .unwrap_or_else(|e| panic!("{what}, round {round}, queue {index}: {e:#}"));
            assert!(done.tag == tag && done.data == filled(8, 8));
        }
    }
}

/// Commands that only ask are answered at once.
fn questions_are_answered(control: &mut Control, what: &str) {
    for command in ["status", "table", "toml", "json", "no_path_retry 60"] {
        let start = Instant::now();
        control.run(command).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        assert!(start.elapsed() < AT_ONCE, "{what}: {command} took {:?}", start.elapsed());
    }
}

#[test]
fn f61_adding_a_path_whose_open_hangs() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--path-timeout", "300"]);
    let mut disk = rig.disk(4);
    rig.fs.add_name("c");
    let threads = rig.server.stats().threads;
    for kind in [Kind::Stat, Kind::Open, Kind::Read] {
        rig.fs.rule("c", Rule::hold().on(&[kind]));
        let mut adding = rig.control();
        adding.send(&format!("add_path 1 {}", rig.dev("c"))).unwrap();
        rig.fs.wait_held("c", 1, SOON).unwrap();
        let mut control = rig.control();
        questions_are_answered(&mut control, "while an open hangs");
        reads_flow(&mut disk.queues, "while an open hangs");
        // It ends in time, with a reason, and is not used when its open ends later.
        let answer = adding.answer_within(Duration::from_secs(5)).unwrap();
        let error = answer.unwrap_or_else(|| panic!("{kind:?} hangs, and no answer to the add")).unwrap_err();
        assert!(error.contains(&rig.dev("c")), "{error}");
        rig.fs.release("c");
        wait_until("what was opened to be closed", SOON, || {
            !rig.server.open_files().contains(&rig.dev("c")) && rig.server.stats().threads == threads
        })
        .unwrap_or_else(|e| panic!("{e:#}: {:?}", rig.server.stats()));
        assert!(!rig.status().has(&rig.fs.path("c")), "added after its client was told that it is not");
        // And the name is free again.
        control.run(&format!("add_path 1 {}", rig.dev("c"))).unwrap();
        control.run(&format!("remove_path {}", rig.dev("c"))).unwrap();
    }
}

#[test]
fn f61_removing_a_path_that_has_requests_and_hangs() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--path-timeout", "300"]);
    let mut disk = rig.disk(4);
    rig.fs.rule("a", Rule::hold().reads());
    for i in 0..8 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("a", 4, SOON).unwrap();
    (0..4).for_each(|_| assert_eq!(disk.q().done().unwrap().status, OK));
    let mut removing = rig.control();
    removing.send(&format!("remove_path {}", rig.dev("a"))).unwrap();
    questions_are_answered(&mut rig.control(), "while a removed path has requests");
    assert!(!rig.status().has(&rig.fs.path("a")));
    reads_flow(&mut disk.queues[1..], "while a removed path has requests");
    let answer = removing.answer_within(Duration::from_secs(5)).unwrap();
    assert!(rig.server.open_files().contains(&rig.dev("a")));
    let error = answer.expect("no answer at all to a remove that hangs").unwrap_err();
    assert!(error.contains(&rig.dev("a")), "{error}");
    rig.fs.release("a");
    wait_until("the descriptor to be closed", SOON, || !rig.server.open_files().contains(&rig.dev("a")))
        .unwrap();
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
}

/// What is probed is compared with another path, which must be free to go meanwhile.
#[test]
fn f61_removing_a_path_while_another_one_hangs() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &["--path-timeout", "3000"]);
    rig.tell("fail_path", "c");
    rig.fs.rule("c", Rule::hold().on(&[Kind::Stat]));
    rig.tell("reinstate_path", "c");
    rig.fs.wait_held("c", 1, SOON).unwrap();
    for name in ["a", "b"] {
        let start = Instant::now();
        rig.tell("remove_path", name);
        assert!(start.elapsed() < AT_ONCE, "the removal of {name} took {:?}", start.elapsed());
        rig.fs.add_name("d");
        rig.control().run(&format!("add_path 1 {}", rig.dev(if name == "a" { "d" } else { "a" }))).unwrap();
    }
    rig.fs.release("c");
    rig.wait_active("c", true);
}

/// A request that another path keeps was sent by a table that the removed path was part of.
#[test]
fn f61_removing_a_path_while_another_one_has_requests_and_hangs() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &["--path-timeout", "3000"]);
    let mut disk = rig.disk(1);
    rig.fs.rule("c", Rule::hold().reads());
    for i in 0..6 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("c", 2, SOON).unwrap();
    (0..4).for_each(|_| assert_eq!(disk.q().done().unwrap().status, OK));
    let start = Instant::now();
    rig.tell("remove_path", "a");
    assert!(start.elapsed() < AT_ONCE, "it took {:?}", start.elapsed());
    assert!(!rig.server.open_files().contains(&rig.dev("a")));
    rig.fs.release("c");
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
}

/// The server of a path is stopped: opening, closing, looking at it, all hang.
#[test]
fn f61_removing_an_idle_path_whose_close_hangs() {
    need!(faulty);
    let image = Image::filled(MIB);
    let two = Two::start(&image, &[]);
    let mut disk = two.disk(4);
    reads_flow(&mut disk.queues, "at the start");
    two.a.stop();
    let mut removing = two.socket.connect().unwrap();
    removing.send(&format!("remove_path {}", two.paths[0].display())).unwrap();
    let mut control = two.socket.connect().unwrap();
    questions_are_answered(&mut control, "while a close hangs");
    reads_flow(&mut disk.queues, "while a close hangs");
    // Another change, and another front-end.
    two.b.add_name("b2");
    control.run(&format!("add_path 1 {}", two.b.path("b2").display())).unwrap();
    drop(disk);
    let mut disk = two.disk(4);
    reads_flow(&mut disk.queues, "after a new front-end came");
    assert!(removing.answer_within(Duration::from_millis(1)).unwrap().is_none_or(|answer| answer.is_err()));
    two.a.cont();
    two.server.wait_for_log("path closed", SOON).unwrap();
    assert!(!two.server.open_files().contains(&two.paths[0].display().to_string()));
}

#[test]
fn f61_a_stopped_server_and_all_that_can_be_done_to_its_path() {
    need!(faulty);
    let image = Image::filled(MIB);
    let mut two = Two::start(&image, &["--path-timeout", "300"]);
    let mut disk = two.disk(4);
    reads_flow(&mut disk.queues, "at the start");
    two.a.stop();
    let path = two.paths[0].display().to_string();
    let mut control = two.socket.connect().unwrap();
    for command in ["fail_path", "reinstate_path", "path_args", "fail_path", "reinstate_path"] {
        control.run(&format!("{command} {path}")).unwrap();
        questions_are_answered(&mut control, command);
        reads_flow(&mut disk.queues, command);
    }
    control.send(&format!("remove_path {path}")).unwrap();
    reads_flow(&mut disk.queues, "remove_path");
    let mut adding = two.socket.connect().unwrap();
    adding.send(&format!("add_path 1 {path}")).unwrap();
    questions_are_answered(&mut two.socket.connect().unwrap(), "add_path");
    reads_flow(&mut disk.queues, "add_path");
    drop(disk);
    two.server.signal(libc::SIGTERM);
    two.server.wait_for_log("INFO ] stopped", Duration::from_secs(5)).unwrap();
    // The kernel does not let a process go while a close of its own waits for an answer.
    two.a.cont();
    assert_eq!(two.server.wait_exit(SOON).unwrap().code(), Some(0));
}

#[test]
fn f61_clients_that_do_not_keep_the_rules() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b", "c"], &[]);
    let mut disk = rig.disk(2);
    let mut control = rig.control();
    control.run("status").unwrap();
    let before = rig.server.stats();
    // Gone in the middle of a line; after the question; with an answer on its way.
    for text in ["stat", "json\njson\njso", "json\n", "\n", "no_such_thing\n\0\u{ff}\n"] {
        for _ in 0..20 {
            rig.control().send_bytes(text.as_bytes()).unwrap();
        }
        questions_are_answered(&mut control, text);
    }
    rig.fs.rule("c", Rule::hold().reads());
    for i in 0..3 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("c", 1, SOON).unwrap();
    rig.control().send(&format!("remove_path {}", rig.dev("c"))).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("c")));
    rig.fs.release("c");
    rig.server.wait_for_log("path closed", SOON).unwrap();
    // Asks and never reads.
    let mut greedy = rig.control();
    while greedy.send("json").is_ok() {}
    questions_are_answered(&mut control, "after a client that never reads");
    // A line without an end.
    let mut endless = rig.control();
    wait_until("a line without an end to be refused", SOON, || endless.send_bytes(&[b'x'; 1024]).is_err())
        .unwrap();
    // More clients than anybody needs; those that are let in are served, and room comes back.
    let mut crowd: Vec<_> = (0..200).map(|_| rig.control()).collect();
    crowd[0].run("status").unwrap();
    questions_are_answered(&mut control, "in a crowd");
    reads_flow(&mut disk.queues[1..], "in a crowd");
    drop((crowd, greedy, endless));
    wait_until("room to come back", SOON, || rig.control().run("status").is_ok()).unwrap();
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == OK));
    wait_until("descriptors to be closed", SOON, || rig.server.stats().fds <= before.fds)
        .unwrap_or_else(|e| panic!("{e:#}: {:?} before {before:?}", rig.server.stats()));
}

#[test]
fn f55_f57_the_command_socket_is_as_private_as_the_other() {
    use std::os::unix::fs::PermissionsExt as _;
    let image = Image::filled(MIB);
    let socket = Socket::new().unwrap();
    let builder = || Server::polypath().path(&image.path).arg("--control").arg(socket.path()).umask(0);
    let mut server = builder().start().unwrap();
    assert_eq!(socket.path().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    // A living one is not taken away.
    let exited = builder().run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains("--control"), "{exited:?}");
    socket.connect().unwrap().run("status").unwrap();
    // A dead one is replaced.
    server.kill();
    assert!(socket.path().exists());
    let mut server = builder().start().unwrap();
    socket.connect().unwrap().run("status").unwrap();
    assert_eq!(server.terminate(SOON).unwrap(), 0);
    assert!(!socket.path().exists());
    // A file is neither.
    std::fs::write(socket.path(), "precious").unwrap();
    assert!(builder().run_to_exit(SOON).unwrap().code > 0);
    assert_eq!(std::fs::read(socket.path()).unwrap(), b"precious");
}

#[test]
fn several_commands_in_one_go_are_answered_in_order() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut control = rig.control();
    control.send_bytes(b"status\r\n\nnonsense\n  table  \n").unwrap();
    let mut answer = || control.answer_within(SOON).unwrap().expect("an answer");
    assert!(answer().unwrap().contains(" multipath 2 0 0 0 1 1 "));
    assert!(answer().is_err());
    assert!(answer().unwrap_err().contains("nonsense"));
    assert!(answer().unwrap().starts_with("0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 "));
}

#[test]
fn commands_that_make_no_sense_are_refused_with_the_reason() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut control = rig.control();
    let before = control.json().unwrap();
    let (a, absent) = (rig.dev("a"), "/nowhere/x");
    for (command, word) in [
        ("fail_path".to_owned(), "column 10"),
        (format!("fail_path {absent}"), absent),
        (format!("reinstate_path {absent}"), absent),
        (format!("remove_path {absent}"), absent),
        (format!("path_args {absent} 1"), absent),
        (format!("path_args {a} many"), "many"),
        (format!("path_args {a} 1 2 3"), "2"),
        (format!("regroup_path {a} 2"), "2"),
        (format!("regroup_path {a} x"), "x"),
        (format!("regroup_path {absent} 1"), absent),
        (format!("add_path 1 {a}"), &a),
        (format!("add_path 0 {absent}"), "0"),
        (format!("add_path 3 {absent}"), "3"),
        (format!("add_path 1 {absent}"), absent),
        ("add_path 1 /dev/null".to_owned(), "/dev/null"),
        ("switch_group 0".to_owned(), "0"),
        ("switch_group 2".to_owned(), "2"),
        ("switch_group 1x".to_owned(), "1x"),
        ("disable_group".to_owned(), "column 14"),
        ("enable_group -1".to_owned(), "-1"),
        ("no_path_retry often".to_owned(), "seconds"),
        ("queue_if_no_path now".to_owned(), "now"),
        ("reload".to_owned(), "reload"),
    ] {
        let error = control.refused(&command).unwrap();
        assert!(error.contains(word), "{command}: {error}");
        assert_eq!(control.json().unwrap(), before, "{command} changed something");
    }
}
