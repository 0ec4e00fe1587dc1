//! The configuration file, and changing it while the disk runs.

use std::path::{Path, PathBuf};

use polypath_vm_tests::control::Socket;
use polypath_vm_tests::faulty::{FaultyFs, Kind, Rule};
use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::server::{Server, exit_code, wait_until};
use serde_json::{Value, json};

use crate::common::{Image, MIB, SOON, filled, need};
use crate::rig::{Rig, SetAtEnd};
use crate::run::told;

/// A configuration file with groups of these paths.
fn write(file: &Path, head: &str, groups: &[&[&str]]) {
    let mut text = format!("{head}\n[table]\nno_path_retry = 30\n");
    for group in groups {
        text.push_str("[[table.group]]\nselector = \"service-time\"\n");
        for device in *group {
            text.push_str(&format!("[[table.group.path]]\ndevice = \"{device}\"\n"));
        }
    }
    // As an editor does: nobody reads half of it.
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// A disk that is served as its configuration file says.
struct Configured {
    rig: Rig,
    file: PathBuf,
}

impl Configured {
    fn start(names: &[&str], groups: &[&[&str]], head: &str) -> Self {
        let image = Image::filled(MIB);
        let fs = FaultyFs::mount(&image.path, names).unwrap();
        let file = image.dir().join("disk.toml");
        let devices = |groups: &[&[&str]]| -> Vec<Vec<String>> {
            groups.iter().map(|g| g.iter().map(|n| fs.path(n).display().to_string()).collect()).collect()
        };
        write_names(&file, head, &devices(groups));
        let builder = Server::polypath().arg("--config").arg(&file);
        Self { rig: Rig::start_with(image, fs, builder), file }
    }

    fn write(&self, head: &str, groups: &[&[&str]]) {
        let devices: Vec<Vec<String>> =
            groups.iter().map(|group| group.iter().map(|name| self.rig.dev(name)).collect()).collect();
        write_names(&self.file, head, &devices);
    }

    fn reload(&self) -> Value {
        self.rig.control().ask_json(&json!({ "command": "reload" })).unwrap()
    }

    /// The groups as they run, by the last letter of each path.
    fn groups(&self) -> Vec<String> {
        let groups = self.rig.status().0["groups"].as_array().unwrap().clone();
        let name = |path: &Value| path["device"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
        groups.iter().map(|group| group["paths"].as_array().unwrap().iter().map(name).collect()).collect()
    }
}

fn write_names(file: &Path, head: &str, groups: &[Vec<String>]) {
    let groups: Vec<Vec<&str>> =
        groups.iter().map(|group| group.iter().map(String::as_str).collect()).collect();
    write(file, head, &groups.iter().map(Vec::as_slice).collect::<Vec<_>>());
}

#[test]
fn a_file_is_enough_to_start() {
    need!(faulty);
    let configured = Configured::start(
        &["a", "b", "c"],
        &[&["a", "b"], &["c"]],
        "serial = \"fromfile\"\nnum_queues = 3\n",
    );
    assert_eq!(configured.groups(), ["ab", "c"]);
    let mut disk = configured.rig.disk(3);
    assert_eq!(disk.q().get_id().unwrap(), "fromfile");
    assert_eq!(configured.rig.status().0["no_path_retry"], 30);
    // Sockets and all, without another option; what the line says counts more.
    let image = Image::filled(MIB);
    let (file, socket, control) = (image.dir().join("c.toml"), image.dir().join("s"), Socket::new().unwrap());
    let text = format!(
        "socket_path = {socket:?}\ncontrol = {:?}\npaths = [{:?}]\nread_only = true\nserial = 'file'\nlog_level = 'off'\n",
        control.path(),
        image.path
    );
    std::fs::write(&file, text).unwrap();
    let mut server = Server::polypath()
        .arg("--config")
        .arg(&file)
        .arg("--serial")
        .arg("line")
        .log_level(None)
        .spawn()
        .unwrap();
    wait_until("the socket", SOON, || polypath_vm_tests::server::is_listening(&socket)).unwrap();
    let mut disk = Disk::open(&socket).unwrap();
    assert_eq!(disk.q().get_id().unwrap(), "line");
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    let show = control.connect().unwrap().result(json!({ "command": "show" })).unwrap();
    assert_eq!((&show["disk"]["read_only"], &show["settings"]["log_level"]), (&json!(true), &json!("off")));
    assert_eq!(show["settings"]["config"], file.to_str().unwrap());
    assert_eq!(server.terminate(SOON).unwrap(), 0);
    assert_eq!(server.stderr(), "");
}

#[test]
fn f62_a_wrong_file_is_refused_with_line_and_column() {
    let image = Image::filled(MIB);
    let file = image.dir().join("c.toml");
    for (text, words) in [
        ("speed = 3\n", ["line 1, column 1", "speed"]),
        ("serial = 'x'\nnum_queues = 0\n", ["line 2, column 14", "from 1 to 64"]),
        ("[table]\nspeed = 3\n", ["line 2, column 1", "speed"]),
        ("[[table.group]]\n[[table.group.path]]\ndevice = 'x'\nwait = 4\n", ["line 4, column 1", "wait"]),
        ("serial = 7\n", ["line 1, column 10", "string"]),
        ("paths = []\n", ["--path", "needed"]),
        ("paths = ['/nowhere/x']\n", ["/nowhere/x", "No such file"]),
    ] {
        std::fs::write(&file, text).unwrap();
        let exited = Server::polypath().arg("--config").arg(&file).run_to_exit(SOON).unwrap();
        assert!(exited.code > 0 && !exited.socket_left, "{text}: {exited:?}");
        assert!(words.iter().all(|word| exited.stderr.contains(word)), "{text}: {exited:?}");
        assert_eq!(exited.stderr.lines().count(), 1, "{exited:?}");
    }
    let exited =
        Server::polypath().arg("--config").arg(image.dir().join("absent")).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains("absent"), "{exited:?}");
}

#[test]
fn a_changed_file_becomes_the_running_table_under_load() {
    need!(faulty);
    let configured = Configured::start(&["a", "b", "c", "d"], &[&["a", "b"]], "");
    configured.rig.fs.logging(false);
    let mut disk = configured.rig.disk(2);
    let mut q = disk.queues.remove(0);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let stop = &stop;
    std::thread::scope(|scope| {
        let load = scope.spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                assert!(q.read(8, 8).unwrap() == filled(8, 8));
            }
        });
        let end = SetAtEnd(stop);
        for groups in [
            &[&["a", "b"][..], &["c"]][..],
            &[&["c"], &["d", "a"]],
            &[&["d"]],
            &[&["a", "b", "c", "d"]],
            &[&["b"], &["a"]],
        ] {
            configured.write("", groups);
            let answer = configured.reload();
            assert_eq!(answer["ok"], true, "{answer}");
            assert_eq!(configured.groups(), groups.iter().map(|g| g.concat()).collect::<Vec<_>>());
            assert_eq!(answer["result"]["needs_restart"], json!([]));
        }
        drop(end);
        load.join().unwrap();
    });
    let open = || configured.rig.server.open_files();
    wait_until("what left the table to be closed", SOON, || !open().contains(&configured.rig.dev("d")))
        .unwrap_or_else(|e| panic!("{e:#}: {:?}", open()));
}

