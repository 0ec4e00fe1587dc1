use proptest::prelude::*;

use super::super::strategy;
use super::*;

const FULL: &str = r#"# A disk with two paths that are good and one that is a last resort.
[table]
length_sectors = 1563037696
no_path_retry = 30
initial_group = 1
retain_attached_hw_handler = true
pg_init_retries = 5
pg_init_delay_msecs = 2000
queue_mode = "bio"
hw_handler = ["alua", "1"]

[[table.group]]
selector = "service-time"
selector_args = []
[[table.group.path]]
device = "/dev/skd0"
weight = 4
[[table.group.path]]
device = "/dev/skd1"
args = ["1000", "1"]

[[table.group]]
selector = "historical-service-time"
selector_args = [972, "2"]
path = [{ device = "/dev/sd b" }]
"#;

#[test]
fn every_key_is_read() {
    let spec = TableSpec::parse_toml(FULL).unwrap();
    assert_eq!(spec.no_path_retry, "30".parse().ok());
    assert_eq!(
        spec.to_dm().unwrap(),
        "0 1563037696 multipath 8 queue_if_no_path pg_init_retries 5 pg_init_delay_msecs 2000 \
         retain_attached_hw_handler queue_mode bio 2 alua 1 2 1 service-time 0 2 2 /dev/skd0 1 4 /dev/skd1 1000 1 \
         historical-service-time 2 972 2 1 1 /dev/sd\\ b 1"
    );
    assert_eq!(spec.check(), Ok(()));
    assert_eq!(TableSpec::parse_toml(&spec.to_toml()), Ok(spec));
}

#[test]
fn defaults_are_the_documented_ones() {
    let spec = TableSpec::parse_toml("[table]\n[[table.group]]\n[[table.group.path]]\ndevice = 'a'").unwrap();
    assert_eq!(spec, TableSpec::one_group(Kind::LearnedServiceTime, ["a"]));
    assert_eq!(TableSpec::parse_toml("[table]"), Ok(TableSpec::default()));
    assert_eq!(
        TableSpec::parse_toml("table.no_path_retry = 0").unwrap().no_path_retry,
        Some(NoPathRetry::Fail)
    );
    let affine = "[[table.group]]\nselector = 'io-affinity'\npath = [{ device = 'a' }, { device = 'b' }]";
    assert_eq!(TableSpec::parse_toml(affine), Ok(TableSpec::one_group(Kind::IoAffinity, ["a", "b"])));
}

#[test]
fn a_section_can_be_part_of_another_file() {
    #[derive(serde::Deserialize)]
    struct Config {
        socket: String,
        table: TableSection,
    }
    let source = "socket = 's'\n[table]\nlength_sectors = 0";
    let config: Config = ::toml::from_str(source).unwrap();
    assert_eq!(config.socket, "s");
    let error = config.table.to_spec(source).unwrap_err();
    assert_eq!((error.line, error.column), (3, 18));
    let error = ::toml::from_str::<Config>("socket = 's'").map_err(|error| TomlError::syntax("", &error));
    assert_eq!(error.err().unwrap().to_string(), "line 1, column 1: missing field `table`");
}

