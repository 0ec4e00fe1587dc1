//! A selector allocates when it is made and never again.

use polypath_selector::{
    Direction, GroupArgs, Kind, Outcome, PathArgs, PathLoad, PathSet, Request, Selector, Ticket,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static NR_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting touches only a thread-local number that
// itself needs no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NR_ALLOCATIONS.set(NR_ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn choosing_starting_and_ending_do_not_allocate() {
    const NR_PATHS: usize = 70;
    for kind in Kind::ALL {
        let args: Vec<_> = (0..NR_PATHS).map(|path| PathArgs::for_path(kind, path, NR_PATHS)).collect();
        let mut selector = Selector::new(kind, &GroupArgs::default(), &args, 3).unwrap();
        let mut usable = PathSet::full(NR_PATHS);
        let load = [PathLoad::default(); NR_PATHS];
        let mut slots: [Option<Ticket>; 32] = [None; 32];
        let before = NR_ALLOCATIONS.get();
        for round in 0..10_000u64 {
            let now_ns = round * 10_000;
            let slot = &mut slots[usize::try_from(round % 32).unwrap()];
            if let Some(ticket) = slot.take() {
                let outcome = if round % 97 == 0 { Outcome::PathError } else { Outcome::Success };
                selector.end_io(ticket, now_ns, outcome);
            }
            if round % 1000 == 999 {
                usable.remove(5);
                selector.fail_path(5);
                usable.insert(5);
                selector.reinstate_path(5);
            }
            let request = Request { bytes: 4096, direction: Direction::Write, queue: 9, now_ns };
            let path = selector.select(&request, &usable, &load).unwrap();
            *slot = Some(selector.start_io(path, &request, &load));
        }
        assert_eq!(NR_ALLOCATIONS.get() - before, 0, "{kind}");
    }
}
