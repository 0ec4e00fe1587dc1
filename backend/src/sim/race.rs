//! The real worker on the real ring, and a guest on another thread: neither may sleep through what the other has for it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use polypath_paths::TableCell;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_GET_ID;
use vm_memory::{Bytes as _, GuestAddress};

use super::fixture::table;
use super::ring::{NEXT, RawRing, WRITE, passes};
use crate::disk::{Disk, DiskOptions, Tuning};
use crate::memory::{Lessor, anonymous};
use crate::vring::Vring;
use crate::worker::{Command, WorkerConfig, WorkerHandle};

/// Two descriptors for each request.
const RING_SIZE: u16 = 8;
const NR_CHAINS: u16 = RING_SIZE / 2;
const NR_REQUESTS: u32 = 5_000;

/// A sleep of this length is for ever.
const FOR_EVER_S: i64 = 10;

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

fn wait(call: &OwnedFd) {
    let limit = Timespec { tv_sec: FOR_EVER_S, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(call.as_fd(), PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "a kick or a call was lost");
    rustix::io::read(call, &mut [0; 8]).unwrap();
}

/// Requests that are answered at once, in bursts, so that the worker goes to sleep as often as can be.
fn guest(ring: &RawRing, event_idx: bool, kick: &OwnedFd, call: &OwnedFd) {
    let (mut avail, mut used, mut nr_sent, mut nr_seen) = (0_u16, 0_u16, 0_u32, 0_u32);
    while nr_seen < NR_REQUESTS {
        let old = avail;
        for _ in 0..=nr_sent % 3 {
            if avail.wrapping_sub(used) < NR_CHAINS && nr_sent < NR_REQUESTS {
                ring.set_available(avail, avail % NR_CHAINS * 2);
                (avail, nr_sent) = (avail.wrapping_add(1), nr_sent + 1);
            }
        }
        ring.publish_available(avail);
        let wanted =
            if event_idx { passes(ring.available_event(), old, avail) } else { !ring.is_no_notify() };
        if wanted {
            rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        }
        let mut look = || {
            while used != ring.used_index() {
                assert_eq!(ring.used(used), (u32::from(used % NR_CHAINS * 2), 21));
                (used, nr_seen) = (used.wrapping_add(1), nr_seen + 1);
            }
            used
        };
        let next = look();
        if event_idx {
            ring.set_used_event(next);
        } else {
            ring.set_no_interrupt(false);
        }
        // With nothing new since the guest asked for a call, it sleeps: the worker has everything.
        if look() == next && next != avail {
            wait(call);
        }
    }
}

fn run(event_idx: bool) {
    let map = anonymous(64 << 10);
    let ring = RawRing::new(&map, RING_SIZE, 0);
    for i in 0..NR_CHAINS {
        let (header, id) = (0x1000 + u64::from(i) * 64, 0x2000 + u64::from(i) * 64);
        map.write_obj(VIRTIO_BLK_T_GET_ID.to_le(), GuestAddress(header)).unwrap();
        ring.set_descriptor(2 * i, (header, 16, NEXT, 2 * i + 1));
        ring.set_descriptor(2 * i + 1, (id, 21, WRITE, 0));
    }
    let (_links, table) = table(1, 4096);
    let options =
        DiskOptions { nr_queues: 1, queue_size: RING_SIZE, id: None, tuning: Tuning::default(), cpus: None };
    let (kick, call) = (event(), event());
    let config = WorkerConfig {
        index: 0,
        vring: Vring::new(&map, RING_SIZE, ring.at(), 0, event_idx, false).unwrap(),
        map: Lessor::new(Arc::clone(&map)).lease(),
        kick: Some(kick.try_clone().unwrap()),
        call: Some(call.try_clone().unwrap()),
        error: None,
        enabled: true,
        disk: Arc::new(Disk::new(TableCell::new(table), options)),
        features: 0,
        fence: None,
        nr_workers: Arc::new(AtomicUsize::new(0)),
    };
    let worker = WorkerHandle::spawn(config).unwrap();
    guest(&ring, event_idx, &kick, &call);
    worker.send(Command::Stop(false));
    assert_eq!(u32::from(worker.join()), NR_REQUESTS);
}

#[test]
fn f27_a_worker_sleeps_through_nothing_with_event_idx() {
    run(true);
}

#[test]
fn f27_a_worker_sleeps_through_nothing_with_flags() {
    run(false);
}
