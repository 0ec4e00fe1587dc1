use proptest::prelude::*;
use serde_json::json;

use super::super::strategy;
use super::*;

fn idle(line: &str) -> TableStatus {
    TableStatus::idle(&TableSpec::parse_dm(line).unwrap(), 0)
}

/// Two groups, the second of which is in use.
fn busy() -> TableStatus {
    let mut status = idle(
        "0 41943040 multipath 1 queue_if_no_path 2 alua x 2 1 round-robin 0 2 1 8:0 1000 /dev/a\\ b 1 \
         historical-service-time 0 1 1 8:32 1000",
    );
    status.next_group = None;
    status.current_group = Some(2);
    status.groups[0].bypassed = true;
    status.groups[0].paths[1].active = false;
    status.groups[0].paths[1].fail_count = 4_294_967_295;
    let path = &mut status.groups[1].paths[0];
    path.info = PathInfo::HistoricalServiceTime { average: 52_000_768, in_flight: 2, stale_after_ns: 7 };
    path.in_flight = 2;
    path.in_flight_bytes = 8192;
    path.last_error = Some("EIO".into());
    status
}

#[test]
fn info_and_table_of_the_kernels_documentation() {
    // The examples of dm-service-time.rst and dm-queue-length.rst in Documentation/admin-guide/device-mapper.
    let table = [
        (
            "0 10 multipath 0 0 1 1 service-time 0 2 2 8:0 128 1 8:16 128 4",
            "0 10 multipath 2 0 0 0 1 1 E 0 2 2 8:0 A 0 0 1 8:16 A 0 0 4",
            "0 10 multipath 0 0 1 1 service-time 0 2 2 8:0 1 1 8:16 1 4",
        ),
        (
            "0 10 multipath 0 0 1 1 queue-length 0 2 1 8:0 128 8:16 128",
            "0 10 multipath 2 0 0 0 1 1 E 0 2 1 8:0 A 0 0 8:16 A 0 0",
            "0 10 multipath 0 0 1 1 queue-length 0 2 1 8:0 1 8:16 1",
        ),
    ];
    for (line, info, table) in table {
        let status = idle(line);
        assert_eq!((status.dmsetup_status().as_str(), status.dmsetup_table().as_str()), (info, table));
    }
}

#[test]
fn info_and_table_of_every_selector() {
    let group = |words: &str| idle(&format!("0 8 multipath 0 0 1 1 {words}"));
    let table = [
        ("round-robin 0 1 1 a 5", "E 0 1 0 a A 0", "round-robin 0 1 1 a 1"),
        ("queue-length 0 1 1 a 5", "E 0 1 1 a A 0 0", "queue-length 0 1 1 a 1"),
        ("service-time 0 1 2 a 5 7", "E 0 1 2 a A 0 0 7", "service-time 0 1 2 a 1 7"),
        (
            "historical-service-time 2 900 3 1 1 a 5",
            "E 2 900 3 1 3 a A 0 1024 0 0",
            "historical-service-time 2 900 3 1 1 a 0",
        ),
        ("io-affinity 0 1 1 a ff", "E 0 1 1 a A 0 0", "io-affinity 0 1 1 a ff"),
        ("learned-service-time 0 1 0 a", "E 1 6 1 4 a A 0 0 0 0 0", "learned-service-time 1 6 1 1 a 1"),
    ];
    assert_eq!(table.len(), Kind::ALL.len());
    for (words, info, table) in table {
        let status = group(words);
        assert_eq!(status.info(), format!("2 0 0 0 1 1 {info}"));
        assert_eq!(status.table(), format!("0 0 1 1 {table}"));
    }
}

#[test]
fn info_and_table_of_a_busy_disk() {
    let mut status = busy();
    let paths = "D 0 2 0 8:0 A 0 /dev/a\\ b F 4294967295";
    assert_eq!(status.info(), format!("2 0 0 0 2 2 {paths} A 2 972 0 1 3 8:32 A 0 52000768 2 7"));
    let groups = "round-robin 0 2 1 8:0 1 /dev/a\\ b 1 historical-service-time 2 972 0 1 1 8:32 0";
    assert_eq!(status.table(), format!("1 queue_if_no_path 1 alua 2 2 {groups}"));

    // A message, a bypassed group in use, a group that was asked for.
    status.queue_if_no_path = false;
    status.features.queue_mode = QueueMode::Bio;
    status.groups[1].bypassed = true;
    status.next_group = Some(1);
    assert_eq!(status.table(), format!("2 queue_mode bio 0 2 1 {groups}"));
    assert!(status.info().starts_with("2 0 0 0 2 1 D "), "{}", status.info());
    assert!(status.info().contains(" D 2 972 0 1 3 8:32 "), "{}", status.info());
}

