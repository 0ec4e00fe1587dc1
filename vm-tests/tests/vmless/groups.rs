//! Priority groups: which is used, when it changes, and how it is shown.

use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{FaultyFs, Rule};
use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::Rig;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Long enough to see that something does not happen.
const MOMENT: Duration = Duration::from_millis(300);

/// Group 1: a, b; group 2: c; group 3: d.
fn three_groups(args: &[&str]) -> (Rig, Disk) {
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &NAMES).unwrap();
    let dev = |name| fs.path(name).display().to_string();
    let line = format!(
        "0 2048 multipath 0 0 3 1 service-time 0 2 2 {} 1 1 {} 1 4 round-robin 0 1 1 {} 1 round-robin 0 1 0 {}",
        dev("a"),
        dev("b"),
        dev("c"),
        dev("d")
    );
    let builder = Server::polypath().arg("--table").arg(line);
    let rig = Rig::start_with(image, fs, args.iter().fold(builder, |builder, arg| builder.arg(arg)));
    let disk = rig.disk(1);
    (rig, disk)
}

/// The names that a few reads go by.
fn used(rig: &Rig, disk: &mut Disk) -> Vec<&'static str> {
    let before = NAMES.map(|name| rig.fs.counts(name).reads);
    // At once, or a path with little weight would never be chosen.
    let reads: Vec<_> = (0..24).map(|i| polypath_vm_tests::front_end::Op::read(64 + i * 16, 8)).collect();
    for (i, done) in (0..).zip(disk.q().run_all(&reads).unwrap()) {
        assert!(done.data == filled(64 + i * 16, 8));
    }
    // A probe is one read.
    NAMES
        .into_iter()
        .zip(before)
        .filter(|(name, before)| rig.fs.counts(name).reads > before + 1)
        .map(|(n, _)| n)
        .collect()
}

fn fail(rig: &Rig, names: &[&str]) {
    for name in names {
        rig.fs.rule(name, Rule::errno(libc::ENODEV));
        rig.tell("fail_path", name);
        rig.tell("reinstate_path", name);
        rig.wait_active(name, false);
    }
}

fn heal(rig: &Rig, name: &str) {
    rig.fs.clear(name);
    rig.wait_active(name, true);
}

#[test]
fn a_group_is_used_until_its_last_path_is_gone_and_kept_after_that() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&[]);
    assert_eq!(used(&rig, &mut disk), ["a", "b"]);
    fail(&rig, &["a"]);
    assert_eq!(used(&rig, &mut disk), ["b"]);
    fail(&rig, &["b"]);
    assert_eq!(used(&rig, &mut disk), ["c"]);
    assert!(rig.server.wait_for_log("group switched", SOON).unwrap().ends_with("from=1 to=2"));
    heal(&rig, "a");
    heal(&rig, "b");
    std::thread::sleep(MOMENT);
    assert_eq!(used(&rig, &mut disk), ["c"], "it goes back by itself");
    fail(&rig, &["c"]);
    assert_eq!(used(&rig, &mut disk), ["a", "b"], "in the order of the table");
    fail(&rig, &["a", "b"]);
    assert_eq!(used(&rig, &mut disk), ["d"]);
}

#[test]
fn messages_for_groups() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&[]);
    let mut control = rig.control();
    control.run("switch_group 2").unwrap();
    assert_eq!(used(&rig, &mut disk), ["c"]);
    assert_eq!(rig.status().current_group(), Some(2));
    control.run("disable_group 2").unwrap();
    assert_eq!(used(&rig, &mut disk), ["a", "b"]);
    assert_eq!(rig.status().group_state(2), "disabled");
    control.run("disable_group 1").unwrap();
    assert_eq!(used(&rig, &mut disk), ["d"], "bypassed groups come last");
    fail(&rig, &["d"]);
    assert_eq!(used(&rig, &mut disk), ["a", "b"], "but they come");
    assert!(control.run("status").unwrap().contains(" 3 1 D 0 2 2 "), "{}", control.run("status").unwrap());
    heal(&rig, "d");
    std::thread::sleep(MOMENT);
    assert_eq!(used(&rig, &mut disk), ["a", "b"], "a group is kept, also a bypassed one");
    control.run("enable_group 2").unwrap();
    assert_eq!(used(&rig, &mut disk), ["c"], "the group in use is forgotten");
    control.run("switch_group 3").unwrap();
    assert_eq!(used(&rig, &mut disk), ["d"]);
    let status = rig.status();
    assert_eq!(
        [1, 2, 3].map(|n| status.group_state(n)),
        ["enabled", "enabled", "active"],
        "switching enables all"
    );
    // A group without a path is no choice.
    fail(&rig, &["c"]);
    control.run("switch_group 2").unwrap();
    assert_eq!(used(&rig, &mut disk), ["a", "b"]);
}

#[test]
fn an_initial_group_other_than_the_first() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &NAMES).unwrap();
    let dev = |name| fs.path(name).display().to_string();
    let line = format!(
        "0 2048 multipath 3 queue_if_no_path pg_init_retries 5 1 alua 2 2 queue-length 0 1 1 {} 1000 queue-length 0 1 0 {}",
        dev("a"),
        dev("b")
    );
    let rig = Rig::start_with(image, fs, Server::polypath().arg("--table").arg(line));
    let mut disk = rig.disk(1);
    assert_eq!(used(&rig, &mut disk), ["b"]);
    let mut control = rig.control();
    let table = control.run("table").unwrap();
    assert!(
        table.starts_with("0 2048 multipath 3 queue_if_no_path pg_init_retries 5 1 alua 2 2 queue-length"),
        "{table}"
    );
    assert_eq!(control.json().unwrap().0["no_path_retry"], "queue");
}

