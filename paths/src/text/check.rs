//! Tables that were made by hand: can the text forms express them?

use polypath_selector::{GroupArgs, Kind, NewError, PathArgs, Selector};

use super::error::{Rule, Sentence};
use super::spec::{
    Features, GROUP_PATHS_MAX, GROUPS_MAX, GroupSpec, LENGTH_SECTORS_MAX, PathSpec, TableSpec, WORDS_MAX,
    path_words,
};
use super::words::number_in;

/// A value of a [`TableSpec`] that no text form accepts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}", place(.group, .path), Sentence(.value, .rule))]
pub struct SpecError {
    /// Number of the group that it is in, from 1, if it is in one.
    pub group: Option<usize>,
    /// Number of the path in the group, from 1, if it is in one.
    pub path: Option<usize>,
    /// The value as text.
    pub value: String,
    /// What it breaks.
    pub rule: Rule,
}

fn place(group: &Option<usize>, path: &Option<usize>) -> String {
    let part = |name, number: &Option<usize>| number.map(|number| format!("{name} {number}: "));
    part("group", group).unwrap_or_default() + &part("path", path).unwrap_or_default()
}

impl TableSpec {
    /// Whether every value keeps the rules of the text forms, so that what is printed can be read back.
    ///
    /// What was parsed does; this is for tables that a program has put together or changed.
    ///
    /// # Errors
    /// The first value that breaks a rule.
    pub fn check(&self) -> Result<(), SpecError> {
        let (name, least, most) = Features::PG_INIT_RETRIES;
        number(self.features.pg_init_retries, name, least, most)?;
        let (name, least, most) = Features::PG_INIT_DELAY;
        number(self.features.pg_init_delay_msecs, name, least, most)?;
        number(self.length_sectors, "a length in sectors", 1, LENGTH_SECTORS_MAX)?;
        number(Some(self.hw_handler.len()), "a number of hardware handler words", 0, WORDS_MAX as u64)?;
        self.hw_handler.iter().try_for_each(|word| name_rule(word).map_err(|rule| bad(word, rule)))?;
        let groups = self.groups.len();
        number(Some(groups), "a number of groups", 0, GROUPS_MAX as u64)?;
        if self.initial_group > groups || (self.initial_group == 0) != (groups == 0) {
            return Err(bad(self.initial_group, Rule::InitialGroup { groups }));
        }
        (1..).zip(&self.groups).try_for_each(|(group, spec)| {
            check_group(spec).map_err(|error| SpecError { group: Some(group), ..error })
        })
    }
}

fn check_group(group: &GroupSpec) -> Result<(), SpecError> {
    let words = group.arg_words();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    GroupArgs::parse(group.selector, &words).map_err(|error| bad("", error))?;
    number(Some(group.paths.len()), "a number of paths", 1, GROUP_PATHS_MAX as u64)?;
    (1..).zip(&group.paths).try_for_each(|(path, spec)| {
        check_path(group.selector, spec).map_err(|error| SpecError { path: Some(path), ..error })
    })?;
    match path_without_queue(group) {
        Some(path) => {
            let words = path_words(group.selector, &group.paths[path].args);
            Err(SpecError { path: Some(path + 1), ..bad(words.join(" "), Rule::QueuesTaken) })
        }
        None => Ok(()),
    }
}

fn check_path(selector: Kind, path: &PathSpec) -> Result<(), SpecError> {
    name_rule(&path.device).map_err(|rule| bad(&path.device, rule))?;
    let words = path_words(selector, &path.args);
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    PathArgs::parse(selector, &words).map_err(|error| bad("", error))?;
    Ok(())
}

fn number<T: ToString>(value: Option<T>, name: &'static str, least: u64, most: u64) -> Result<(), SpecError> {
    let Some(value) = value.map(|value| value.to_string()) else { return Ok(()) };
    number_in::<u64>(&value, name, least, most).map(|_| ()).map_err(|rule| bad(value, rule))
}

fn bad(value: impl ToString, rule: impl Into<Rule>) -> SpecError {
    SpecError { group: None, path: None, value: value.to_string(), rule: rule.into() }
}

