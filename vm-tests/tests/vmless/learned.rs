//! Selectors that measure: what they make of paths that are really slow, and what they show of it.

use polypath_vm_tests::faulty::Rule;
use polypath_vm_tests::front_end::{OK, Op};

use crate::common::{Image, MIB, need};
use crate::rig::Rig;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// What the paths need for a read: `d` four times what the others do. Well above what the machine itself needs.
const FAST_MS: u64 = 3;
const SLOW_MS: u64 = 12;

/// Four paths, one of them four times slower. Gives the rig and the share of `d` in per cent of `nr` reads, of which
/// `depth` are outstanding at a time.
fn share_of_the_slow_path(selector: &str, depth: usize, nr: u64) -> (Rig, f64) {
    let rig = Rig::start(Image::filled(MIB), &NAMES, &["--selector", selector]);
    rig.fs.logging(false);
    // Not the block that is probed.
    for (name, ms) in [("a", FAST_MS), ("b", FAST_MS), ("c", FAST_MS), ("d", SLOW_MS)] {
        rig.fs.rule(name, Rule::delay_ms(ms).reads().sectors(8..u64::MAX / 512));
    }
    let mut disk = rig.disk(1);
    let reads = || NAMES.map(|name| rig.fs.counts(name).reads);
    let mut read = |nr: u64| {
        let (q, mut sent) = (disk.q(), 0);
        while sent < nr || q.nr_pending() != 0 {
            if sent < nr && q.nr_pending() < depth {
                // Apart from each other, so that no two become one.
                q.submit(&Op::read(8 + sent % 100 * 16, 8)).unwrap();
                sent += 1;
                continue;
            }
            assert_eq!(q.done().unwrap().status, OK);
        }
    };
    // While nothing is known, all paths are alike.
    read(nr / 4);
    let before = reads();
    read(nr);
    let after = reads();
    let share = |at: usize| (after[at] - before[at]) as f64;
    let all: f64 = (0..NAMES.len()).map(share).sum();
    let of_d = share(3) / all * 100.0;
    (rig, of_d)
}

/// The case published with historical-service-time: a quarter of all with service-time at depth 1, and the slow path
/// could do one in thirteen.
#[test]
fn a_path_that_is_four_times_slower_gets_less() {
    need!(faulty);
    for (depth, nr) in [(1, 250), (4, 800)] {
        for selector in ["service-time", "historical-service-time", "learned-service-time"] {
            let (rig, share) = share_of_the_slow_path(selector, depth, nr);
            println!(
                "depth {depth:2}: {share:4.1} % by a path four times slower than three others, {selector}"
            );
            if selector == "learned-service-time" {
                assert!((2.0..15.0).contains(&share), "{share} % with {selector} at depth {depth}");
            }
            assert_eq!(rig.server.count_log("path failed"), 0, "{}", rig.server.stderr());
        }
    }
}

#[test]
fn what_was_learned_is_shown() {
    need!(faulty);
    let (rig, _) = share_of_the_slow_path("learned-service-time", 4, 200);
    let read_ns = |rig: &Rig, name: &str| {
        rig.status().path(&rig.fs.path(name))["selector_info"]["read_ns"].as_u64().unwrap()
    };
    let times = NAMES.map(|name| read_ns(&rig, name));
    assert!(times.iter().all(|ns| *ns >= FAST_MS * 1_000_000), "{times:?}");
    assert!(
        times[3] >= SLOW_MS * 1_000_000 && times[3] > times[0].min(times[1]).min(times[2]) * 2,
        "{times:?}"
    );
    let line = rig.control().run("status").unwrap();
    assert!(NAMES.iter().all(|name| line.contains(&format!(" {} 0 ", read_ns(&rig, name)))), "{line}");
    // Other arguments or paths make another table; what is known of a path goes along.
    rig.tell("remove_path", "c");
    assert_eq!(read_ns(&rig, "d"), times[3]);

    let (rig, _) = share_of_the_slow_path("historical-service-time", 4, 200);
    let average_ns =
        |name: &str| rig.status().path(&rig.fs.path(name))["selector_info"]["average_ns"].as_u64().unwrap();
    assert!(average_ns("d") > average_ns("a"), "{} and {}", average_ns("d"), average_ns("a"));
}
