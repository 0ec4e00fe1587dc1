//! Rings are set up and started by messages in whatever order the protocol allows.

use polypath_vm_tests::front_end::wire::req;
use polypath_vm_tests::front_end::{Disk, Op};
use polypath_vm_tests::server::Server;

use crate::common::{Image, MIB, SOON, filled};

/// All orders of so many things.
fn orders(nr: usize) -> Vec<Vec<usize>> {
    let Some(last) = nr.checked_sub(1) else { return vec![Vec::new()] };
    let insert = |order: Vec<usize>| {
        (0..nr).map(move |at| {
            let mut order = order.clone();
            order.insert(at, last);
            order
        })
    };
    orders(last).into_iter().flat_map(insert).collect()
}

/// What is told of a ring before it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Size,
    Base,
    Addresses,
    Call,
    Kick,
    Enable,
}

const STEPS: [Step; 6] = [Step::Size, Step::Base, Step::Addresses, Step::Call, Step::Kick, Step::Enable];

fn tell(disk: &Disk, step: Step, base: u16) {
    let (session, queue) = (&disk.session, &disk.queues[0].queue);
    match step {
        Step::Size => session.set_vring_state(req::SET_VRING_NUM, 0, queue.size().into()),
        Step::Base => session.set_vring_state(req::SET_VRING_BASE, 0, base.into()),
        Step::Addresses => session.set_vring_addr(queue),
        Step::Call => session.set_vring_fd(req::SET_VRING_CALL, 0, queue.call_fd()),
        Step::Kick => session.set_vring_fd(req::SET_VRING_KICK, 0, queue.kick_fd()),
        Step::Enable => session.enable(0, true),
    }
    .unwrap_or_else(|e| panic!("{step:?}: {e:#}"));
}

/// The kick starts a ring, so size, index and addresses come before it; all else may come before or after.
#[test]
fn a_ring_starts_by_messages_in_every_legal_order() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).start().unwrap();
    for tracked in [false, true] {
        let mut disk = Disk::at(server.socket()).connect().unwrap();
        if tracked {
            disk.track().unwrap();
        }
        let mut nr_orders = 0;
        let mut base = 0;
        for order in orders(STEPS.len()) {
            let order: Vec<Step> = order.into_iter().map(|step| STEPS[step]).collect();
            let at = |step| order.iter().position(|known| *known == step).unwrap();
            if [Step::Size, Step::Base, Step::Addresses].iter().any(|step| at(*step) > at(Step::Kick)) {
                continue;
            }
            nr_orders += 1;
            // One request is there before the ring runs, one comes after.
            disk.q().stage(&Op::read(8, 8)).unwrap();
            disk.q().queue.publish();
            order.iter().for_each(|step| tell(&disk, *step, base));
            disk.q().queue.kick_always();
            let first = disk.q().done_within(SOON).unwrap_or_else(|e| panic!("{order:?}: {e:#}"));
            assert!(first.data == filled(8, 8), "{order:?}");
            assert!(disk.q().read(16, 8).unwrap() == filled(16, 8), "{order:?}");
            disk.session.enable(0, false).unwrap();
            base = disk.session.stop(0).unwrap();
            assert_eq!(base, disk.q().queue.next_avail(), "{order:?}");
        }
        assert_eq!(nr_orders, 180);
    }
}

/// Rings do not wait for one another, whichever starts or stops first.
#[test]
fn rings_start_and_stop_in_every_order() {
    let image = Image::filled(MIB);
    let server = Server::polypath().path(&image.path).num_queues(4).start().unwrap();
    let mut disk = Disk::at(server.socket()).queues(4).connect().unwrap();
    disk.track().unwrap();
    let mut bases = [0; 4];
    for (started, stopped) in orders(4).into_iter().zip(orders(4).into_iter().rev()) {
        for &index in &started {
            disk.session.start(&disk.queues[index].queue, bases[index]).unwrap();
            let sector = index as u64 * 8;
            assert!(disk.queues[index].read(sector, 8).unwrap() == filled(sector, 8), "{started:?}");
        }
        for &index in &stopped {
            bases[index] = disk.session.stop(u16::try_from(index).unwrap()).unwrap();
            assert_eq!(bases[index], disk.queues[index].queue.next_avail(), "{stopped:?}");
        }
    }
}
