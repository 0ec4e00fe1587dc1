//! Front-ends whose shared memory goes away or never was, and such as stop in the middle of a message.

use std::os::fd::AsRawFd as _;
use std::time::Duration;

use polypath_vm_tests::front_end::memory::anonymous_file;
use polypath_vm_tests::front_end::request::{UNTOUCHED, header};
use polypath_vm_tests::front_end::session::region_bytes;
use polypath_vm_tests::front_end::wire::{NEED_REPLY, VERSION, encode, req};
use polypath_vm_tests::front_end::{Chain, Disk, IOERR, Inflight, Op, Region, Session, feature};
use polypath_vm_tests::server::{Server, exit_code};

use crate::common::{Image, MIB, SOON, filled};

/// What the log says then.
const WORD: &str = "memory that the front-end shares is gone";

fn serve(image: &Image) -> (Server, Disk) {
    let server = Server::polypath().path(&image.path).start().unwrap();
    let disk = Disk::open(server.socket()).unwrap();
    (server, disk)
}

/// A region beside the first one, which the back-end has.
fn region(disk: &Disk) -> std::sync::Arc<Region> {
    let region = disk.memory.add(Region::new(disk.memory.end() + MIB, MIB, 0).unwrap());
    disk.session.add_region(&region).unwrap();
    region
}

fn cut_short(region: &Region) {
    // SAFETY: plain numbers; nobody here touches the region any more.
    assert_eq!(unsafe { libc::ftruncate(region.as_raw_fd(), 0) }, 0);
}

fn ends_with_a_word(mut server: Server, image: &Image) {
    let status = server.wait_exit(SOON).unwrap();
    assert_eq!(exit_code(status), -libc::SIGABRT, "{}", server.stderr());
    assert_eq!(server.count_log(WORD), 1, "{}", server.stderr());
    let socket = server.socket().to_owned();
    // Started again in the same place, it serves.
    let _next = Server::polypath().path(&image.path).socket(&socket).start().unwrap();
    assert!(Disk::open(&socket).unwrap().q().read(0, 8).unwrap() == filled(0, 8));
}

/// The kernel says no, and that is one request's affair.
#[test]
fn f46_data_in_memory_that_was_cut_short_is_an_io_error() {
    let image = Image::filled(MIB);
    let (server, mut disk) = serve(&image);
    let region = region(&disk);
    let head = disk.memory.alloc_with(&header(0, 0));
    let status = disk.memory.alloc_with(&[UNTOUCHED]);
    cut_short(&region);
    let chain = Chain::new().readable(head.addr, 16).writable(region.guest, 4096).writable(status.addr, 1);
    let sent = disk.q().queue.send(&chain).unwrap();
    disk.q().queue.wait_head(sent, SOON).unwrap();
    assert_eq!(status.bytes(), [IOERR]);
    assert!(disk.q().read(0, 8).unwrap() == filled(0, 8));
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
}

#[test]
fn f46_a_header_in_memory_that_was_cut_short_ends_the_process_with_a_word() {
    let image = Image::filled(MIB);
    let (server, mut disk) = serve(&image);
    let region = region(&disk);
    cut_short(&region);
    let status = disk.memory.alloc_with(&[UNTOUCHED]);
    let chain = Chain::new().readable(region.guest, 16).writable(status.addr, 1);
    disk.q().queue.send(&chain).unwrap();
    ends_with_a_word(server, &image);
}

#[test]
fn f46_a_tracking_area_that_was_cut_short_ends_the_process_with_a_word() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::at(server.socket()).connect().unwrap();
    // The one that the back-end makes cannot be cut short; a front-end may bring its own.
    let made = disk.track().unwrap();
    assert!(made.file.set_len(0).is_err());
    let area = Inflight { file: anonymous_file(made.size).unwrap(), ..made };
    area.set(&disk.session).unwrap();
    disk.start().unwrap();
    disk.q().read(0, 8).unwrap();
    area.file.set_len(0).unwrap();
    disk.q().submit(&Op::read(0, 8)).unwrap();
    ends_with_a_word(server, &image);
}

