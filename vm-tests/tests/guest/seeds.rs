//! The loads of the kernel's multipath threads (`vm-tests/fio`): they complete, and what can merge does.

use anyhow::{Result, ensure};
use polypath_vm_tests::control::Socket;
use polypath_vm_tests::guest::{Guest, Vm};
use polypath_vm_tests::server::Server;
use serde_json::{Value, json};

use crate::support::{Image, stop};

/// Long enough for every job to begin, also where the guest's processors are emulated.
const SECONDS: u32 = 8;

/// polypath on an image, and a guest with as many queues as processors.
fn start(image: &Image, control: &Socket) -> Result<(Server, Guest)> {
    let server = Server::polypath().path(image.path()).num_queues(2);
    let server = server.arg("--control").arg(control.path()).start()?;
    let vm = Vm::new().cpus(2).disk(&server).queues(2).boot()?;
    Ok((server, vm))
}

/// I/Os that went to the path, requests that went with another, and errors.
fn counts(control: &Socket, kind: &str) -> Result<(u64, u64, u64)> {
    let counters: Value = control.connect()?.result(json!({ "command": "counters" }))?;
    let number = |field: &str| counters["paths"][0][kind][field].as_u64().unwrap_or(0);
    Ok((number("nr_ios"), number("nr_merged"), number("nr_errors")))
}

#[test]
fn of_64_jobs_that_write_in_sequence_requests_merge() -> Result<()> {
    let (image, control) = (Image::new(128)?, Socket::new()?);
    let (server, vm) = start(&image, &control)?;
    let before = counts(&control, "write")?;
    let result = vm.fio_file("64-seq-write.fio", "/dev/vda", SECONDS)?;
    let (ios, merged, errors) = counts(&control, "write")?;
    let (ios, merged) = (ios - before.0, merged - before.1);
    println!("{result:?}: {ios} I/Os, {merged} requests went with another");
    ensure!(result.writes >= 64 && errors == 0, "{result:?}, {errors} errors");
    // The guest's kernel merges as well, so that fewer come here than its jobs wrote.
    ensure!(ios + merged <= result.writes + 64, "{result:?}, {ios} I/Os, {merged} merged");
    ensure!(merged > 0, "nothing merged in {ios} I/Os");
    stop(server)
}

#[test]
fn of_12_jobs_that_read_at_random_each_request_is_served() -> Result<()> {
    let (image, control) = (Image::new(1024)?, Socket::new()?);
    let (server, vm) = start(&image, &control)?;
    let before = counts(&control, "read")?;
    let result = vm.fio_file("12-rand-read.fio", "/dev/vda", SECONDS)?;
    let (ios, merged, errors) = counts(&control, "read")?;
    let (ios, merged) = (ios - before.0, merged - before.1);
    println!("{result:?}: {ios} I/Os, {merged} requests went with another");
    ensure!(result.reads >= 12 && errors == 0, "{result:?}, {errors} errors");
    // All of them came here; the guest asks for some more of its own when the disk is opened and closed.
    ensure!(ios + merged >= result.reads, "{result:?}, {ios} I/Os, {merged} merged");
    // Neighbours in 1 GiB are rare.
    ensure!(merged * 10 <= ios, "{merged} merged in {ios} I/Os");
    stop(server)
}
