//! What the selectors do with paths of unequal speed, simulated; prints the tables that the docs quote
//! (`cargo test -p polypath-selector --test unequal_paths -- --nocapture`).

mod sim;

use polypath_selector::Kind;
use sim::{MS, Path, Report, Run};

/// The selectors that look at the paths; io-affinity looks at the queue.
const KINDS: [Kind; 5] = [
    Kind::RoundRobin,
    Kind::QueueLength,
    Kind::ServiceTime,
    Kind::HistoricalServiceTime,
    Kind::LearnedServiceTime,
];
/// Time from an answer to the next request with which historical-service-time puts on the slow path what was
/// published for it (a submitter that never pauses gives 6.5 %).
const THINK_NS: u64 = 125_000;

/// Four paths, the last one four times slower.
fn published_case(kind: Kind, depth: usize) -> Report {
    let fast = Path::serial(100_000);
    let paths = [fast.clone(), fast.clone(), fast, Path::serial(400_000)];
    Run { think_ns: THINK_NS, ..Run::new(kind, &paths) }.depth(depth).run()
}

#[test]
fn the_published_case() {
    println!("share of the slow path, mean latency; best share 1/13 = 7.7 %");
    for kind in KINDS {
        let line = [1, 2, 4, 8, 64].map(|depth| {
            let report = published_case(kind, depth);
            format!("{:4.1} % {:5.0} us", report.share(3) * 100.0, report.mean_ns / 1000.0)
        });
        println!("{kind:24} depth 1, 2, 4, 8, 64: {}", line.join(" | "));
    }
    let share = |kind| published_case(kind, 1).share(3);
    assert!((0.249..0.251).contains(&share(Kind::ServiceTime)));
    assert!((0.10..0.125).contains(&share(Kind::HistoricalServiceTime)));
    assert!((0.070..0.080).contains(&share(Kind::LearnedServiceTime)));
}

/// Every case against the best selector for it: how much longer a request takes on average.
#[test]
fn the_learning_selector_is_never_far_from_the_best() {
    let mut worst = KINDS.map(|kind| (kind, 0.0, String::new()));
    let serial = Path::serial;
    let delay = Path::delay;
    let few_lanes = |service_ns| Path { lanes: 4, ..serial(service_ns) };
    let cases: [(&str, Vec<Path>); 7] = [
        ("four serial, one 4 times slower", [100, 100, 100, 400].map(|us| serial(us * 1000)).into()),
        ("four delays, one 4 times slower", [100, 100, 100, 400].map(|us| delay(us * 1000)).into()),
        ("two serial, one 4 times slower", [100, 400].map(|us| serial(us * 1000)).into()),
        ("two delays, one 4 times slower", [100, 400].map(|us| delay(us * 1000)).into()),
        ("two of 4 lanes, one half as fast", [100, 200].map(|us| few_lanes(us * 1000)).into()),
        ("two serial, one 50 times slower", [100, 5000].map(|us| serial(us * 1000)).into()),
        ("three equal serial", [100, 100, 100].map(|us| serial(us * 1000)).into()),
    ];
    for (name, paths) in &cases {
        for (workers, depth) in
            [(1, 1), (1, 2), (1, 4), (1, 16), (1, 64), (2, 1), (2, 8), (4, 1), (4, 4), (8, 1), (8, 8)]
        {
            let run =
                |kind| Run::new(kind, paths).workers(workers).depth(depth).requests(5_000).run().mean_ns;
            let means = KINDS.map(run);
            let best = means.iter().copied().fold(f64::MAX, f64::min);
            for ((_, most, place), mean) in worst.iter_mut().zip(means) {
                if mean / best > *most {
                    *most = mean / best;
                    *place = format!("{name}, {workers} workers at depth {depth}");
                }
            }
        }
    }
    for (kind, most, place) in &worst {
        println!("{kind:24} at worst {most:6.2} times the best mean latency: {place}");
    }
    let learned = worst.last().expect("the list ends with it").1;
    assert!(worst.iter().all(|(_, most, _)| *most >= learned), "the least regret of all");
}

#[test]
fn a_fast_failing_path_attracts_no_load() {
    let failing = Path { fails: true, ..Path::serial(5_000) };
    let paths = [failing, Path::serial(100_000), Path::serial(100_000)];
    for depth in [1, 8, 32] {
        for kind in KINDS {
            let report = Run::new(kind, &paths).depth(depth).requests(10_000).run();
            println!("{kind:24} depth {depth:2}: {:5.1} % on the failing path", report.share(0) * 100.0);
            if kind == Kind::LearnedServiceTime {
                assert!(report.share(0) < 0.01, "{}", report.share(0));
                assert!(report.share_between(0, 100 * MS, u64::MAX) < 0.005);
            }
        }
    }
}