#[test]
fn every_error_has_line_column_and_rule() {
    // Before the offending value, the value, what follows; the message.
    let table: [(&str, &str, &str, &str); 38] = [
        ("", "", "", "missing field `table`"),
        ("[table]\n", "nonsense", " = 1", "unknown field `nonsense`, expected one of `length_sectors`"),
        ("[table]\n[", "other", "]\nx = 1", "unknown field `other`, expected `table`"),
        ("[table]\nlength_sectors = ", "abc", "", "string values must be quoted"),
        ("[table]\nlength_sectors = ", "'x'", "", "invalid type: string \"x\", expected i64"),
        ("[table]\nlength_sectors = ", "0", "", "`0` is not a length in sectors, a number from 1 to"),
        ("[table]\nlength_sectors = ", "-8", "", "`-8` is not a length in sectors, a number from 1 to"),
        ("[table]\nlength_sectors = ", "36028797018963968", "", "`36028797018963968` is not a length"),
        (
            "[table]\nno_path_retry = ",
            "'never'",
            "",
            "invalid value: string \"never\", expected \"fail\", \"queue\"",
        ),
        ("[table]\nno_path_retry = ", "-1", "", "invalid value: string \"-1\", expected \"fail\", \"queue\""),
        (
            "[table]\nno_path_retry = ",
            "true",
            "",
            "invalid type: boolean `true`, expected \"fail\", \"queue\" or a number",
        ),
        ("[table]\ninitial_group = ", "1", "", "`1` is not an initial group: 0 without groups"),
        (
            "[table]\ninitial_group = ",
            "2",
            "\n[[table.group]]\npath = [{device='a'}]",
            "else from 1 to their number (1)",
        ),
        (
            "[table]\ninitial_group = ",
            "0",
            "\n[[table.group]]\npath = [{device='a'}]",
            "else from 1 to their number (1)",
        ),
        ("[table]\nretain_attached_hw_handler = ", "1", "", "invalid type: integer `1`, expected a boolean"),
        (
            "[table]\npg_init_retries = ",
            "51",
            "",
            "`51` is not a number of pg_init retries, a number from 1 to 50",
        ),
        (
            "[table]\npg_init_retries = ",
            "0",
            "",
            "`0` is not a number of pg_init retries, a number from 1 to 50",
        ),
        (
            "[table]\npg_init_delay_msecs = ",
            "60001",
            "",
            "`60001` is not a pg_init delay in ms, a number from 0 to 60000",
        ),
        ("[table]\nqueue_mode = ", "'blk'", "", "`blk` is not a queue mode, valid are bio, rq, mq"),
        ("[table]\nhw_handler = ['alua', ", "''", "]", "`` is empty"),
        ("[table]\nhw_handler = [", r#""a\nb""#, "]", r"`a\nb` has a control character"),
        (
            "[[table.group]]\nselector = ",
            "'Service-time'",
            "",
            "unknown path selector `Service-time`, valid are round-robin,",
        ),
        ("[[table.group]]\nselector = ", r#""\n""#, "", r"`\n` has a control character"),
        (
            "[[table.group]]\nselector = 'round-robin'\nselector_args = [",
            "1",
            "]",
            "argument 1 of round-robin: `1` is one word too many, at most 0 expected",
        ),
        (
            "[[table.group]]\nselector_args = [",
            "'1001'",
            "]",
            "argument 1 of learned-service-time: `1001` is not a share ratio, a number from 1 to 1000",
        ),
        (
            "[table]\n",
            "[[table.group]]",
            "\nselector = 'round-robin'",
            "`0` is not a number of paths, a number from 1 to 1024",
        ),
        ("[[table.group]]\n", "[[table.group.path]]", "\nweight = 1", "missing field `device`"),
        ("[[table.group]]\n[[table.group.path]]\ndevice = ", "''", "", "`` is empty"),
        (
            "[[table.group]]\n[[table.group.path]]\ndevice = ",
            "\"\\u0000\"",
            "",
            r"`\0` has a control character",
        ),
        (
            "[[table.group]]\n[[table.group.path]]\ndevice = 'a'\nweight = ",
            "1",
            "",
            "`1` is a weight, which only paths of service-time have",
        ),
        (
            "[[table.group]]\nselector = 'service-time'\n[[table.group.path]]\ndevice = 'a'\nweight = ",
            "101",
            "",
            "`101` is not a weight, a number from 0 to 100",
        ),
        (
            "[[table.group]]\nselector = 'service-time'\n[[table.group.path]]\ndevice = 'a'\nweight = ",
            "2",
            "\nargs = [1]",
            "`2` is a weight beside `args`, which have it as their second word",
        ),
        (
            "[[table.group]]\nselector = 'service-time'\n[[table.group.path]]\ndevice = 'a'\nargs = [1, ",
            "101",
            "]",
            "argument 2 of service-time: `101` is not a relative throughput, a number from 0 to 100",
        ),
        (
            "[[table.group]]\nselector = 'io-affinity'\n[[table.group.path]]\ndevice = 'a'\nargs = ",
            "[]",
            "",
            "argument 1 of io-affinity: one word is missing, 1 expected",
        ),
        (
            "[[table.group]]\nselector = 'io-affinity'\npath = [{ device = 'é', args = ['f'] }, { device = 'b', args = ",
            "['1']",
            " }]",
            "`1` names no queue that is left over by the earlier paths of its group",
        ),
        (
            "[[table.group]]\nselector = 'io-affinity'\n[[table.group.path]]\ndevice = 'a'\nargs = [",
            "0xff",
            "]",
            "`255` needs quotes: the digits of a mask are hexadecimal",
        ),
        ("[table]\n", "\"a\\u0007\\n\"", " = 1", "unknown field `a\\u{7}, `"),
        (
            "[table]\nhw_handler = [",
            "1.5",
            "]",
            "invalid type: floating point `1.5`, expected a word or a number",
        ),
    ];
    for (before, value, after, message) in table {
        let source = format!("{before}{value}{after}");
        let error = TableSpec::parse_toml(&source).unwrap_err();
        assert!(error.to_string().contains(message), "{source}\n{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error:?}");
        let expected = TomlError::at(&source, before.len(), error.problem.clone());
        assert_eq!(error, expected, "{source}");
    }
}

#[test]
fn a_table_is_printed_for_people() {
    let spec = TableSpec::parse_toml(FULL).unwrap();
    let printed = r#"[table]
length_sectors = 1563037696
no_path_retry = 30
initial_group = 1
retain_attached_hw_handler = true
pg_init_retries = 5
pg_init_delay_msecs = 2000
queue_mode = "bio"
hw_handler = ["alua", "1"]

[[table.group]]
selector = "service-time"

[[table.group.path]]
device = "/dev/skd0"
weight = 4

[[table.group.path]]
device = "/dev/skd1"
args = ["1000", "1"]

[[table.group]]
selector = "historical-service-time"
selector_args = ["972", "2"]

[[table.group.path]]
device = "/dev/sd b"
"#;
    assert_eq!(spec.to_toml(), printed);
}

proptest! {
    #[test]
    fn any_table_reads_back(spec in strategy::spec()) {
        let source = spec.to_toml();
        prop_assert_eq!(TableSpec::parse_toml(&source), Ok(spec), "{}", source);
    }

    #[test]
    fn both_forms_of_a_table_are_the_same_table(spec in strategy::dm_spec()) {
        let by_toml = TableSpec::parse_toml(&spec.to_toml()).unwrap();
        let by_dm = TableSpec::parse_dm(&spec.to_dm().unwrap()).unwrap();
        prop_assert_eq!(by_toml, by_dm);
    }

    #[test]
    fn any_text_is_read_or_refused(source in any::<String>()) {
        if let Err(error) = TableSpec::parse_toml(&source) {
            prop_assert_eq!(error.to_string().lines().count(), 1, "{:?}", error);
        }
    }

    #[test]
    fn any_damaged_file_is_read_or_refused(
        spec in strategy::spec(),
        at in any::<prop::sample::Index>(),
        len in 0usize..20,
        with in "\\PC{0,4}|[0-9]{1,20}|'|\n",
    ) {
        let mut source: Vec<char> = spec.to_toml().chars().collect();
        let at = at.index(source.len());
        let end = source.len().min(at + len);
        source.splice(at..end, with.chars());
        let source: String = source.into_iter().collect();
        match TableSpec::parse_toml(&source) {
            Ok(spec) => prop_assert_eq!(spec.check(), Ok(())),
            Err(error) => {
                prop_assert_eq!(error.to_string().lines().count(), 1, "{:?}", error);
                prop_assert!(error.line <= source.lines().count() + 1);
            }
        }
    }
}
