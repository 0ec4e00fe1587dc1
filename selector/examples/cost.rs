//! Prints what a request costs in its selector (choice, start and end), by number of paths.
//!
//! `cargo run --release -p polypath-selector --example cost [SELECTOR PATHS ROUNDS]`; with the arguments it runs that
//! one case alone, to be counted from outside (`valgrind --tool=callgrind`; the difference of two numbers of rounds is
//! the cost of the requests alone).

use polypath_selector::{
    Direction, GroupArgs, Kind, Outcome, PathArgs, PathLoad, PathSet, Request, Selector,
};
use std::hint::black_box;
use std::time::Instant;

fn nanoseconds(kind: Kind, nr_paths: usize, rounds: u64) -> f64 {
    let args: Vec<_> = (0..nr_paths).map(|path| PathArgs::for_path(kind, path, nr_paths)).collect();
    let mut selector = Selector::new(kind, &GroupArgs::default(), &args, 0).expect("default arguments");
    let usable = PathSet::full(nr_paths);
    // Some load everywhere, or the scanning selectors would stop at the first idle path.
    let load = vec![PathLoad { in_flight: 1, bytes: 4096 }; nr_paths];
    let begin = Instant::now();
    for round in 0..rounds {
        let request = Request { bytes: 4096, direction: Direction::Read, queue: 1, now_ns: round * 1000 };
        let path = selector.select(black_box(&request), &usable, &load).expect("a usable path");
        let ticket = selector.start_io(path, &request, &load);
        selector.end_io(black_box(ticket), request.now_ns + 900, Outcome::Success);
    }
    begin.elapsed().as_nanos() as f64 / rounds as f64
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [kind, nr_paths, rounds] = &arguments[..] {
        let kind = kind.parse().expect("the name of a selector");
        let nr_paths = nr_paths.parse().expect("a number of paths");
        let rounds = rounds.parse().expect("a number of rounds");
        println!("{kind} {nr_paths}: {:.1} ns", nanoseconds(kind, nr_paths, rounds));
        return;
    }
    for kind in Kind::ALL {
        let costs =
            [1, 2, 8, 64].map(|nr_paths| format!("{:6.1} ns", nanoseconds(kind, nr_paths, 10_000_000)));
        println!("{kind:24} with 1, 2, 8, 64 paths: {}", costs.join(" "));
    }
}
