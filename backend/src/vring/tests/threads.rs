//! Two real threads on one ring: neither may sleep through what the other has for it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::*;

const SIZE: u16 = 8;
const NR_REQUESTS: u32 = 20_000;

/// A sleep of this length is for ever: what should have ended it was lost.
const FOR_EVER: Duration = Duration::from_secs(10);

struct Event(OwnedFd);

impl Event {
    fn new() -> Self {
        Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap())
    }

    fn signal(&self) {
        rustix::io::write(&self.0, &1_u64.to_ne_bytes()).unwrap();
    }

    fn wait(&self, who: &str) {
        let limit = Timespec { tv_sec: FOR_EVER.as_secs().try_into().unwrap(), tv_nsec: 0 };
        let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{who} sleeps and is not woken");
        rustix::io::read(&self.0, &mut [0; 8]).unwrap();
    }
}

/// The device as a worker works it: take all, give all back, publish, arm, look again, sleep.
fn device(map: &GuestMap, mut vring: Vring, kick: &Event, call: &Event) {
    let mut nr_done = 0;
    while nr_done < NR_REQUESTS {
        let mut nr_taken = 0;
        while let Pop::Head(head) = vring.pop(map) {
            if nr_taken == 0 {
                vring.suppress_kicks(map);
            }
            vring.push_used(map, head, nr_done);
            (nr_taken, nr_done) = (nr_taken + 1, nr_done + 1);
        }
        if vring.publish(map) {
            call.signal();
        }
        if !vring.arm_kicks(map) && nr_done < NR_REQUESTS {
            kick.wait("the device");
        }
    }
}

/// The driver: keeps the ring as full as the numbers say, kicks when asked to, sleeps when there is nothing to see.
fn driver(ring: &RawRing, event_idx: bool, kick: &Event, call: &Event) {
    let (mut avail, mut used, mut nr_sent, mut nr_seen) = (0_u16, 0_u16, 0_u32, 0_u32);
    while nr_seen < NR_REQUESTS {
        let old = avail;
        let burst = 1 + nr_sent % 5;
        for _ in 0..burst {
            if avail.wrapping_sub(used) < SIZE && nr_sent < NR_REQUESTS {
                ring.set_available(avail, avail % SIZE);
                (avail, nr_sent) = (avail.wrapping_add(1), nr_sent + 1);
            }
        }
        if avail != old {
            ring.publish_available(avail);
            let wanted =
                if event_idx { passes(ring.available_event(), old, avail) } else { !ring.is_no_notify() };
            if wanted {
                kick.signal();
            }
        }
        let mut look = || {
            while used != ring.used_index() {
                assert_eq!(ring.used(used), (u32::from(used % SIZE), nr_seen));
                (used, nr_seen) = (used.wrapping_add(1), nr_seen + 1);
            }
            used
        };
        if event_idx {
            let next = look();
            ring.set_used_event(next);
        } else {
            ring.set_no_interrupt(true);
            look();
            ring.set_no_interrupt(false);
        }
        let is_full = avail.wrapping_sub(look()) == SIZE || nr_sent == NR_REQUESTS;
        if is_full && avail != used {
            call.wait("the driver");
        }
    }
}

fn run(event_idx: bool) {
    let ring = Both::at(SIZE, 0, event_idx);
    let (kick, call) = (Event::new(), Event::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        let device = scope.spawn(|| device(&ring.map, ring.device, &kick, &call));
        driver(&ring.guest, event_idx, &kick, &call);
        device.join().unwrap();
    });
    assert!(start.elapsed() < 3 * FOR_EVER);
}

#[test]
fn f27_no_kick_and_no_call_is_lost_between_threads_with_event_idx() {
    run(true);
}

#[test]
fn f27_no_kick_and_no_call_is_lost_between_threads_with_flags() {
    run(false);
}