#[test]
fn a_path_that_was_slow_once_gets_its_share_back() {
    let (from_ns, to_ns) = (100 * MS, 2100 * MS);
    for (times, depth, requests) in
        [(10, 1, 45_000), (10, 16, 120_000), (1000, 1, 45_000), (1000, 16, 120_000)]
    {
        let was_slow = Path { slow: Some((from_ns, to_ns, times)), ..Path::serial(100_000) };
        let paths = [was_slow, Path::serial(100_000), Path::serial(100_000)];
        let report = Run::new(Kind::LearnedServiceTime, &paths).depth(depth).requests(requests).run();
        let end_ns = report.log.last().map_or(0, |(time, _)| *time);
        let is_back = |from_ns: &u64| {
            let share = report.share_between(0, *from_ns, *from_ns + 10 * MS);
            (share - 1.0 / 3.0).abs() < 0.03
        };
        let back_ns = (to_ns..end_ns).step_by(10_000_000).find(is_back).map(|back_ns| back_ns - to_ns);
        let [before, during, after] = [(from_ns / 2, from_ns), (from_ns, to_ns), (end_ns - 100 * MS, end_ns)]
            .map(|(from_ns, to_ns)| report.share_between(0, from_ns, to_ns) * 100.0);
        println!(
            "{times:4} times slower for 2 s, depth {depth:2}: {before:4.1} %, then {during:5.2} %, in the end \
             {after:4.1} %; back {:?} ms after it was fast again",
            back_ns.map(|back_ns| back_ns / MS)
        );
        assert!(during < 5.0, "{during}");
        assert!((after - 100.0 / 3.0).abs() < 1.7, "{after}");
        // Caught requests come back, then the next probe is due.
        let probe_ns = 33 * times * 120_000;
        assert!(back_ns.is_some_and(|back_ns| back_ns < 100 * MS + probe_ns), "{back_ns:?}");
    }
}

#[test]
fn a_hung_path_draws_no_more_requests() {
    for kind in KINDS {
        let hung = Path { slow: Some((50 * MS, 250 * MS, 20_000)), ..Path::delay(100_000) };
        let paths = [hung, Path::delay(100_000)];
        let report = Run::new(kind, &paths).depth(32).requests(100_000).run();
        let sent =
            report.log.iter().filter(|(time, path)| *path == 0 && (50 * MS..250 * MS).contains(time)).count();
        let all = report.log.iter().filter(|(time, _)| (50 * MS..250 * MS).contains(time)).count();
        println!("{kind:24} hung for 200 ms at depth 32: {sent} of {all} requests on it");
        if kind == Kind::LearnedServiceTime {
            assert!(sent <= 20 && all > 25_000, "{sent} of {all}");
        }
    }
}

#[test]
fn f40_equal_paths_get_equal_shares() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::IoAffinity) {
        for workers in [1, 2, 4, 8] {
            for path in
                [Path::serial(100_000), Path::delay(100_000), Path { lanes: 4, ..Path::serial(100_000) }]
            {
                let report = Run::new(kind, &vec![path.clone(); 3]).workers(workers).requests(30_000).run();
                let shares = [0, 1, 2].map(|path| report.share(path) * 3.0);
                assert!(
                    shares.iter().all(|share| (share - 1.0).abs() < 0.05),
                    "{kind} {workers}: {shares:?}"
                );

                let slow = Path { service_ns: 400_000, ..path.clone() };
                let paths = [path.clone(), path, slow];
                let report = Run::new(kind, &paths).workers(workers).requests(30_000).run();
                let ratio = report.share(0) / report.share(1);
                assert!((ratio - 1.0).abs() < 0.05, "{kind} {workers}: {ratio}");
            }
        }
    }
}

#[test]
fn two_equal_paths_do_twice_the_work_of_one() {
    for kind in KINDS {
        for lanes in [1, 8] {
            let path = Path { lanes, ..Path::serial(100_000) };
            let rate = |paths: &[Path]| Run::new(kind, paths).workers(2).depth(32).run().per_ms();
            let ratio = rate(&[path.clone(), path.clone()]) / rate(std::slice::from_ref(&path));
            assert!(ratio > 1.95, "{kind} {lanes}: {ratio}");
        }
    }
}
