//! The size of the disk by command: in JSON, and for people.

use polypath_vm_tests::front_end::Op;
use serde_json::json;

use crate::common::{Image, MIB};
use crate::rig::Rig;
use crate::run::told;

#[test]
fn f33_resize_by_command_grows_and_shrinks_only_when_told_to() {
    let image = Image::filled(4 * MIB);
    let path = image.path.clone();
    let set_len =
        |mib: u64| std::fs::File::options().write(true).open(&path).unwrap().set_len(mib * MIB).unwrap();
    let (server, socket) = crate::rig::controlled(polypath_vm_tests::server::Server::polypath().path(&path));
    let mut disk = polypath_vm_tests::front_end::Disk::open(server.socket()).unwrap();
    let mut control = socket.connect().unwrap();
    let size = |disk: &mut polypath_vm_tests::front_end::Disk| disk.reload_config().unwrap().capacity * 512;
    // Nothing has changed.
    assert_eq!(control.result(json!({ "command": "resize" })).unwrap(), json!({ "size_bytes": 4 * MIB }));
    set_len(8);
    assert_eq!(control.result(json!({ "command": "resize" })).unwrap(), json!({ "size_bytes": 8 * MIB }));
    assert_eq!(size(&mut disk), 8 * MIB);
    set_len(16);
    assert_eq!(told(&socket.path(), &["resize"]).ok(), "the disk has 16777216 bytes (16 MiB)\n");
    assert_eq!(size(&mut disk), 16 * MIB);
    assert!(disk.q().read(12 * 2048, 8).unwrap() == vec![0; 4096]);
    // Smaller only by word.
    set_len(4);
    let answer = control.ask_json(&json!({ "command": "resize" })).unwrap();
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("refused")), "{answer}");
    let why = told(&socket.path(), &["resize"]).refused(1);
    assert!(why.contains("the size stays 16777216 bytes") && why.contains("shrink"), "{why}");
    assert_eq!(size(&mut disk), 16 * MIB);
    assert_eq!(told(&socket.path(), &["resize", "--shrink"]).ok(), "the disk has 4194304 bytes (4 MiB)\n");
    assert_eq!(size(&mut disk), 4 * MIB);
    assert_eq!(disk.q().run(&Op::read(12 * 2048, 8)).unwrap().status, 1);
    set_len(2);
    let question = json!({ "command": "resize", "shrink": true, "id": 7 });
    let answer = control.ask_json(&question).unwrap();
    assert_eq!((&answer["id"], &answer["result"]["size_bytes"]), (&json!(7), &json!(2 * MIB)), "{answer}");
    let answer = control.ask_json(&json!({ "command": "resize", "shrink": "yes" })).unwrap();
    assert_eq!(answer["error"]["code"], "bad_request", "{answer}");
}

/// A path that cannot be asked leaves everything as it was.
#[test]
fn f34_resize_by_command_with_a_dead_path() {
    crate::common::need!(faulty);
    let rig = Rig::start(Image::filled(4 * MIB), &["a", "b"], &["--path-timeout", "500"]);
    rig.fs.stop();
    let why = told(&rig.socket.path(), &["resize"]);
    rig.fs.cont();
    let why = why.refused(1);
    assert!(why.contains("the size stays 4194304 bytes"), "{why}");
    rig.wait_active("a", true);
    rig.wait_active("b", true);
    assert_eq!(told(&rig.socket.path(), &["resize"]).ok(), "the disk has 4194304 bytes (4 MiB)\n");
}
