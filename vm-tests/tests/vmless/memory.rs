//! Guest memory of many pieces, and of huge pages.

use std::fs;

use polypath_vm_tests::front_end::request::header;
use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Chain, Disk, OK, Region};
use polypath_vm_tests::server::{Server, wait_until};
use polypath_vm_tests::skip::skip;

use crate::common::{Image, MIB, SOON, filled};

/// Reads 4 KiB from `sector` into guest memory at `to`.
fn read_to(disk: &mut Disk, sector: u64, to: u64) {
    let memory = disk.memory.clone();
    let head = memory.alloc_with(&header(0, sector));
    let status = memory.alloc_with(&[0xEE]);
    let chain = Chain::new().readable(head.addr, 16).writable(to, 4096).writable(status.addr, 1);
    let head = disk.q().queue.send(&chain).unwrap();
    disk.q().queue.wait_head(head, SOON).unwrap();
    assert_eq!(status.bytes(), [OK]);
}

fn mappings_of_guests(server: &Server) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", server.pid())).unwrap();
    maps.lines().filter(|line| line.contains("memfd:guest-memory")).count()
}

/// As many regions as are promised, each of them reached by a request; one more is refused.
#[test]
fn f19_every_memory_slot_can_be_used() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let slots = disk.session.get_u64(req::GET_MAX_MEM_SLOTS).unwrap();
    assert_eq!(slots, 509);
    let first = disk.memory.end() + MIB;
    // One is there already.
    let regions: Vec<_> = (0..slots - 1)
        .map(|i| {
            let region = disk.memory.add(Region::new(first + i * MIB, 8192, 0).unwrap());
            disk.session.add_region(&region).unwrap();
            region
        })
        .collect();
    assert_eq!(mappings_of_guests(&server), usize::try_from(slots).unwrap());
    for (i, region) in (0..).zip(&regions) {
        let sector = i % 200 * 8;
        read_to(&mut disk, sector, region.guest + 2048);
        let got = disk.memory.read_vec(region.guest + 2048, 4096);
        assert!(got == filled(sector, 8), "region {i}");
    }
    // Taken out and put in again, all of them.
    for region in &regions {
        disk.session.remove_region(region).unwrap();
    }
    assert_eq!(mappings_of_guests(&server), 1);
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    for region in &regions {
        disk.session.add_region(region).unwrap();
    }
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    // A front-end that does not keep to the number is let go of; the next one finds everything in order.
    let surplus = Region::new(first + slots * MIB, 8192, 0).unwrap();
    assert!(disk.session.add_region(&surplus).is_err(), "more regions than promised");
    drop(disk);
    let mut disk = Disk::open(server.socket()).unwrap();
    assert!(disk.q().read(8, 8).unwrap() == filled(8, 8));
    assert_eq!(mappings_of_guests(&server), 1);
}

/// Huge pages lent by the host for a test; given back on drop.
struct HugePages {
    before: u64,
}

impl HugePages {
    const NR: &str = "/proc/sys/vm/nr_hugepages";

    fn lend(more: u64) -> Result<Self, String> {
        let why = |e: std::io::Error| format!("{}: {e}", Self::NR);
        let text = fs::read_to_string(Self::NR).map_err(why)?;
        let before = text.trim().parse().map_err(|_| format!("{}: {text}", Self::NR))?;
        let pages = Self { before };
        fs::write(Self::NR, (before + more).to_string()).map_err(why)?;
        if Self::free() < more {
            return Err(format!("{more} huge pages cannot be had"));
        }
        Ok(pages)
    }

    fn free() -> u64 {
        let info = fs::read_to_string("/proc/meminfo").unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
        line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(Self::NR, self.before.to_string());
    }
}

#[test]
fn f19_huge_pages_are_used_and_given_back() {
    const HUGE: u64 = 2 * MIB;
    let _pages = match HugePages::lend(8) {
        Ok(pages) => pages,
        Err(why) => return skip("memory::f19_huge_pages_are_used_and_given_back", why),
    };
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    let mut disk = Disk::open(server.socket()).unwrap();
    let free = HugePages::free();
    for by_disconnect in [false, true] {
        let at = (disk.memory.end() + HUGE).next_multiple_of(HUGE);
        let region = disk.memory.add(Region::huge(at, 4 * HUGE).unwrap());
        disk.session.add_region(&region).unwrap();
        // Within a page, over the border of two, at an odd place, at the very end.
        for (sector, offset) in [(0, 0), (8, HUGE - 2048), (16, 2 * HUGE + 513), (24, 4 * HUGE - 4096)] {
            read_to(&mut disk, sector, at + offset);
            assert!(disk.memory.read_vec(at + offset, 4096) == filled(sector, 8), "at {offset:#x}");
        }
        assert!(HugePages::free() < free);
        if by_disconnect {
            drop((region, disk));
            wait_until("huge pages to be free", SOON, || HugePages::free() == free).unwrap();
            return;
        }
        disk.session.remove_region(&region).unwrap();
        disk.memory.remove(at);
        drop(region);
        assert_eq!(HugePages::free(), free, "kept after the removal was acknowledged");
    }
}
