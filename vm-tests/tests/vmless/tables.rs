//! Tables as text: what is accepted, what is printed, and what is said of mistakes.

use polypath_vm_tests::faulty::FaultyFs;
use polypath_vm_tests::server::{Exited, Server};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, controlled};

/// Three names on one file, and a table line of two groups.
fn rig(kind: &str) -> (Image, FaultyFs, String) {
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b", "c"]).unwrap();
    let dev = |name| fs.path(name).display().to_string();
    let (a, b, c) = (dev("a"), dev("b"), dev("c"));
    let line = match kind {
        "service-time" => format!("service-time 0 2 2 {a} 1 1 {b} 1 4 round-robin 0 1 1 {c} 1"),
        "historical-service-time" => {
            format!("historical-service-time 2 931 2 2 1 {a} 0 {b} 0 learned-service-time 1 6 1 1 {c} 1")
        }
        "io-affinity" => format!("io-affinity 0 2 1 {a} 5 {b} fffffffa queue-length 0 1 1 {c} 1"),
        _ => unreachable!(),
    };
    (image, fs, format!("0 2048 multipath 1 queue_if_no_path 0 2 1 {line}"))
}

#[test]
fn what_is_printed_is_accepted_again_in_both_forms() {
    need!(faulty);
    for kind in ["service-time", "historical-service-time", "io-affinity"] {
        let (image, fs, line) = rig(kind);
        let (server, socket) = controlled(Server::polypath().arg("--table").arg(&line));
        let mut control = socket.connect().unwrap();
        assert_eq!(control.run("table").unwrap(), line);
        let (toml, json) = (control.run("toml").unwrap(), control.json().unwrap());
        drop((control, server));
        let files = [image.dir().join("table.toml"), image.dir().join("table.dm")];
        std::fs::write(&files[0], &toml).unwrap();
        std::fs::write(&files[1], format!("{line}\n")).unwrap();
        for file in files {
            let (_server, socket) = controlled(Server::polypath().arg("--table-file").arg(&file));
            let mut control = socket.connect().unwrap();
            assert_eq!(control.run("table").unwrap(), line, "{file:?}");
            assert_eq!(control.run("toml").unwrap(), toml, "{file:?}");
            assert_eq!(control.json().unwrap(), json, "{file:?}");
        }
        drop(fs);
    }
}

#[test]
fn the_forms_of_the_status() {
    need!(faulty);
    let (image, fs, line) = rig("service-time");
    let rig = Rig::start_with(image, fs, Server::polypath().arg("--table").arg(&line));
    let (a, b, c) = (rig.dev("a"), rig.dev("b"), rig.dev("c"));
    let mut disk = rig.disk(1);
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    let mut control = rig.control();
    assert_eq!(
        control.run("status").unwrap(),
        format!("0 2048 multipath 2 0 0 0 2 1 A 0 2 2 {a} A 0 0 1 {b} A 0 0 4 E 0 1 0 {c} A 0")
    );
    rig.tell("fail_path", "b");
    assert_eq!(
        control.run("status").unwrap(),
        format!("0 2048 multipath 2 0 0 0 2 1 A 0 2 2 {a} A 0 0 1 {b} F 1 0 4 E 0 1 0 {c} A 0")
    );
    let status = control.json().unwrap();
    let json = &status.0;
    assert_eq!(
        (json["length_sectors"].as_u64(), json["queue_if_no_path"].as_bool()),
        (Some(2048), Some(true))
    );
    assert_eq!(json["groups"][0]["selector"], "service-time");
    assert_eq!(json["groups"][0]["nr_active"], 1);
    let path = status.path(&rig.fs.path("b"));
    assert_eq!((path["state"].as_str(), path["fail_count"].as_u64()), (Some("failed"), Some(1)));
    assert_eq!(path["args"], serde_json::json!(["1", "4"]));
    assert_eq!(path["failed_by_operator"], true);
    // The TOML form is what a start takes: a weight, no state.
    let toml = control.run("toml").unwrap();
    assert!(toml.contains("no_path_retry = \"queue\"") && toml.contains("weight = 4"), "{toml}");
}

#[test]
fn a_line_without_queueing_takes_the_option_and_the_default() {
    need!(faulty);
    let (_image, _fs, line) = rig("service-time");
    let plain = line.replace("1 queue_if_no_path", "0");
    for (args, line, expected) in [
        (&[][..], &plain, serde_json::json!(60)),
        (&["--no-path-retry", "fail"], &plain, serde_json::json!("fail")),
        (&["--no-path-retry", "7"], &plain, serde_json::json!(7)),
        // A table that says so itself has its own way.
        (&["--no-path-retry", "fail"], &line, serde_json::json!("queue")),
    ] {
        let builder = Server::polypath().arg("--table").arg(line);
        let (_server, socket) = controlled(args.iter().fold(builder, |builder, arg| builder.arg(arg)));
        let mut control = socket.connect().unwrap();
        assert_eq!(control.json().unwrap().0["no_path_retry"], expected, "{args:?}");
        let queueing = control.run("table").unwrap().contains("queue_if_no_path");
        assert_eq!(queueing, expected != "fail", "{args:?}");
    }
}