#[test]
fn f34_a_reload_that_cannot_be_done_changes_nothing() {
    need!(faulty);
    let configured = Configured::start(&["a", "b", "c"], &[&["a", "b"]], "path_timeout = 300\n");
    let other = Image::filled(MIB);
    let before = configured.rig.status();
    let refused = |word: &str| {
        let answer = configured.reload();
        let why = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        assert!(why.contains(word) && why.contains("nothing was changed"), "{why}");
        assert_eq!(configured.rig.status(), before);
    };
    std::fs::write(&configured.file, "speed = 9\n").unwrap();
    refused("line 1, column 1");
    std::fs::remove_file(&configured.file).unwrap();
    refused("No such file");
    write_names(&configured.file, "", &[vec![configured.rig.dev("a"), "/nowhere/x".into()]]);
    refused("/nowhere/x");
    write_names(&configured.file, "", &[vec![configured.rig.dev("a"), other.path.display().to_string()]]);
    refused("refused");
    // One of the new paths hangs: it ends in time, and the other new one is closed again.
    configured.rig.fs.add_name("d");
    configured.rig.fs.rule("d", Rule::hold().on(&[Kind::Open]));
    configured.write("path_timeout = 300\n", &[&["a", "c", "d"]]);
    let answer = configured.reload();
    assert_eq!(answer["error"]["code"], "timed_out", "{answer}");
    assert_eq!(configured.rig.status(), before);
    configured.rig.fs.release("d");
    for name in ["c", "d"] {
        let name = configured.rig.dev(name);
        wait_until("new paths to be closed", SOON, || !configured.rig.server.open_files().contains(&name))
            .unwrap();
    }
    // And then it can be done.
    configured.write("path_timeout = 300\n", &[&["a", "c", "d"]]);
    assert_eq!(configured.reload()["ok"], true);
    assert_eq!(configured.groups(), ["acd"]);
}