#[test]
fn failback_at_once() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&["--failback", "immediate"]);
    fail(&rig, &["a", "b"]);
    assert_eq!(used(&rig, &mut disk), ["c"]);
    heal(&rig, "b");
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
    assert_eq!(used(&rig, &mut disk), ["b"]);
    rig.control().run("switch_group 2").unwrap();
    heal(&rig, "a");
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
}

#[test]
fn failback_after_a_while() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&["--failback", "2"]);
    fail(&rig, &["a", "b"]);
    heal(&rig, "b");
    let healed = Instant::now();
    assert_eq!(used(&rig, &mut disk), ["c"]);
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
    let took = healed.elapsed();
    assert!((1.5..4.0).contains(&took.as_secs_f64()), "{took:?}");
    assert_eq!(used(&rig, &mut disk), ["b"]);
    // A failure in between ends the countdown; it begins anew with the next path that comes up.
    rig.control().run("switch_group 2").unwrap();
    heal(&rig, "a");
    rig.fs.rule("a", Rule::errno(libc::ENODEV));
    rig.tell("fail_path", "a");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(rig.status().current_group(), Some(2), "{}", rig.server.stderr());
    rig.fs.clear("a");
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
}

#[test]
fn failback_only_after_the_first_path_of_the_best_group() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&["--failback", "followover"]);
    // Somebody else moved us: the best group has a path all the time.
    fail(&rig, &["a"]);
    rig.control().run("switch_group 2").unwrap();
    heal(&rig, "a");
    std::thread::sleep(MOMENT);
    assert_eq!(used(&rig, &mut disk), ["c"]);
    fail(&rig, &["a", "b"]);
    heal(&rig, "b");
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
    assert_eq!(used(&rig, &mut disk), ["b"]);
}

/// A path that is added is a path that comes up.
#[test]
fn failback_to_a_group_that_got_a_path_by_command() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&["--failback", "immediate"]);
    fail(&rig, &["a", "b"]);
    assert_eq!(used(&rig, &mut disk), ["c"]);
    rig.fs.add_name("e");
    let before = rig.fs.counts("e").reads;
    rig.control().run(&format!("add_path 1 {} 1 1", rig.dev("e"))).unwrap();
    rig.wait_status("the best group", |status| status.current_group() == Some(1));
    disk.q().read(8, 8).unwrap();
    assert!(rig.fs.counts("e").reads > before + 1);
}

/// The choice of a group outlives changes to others.
#[test]
fn removing_a_path_elsewhere_does_not_move_the_group() {
    need!(faulty);
    let (rig, mut disk) = three_groups(&[]);
    let mut control = rig.control();
    control.run("switch_group 2").unwrap();
    assert_eq!(used(&rig, &mut disk), ["c"]);
    control.run(&format!("remove_path {}", rig.dev("a"))).unwrap();
    assert_eq!(used(&rig, &mut disk), ["c"]);
    // The only path of its group: the group goes with it.
    control.run(&format!("remove_path {}", rig.dev("d"))).unwrap();
    assert_eq!(rig.status().0["groups"].as_array().unwrap().len(), 2);
    assert_eq!(used(&rig, &mut disk), ["c"], "group 3 went, and the one in use with it");
    // A group before it goes, so its number changes.
    control.run(&format!("remove_path {}", rig.dev("b"))).unwrap();
    assert_eq!(used(&rig, &mut disk), ["c"]);
    assert_eq!(rig.status().current_group(), Some(1));
}

/// The same device in two groups is one path: failing it, and what it has in flight, count in both.
#[test]
fn a_device_in_two_groups_is_one_path() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &NAMES).unwrap();
    let dev = |name| fs.path(name).display().to_string();
    let (a, b) = (dev("a"), dev("b"));
    let line = format!("0 2048 multipath 0 0 2 1 queue-length 0 1 0 {a} queue-length 0 2 0 {a} {b}");
    let builder = Server::polypath().arg("--table").arg(line).arg("--path-timeout").arg("300");
    let rig = Rig::start_with(image, fs, builder);
    let mut disk = rig.disk(1);
    rig.tell("fail_path", "a");
    assert_eq!(used(&rig, &mut disk), ["b"]);
    assert_eq!(rig.control().run("status").unwrap().matches(" F ").count(), 2);
    rig.tell("reinstate_path", "a");
    rig.wait_active("a", true);
    rig.control().run("switch_group 1").unwrap();
    assert_eq!(used(&rig, &mut disk), ["a"]);
    // It hangs with requests that were sent through group 1, and group 2 is used then.
    rig.fs.rule("a", Rule::hold().reads().sectors(1024..1032));
    disk.q().submit(&polypath_vm_tests::front_end::Op::read(1024, 8)).unwrap();
    rig.fs.wait_held("a", 1, SOON).unwrap();
    rig.control().run("switch_group 2").unwrap();
    let status = rig.status();
    let in_flight: Vec<_> =
        status.paths().filter(|(_, p)| p["device"] == a).map(|(_, p)| p["in_flight"].clone()).collect();
    assert_eq!(in_flight, [1, 1]);
    for i in 0..8 {
        disk.q().submit(&polypath_vm_tests::front_end::Op::read(i * 8, 8)).unwrap();
        disk.q().done().unwrap();
    }
    assert_eq!(rig.status().path(&rig.fs.path("a"))["in_flight"], 1, "what group 1 sent is forgotten");
    rig.fs.release("a");
    assert!(disk.q().done().unwrap().data == filled(1024, 8));
}
