use super::*;
use crate::PathLoad;

const US: u64 = 1000;

/// A selector whose paths have answered small reads in these times, at time 0.
fn taught(times_us: &[u64]) -> LearnedServiceTime {
    let mut selector = LearnedServiceTime::new(6, times_us.len(), 0);
    for (index, time_us) in times_us.iter().enumerate() {
        teach(&mut selector, index, 0, time_us * US, Outcome::Success);
    }
    selector
}

fn teach(selector: &mut LearnedServiceTime, index: usize, start_ns: u64, end_ns: u64, outcome: Outcome) {
    selector.start_io(index, 0, start_ns);
    let path = u16::try_from(index).unwrap();
    selector.end_io(Ticket { start_ns, path, ahead: 0, cell: 0 }, end_ns, outcome);
}

fn read(now_ns: u64) -> Request {
    Request { bytes: 4096, direction: Direction::Read, queue: 0, now_ns }
}

/// Shares of `count` requests at depth 1, each ended after its path's average.
fn shares<const N: usize>(selector: &mut LearnedServiceTime, now_ns: &mut u64, count: usize) -> [usize; N] {
    let mut shares = [0; N];
    for _ in 0..count {
        let load = [PathLoad::default(); N];
        let index = selector.select(&read(*now_ns), &PathSet::full(N), &load).unwrap();
        let took_ns = u64::from(selector.paths[index].time_ns[0]);
        teach(selector, index, *now_ns, *now_ns + took_ns, Outcome::Success);
        *now_ns += took_ns;
        shares[index] += 1;
    }
    shares
}

#[test]
fn each_path_is_given_the_same_time() {
    assert_eq!(shares(&mut taught(&[100, 100, 100, 400]), &mut { US }, 1300), [400, 400, 400, 100]);
    assert_eq!(shares(&mut taught(&[100, 200, 500]), &mut { US }, 1700), [1000, 500, 200]);
}

#[test]
fn f40_fresh_paths_take_turns_from_the_first() {
    let mut selector = LearnedServiceTime::new(6, 3, 4);
    let picks: Vec<_> = (0..6)
        .map(|_| {
            let index = selector.select(&read(0), &PathSet::full(3), &[PathLoad::default(); 3]).unwrap();
            selector.start_io(index, 0, 0);
            index
        })
        .collect();
    assert_eq!(picks, [1, 2, 0, 1, 2, 0]);
}

#[test]
fn a_far_slower_path_is_only_probed() {
    let [fast, slow] = shares(&mut taught(&[100, 700]), &mut { US }, 10_000);
    assert!(slow > 0 && slow <= fast / 32, "{fast} {slow}");
}

#[test]
fn a_far_slower_path_takes_what_does_not_fit_on_the_others() {
    let mut selector = taught(&[100, 700]);
    let busy = |in_flight| [PathLoad { in_flight, bytes: 0 }, PathLoad::default()];
    selector.paths[0].own = 1;
    selector.paths[0].heard_ns = 700 * US;
    let at = |in_flight, selector: &mut LearnedServiceTime| {
        selector.select(&read(700 * US), &PathSet::full(2), &busy(in_flight))
    };
    assert_eq!(at(2, &mut selector), Some(0));
    assert_eq!(at(8, &mut selector), Some(1));
}

#[test]
fn errors_push_a_path_out_and_successes_bring_it_back() {
    let mut selector = taught(&[100, 100]);
    let mut now_ns = US;
    teach(&mut selector, 0, now_ns, now_ns + 1, Outcome::PathError);
    assert_eq!(selector.paths[0].penalty, PENALTY_FIRST);
    assert_eq!(shares(&mut selector, &mut now_ns, 32), [0, 32]);
    for _ in 0..20 {
        teach(&mut selector, 0, now_ns, now_ns + 1, Outcome::PathError);
    }
    assert_eq!(selector.paths[0].penalty, PENALTY_MAX);
    assert_eq!(selector.paths[0].time_ns[0], 100_000, "failures teach nothing");
    teach(&mut selector, 0, now_ns, now_ns + 1, Outcome::TargetError);
    assert_eq!(selector.paths[0].penalty, PENALTY_MAX, "a refusal says nothing about the path");
    for expected in [6, 3, 1, 0] {
        teach(&mut selector, 0, now_ns, now_ns + 100 * US, Outcome::Success);
        assert_eq!(selector.paths[0].penalty, expected);
    }
    teach(&mut selector, 0, now_ns, now_ns + 1, Outcome::PathError);
    selector.reinstate_path(0);
    assert_eq!(selector.paths[0].penalty, 0);
}

#[test]
fn a_silent_path_draws_no_more_requests() {
    let mut selector = taught(&[100, 100]);
    selector.start_io(0, 0, US);
    let one_each = [PathLoad { in_flight: 1, bytes: 0 }; 2];
    let late = read(2000 * US);
    selector.start_io(1, 0, late.now_ns);
    for _ in 0..100 {
        assert_eq!(selector.select(&late, &PathSet::full(2), &one_each), Some(1));
    }
}

#[test]
fn a_hiccup_counts_once_and_at_most_doubles_the_average() {
    let mut selector = taught(&[100]);
    let hiccup_ns = 1_000_000 * US;
    let tickets: Vec<_> = (0..32)
        .map(|ahead| {
            selector.start_io(0, 0, 200 * US);
            Ticket { start_ns: 200 * US, path: 0, ahead, cell: 0 }
        })
        .collect();
    tickets.into_iter().for_each(|ticket| selector.end_io(ticket, hiccup_ns, Outcome::Success));
    assert_eq!(selector.paths[0].time_ns[0], 187_500);
}

#[test]
fn directions_and_sizes_are_learned_apart() {
    use Direction::{Other, Read, Write};
    let cells = [(Read, 0), (Read, 8193), (Read, 65_537), (Read, 262_145), (Write, 4096), (Write, 1 << 30)];
    assert_eq!(cells.map(|(direction, bytes)| cell(direction, bytes)), [0, 1, 2, 3, 4, 7]);
    assert_eq!((cell(Other, 0), cell(Other, u64::MAX), cell(Read, 8192)), (8, NR_CELLS - 1, 0));
    let mut selector = taught(&[100]);
    let slow_write = Ticket { start_ns: 0, path: 0, ahead: 0, cell: 4 };
    selector.start_io(0, 4, 0);
    selector.end_io(slow_write, 900 * US, Outcome::Success);
    assert_eq!((selector.paths[0].time_ns[0], selector.paths[0].time_ns[4]), (100_000, 900_000));
}

#[test]
fn what_was_learned_is_inherited() {
    let old = taught(&[100, 300]);
    let mut new = LearnedServiceTime::new(6, 1, 0);
    new.inherit(0, &old, 1);
    assert_eq!(new.paths[0].time_ns[0], 300_000);
    assert_eq!(new.paths[0].own, 0);
}

#[test]
fn a_choice_among_no_paths_leaves_no_trace() {
    let mut selector = LearnedServiceTime::new(6, 2, 0);
    assert_eq!(selector.select(&read(0), &PathSet::empty(2), &[PathLoad::default(); 2]), None);
    assert_eq!(selector.best_ns[0], 0);
}