/// Regions that overlap, wrap around, are empty or longer than their file: refused, as a table and one by one, and the next
/// front-end is served.
#[test]
fn f45_regions_that_cannot_be_are_refused() {
    let image = Image::filled(MIB);
    let (mut server, disk) = serve(&image);
    drop(disk);
    let odd = |guest: u64, len: u64, user: u64, offset: u64| {
        [guest, len, user, offset].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()
    };
    let good = Region::new(1 << 32, MIB, 0).unwrap();
    let cases = [
        ("the same twice", vec![region_bytes(&good), region_bytes(&good)]),
        ("overlap by a page", vec![region_bytes(&good), odd((1 << 32) + MIB - 4096, MIB, 1 << 40, 0)]),
        ("one inside the other", vec![region_bytes(&good), odd((1 << 32) + 4096, 4096, 1 << 40, 0)]),
        ("the guest's space wraps", vec![odd(u64::MAX - 4095, 8192, 1 << 40, 0)]),
        ("the front-end's space wraps", vec![odd(1 << 32, 8192, u64::MAX - 4095, 0)]),
        ("offset and length wrap", vec![odd(1 << 32, 8192, 1 << 40, u64::MAX - 4095)]),
        ("longer than the file", vec![odd(1 << 32, 2 * MIB, 1 << 40, 0)]),
        ("beyond the file", vec![odd(1 << 32, 4096, 1 << 40, MIB)]),
        ("no length", vec![odd(1 << 32, 0, 1 << 40, 0)]),
        ("a length of everything", vec![odd(0, u64::MAX, 0, 0)]),
    ];
    for (what, regions) in cases {
        let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        let fds = vec![good.as_raw_fd(); regions.len()];
        let nr = u32::try_from(regions.len()).unwrap();
        let table = [&nr.to_le_bytes()[..], &[0; 4], &regions.concat()].concat();
        let answer = session.try_set(req::SET_MEM_TABLE, &table, &fds);
        assert!(!matches!(answer, Ok(0)), "{what}: the table was taken");
        drop(session);
        let session = Session::negotiate(server.socket(), feature::ALL).unwrap();
        let add = |region: &[u8]| {
            let payload = [&[0; 8][..], region].concat();
            session.try_set(req::ADD_MEM_REG, &payload, &[good.as_raw_fd()])
        };
        let (last, first) = regions.split_last().unwrap();
        first.iter().for_each(|region| assert_eq!(add(region).unwrap(), 0, "{what}"));
        assert!(!matches!(add(last), Ok(0)), "{what}: the region was taken");
        drop(session);
        assert!(server.is_alive(), "{what}: {}", server.stderr());
        let mut disk = Disk::open(server.socket()).unwrap();
        assert!(disk.q().read(0, 8).unwrap() == filled(0, 8), "after {what}");
    }
}

/// A front-end that falls silent in the middle of a message ends at worst its own connection (messages come whole from every
/// known one): the next is served at once, and the stop of the process waits for none.
#[test]
fn f56_silence_in_the_middle_of_a_message() {
    let image = Image::filled(MIB);
    let message = encode(req::SET_VRING_NUM, VERSION | NEED_REPLY, &[0; 8]);
    for len in [1, 4, 11, 12, 15] {
        let (mut server, disk) = serve(&image);
        disk.session.channel.send_bytes(&message[..len], &[]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(server.is_alive(), "{len} bytes: {}", server.stderr());
        drop(disk);
        let mut next = Disk::open(server.socket()).unwrap();
        assert!(next.q().read(0, 8).unwrap() == filled(0, 8), "after {len} bytes");
        drop(next);
        let session = Session::raw(server.socket()).unwrap();
        session.channel.send_bytes(&message[..len], &[]).unwrap();
        assert_eq!(server.terminate(SOON).unwrap(), 0, "{len} bytes: {}", server.stderr());
    }
}