#[test]
fn what_needs_a_restart_is_said_and_the_rest_is_done() {
    need!(faulty);
    let configured = Configured::start(&["a", "b"], &[&["a", "b"]], "serial = \"x\"\n");
    configured.write(
        "serial = \"y\"\nnum_queues = 2\npath_timeout = 4000\nfailback = \"immediate\"\nlog_level = \"debug\"\n",
        &[&["a", "b"]],
    );
    // The log level was given on the command line, which counts more.
    let text = told(&configured.rig.socket.path(), &["reload"]).ok();
    for line in ["changed: path_timeout: 4000", "changed: failback: immediate"] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    for option in ["serial", "num_queues"] {
        assert!(text.contains(&format!("needs a restart: {option} ")), "{option}: {text}");
    }
    assert!(!text.contains("log_level"), "{text}");
    let show = configured.rig.control().result(json!({ "command": "show" })).unwrap();
    assert_eq!(
        (&show["settings"]["path_timeout_ms"], &show["settings"]["failback"]),
        (&json!(4000), &json!("immediate"))
    );
    assert_eq!(show["disk"]["serial"], "x");
    // By hand changed, by a reload as configured again.
    configured.rig.tell("remove_path", "b");
    configured.rig.control().run("no_path_retry fail").unwrap();
    let show = configured.rig.control().result(json!({ "command": "show" })).unwrap();
    assert_eq!(show["differs_from_configuration"].as_array().unwrap().len(), 2, "{show}");
    assert_eq!(configured.reload()["ok"], true);
    assert_eq!(configured.groups(), ["ab"]);
    assert_eq!(configured.rig.status().0["no_path_retry"], 30);
    assert!(told(&configured.rig.socket.path(), &["reload"]).ok().contains("needs a restart"));
}

