//! Everything that can happen to a path, to each in turn, while fio in the guest checks what it wrote.

use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polypath_vm_tests::control::{Control, Socket};
use polypath_vm_tests::faulty::{self, FaultyFs, Kind, Rule};
use polypath_vm_tests::guest::{Fio, Vm};
use polypath_vm_tests::server::{Builder, Server, wait_until};
use polypath_vm_tests::skip::skip;

use crate::support::{Image, stop};

/// For what a guest on emulated processors has to do as well.
const SOON: Duration = Duration::from_secs(30);

const NAMES: [&str; 3] = ["a", "b", "c"];

/// Short, and far above what a path that is well needs.
const PATH_TIMEOUT: &str = "500";

/// Runs checked loads in the guest, one after the other, as long as `events` takes. Gives how many requests they made.
fn under_fio(server: &Server, events: impl FnOnce() -> Result<()>) -> Result<u64> {
    let vm = Vm::new().cpus(2).disk(server).queues(2).boot()?;
    let (done, nr_requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                let fio = Fio::new("/dev/vda", "randrw").depth(16).jobs(2, "4m").verify();
                let result = vm.fio(&fio).context("the guest must not notice")?;
                nr_requests.fetch_add(result.reads + result.writes, Ordering::Relaxed);
            }
            Ok(())
        });
        let happened = events().and_then(|()| {
            ensure!(!load.is_finished(), "the load has ended early");
            Ok(())
        });
        done.store(true, Ordering::Relaxed);
        let loaded = load.join().expect("no panic in the load");
        loaded.and(happened)
    })
    .with_context(|| server.stderr())?;
    vm.power_off()?;
    Ok(nr_requests.load(Ordering::Relaxed))
}

fn controlled(builder: Builder) -> Result<(Server, Socket)> {
    let socket = Socket::new()?;
    let server = builder.arg("--path-timeout").arg(PATH_TIMEOUT).arg("--control").arg(socket.path());
    Ok((server.num_queues(2).start()?, socket))
}

fn wait_active(control: &mut Control, fs: &FaultyFs, name: &str, active: bool) -> Result<()> {
    let path = fs.path(name);
    wait_until(&format!("path {name} to be active: {active}"), SOON, || {
        control.json().is_ok_and(|status| status.is_active(&path) == active)
    })
}

fn wait_used(fs: &FaultyFs, name: &str, more: u64) -> Result<()> {
    let goal = fs.counts(name).data() + more;
    wait_until(&format!("{more} requests by {name}"), SOON, || fs.counts(name).data() >= goal)
}

#[test]
fn each_path_in_turn_meets_everything_under_fio() -> Result<()> {
    if let Err(why) = faulty::available() {
        skip("each_path_in_turn_meets_everything_under_fio", why);
        return Ok(());
    }
    let image = Image::new(64)?;
    let stranger = image.path().with_file_name("stranger");
    std::fs::write(&stranger, vec![0xDD; 64 << 20])?;
    let fs = FaultyFs::mount(&image.path(), &NAMES)?;
    fs.logging(false);
    let (server, socket) = controlled(Server::polypath().paths(fs.paths(&NAMES)))?;
    let mut control = socket.connect()?;
    let data = [Kind::Read, Kind::Write];
    let nr_requests = under_fio(&server, || {
        for (n, name) in (100..).zip(NAMES) {
            let dev = fs.path(name).display().to_string();
            let well_again = |control: &mut Control| {
                fs.clear(name);
                fs.release(name);
                // What the path has gone through does not count for its quarantine.
                control.run(&format!("reinstate_path {dev}"))?;
                wait_active(control, &fs, name, true)?;
                wait_used(&fs, name, 20)
            };
            wait_used(&fs, name, 50)?;
            fs.rule(name, Rule::errno(libc::EIO).on(&data));
            wait_active(&mut control, &fs, name, false).context("errors")?;
            well_again(&mut control)?;
            // It keeps what it gets, probes as well, for longer than the timeout.
            fs.rule(name, Rule::hold());
            wait_active(&mut control, &fs, name, false).context("a hang")?;
            well_again(&mut control)?;
            fs.rule(name, Rule::delay_ms(30).on(&data).next(60));
            wait_used(&fs, name, 60).context("slowness")?;
            control.run(&format!("remove_path {dev}"))?;
            let before = fs.counts(name).data();
            std::thread::sleep(Duration::from_millis(300));
            ensure!(fs.counts(name).data() == before, "a removed path is used");
            control.run(&format!("add_path 1 {dev}"))?;
            wait_used(&fs, name, 20)?;
            // Writes that one path may not do are done by the others, and no path is at fault.
            let refused = fs.counts(name).refused;
            fs.rule(name, Rule::errno(libc::EROFS).writes().next(20));
            wait_until("a path to be read-only", SOON, || fs.counts(name).refused >= refused + 20)?;
            wait_active(&mut control, &fs, name, true)?;
            // Another disk comes under the name: it is left out and not written to.
            fs.rule(name, Rule::errno(libc::ENODEV));
            wait_active(&mut control, &fs, name, false)?;
            fs.set_backing(name, &stranger);
            fs.set_inode(name, n);
            fs.clear(name);
            control.run(&format!("reinstate_path {dev}"))?;
            let path = fs.path(name);
            wait_until("the stranger to be refused", SOON, || {
                control.json().is_ok_and(|status| {
                    let why = status.path(&path)["last_error"].as_str().unwrap_or_default().to_owned();
                    why.contains("not the same disk")
                })
            })?;
            fs.set_backing(name, &image.path());
            fs.set_inode(name, std::fs::metadata(fs.path(NAMES[usize::from(name == "a")]))?.ino());
            well_again(&mut control)?;
        }
        // All of them, by errors and by silence.
        for rule in [Rule::errno(libc::EIO).on(&data), Rule::hold()] {
            NAMES.iter().for_each(|name| fs.rule(name, rule.clone()));
            wait_until("no path", SOON, || control.json().is_ok_and(|status| status.nr_active() == 0))?;
            for name in NAMES {
                fs.clear(name);
                fs.release(name);
            }
            for name in NAMES {
                control.run(&format!("reinstate_path {}", fs.path(name).display()))?;
                wait_active(&mut control, &fs, name, true)?;
                wait_used(&fs, name, 20)?;
            }
        }
        Ok(())
    })?;
    println!("{nr_requests} requests by fio meanwhile");
    ensure!(std::fs::read(&stranger)?.iter().all(|byte| *byte == 0xDD), "another disk was written to");
    stop(server)
}
