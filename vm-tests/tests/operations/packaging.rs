//! What is shipped beside the program: units, the Debian package, the lines of front-ends.

use std::path::{Path, PathBuf};
use std::process::Command;

use polypath_vm_tests::front_end::Disk;
use polypath_vm_tests::server::{Process, Server, polypath_bin, wait_until};
use polypath_vm_tests::skip::skip;
use serde_json::Value;

use crate::common::{Image, MIB, SOON, filled};
use crate::run::{Ran, polypath, run_to_end};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn packaging(name: &str) -> PathBuf {
    root().join("packaging").join(name)
}

fn has(program: &str) -> bool {
    let dirs = std::env::var("PATH").unwrap_or_default();
    dirs.split(':').chain(["/usr/sbin"]).any(|dir| Path::new(dir).join(program).is_file())
}

fn run(program: &str, args: &[&str]) -> Ran {
    let mut command = Command::new(program);
    command.args(args);
    run_to_end(command, "")
}

#[test]
fn systemd_takes_the_units() {
    if !has("systemd-analyze") {
        return skip("packaging::systemd_takes_the_units", "no systemd-analyze");
    }
    let dir = tempfile::tempdir().unwrap();
    // The program is looked for where the unit says; here it is somewhere else.
    let bin = polypath_bin().unwrap().canonicalize().unwrap();
    for kind in ["service", "socket"] {
        let text = std::fs::read_to_string(packaging(&format!("systemd/polypath@.{kind}"))).unwrap();
        let text = text.replace("/usr/bin/polypath", bin.to_str().unwrap());
        std::fs::write(dir.path().join(format!("polypath@.{kind}")), text).unwrap();
    }
    let at = |name: &str| dir.path().join(name).display().to_string();
    let mut command = Command::new("systemd-analyze");
    // Only what it says of these: other units of the machine may have faults of their own.
    command.args([
        "verify",
        "--man=no",
        "--recursive-errors=no",
        &at("polypath@disk0.service"),
        &at("polypath@disk0.socket"),
    ]);
    let ran = run_to_end(command, "");
    assert!(ran.code == 0 && !ran.err.contains("polypath@"), "{ran:?}");
    let ran = run(
        "systemd-analyze",
        &["security", "--offline=yes", "--no-pager", "--threshold=45", &at("polypath@disk0.service")],
    );
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn qemus_description_is_what_the_program_says_of_itself() {
    let text = std::fs::read_to_string(packaging("50-polypath.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let said: Value = serde_json::from_str(&polypath(&["--print-capabilities"]).ok()).unwrap();
    assert_eq!(file["type"], said["type"]);
    assert_eq!(file["binary"], "/usr/bin/polypath");
    assert!(file["description"].is_string() && file["tags"].is_array(), "{file}");
    let known = ["description", "type", "binary", "tags"];
    assert!(file.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())), "{file}");
}

#[test]
fn libvirt_takes_the_domain() {
    let out = root().join("images/out/monitoring");
    let (xmllint, schema) = (out.join("usr/bin/xmllint"), out.join("usr/share/libvirt/schemas/domain.rng"));
    let program = if has("xmllint") { Path::new("xmllint") } else { &xmllint };
    if !schema.exists() || Command::new(program).arg("--version").output().is_err() {
        return skip("packaging::libvirt_takes_the_domain", "no xmllint or no schema: run images/build");
    }
    let mut command = Command::new(program);
    command.arg("--noout").arg("--relaxng").arg(schema).arg(packaging("examples/libvirt.xml"));
    let ran = run_to_end(command, "");
    assert!(ran.code == 0 && ran.err.contains("validates"), "{ran:?}");
}

/// Starts an example line on a disk that is served, until its front-end is there.
fn connects(script: &str, program: &Path, args: &[&str]) {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let name = Path::new(script).file_stem().unwrap().to_str().unwrap();
    let name = if name == "qemu" { "qemu-system-x86_64" } else { name };
    std::os::unix::fs::symlink(program, dir.path().join(name)).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(packaging(script));
    command.args(args).env("SOCKET", server.socket()).env("PATH", path);
    let mut vmm = Process::spawn(command, dir.path(), "vmm").unwrap();
    wait_until("the front-end", SOON, || {
        assert!(vmm.is_alive(), "{}", vmm.stderr());
        server.count_log("front-end connected") == 1
    })
    .unwrap_or_else(|e| panic!("{e:#}\n{}", vmm.stderr()));
    // It has asked for what it needs and stays.
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(vmm.is_alive(), "{}", vmm.stderr());
}

#[test]
fn qemu_takes_the_line() {
    match polypath_vm_tests::guest::Qemu::Stable.program() {
        Ok(program) => connects("examples/qemu.sh", &program, &["-S"]),
        Err(why) => skip("packaging::qemu_takes_the_line", format!("{why:#}")),
    }
}

/// Words that Cloud Hypervisor's `--disk`, `--memory` and `--cpus` know, of all its versions since 20 (`cloud-hypervisor
/// --help`); each option's words are separated by commas.
const CLOUD_HYPERVISOR: [(&str, &[&str]); 3] = [
    ("--disk", &["vhost_user", "socket", "num_queues", "queue_size", "id", "pci_segment"]),
    ("--memory", &["size", "shared", "mergeable", "hugepages", "prefault", "thp"]),
    ("--cpus", &["boot", "max", "topology", "kvm_hyperv", "max_phys_bits", "affinity", "features"]),
];

#[test]
fn cloud_hypervisor_takes_the_line() {
    let dirs = std::env::var("PATH").unwrap_or_default();
    let found = dirs.split(':').map(|dir| Path::new(dir).join("cloud-hypervisor")).find(|bin| bin.is_file());
    if let Some(program) = found
        && Path::new("/dev/kvm").exists()
    {
        return connects("examples/cloud-hypervisor.sh", &program, &[]);
    }
    // It is not there: the shell runs the line all the same, and what it would be called with is looked at.
    let dir = tempfile::tempdir().unwrap();
    let stand_in = dir.path().join("cloud-hypervisor");
    std::fs::write(&stand_in, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").unwrap();
    std::fs::set_permissions(&stand_in, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(packaging("examples/cloud-hypervisor.sh"));
    command.arg("--serial").env("PATH", format!("{}:{dirs}", dir.path().display())).env("SOCKET", "/s");
    let text = run_to_end(command, "").ok();
    let words: Vec<&str> = text.lines().collect();
    assert_eq!(words.last(), Some(&"--serial"), "what is added comes along: {words:?}");
    let mut values = std::collections::BTreeMap::new();
    for (option, known) in CLOUD_HYPERVISOR {
        let at =
            words.iter().position(|word| *word == option).unwrap_or_else(|| panic!("{option}: {words:?}"));
        for pair in words[at + 1].split(',') {
            let (name, value) = pair.split_once('=').unwrap_or_else(|| panic!("{pair}"));
            assert!(known.contains(&name), "{option} has no {name}");
            values.insert((option, name), value);
        }
    }
    let number = |option, name| values[&(option, name)].parse::<u32>().unwrap();
    assert_eq!(values[&("--disk", "vhost_user")], "on");
    assert_eq!(values[&("--disk", "socket")], "/s");
    assert_eq!(values[&("--memory", "shared")], "on");
    assert!(number("--disk", "num_queues") <= number("--cpus", "boot"), "{values:?}");
    assert!(number("--disk", "queue_size").is_power_of_two(), "{values:?}");
}

/// A root directory of its own, over the fresh tree, in a mount and process namespace that ends with the script.
fn in_fresh_tree(tree: &Path, work: &Path, files: &[&Path], script: &str) -> Ran {
    let outer = format!(
        "set -e\nmount -t tmpfs none {work}\ncd {work}\nmkdir up work root\n\
         mount -t overlay overlay -o lowerdir={tree},upperdir=up,workdir=work root\n\
         mount -t proc none root/proc\nmount -t tmpfs none root/run\nmkdir -p root/in\n{copies}\
         exec chroot root /bin/sh -ec '{script}'\n",
        work = work.display(),
        tree = tree.display(),
        copies = files.iter().map(|file| format!("cp {} root/in/\n", file.display())).collect::<String>(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &outer]);
    command
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("DEBIAN_FRONTEND", "noninteractive");
    run_to_end(command, "")
}

#[test]
fn the_package_is_installed_serves_a_disk_and_is_removed() {
    let test = "packaging::the_package_is_installed_serves_a_disk_and_is_removed";
    let tree = root().join("images/out/tree");
    // SAFETY: geteuid has no preconditions.
    if !tree.exists() || unsafe { libc::geteuid() } != 0 {
        return skip(test, "no fresh tree: run images/build as root");
    }
    if !has("dh") {
        return skip(test, "no debhelper");
    }
    let bin = polypath_bin().unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(packaging("build-deb"));
    command.arg("--binary").arg(&bin).env("CARGO_TARGET_DIR", out.path());
    let ran = run_to_end(command, "");
    assert_eq!(ran.code, 0, "{ran:?}");
    let deb = PathBuf::from(ran.out.trim());
    let fields = run("dpkg-deb", &["-f", deb.to_str().unwrap(), "Depends"]).ok();
    assert!(fields.contains("libc6"), "{fields}");
    let listed = run("dpkg-deb", &["-c", deb.to_str().unwrap()]).ok();
    for file in [
        "/usr/bin/polypath",
        "/usr/share/qemu/vhost-user/50-polypath.json",
        "/systemd/system/polypath@.service",
        "/systemd/system/polypath@.socket",
        "/usr/share/man/man1/polypath-show.1.gz",
        "/usr/share/bash-completion/completions/polypath",
        "/usr/share/polypath/grafana/polypath.json",
        "/etc/polypath/",
    ] {
        assert!(listed.contains(file), "{file} is not in\n{listed}");
    }
    let work = tempfile::tempdir().unwrap();
    let script = r#"
        dpkg -i /in/*.deb
        polypath --version
        truncate -s 1M /var/disk; ln /var/disk /var/disk2; mkdir -p /run/polypath
        printf "socket_path = \"/run/polypath/d.sock\"\n[[table.group]]\n[[table.group.path]]\ndevice = \"/var/disk\"\n[[table.group.path]]\ndevice = \"/var/disk2\"\n" >/etc/polypath/d.toml
        polypath check /etc/polypath/d.toml
        polypath --config /etc/polypath/d.toml --control /run/polypath/d.control 2>/var/log/polypath &
        for i in $(seq 100); do polypath show >/dev/null 2>&1 && break; sleep 0.1; done
        polypath show
        if dpkg -r polypath; then echo REMOVED WHILE IN USE; exit 1; fi
        polypath shutdown
        wait
        cat /var/log/polypath
        dpkg -r polypath
        test ! -e /usr/bin/polypath
        test -e /etc/polypath/d.toml
        dpkg --purge polypath
        echo all is well
    "#;
    let ran = in_fresh_tree(&tree, work.path(), &[&deb], script);
    assert!(ran.code == 0 && ran.out.trim_end().ends_with("all is well"), "{}\n{}", ran.out, ran.err);
    assert!(
        ran.out.contains("ok, 2 of 2 paths active") && ran.err.contains("is in use"),
        "{}\n{}",
        ran.out,
        ran.err
    );
}

#[test]
fn a_socket_of_systemds_and_a_configuration_file_go_together() {
    let image = Image::filled(MIB);
    let (socket, file) = (image.dir().join("s"), image.dir().join("c.toml"));
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::fs::write(&file, format!("paths = [{:?}]\nnum_queues = 2\n", image.path)).unwrap();
    let raw = std::os::fd::AsRawFd::as_raw_fd(&listener);
    // LISTEN_PID has to be the program's own pid, which only a shell that becomes it can know.
    let mut command = Command::new("sh");
    command.args(["-c", "LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" --config \"$1\""]);
    command.arg(polypath_bin().unwrap()).arg(&file);
    // SAFETY: dup2 and fcntl are async-signal-safe and the closure owns what it reads.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
            // Onto itself, dup2 would leave the descriptor to be closed by the exec.
            let done = if raw == 3 { libc::fcntl(raw, libc::F_SETFD, 0) } else { libc::dup2(raw, 3) };
            if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    let mut process = Process::spawn(command, image.dir(), "activated").unwrap();
    assert!(Disk::open(&socket).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(process.terminate(SOON).unwrap(), 0);
}
