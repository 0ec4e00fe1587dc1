//! Clients of the control socket that are many, slow, or gone.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use polypath_vm_tests::control::Control;
use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::Op;
use polypath_vm_tests::server::wait_until;
use serde_json::json;

use crate::common::{Image, MIB, SOON, need};
use crate::rig::Rig;

#[test]
fn f61_a_hundred_clients_at_once_are_all_answered() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    let before = rig.server.stats();
    let mut clients: Vec<Control> = (0..100).map(|_| rig.control()).collect();
    for _ in 0..3 {
        for (number, client) in clients.iter_mut().enumerate() {
            client.send(&json!({ "command": "show", "id": number }).to_string()).unwrap();
        }
        assert!(disk.q().read(0, 8).is_ok());
        for (number, client) in clients.iter_mut().enumerate() {
            let answer = client.object_within(SOON).unwrap().expect("an answer");
            assert_eq!((&answer["id"], &answer["ok"]), (&json!(number), &json!(true)));
        }
    }
    // Half of them go in the middle of a command, half with an answer on its way.
    for (number, mut client) in clients.into_iter().enumerate() {
        let line = if number % 2 == 0 { "{\"command\":\"sh" } else { "{\"command\":\"show\"}\n" };
        client.send_bytes(line.as_bytes()).unwrap();
    }
    rig.control().result(json!({ "command": "hello" })).unwrap();
    wait_until("descriptors to be closed", SOON, || rig.server.stats().fds <= before.fds).unwrap();
}

#[test]
fn one_client_too_many_is_told_so() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a"], &[]);
    let crowd: Vec<Control> = (0..256).map(|_| rig.control()).collect();
    let answer = rig.control().object_within(SOON).unwrap().unwrap();
    assert!(answer["error"]["message"].as_str().unwrap().contains("256 clients"), "{answer}");
    drop(crowd);
    wait_until("room to come back", SOON, || rig.control().result(json!({ "command": "hello" })).is_ok())
        .unwrap();
}

#[test]
fn a_client_that_says_it_asks_nothing_more_still_gets_its_answers() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut disk = rig.disk(1);
    rig.fs.rule("a", Rule::hold().reads());
    for i in 0..4 {
        disk.q().stage(&Op::read(i * 16, 8)).unwrap();
    }
    disk.q().kick();
    rig.fs.wait_held("a", 1, SOON).unwrap();
    // As `echo ... | socat` does.
    let mut stream = UnixStream::connect(rig.socket.path()).unwrap();
    writeln!(stream, "{}", json!({ "command": "remove_path", "path": rig.dev("a") })).unwrap();
    writeln!(stream, "status").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    rig.wait_status("the path to be gone", |status| !status.has(&rig.fs.path("a")));
    rig.fs.release("a");
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
    assert!(text.contains("multipath") && text.contains("drained_ms"), "{text}");
    assert!(disk.q().drain().unwrap().iter().all(|done| done.status == 0));
}

#[test]
fn f61_a_follower_that_does_not_read_delays_nobody_and_is_dropped() {
    need!(faulty);
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &[]);
    let mut slow = rig.control();
    slow.result(json!({ "command": "events", "follow": true })).unwrap();
    let mut good = rig.control();
    good.result(json!({ "command": "events", "follow": true })).unwrap();
    let mut control = rig.control();
    // Answered, so accepted: its descriptor is counted.
    control.result(json!({ "command": "hello" })).unwrap();
    let before = rig.server.stats();
    let (start, mut nr_events) = (Instant::now(), 0);
    // More than any socket and the program keep for it: its end shows as a closed descriptor.
    while rig.server.stats().fds >= before.fds {
        assert!(start.elapsed() < Duration::from_secs(50), "not dropped after {nr_events} events");
        for _ in 0..200 {
            control
                .send(&json!({ "command": "set_no_path_retry", "value": nr_events % 60 + 1 }).to_string())
                .unwrap();
            nr_events += 1;
        }
        for _ in 0..200 {
            assert_eq!(control.object_within(SOON).unwrap().unwrap()["ok"], true);
            assert_eq!(good.object_within(SOON).unwrap().unwrap()["event"], "setting_changed");
        }
    }
}