#[test]
fn sighup_reloads_and_does_not_end_the_process() {
    need!(faulty);
    let mut configured = Configured::start(&["a", "b"], &[&["a"]], "");
    configured.write("", &[&["a", "b"]]);
    configured.rig.server.signal(libc::SIGHUP);
    wait_until("the new table", SOON, || configured.groups() == ["ab"]).unwrap();
    configured.rig.server.wait_for_log("reloaded: changed=[path added", SOON).unwrap();
    std::fs::write(&configured.file, "[table\n").unwrap();
    configured.rig.server.signal(libc::SIGHUP);
    configured.rig.server.wait_for_log("not reloaded: ", SOON).unwrap();
    assert_eq!(configured.groups(), ["ab"]);
    assert_eq!(configured.rig.server.terminate(SOON).unwrap(), 0);
    // Without a file there is nothing to read, which is no reason to end.
    let image = Image::filled(MIB);
    let mut server = Server::polypath().path(&image.path).start().unwrap();
    server.signal(libc::SIGHUP);
    server.wait_for_log("SIGHUP: there is no file", SOON).unwrap();
    assert!(Disk::open(server.socket()).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    server.signal(libc::SIGTERM);
    assert_eq!(exit_code(server.wait_exit(SOON).unwrap()), 0);
}

#[test]
fn a_table_file_is_reloaded_as_well() {
    need!(faulty);
    let image = Image::filled(MIB);
    let fs = FaultyFs::mount(&image.path, &["a", "b"]).unwrap();
    let file = image.dir().join("table");
    let line = |names: &[&str]| {
        let paths: Vec<String> = names.iter().map(|name| format!("{} 1", fs.path(name).display())).collect();
        format!("0 2048 multipath 0 0 1 1 round-robin 0 {} 1 {}\n", names.len(), paths.join(" "))
    };
    std::fs::write(&file, line(&["a"])).unwrap();
    let second = line(&["a", "b"]);
    let rig = Rig::start_with(image, fs, Server::polypath().arg("--table-file").arg(&file));
    std::fs::write(&file, second).unwrap();
    rig.control().result(json!({ "command": "reload" })).unwrap();
    assert_eq!(rig.status().nr_active(), 2);
}

#[test]
fn check_explains_each_finding_and_changes_nothing() {
    let (image, other) = (Image::filled(MIB), Image::filled(MIB));
    let hard = image.dir().join("hard");
    std::fs::hard_link(&image.path, &hard).unwrap();
    let file = image.dir().join("c.toml");
    let (socket, control) = (image.dir().join("s"), image.dir().join("x.control"));
    let head = format!("socket_path = {socket:?}\ncontrol = {control:?}\n");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let check = || crate::run::polypath(&["check", file.to_str().unwrap()]);
    write_names(&file, &head, &[vec![text(&image.path), text(&hard)]]);
    let good = check().ok();
    assert!(good.lines().all(|line| line.starts_with("ok ") || line.starts_with("warning ")), "{good}");
    for about in ["socket_path", "control", &text(&hard), "io_uring", "memlock", "nofile", "inode"] {
        assert!(good.contains(about), "{about}: {good}");
    }
    assert!(!socket.exists() && !control.exists());
    // A disk that runs is not disturbed, and its sockets are taken.
    let server = Server::polypath().arg("--config").arg(&file).log_level(None).spawn().unwrap();
    wait_until("the socket", SOON, || polypath_vm_tests::server::is_listening(&socket)).unwrap();
    let ran = check();
    assert!(ran.code == 1 && ran.out.contains("living process"), "{ran:?}");
    assert_eq!(server.count_log("front-end"), 0, "{}", server.stderr());
    drop(server);
    assert!(check().ok().contains("dead socket"));
    // What would fail, all of it at once.
    write_names(
        &file,
        &head,
        &[vec![text(&image.path), text(&other.path), "/nowhere/x".into(), "/dev/null".into()]],
    );
    let ran = check();
    assert_eq!(ran.code, 1, "{ran:?}");
    for (about, word) in [
        (text(&other.path), "not the same"),
        ("/nowhere/x".into(), "No such file"),
        ("/dev/null".into(), "regular file"),
    ] {
        assert!(
            ran.out
                .lines()
                .any(|line| line.starts_with("ERROR") && line.contains(&about) && line.contains(word)),
            "{about}: {ran:?}"
        );
    }
    let ran = crate::run::polypath(&["check", file.to_str().unwrap(), "--json"]);
    assert!(ran.out.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{ran:?}");
    std::fs::write(&file, "speed = 1").unwrap();
    assert!(check().refused(1).contains("line 1, column 1"));
}
