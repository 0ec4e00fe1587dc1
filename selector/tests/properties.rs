//! What must hold for every selector, whatever happens around it.

use polypath_selector::{
    Direction, GroupArgs, Kind, Outcome, PathArgs, PathLoad, PathSet, Request, Selector, Ticket,
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Select { usable: u128, bytes: u64, direction: Direction, queue: usize, start: bool },
    End { which: usize, outcome: Outcome },
    Fail(usize),
    Reinstate(usize),
    Wait(u64),
    Load { path: usize, in_flight: u32, bytes: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let direction = prop_oneof![Just(Direction::Read), Just(Direction::Write), Just(Direction::Other)];
    let outcome = prop_oneof![Just(Outcome::Success), Just(Outcome::TargetError), Just(Outcome::PathError)];
    let bytes = prop_oneof![Just(0), Just(4096), Just(1 << 20), any::<u64>()];
    let select = (any::<u128>(), bytes.clone(), direction, 0..70usize, any::<bool>()).prop_map(
        |(usable, bytes, direction, queue, start)| Step::Select { usable, bytes, direction, queue, start },
    );
    let wait = prop_oneof![0..1_000_000u64, Just(u64::MAX / 4)];
    let load = (0..100usize, prop_oneof![0..64u32, Just(u32::MAX)], bytes)
        .prop_map(|(path, in_flight, bytes)| Step::Load { path, in_flight, bytes });
    prop_oneof![
        8 => select,
        4 => (any::<usize>(), outcome).prop_map(|(which, outcome)| Step::End { which, outcome }),
        1 => (0..120usize).prop_map(Step::Fail),
        1 => (0..120usize).prop_map(Step::Reinstate),
        2 => wait.prop_map(Step::Wait),
        1 => load,
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(Kind::ALL.to_vec())
}

fn selector(kind: Kind, nr_paths: usize, worker: usize) -> Selector {
    let args: Vec<_> = (0..nr_paths).map(|path| PathArgs::for_path(kind, path, nr_paths)).collect();
    Selector::new(kind, &GroupArgs::default(), &args, worker).expect("default arguments")
}

proptest! {
    // The default wants a `lib.rs` beside the test to keep failing seeds; a failure prints its input, which is enough.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Some path exactly if one is usable, and never an unusable one; no panic on any load, time or order of calls.
    #[test]
    fn picks_a_usable_path_exactly_if_there_is_one(
        kind in kind(),
        nr_paths in 1..100usize,
        worker in 0..70usize,
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut selector = selector(kind, nr_paths, worker);
        let mut load = vec![PathLoad::default(); nr_paths];
        let mut tickets: Vec<Ticket> = Vec::new();
        let mut now_ns = 0u64;
        for step in steps {
            match step {
                Step::Select { usable: mask, bytes, direction, queue, start } => {
                    let mut usable = PathSet::empty(nr_paths);
                    (0..nr_paths).filter(|path| mask >> path & 1 == 1).for_each(|path| usable.insert(path));
                    let request = Request { bytes, direction, queue, now_ns };
                    let choice = selector.select(&request, &usable, &load);
                    prop_assert_eq!(choice.is_some(), !usable.is_empty());
                    if let Some(path) = choice {
                        prop_assert!(usable.contains(path));
                        if start {
                            tickets.push(selector.start_io(path, &request, &load));
                        }
                    }
                }
                Step::End { which, outcome } if !tickets.is_empty() => {
                    let ticket = tickets.swap_remove(which % tickets.len());
                    selector.end_io(ticket, now_ns, outcome);
                }
                Step::End { .. } => {}
                Step::Fail(path) => selector.fail_path(path),
                Step::Reinstate(path) => selector.reinstate_path(path),
                Step::Wait(ns) => now_ns = now_ns.wrapping_add(ns),
                Step::Load { path, in_flight, bytes } => {
                    if let Some(entry) = load.get_mut(path) {
                        *entry = PathLoad { in_flight, bytes };
                    }
                }
            }
        }
    }

    /// At depth 1, equal paths get equal shares, from whichever path the worker starts and whichever are usable.
    #[test]
    fn f40_equal_paths_get_equal_shares(
        kind in kind(),
        nr_paths in 1..12usize,
        worker in 0..16usize,
        mask in 1..4096u32,
        took_ns in 1_000..1_000_000u64,
    ) {
        prop_assume!(kind != Kind::IoAffinity);
        let mut selector = selector(kind, nr_paths, worker);
        let mut usable = PathSet::empty(nr_paths);
        (0..nr_paths).filter(|path| mask >> path & 1 == 1).for_each(|path| usable.insert(path));
        prop_assume!(!usable.is_empty());
        let rounds = 200;
        let load = vec![PathLoad::default(); nr_paths];
        let mut shares = vec![0usize; nr_paths];
        let mut now_ns = 1_000_000_000;
        for _ in 0..rounds * usable.len() {
            let request = Request { bytes: 4096, direction: Direction::Read, queue: 0, now_ns };
            let path = selector.select(&request, &usable, &load).expect("a usable path");
            let ticket = selector.start_io(path, &request, &load);
            now_ns += took_ns;
            selector.end_io(ticket, now_ns, Outcome::Success);
            shares[path] += 1;
        }
        for path in usable.iter() {
            prop_assert!(shares[path].abs_diff(rounds) <= rounds / 20, "{:?}", shares);
        }
    }

    /// What is printed as a table line is read back as the same.
    #[test]
    fn arguments_survive_a_round_trip(kind in kind(), repeat in any::<u32>(), throughput in 0..101u32, path in 0..9usize) {
        let mask = PathArgs::for_path(Kind::IoAffinity, path, 9).table(Kind::IoAffinity);
        let (repeat, throughput) = (repeat.to_string(), throughput.to_string());
        let words = match kind {
            Kind::IoAffinity => vec![mask.as_str()],
            Kind::ServiceTime => vec![repeat.as_str(), throughput.as_str()],
            _ => vec![repeat.as_str()],
        };
        let printed = PathArgs::parse(kind, &words).unwrap().table(kind);
        let words: Vec<_> = printed.split(' ').collect();
        prop_assert_eq!(PathArgs::parse(kind, &words).unwrap().table(kind), printed.clone());
    }
}
