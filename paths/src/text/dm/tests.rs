use polypath_selector::Kind;
use proptest::prelude::*;

use super::super::strategy;
use super::*;

const SEED: &str = "0 1563037696 multipath 0 0 1 1 service-time 0 1 2 /dev/skd0 1000 1";

#[test]
fn lines_of_the_kernels_documentation_and_mailing_list_are_accepted_and_echoed() {
    let table = [
        SEED,
        // Documentation/admin-guide/device-mapper/dm-service-time.rst
        "0 10 multipath 0 0 1 1 service-time 0 2 2 8:0 128 1 8:16 128 4",
        // Documentation/admin-guide/device-mapper/dm-queue-length.rst
        "0 10 multipath 0 0 1 1 queue-length 0 2 1 8:0 128 8:16 128",
        "0 41943040 multipath 1 queue_if_no_path 1 alua 2 1 round-robin 0 1 1 8:0 1 round-robin 0 1 1 8:16 1",
        "0 41943040 multipath 3 queue_if_no_path pg_init_retries 50 1 emc 1 1 historical-service-time 2 972 2 1 1 8:0 1",
        "0 8 multipath 0 0 1 1 io-affinity 0 2 1 /dev/sda ff /dev/sdb ff00",
        "0 8 multipath 0 0 1 1 learned-service-time 1 6 1 1 /dev/sda 1",
        "0 8 multipath 8 queue_if_no_path pg_init_retries 1 pg_init_delay_msecs 2000 retain_attached_hw_handler \
         queue_mode bio 0 0 0",
        "0 8 multipath 0 3 hp_sw some words 1 1 round-robin 0 1 1 /dev/disk/by-path/a\\ b 1",
    ];
    for line in table {
        let spec = TableSpec::parse_dm(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(spec.to_dm().as_deref(), Ok(line));
        assert_eq!(spec.check(), Ok(()));
    }
}

#[test]
fn the_line_of_one_path_means_what_it_says() {
    let spec = TableSpec::parse_dm(SEED).unwrap();
    assert_eq!(spec.length_sectors, Some(1_563_037_696));
    assert_eq!((spec.no_path_retry, &spec.features), (None, &Features::default()));
    assert_eq!((spec.groups.len(), spec.initial_group), (1, 1));
    let group = &spec.groups[0];
    assert_eq!((group.selector, group.paths.len()), (Kind::ServiceTime, 1));
    let path = &group.paths[0];
    assert_eq!((path.args.repeat_count, path.args.relative_throughput), (1000, 1));
}

#[test]
fn laxities_of_the_kernel_read_as_their_plain_forms() {
    let table = [
        // Keywords in any case.
        (
            "0 8 multipath 5 Queue_If_No_Path PG_INIT_RETRIES 7 QUEUE_MODE BIO 0 0 0",
            "0 8 multipath 5 queue_if_no_path pg_init_retries 7 queue_mode bio 0 0 0",
        ),
        // Request mode is the default, under both names.
        ("0 8 multipath 2 queue_mode RQ 0 0 0", "0 8 multipath 0 0 0 0"),
        ("0 8 multipath 2 queue_mode mq 0 0 0", "0 8 multipath 0 0 0 0"),
        // The last one counts.
        (
            "0 8 multipath 4 pg_init_retries 7 pg_init_retries 8 0 0 0",
            "0 8 multipath 2 pg_init_retries 8 0 0 0",
        ),
        // Optional arguments.
        ("0 8 multipath 0 0 1 1 service-time 0 1 0 a", "0 8 multipath 0 0 1 1 service-time 0 1 2 a 1 1"),
        ("0 8 multipath 0 0 1 1 service-time 0 1 1 a 5", "0 8 multipath 0 0 1 1 service-time 0 1 2 a 5 1"),
        (
            "0 8 multipath 0 0 1 1 historical-service-time 0 1 0 a",
            "0 8 multipath 0 0 1 1 historical-service-time 2 972 0 1 1 a 1",
        ),
        // An initial group that does not exist is none.
        ("0 8 multipath 0 0 1 1024 round-robin 0 1 1 a 1", "0 8 multipath 0 0 1 1 round-robin 0 1 1 a 1"),
        // White space of any kind, zeros in front.
        (" 00 010\tmultipath\n0 0  0 0\n", "0 10 multipath 0 0 0 0"),
        // Words that are also keywords.
        (
            "0 8 multipath 0 1 multipath 1 1 round-robin 0 1 1 round-robin 1",
            "0 8 multipath 0 1 multipath 1 1 round-robin 0 1 1 round-robin 1",
        ),
    ];
    for (given, printed) in table {
        let spec = TableSpec::parse_dm(given).unwrap_or_else(|error| panic!("{given}: {error}"));
        assert_eq!(spec.to_dm().as_deref(), Ok(printed));
        assert_eq!(TableSpec::parse_dm(printed), Ok(spec));
    }
}

#[test]
fn every_error_names_the_word_its_place_and_the_rule() {
    // Word, column and the end of the message.
    let table: [(&str, usize, usize, &str); 49] = [
        ("", 1, 1, "the line ends where the start sector, 0, is expected"),
        (
            "mpatha: 0 8 multipath",
            1,
            1,
            "`mpatha:` is not 0, the sector where the only target of a table starts",
        ),
        ("8 8 multipath 0 0 0 0", 1, 1, "`8` is not 0, the sector where the only target of a table starts"),
        ("0", 2, 2, "the line ends where a length in sectors is expected"),
        (
            "0 0 multipath 0 0 0 0",
            2,
            3,
            "`0` is not a length in sectors, a number from 1 to 36028797018963967",
        ),
        ("0 36028797018963968", 2, 3, "a number from 1 to 36028797018963967"),
        ("0 8k multipath", 2, 3, "`8k` is not a length in sectors, a number from 1 to 36028797018963967"),
        ("0 8", 3, 4, "the line ends where the target `multipath` is expected"),
        ("0 8 linear 8:0 0", 3, 5, "`linear` is not `multipath`, the only target there is here"),
        ("0 8 Multipath 0", 3, 5, "`Multipath` is not `multipath`, the only target there is here"),
        ("0 8 multipath", 4, 14, "the line ends where a number of feature words is expected"),
        (
            "0 8 multipath 9 a b c d e f g h i",
            4,
            15,
            "`9` is not a number of feature words, a number from 0 to 8",
        ),
        ("0 8 multipath x", 4, 15, "`x` is not a number of feature words, a number from 0 to 8"),
        ("0 8 multipath 2 queue_if_no_path", 4, 15, "`2` announces more words than follow (1)"),
        (
            "0 8 multipath 1 queue_if_not_path 0 0 0",
            5,
            17,
            "`queue_if_not_path` is not a feature, valid are queue_if_no_path, retain_attached_hw_handler, \
             pg_init_retries, pg_init_delay_msecs, queue_mode",
        ),
        (
            "0 8 multipath 2 queue_if_no_path pg_init_retries 5 0 0 0",
            6,
            34,
            "`pg_init_retries` needs a value, which is not among the announced feature words (2)",
        ),
        (
            "0 8 multipath 1 pg_init_delay_msecs 0 0 0",
            5,
            17,
            "`pg_init_delay_msecs` needs a value, which is not among the announced feature words (1)",
        ),
        (
            "0 8 multipath 1 queue_mode 0 0 0",
            5,
            17,
            "`queue_mode` needs a value, which is not among the announced feature words (1)",
        ),
        (
            "0 8 multipath 2 pg_init_retries 0 0 0 0",
            6,
            33,
            "`0` is not a number of pg_init retries, a number from 1 to 50",
        ),
        ("0 8 multipath 2 pg_init_retries 51 0 0 0", 6, 33, "a number from 1 to 50"),
        (
            "0 8 multipath 2 pg_init_delay_msecs 60001 0 0 0",
            6,
            37,
            "`60001` is not a pg_init delay in ms, a number from 0 to 60000",
        ),
        ("0 8 multipath 2 queue_mode blk 0 0 0", 6, 28, "`blk` is not a queue mode, valid are bio, rq, mq"),
        ("0 8 multipath 0", 5, 16, "the line ends where a number of hardware handler words is expected"),
        (
            "0 8 multipath 0 1025",
            5,
            17,
            "`1025` is not a number of hardware handler words, a number from 0 to 1024",
        ),
        ("0 8 multipath 0 3 alua 0", 5, 17, "`3` announces more words than follow (2)"),
        ("0 8 multipath 0 0", 6, 18, "the line ends where a number of groups is expected"),
        ("0 8 multipath 0 0 1025 1", 6, 19, "`1025` is not a number of groups, a number from 0 to 1024"),
        ("0 8 multipath 0 0 1", 7, 20, "the line ends where an initial group is expected"),
        ("0 8 multipath 0 0 1 1025", 7, 21, "`1025` is not an initial group, a number from 0 to 1024"),
        (
            "0 8 multipath 0 0 1 0 round-robin 0 1 1 a 1",
            7,
            21,
            "`0` is not an initial group: 0 without groups, else from 1 to their number (1)",
        ),
        (
            "0 8 multipath 0 0 0 1",
            7,
            21,
            "`1` is not an initial group: 0 without groups, else from 1 to their number (0)",
        ),
        ("0 8 multipath 0 0 0 0 0", 8, 23, "`0` is one word too many: the announced groups (0) are complete"),
        (
            "0 8 multipath 0 0 1 1 round-robin 0 1 1 a 1 round-robin 0 1 1 b 1",
            14,
            45,
            "`round-robin` is one word too many: the announced groups (1) are complete",
        ),
        ("0 8 multipath 0 0 2 1 round-robin 0 1 1 a 1", 14, 44, "the line ends after 1 of 2 groups"),
        ("0 8 multipath 0 0 1 1", 8, 22, "the line ends after 0 of 1 groups"),
        ("0 8 multipath 0 0 1 1 Round-Robin 0", 8, 23, UNKNOWN_SELECTOR),
        (
            "0 8 multipath 0 0 1 1 round-robin",
            9,
            34,
            "the line ends where a number of selector arguments is expected",
        ),
        ("0 8 multipath 0 0 1 1 round-robin 9 1 1 a 1", 9, 35, "`9` announces more words than follow (4)"),
        (
            "0 8 multipath 0 0 1 1 round-robin 1 x 1 1 a 1",
            10,
            37,
            "argument 1 of round-robin: `x` is one word too many, at most 0 expected",
        ),
        (
            "0 8 multipath 0 0 1 1 historical-service-time 2 972 x 1 1 a 1",
            11,
            53,
            "argument 2 of historical-service-time: `x` is not a threshold, a number from 0 to 4294967295",
        ),
        ("0 8 multipath 0 0 1 1 round-robin 0", 10, 36, "the line ends where a number of paths is expected"),
        (
            "0 8 multipath 0 0 1 1 round-robin 0 0 1",
            10,
            37,
            "`0` is not a number of paths, a number from 1 to 1024",
        ),
        (
            "0 8 multipath 0 0 1 1 round-robin 0 1",
            11,
            38,
            "the line ends where a number of arguments per path is expected",
        ),
        ("0 8 multipath 0 0 1 1 round-robin 0 1 1", 12, 40, "the line ends where a device is expected"),
        (
            "0 8 multipath 0 0 1 1 service-time 0 2 2 a 1 1 b 1",
            17,
            51,
            "the line ends where an argument of the last device is expected",
        ),
        (
            "0 8 multipath 0 0 1 1 service-time 0 2 2 a 1 1 b 1 101",
            17,
            52,
            "argument 2 of service-time: `101` is not a relative throughput, a number from 0 to 100",
        ),
        (
            "0 8 multipath 0 0 1 1 service-time 0 1 3 a 1 1 1",
            15,
            48,
            "argument 3 of service-time: `1` is one word too many, at most 2 expected",
        ),
        (
            "0 8 multipath 0 0 1 1 io-affinity 0 1 0 a",
            11,
            39,
            "argument 1 of io-affinity: one word is missing, 1 expected",
        ),
        (
            "0 8 multipath 0 0 1 1 io-affinity 0 2 1 /dev/sda 3 /dev/sdb 1",
            15,
            61,
            "`1` names no queue that is left over by the earlier paths of its group",
        ),
    ];
    for (line, number, column, message) in table {
        let error = TableSpec::parse_dm(line).unwrap_err();
        assert_eq!((error.number, error.column), (number, column), "{line}: {error}");
        let message = if message.contains("`") || message.starts_with("the") || message.starts_with("arg") {
            format!("word {number}, column {column}: {message}")
        } else {
            message.into()
        };
        assert!(error.to_string().ends_with(&message), "{line}: {error}");
        assert_points_at_its_word(line, &error);
    }
}

const UNKNOWN_SELECTOR: &str = "unknown path selector `Round-Robin`, valid are round-robin, queue-length, \
                                service-time, historical-service-time, io-affinity, learned-service-time";

/// The place of an error is the place of its word.
fn assert_points_at_its_word(line: &str, error: &TextError) {
    let words = match Words::split(line) {
        Ok(words) => words,
        Err(split_error) => return assert_eq!(error, &split_error),
    };
    let mut words = words.cursor();
    words.words(error.number - 1);
    match words.word("") {
        Ok(word) => assert_eq!((&word.text, word.column), (&error.word, error.column), "{line}: {error}"),
        Err(end) => assert_eq!((end.number, end.column), (error.number, error.column), "{line}: {error}"),
    }
}

#[test]
fn limits_hold_at_their_ends() {
    let paths: String = (0..1024).map(|path| format!(" /dev/p{path} 1")).collect();
    let group = format!("round-robin 0 1024 1{paths}");
    let spec = TableSpec::parse_dm(&format!("0 8 multipath 0 0 1 1 {group}")).unwrap();
    assert_eq!(spec.paths().count(), 1024);
    let error = TableSpec::parse_dm(&format!("0 8 multipath 0 0 1 1 round-robin 0 1025 1{paths} x 1"));
    assert_eq!(error.unwrap_err().word, "1025");

    let groups = " round-robin 0 1 1 a 1".repeat(1024);
    let spec = TableSpec::parse_dm(&format!("0 8 multipath 0 0 1024 1024{groups}")).unwrap();
    assert_eq!((spec.groups.len(), spec.initial_group), (1024, 1024));

    let handler = " word".repeat(1024);
    let spec = TableSpec::parse_dm(&format!("0 8 multipath 0 1024{handler} 0 0")).unwrap();
    assert_eq!(spec.hw_handler.len(), 1024);
}

#[test]
fn without_a_length_there_is_no_line() {
    let mut spec = TableSpec::one_group(Kind::RoundRobin, ["a"]);
    assert_eq!(spec.to_dm(), Err(NoLength));
    spec.length_sectors = Some(8);
    assert_eq!(spec.to_dm().unwrap(), "0 8 multipath 0 0 1 1 round-robin 0 1 1 a 1");
}

proptest! {
    #[test]
    fn any_table_reads_back_from_its_line(spec in strategy::dm_spec()) {
        let line = spec.to_dm().unwrap();
        prop_assert!(!line.contains(char::is_control));
        prop_assert_eq!(TableSpec::parse_dm(&line), Ok(spec));
    }

    #[test]
    fn a_line_says_of_no_path_retry_what_it_can(spec in strategy::spec()) {
        let line = TableSpec { length_sectors: Some(8), ..spec.clone() }.to_dm().unwrap();
        let read = TableSpec::parse_dm(&line).unwrap();
        let queues = spec.no_path_retry.is_some_and(|retry| retry != NoPathRetry::Fail);
        prop_assert_eq!(read.no_path_retry, queues.then_some(NoPathRetry::Queue));
        prop_assert_eq!(read.groups, spec.groups);
    }

    #[test]
    fn any_text_is_read_or_refused(line in any::<String>()) {
        if let Err(error) = TableSpec::parse_dm(&line) {
            assert_points_at_its_word(&line, &error);
        }
    }

    /// Lines that are nearly right get much further than random text.
    #[test]
    fn any_damaged_line_is_read_or_refused(
        spec in strategy::dm_spec(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), 0u8..3, "[0-9]{1,5}|[a-z\\\\]{1,3}"), 1..4),
    ) {
        let line = spec.to_dm().unwrap();
        let mut words: Vec<_> = line.split(' ').collect();
        for (at, how, word) in &damage {
            let at = at.index(words.len());
            match how {
                0 => _ = words.remove(at),
                1 => words.insert(at, word),
                _ => words[at] = word,
            }
        }
        let line = words.join(" ");
        match TableSpec::parse_dm(&line) {
            Ok(spec) => prop_assert_eq!(spec.check(), Ok(())),
            Err(error) => {
                assert_points_at_its_word(&line, &error);
                prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}