/// What a device or a word of the hardware handler must be.
pub(super) fn name_rule(name: &str) -> Result<(), Rule> {
    if name.is_empty() {
        return Err(Rule::Empty);
    }
    if name.chars().any(char::is_control) { Err(Rule::Control) } else { Ok(()) }
}

/// io-affinity: the index of the first path all of whose queues have an earlier path (with `dm-ps-io-affinity.c`, it
/// cannot be added then).
pub(super) fn path_without_queue(group: &GroupSpec) -> Option<usize> {
    if group.selector != Kind::IoAffinity {
        return None;
    }
    let args: Vec<_> = group.paths.iter().map(|path| path.args.clone()).collect();
    match Selector::new(group.selector, &group.args, &args, 0) {
        Err(NewError::NoQueueLeft { path }) => Some(path),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::strategy;
    use super::*;
    use proptest::prelude::*;

    type Change = fn(&mut TableSpec);

    #[test]
    fn every_rule_names_its_place() {
        let table: [(Change, &str); 13] = [
            (
                |t| t.features.pg_init_retries = Some(0),
                "`0` is not a number of pg_init retries, a number from 1 to 50",
            ),
            (
                |t| t.features.pg_init_delay_msecs = Some(60_001),
                "`60001` is not a pg_init delay in ms, a number from 0 to 60000",
            ),
            (
                |t| t.length_sectors = Some(0),
                "`0` is not a length in sectors, a number from 1 to 36028797018963967",
            ),
            (|t| t.hw_handler = vec!["alua".into(), String::new()], "`` is empty"),
            (|t| t.hw_handler = vec!["a\nb".into()], r"`a\nb` has a control character"),
            (
                |t| t.hw_handler = vec!["x".into(); 1025],
                "`1025` is not a number of hardware handler words, a number from 0 to 1024",
            ),
            (
                |t| t.groups = vec![t.groups[0].clone(); 1025],
                "`1025` is not a number of groups, a number from 0 to 1024",
            ),
            (
                |t| t.initial_group = 3,
                "`3` is not an initial group: 0 without groups, else from 1 to their number (2)",
            ),
            (
                |t| t.groups.clear(),
                "`1` is not an initial group: 0 without groups, else from 1 to their number (0)",
            ),
            (|t| t.groups[1].paths.clear(), "group 2: `0` is not a number of paths, a number from 1 to 1024"),
            (|t| t.groups[1].paths[1].device.clear(), "group 2: path 2: `` is empty"),
            (
                |t| t.groups[1].paths[1].args.queue_mask = None,
                "group 2: path 2: argument 1 of io-affinity: one word is missing, 1 expected",
            ),
            (
                |t| t.groups[1].paths[1].args.queue_mask = "5".parse().ok(),
                "group 2: path 2: `5` names no queue that is left over by the earlier paths of its group",
            ),
        ];
        let mut good = TableSpec::one_group(Kind::ServiceTime, ["/dev/sda"]);
        good.groups.extend(TableSpec::one_group(Kind::IoAffinity, ["/dev/sdb", "/dev/sdc"]).groups);
        assert_eq!(good.check(), Ok(()));
        for (change, message) in table {
            let mut spec = good.clone();
            change(&mut spec);
            assert_eq!(spec.check().unwrap_err().to_string(), message);
        }
        let mut spec = good;
        spec.groups[0].paths[0].args.relative_throughput = 101;
        let error = spec.check().unwrap_err();
        assert_eq!((error.group, error.path), (Some(1), Some(1)));
        assert!(error.to_string().contains("`101` is not a relative throughput"), "{error}");
        spec.groups[0].selector = Kind::HistoricalServiceTime;
        spec.groups[0].args.base_weight = 1024;
        let error = spec.check().unwrap_err();
        assert_eq!((error.group, error.path), (Some(1), None));
        assert!(error.to_string().contains("`1024` is not a base weight"), "{error}");
    }

    proptest! {
        #[test]
        fn what_the_other_tests_use_is_good(spec in strategy::spec()) {
            prop_assert_eq!(spec.check(), Ok(()));
        }
    }
}