#[test]
fn a_disk_without_groups_has_group_0() {
    let status = idle("0 8 multipath 1 queue_if_no_path 0 0 0");
    assert_eq!(
        (status.info().as_str(), status.table().as_str()),
        ("2 0 0 0 0 0", "1 queue_if_no_path 0 0 0")
    );
    assert_eq!(status.expected_group(), 0);
    assert_eq!(status.group_state(0), GroupState::Enabled);
}

#[test]
fn json_has_every_member() {
    let mut status = busy();
    status.no_path_retry = "30".parse().unwrap();
    status.held =
        Held { nr_requests: 3, bytes: 12_288, oldest_age_ms: Some(1500), time_left_ms: Some(28_500) };
    status.extra.insert("disk".into(), json!("vda"));
    status.extra.insert("groups".into(), json!("do not replace"));
    status.groups[0].paths[1].extra.insert("failed_by".into(), json!("operator"));
    let expected = json!({
        "disk": "vda",
        "length_sectors": 41_943_040,
        "queue_if_no_path": true,
        "no_path_retry": 30,
        "retain_attached_hw_handler": false,
        "pg_init_retries": null,
        "pg_init_delay_msecs": null,
        "queue_mode": "mq",
        "hw_handler": ["alua", "x"],
        "current_group": 2,
        "next_group": null,
        "held": { "nr_requests": 3, "bytes": 12_288, "oldest_age_ms": 1500, "time_left_ms": 28_500 },
        "groups": [
            {
                "group": 1, "state": "disabled", "selector": "round-robin", "selector_args": [], "nr_active": 1,
                "paths": [
                    {
                        "device": "8:0", "state": "active", "fail_count": 0, "args": ["1000"], "in_flight": 0,
                        "in_flight_bytes": 0, "last_error": null, "selector_info": {},
                    },
                    {
                        "device": "/dev/a b", "state": "failed", "fail_count": 4_294_967_295u32, "args": ["1"],
                        "in_flight": 0, "in_flight_bytes": 0, "last_error": null, "selector_info": {},
                        "failed_by": "operator",
                    },
                ],
            },
            {
                "group": 2, "state": "active", "selector": "historical-service-time",
                "selector_args": ["972", "0"], "nr_active": 1,
                "paths": [{
                    "device": "8:32", "state": "active", "fail_count": 0, "args": ["1000"], "in_flight": 2,
                    "in_flight_bytes": 8192, "last_error": "EIO",
                    "selector_info": { "average_ns": 50_782, "in_flight": 2, "stale_after_ns": 7 },
                }],
            },
        ],
    });
    assert_eq!(status.json(), expected);
    assert_eq!(status.json().to_string().lines().count(), 1);
}

#[test]
fn json_shows_what_each_selector_knows() {
    for kind in Kind::ALL {
        let status = TableStatus::idle(&TableSpec::one_group(kind, ["a"]), 8);
        let path = &status.json()["groups"][0]["paths"][0];
        let nr_members = path["selector_info"].as_object().unwrap().len();
        assert_eq!(nr_members, kind.nr_info_words(), "{kind}");
        assert_eq!(path["args"].as_array().unwrap().len(), kind.nr_table_words(), "{kind}");
    }
}

proptest! {
    #[test]
    fn the_table_form_of_any_table_can_be_given_back(spec in strategy::spec()) {
        let status = TableStatus::idle(&spec, 8);
        let again = TableSpec::parse_dm(&status.dmsetup_table()).unwrap();
        let again = TableStatus::idle(&again, 8);
        prop_assert_eq!(again.table(), status.table());
        prop_assert_eq!(again.info(), status.info());
    }

    #[test]
    fn what_runs_is_what_was_asked_for(spec in strategy::spec()) {
        let said = spec.length_sectors.is_some() && spec.no_path_retry.is_some();
        let status = TableStatus::idle(&spec, 8);
        prop_assert_eq!(status.spec().check(), Ok(()));
        prop_assert_eq!(TableSpec::parse_toml(&status.spec().to_toml()), Ok(status.spec()));
        if said {
            prop_assert_eq!(status.spec(), spec);
        }
    }
}
