//! In steady state a request costs no allocation, whatever the selector, and neither does a path error with the retry.

#[path = "support/loopback.rs"]
mod loopback;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use polypath_selector::Kind;

struct Counting;

static NR_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NR_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        NR_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, so that no other thread allocates meanwhile.
#[test]
fn a_request_allocates_nothing() {
    for selector in Kind::ALL {
        for (nr_paths, errors) in [(1, 0), (8, 0), (64, 0), (8, 50), (64, 20)] {
            let dir = tempfile::tempdir().expect("directory");
            let plan = loopback::Plan { nr_paths, nr_workers: 4, selector, nr_kicks: 200, errors };
            let (mut warm, mut end) = (0, 0);
            loopback::run(dir.path(), plan, |nr_left| {
                let now = NR_ALLOCATIONS.load(Ordering::Relaxed);
                match nr_left {
                    150 => warm = now,
                    0 => end = now,
                    _ => {}
                }
            });
            assert!(warm > 0 && end >= warm);
            assert_eq!(
                end - warm,
                0,
                "{selector} with {nr_paths} paths, each {errors}. answer an error: allocations for 9600 requests"
            );
        }
    }
}