fn refused(args: &[&str]) -> Exited {
    let builder = args.iter().fold(Server::polypath(), |builder, arg| builder.arg(arg));
    let exited = builder.run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && !exited.socket_left, "{args:?}: {exited:?}");
    let lines: Vec<_> = exited.stderr.lines().filter(|line| line.contains("polypath:")).collect();
    assert_eq!(lines.len(), 1, "{args:?}: {}", exited.stderr);
    exited
}

#[test]
fn mistakes_in_a_table_line_name_the_word_and_its_column() {
    let image = Image::filled(MIB);
    let dev = image.path.display().to_string();
    // A mark stands before the word that is wrong, or behind the end if one is missing.
    for (line, word) in [
        ("^1 2048 multipath 0 0 1 1 round-robin 0 1 0 DEV", "`1`"),
        ("0 ^0 multipath 0 0 1 1 round-robin 0 1 0 DEV", "`0`"),
        ("0 2048 ^linear 0 0 1 1 round-robin 0 1 0 DEV", "`linear`"),
        ("0 2048 multipath 1 ^queue_if_nopath 0 1 1 round-robin 0 1 0 DEV", "`queue_if_nopath`"),
        ("0 2048 multipath 2 pg_init_retries ^51 0 1 1 round-robin 0 1 0 DEV", "`51`"),
        ("0 2048 multipath 0 0 1 1 ^robin 0 1 0 DEV", "robin"),
        ("0 2048 multipath 0 0 1 1 round-robin 1 ^0 1 0 DEV", "argument 1 of round-robin"),
        ("0 2048 multipath 0 0 1 1 round-robin 0 1 1 DEV ^x", "`x`"),
        ("0 2048 multipath 0 0 1 1 service-time 0 1 2 DEV 1 ^101", "`101`"),
        ("0 2048 multipath 0 0 1 1 io-affinity 0 1 1 DEV ^0xg", "`0xg`"),
        ("0 2048 multipath 0 0 1 1 io-affinity 0 1 ^0 DEV", "missing"),
        ("0 2048 multipath 0 0 1 1 round-robin 0 1 0 DEV ^more", "`more`"),
        ("0 2048 multipath 0 0 2 1 round-robin 0 1 0 DEV^", "1 of 2 groups"),
        ("0 2048 multipath 0 0 0 ^1 round-robin 0 1 0 DEV", "`1`"),
        ("0 2048 multipath 0 0 1^", "initial group"),
        ("0 2048 multipath 0 0 1 1 round-robin 0 2 0 DEV^", "a device"),
    ] {
        let marked = line.replace("DEV", &dev);
        let column = marked.find('^').unwrap() + 1;
        let stderr = refused(&["--table", &marked.replace('^', "")]).stderr;
        assert!(stderr.contains("--table") && stderr.contains(word), "{line}: {stderr}");
        assert!(stderr.contains(&format!("column {column}:")), "{line}: column {column}? {stderr}");
    }
}

#[test]
fn mistakes_in_a_table_file_name_the_line_and_the_column() {
    need!(faulty);
    let (image, _fs, _) = rig("service-time");
    let file = image.dir().join("table.toml");
    let path = file.display().to_string();
    let dev = image.path.display();
    for (text, at, word) in [
        ("[table]\nno_path_retry = \"often\"\n", "line 2, column 17", "often"),
        ("[table]\nno_path_retri = 3\n", "line 2, column 1", "no_path_retri"),
        ("[table]\n[[table.group]]\nselector = \"robin\"\n", "line 3, column 12", "robin"),
        ("[table]\n[[table.group]]\n[[table.group.path]]\nweight = 3\n", "line", "device"),
        ("[table\n", "line 1", ""),
        ("0 2048 multipath 0 0 1 1 robin 0 1 0 DEV\n", "column 26", "robin"),
    ] {
        std::fs::write(&file, text.replace("DEV", &dev.to_string())).unwrap();
        let stderr = refused(&["--table-file", &path]).stderr;
        assert!(stderr.contains(at) && stderr.contains(word) && stderr.contains(&path), "{text}: {stderr}");
    }
    std::fs::remove_file(&file).unwrap();
    assert!(refused(&["--table-file", &path]).stderr.contains("No such file"));
    std::fs::write(&file, "").unwrap();
    refused(&["--table-file", &path]);
}

#[test]
fn tables_that_cannot_be_served_are_refused() {
    need!(faulty);
    let (image, fs, line) = rig("service-time");
    let stderr = refused(&["--table", &line.replace("0 2048", "0 4096")]).stderr;
    assert!(stderr.contains("4096") && stderr.contains("2048"), "{stderr}");
    let missing = line.replace(fs.path("c").to_str().unwrap(), "/nowhere/x");
    assert!(refused(&["--table", &missing]).stderr.contains("/nowhere/x"));
    refused(&["--table", "0 2048 multipath 0 0 0 0"]);
    refused(&["--table", &line, "--path", image.path.to_str().unwrap()]);
    refused(&["--table", &line, "--selector", "round-robin"]);
    refused(&["--no-path-retry", "never", "--path", image.path.to_str().unwrap()]);
    refused(&["--failback", "often", "--path", image.path.to_str().unwrap()]);
    refused(&["--path-timeout", "0", "--path", image.path.to_str().unwrap()]);
}
