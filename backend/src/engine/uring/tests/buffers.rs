//! Guest memory that is registered with the ring.

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use vm_memory::{FileOffset, GuestMemoryMmap};

use super::*;

/// Memory of so many regions of 1 MiB, a hole between each two of them; with the file of all.
fn regions(nr: u64) -> (File, GuestMap) {
    const LEN: u64 = 1 << 20;
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&file, nr * LEN).unwrap();
    let region = |i: u64| {
        let here = FileOffset::new(file.try_clone().unwrap(), i * LEN);
        (GuestAddress(i * 2 * LEN), usize::try_from(LEN).unwrap(), Some(here))
    };
    let map = GuestMemoryMmap::from_ranges_with_files((0..nr).map(region)).unwrap();
    (file, map.into())
}

impl Case {
    /// The worker goes by that memory.
    fn go_by(&mut self, map: GuestMap) {
        let guest = Arc::new(map);
        self.lease = Rc::new(Lessor::new(Arc::clone(&guest)).lease());
        self.guest = guest;
        self.engine.use_memory(&self.guest);
    }

    fn registered(nr_slots: u32, nr_regions: u64) -> [(Self, File); 2] {
        Self::new(nr_slots).map(|mut case| {
            case.engine.register_memory();
            let (file, map) = regions(nr_regions);
            case.go_by(map);
            (case, file)
        })
    }

    /// Writes and reads in one piece, in several, and through a bounce buffer.
    fn check_io(&mut self, at: u64) {
        let bytes = letters(12288);
        self.put(at, &bytes);
        for segments in [&[(at, 12288)][..], &[(at, 4096), (at + 8192, 4096), (at + 4096, 4096)]] {
            let write = self.transfer(Operation::Write { offset: 0 }, segments, &[]);
            assert_eq!(self.run(write), 12288);
            let read = self.transfer(Operation::Read { offset: 0 }, &[(at + 0x8000, 12288)], &[]);
            assert_eq!(self.run(read), 12288);
            let expected: Vec<u8> = segments
                .iter()
                .flat_map(|&(addr, len)| self.get(addr, usize::try_from(len).unwrap()))
                .collect();
            assert!(self.get(at + 0x8000, 12288) == expected);
        }
        let odd = self.transfer(Operation::Read { offset: 0 }, &[(at + 1, 100), (at + 0x9001, 412)], &[]);
        assert_eq!(self.run(odd), 512);
    }
}

#[test]
fn all_io_goes_by_registered_memory_as_by_other() {
    for (mut case, _file) in Case::registered(4, 3) {
        assert!(case.engine.buffers.place(&[IoVec { iov_base: std::ptr::null_mut(), iov_len: 1 }]).is_none());
        for region in 0..3 {
            case.check_io(region << 21);
        }
    }
}

#[test]
fn memory_is_replaced_while_requests_are_under_way() {
    for (mut case, _file) in Case::registered(64, 2) {
        for round in 0..20_u64 {
            for i in 0..64 {
                case.start(Operation::Write { offset: i * 4096 }, &[(i * 4096, 4096)]);
            }
            // More regions, and fewer.
            let (_file, map) = regions(1 + round % 5);
            case.go_by(map);
            for _ in 0..64 {
                let (transfer, result) = case.next_done();
                assert_eq!(result, 4096);
                end(transfer);
            }
            case.check_io((round % (1 + round % 5)) << 21);
        }
    }
}

/// Why this is not on by itself: what a front-end does for a balloon takes a page from the file, and the guest goes on with
/// another; the ring has the old one.
#[test]
fn what_is_given_back_and_taken_again_is_another_page_for_the_ring() {
    for is_registered in [false, true] {
        for (mut case, file) in Case::registered(1, 1) {
            if !is_registered {
                case.engine.buffers = Buffers::default();
            }
            case.file().write_all_at(&letters(4096), 0).unwrap();
            case.put(0x4000, &[1; 4096]);
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, mode, 0x4000, 4096).unwrap();
            let read = case.transfer(Operation::Read { offset: 0 }, &[(0x4000, 4096)], &[]);
            assert_eq!(case.run(read), 4096);
            assert_eq!(case.get(0x4000, 4096) == letters(4096), !is_registered);
        }
    }
}
