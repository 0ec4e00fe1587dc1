//! The TOML form of a table: its keys, reading, printing.

use std::fmt;
use std::ops::Range;

use ::toml::{Spanned, Value};
use polypath_selector::{ArgError, ArgProblem, GroupArgs, Kind, PathArgs};
use serde::de::{Deserialize, Deserializer, Unexpected, Visitor};

use super::check::{name_rule, path_without_queue};
use super::error::{Rule, Sentence, printable};
use super::spec::{
    Features, GROUP_PATHS_MAX, GROUPS_MAX, GroupSpec, LENGTH_SECTORS_MAX, NoPathRetry, PathSpec, QueueMode,
    TableSpec, WORDS_MAX,
};
use super::words::number_in;

mod print;

/// The `[table]` section of a TOML file, as a part of whatever else the file holds.
///
/// ```toml
/// [table]
/// length_sectors = 1563037696         # sectors of 512 bytes; default: that of the paths
/// no_path_retry = "queue"             # "queue", "fail" or seconds; default: the program's setting
/// initial_group = 1                   # group to use first, from 1; default: 1
///
/// # Kept for dm, without effect here:
/// retain_attached_hw_handler = true   # default: false
/// pg_init_retries = 5                 # 1 to 50; default: none
/// pg_init_delay_msecs = 2000          # ms, 0 to 60000; default: none
/// queue_mode = "bio"                  # "bio", "rq" or "mq"; default: "mq"
/// hw_handler = ["alua"]               # name and arguments; default: none
///
/// [[table.group]]                     # one per priority group, in order
/// selector = "service-time"           # default: "learned-service-time"
/// selector_args = []                  # words as in a dm line, or numbers; default: the selector's own
///
/// [[table.group.path]]                # one or more per group
/// device = "/dev/skd0"
/// weight = 1                          # service-time only, 0 to 100; default: 1
///
/// [[table.group.path]]
/// device = "/dev/skd1"
/// args = ["1000", "1"]                # instead of `weight`: all words as in a dm line; default: the selector's own
/// ```
///
/// No other keys are accepted. Numbers in `selector_args` and `args` may be written with or without quotes, except
/// the hexadecimal mask of io-affinity.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "the table's keys")]
pub struct TableSection {
    /// Sectors of 512 bytes.
    length_sectors: Option<Spanned<i64>>,
    no_path_retry: Option<NoPathRetry>,
    /// From 1.
    initial_group: Option<Spanned<i64>>,
    #[serde(default)]
    retain_attached_hw_handler: bool,
    pg_init_retries: Option<Spanned<i64>>,
    /// In ms.
    pg_init_delay_msecs: Option<Spanned<i64>>,
    queue_mode: Option<Spanned<String>>,
    #[serde(default)]
    hw_handler: Vec<Spanned<Word>>,
    #[serde(default)]
    group: Vec<Spanned<GroupSection>>,
}

/// One `[[table.group]]`.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a group's keys")]
struct GroupSection {
    selector: Option<Spanned<String>>,
    selector_args: Option<Spanned<Vec<Spanned<Word>>>>,
    #[serde(default)]
    path: Vec<PathSection>,
}

/// One `[[table.group.path]]`.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a path's keys")]
struct PathSection {
    device: Spanned<String>,
    weight: Option<Spanned<i64>>,
    args: Option<Spanned<Vec<Spanned<Word>>>>,
}

/// A whole file that holds only a table.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a file with a `[table]`")]
struct File {
    table: TableSection,
}

/// A word of a dm line; a number will do.
#[derive(Clone, Debug)]
struct Word {
    text: String,
    /// Whether it was a string.
    quoted: bool,
}

/// TOML that is no table. Prints on one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct TomlError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong there.
    pub problem: TomlProblem,
}

/// What is wrong with TOML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TomlProblem {
    /// It is not TOML, or not with these keys and types; in the words of the TOML reader.
    #[error("{0}")]
    Syntax(String),
    /// A value breaks a rule.
    #[error("{}", Sentence(.value, .rule))]
    Value {
        /// The value as text.
        value: String,
        /// What it breaks.
        rule: Rule,
    },
}

impl TomlError {
    /// Places an error of the TOML reader, for a program whose own file holds a [`TableSection`].
    #[must_use]
    pub fn syntax(source: &str, error: &::toml::de::Error) -> Self {
        let lines: Vec<_> = error.message().lines().map(str::trim).collect();
        let start = error.span().map_or(0, |span| span.start);
        Self::at(source, start, TomlProblem::Syntax(printable(&lines.join(", "))))
    }

    fn at(source: &str, offset: usize, problem: TomlProblem) -> Self {
        let before = source.get(..offset).unwrap_or(source);
        let line = before.rsplit('\n').next().unwrap_or_default();
        let nr_newlines = before.bytes().filter(|&byte| byte == b'\n').count();
        Self { line: nr_newlines + 1, column: line.chars().count() + 1, problem }
    }
}

/// A value that breaks a rule, and the bytes it stands in.
struct Broken {
    span: Range<usize>,
    value: String,
    rule: Rule,
}

impl Broken {
    fn new(span: Range<usize>, value: impl ToString, rule: impl Into<Rule>) -> Self {
        Self { span, value: value.to_string(), rule: rule.into() }
    }
}

impl TableSpec {
    /// Reads a TOML file that holds a `[table]` and nothing else; its keys are those of [`TableSection`].
    ///
    /// # Errors
    /// The first key or value that is not right, with its line and column.
    pub fn parse_toml(source: &str) -> Result<Self, TomlError> {
        let file: File = ::toml::from_str(source).map_err(|error| TomlError::syntax(source, &error))?;
        file.table.to_spec(source)
    }
}

impl TableSection {
    /// The table that the section describes. `source` is the text that it was read from, to say where an error is.
    ///
    /// # Errors
    /// The first value that breaks a rule.
    pub fn to_spec(&self, source: &str) -> Result<TableSpec, TomlError> {
        self.convert().map_err(|Broken { span, value, rule }| {
            TomlError::at(source, span.start, TomlProblem::Value { value, rule })
        })
    }

    fn convert(&self) -> Result<TableSpec, Broken> {
        let (retries, delay) = (Features::PG_INIT_RETRIES, Features::PG_INIT_DELAY);
        let features = Features {
            retain_attached_hw_handler: self.retain_attached_hw_handler,
            pg_init_retries: number(self.pg_init_retries.as_ref(), retries)?,
            pg_init_delay_msecs: number(self.pg_init_delay_msecs.as_ref(), delay)?,
            queue_mode: match &self.queue_mode {
                Some(mode) => QueueMode::parse(mode.get_ref()).map_err(|rule| broken(mode, rule))?,
                None => QueueMode::default(),
            },
        };
        let length = ("a length in sectors", 1, LENGTH_SECTORS_MAX);
        let length_sectors = number(self.length_sectors.as_ref(), length)?;
        let hw_handler = texts(&self.hw_handler)?.into_iter().map(str::to_owned).collect();
        let most = ("a number of hardware handler words", WORDS_MAX);
        at_most(self.hw_handler.len(), most, || self.hw_handler.last().map(Spanned::span))?;
        at_most(self.group.len(), ("a number of groups", GROUPS_MAX), || {
            self.group.last().map(Spanned::span)
        })?;
        let groups = self.group.iter().map(group).collect::<Result<Vec<_>, _>>()?;
        let initial_group = match &self.initial_group {
            Some(initial) => {
                let (least, most) = (groups.len().min(1), groups.len());
                let read = number_in(&initial.get_ref().to_string(), "", least as u64, most as u64);
                read.map_err(|_| broken(initial, Rule::InitialGroup { groups: groups.len() }))?
            }
            None => groups.len().min(1),
        };
        let no_path_retry = self.no_path_retry;
        Ok(TableSpec { length_sectors, no_path_retry, features, hw_handler, groups, initial_group })
    }
}

fn group(section: &Spanned<GroupSection>) -> Result<GroupSpec, Broken> {
    let (span, section) = (section.span(), section.get_ref());
    let selector = match &section.selector {
        Some(name) => {
            name_rule(name.get_ref()).map_err(|rule| broken(name, rule))?;
            name.get_ref().parse().map_err(|unknown: polypath_selector::UnknownKind| broken(name, unknown))?
        }
        None => Kind::default(),
    };
    let args = match &section.selector_args {
        Some(words) => GroupArgs::parse(selector, &texts(words.get_ref())?)
            .map_err(|error| Broken::new(arg_span(&error, words), "", error))?,
        None => GroupArgs::default(),
    };
    let nr_paths = section.path.len();
    let (name, most) = ("a number of paths", GROUP_PATHS_MAX as u64);
    number_in::<usize>(&nr_paths.to_string(), name, 1, most)
        .map_err(|rule| Broken::new(span, nr_paths, rule))?;
    let paths = section.path.iter().enumerate();
    let paths = paths.map(|(index, section)| path(selector, section, index, nr_paths));
    let group = GroupSpec { selector, args, paths: paths.collect::<Result<_, _>>()? };
    match path_without_queue(&group) {
        Some(index) => {
            let path = &section.path[index];
            let place = path.args.as_ref().map_or(path.device.span(), Spanned::span);
            let mask = group.paths[index].args.queue_mask.as_ref().map(ToString::to_string);
            Err(Broken::new(place, mask.unwrap_or_default(), Rule::QueuesTaken))
        }
        None => Ok(group),
    }
}

fn path(selector: Kind, section: &PathSection, index: usize, nr_paths: usize) -> Result<PathSpec, Broken> {
    let device = section.device.get_ref();
    name_rule(device).map_err(|rule| broken(&section.device, rule))?;
    let mut words = section.args.iter().flat_map(|words| words.get_ref());
    if selector == Kind::IoAffinity
        && let Some(number) = words.find(|word| !word.get_ref().quoted)
    {
        // `0xff` has become 255 on the way here.
        return Err(Broken::new(number.span(), &number.get_ref().text, Rule::MaskUnquoted));
    }
    let mut args = match &section.args {
        Some(words) => PathArgs::parse(selector, &texts(words.get_ref())?)
            .map_err(|error| Broken::new(arg_span(&error, words), "", error))?,
        None => PathArgs::for_path(selector, index, nr_paths),
    };
    if let Some(weight) = &section.weight {
        if selector != Kind::ServiceTime {
            return Err(broken(weight, Rule::Weight));
        }
        if section.args.is_some() {
            return Err(broken(weight, Rule::WeightAndArgs));
        }
        args.relative_throughput = number(Some(weight), ("a weight", 0, 100))?.unwrap_or_default();
    }
    Ok(PathSpec { device: device.clone(), args })
}

fn broken<T: ToString>(value: &Spanned<T>, rule: impl Into<Rule>) -> Broken {
    Broken::new(value.span(), value.get_ref().to_string(), rule)
}

fn number<T: TryFrom<u64>>(
    value: Option<&Spanned<i64>>,
    (name, least, most): (&'static str, u64, u64),
) -> Result<Option<T>, Broken> {
    let read = |value: &Spanned<i64>| {
        number_in(&value.get_ref().to_string(), name, least, most).map_err(|rule| broken(value, rule))
    };
    value.map(read).transpose()
}

fn at_most(
    count: usize,
    (name, most): (&'static str, usize),
    place: impl FnOnce() -> Option<Range<usize>>,
) -> Result<(), Broken> {
    let rule = number_in::<usize>(&count.to_string(), name, 0, most as u64);
    rule.map(|_| ()).map_err(|rule| Broken::new(place().unwrap_or_default(), count, rule))
}

fn texts(words: &[Spanned<Word>]) -> Result<Vec<&str>, Broken> {
    let text = |word: &Spanned<Word>| {
        name_rule(&word.get_ref().text).map_err(|rule| Broken::new(word.span(), &word.get_ref().text, rule))
    };
    words.iter().map(|word| text(word).map(|()| word.get_ref().text.as_str())).collect()
}

/// Where an argument is that a selector refuses; all of them, if one is missing.
fn arg_span(error: &ArgError, words: &Spanned<Vec<Spanned<Word>>>) -> Range<usize> {
    let missing = matches!(error.problem, ArgProblem::Missing { .. });
    words.get_ref().get(error.word).filter(|_| !missing).map_or(words.span(), Spanned::span)
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WordVisitor { expected: "a word or a number" })
    }
}

/// As in TOML: a string, or a number without quotes.
impl<'de> Deserialize<'de> for NoPathRetry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "\"fail\", \"queue\" or a number of seconds";
        let word = deserializer.deserialize_any(WordVisitor { expected })?.text;
        word.parse().map_err(|_| serde::de::Error::invalid_value(Unexpected::Str(&word), &expected))
    }
}

struct WordVisitor {
    expected: &'static str,
}

impl Visitor<'_> for WordVisitor {
    type Value = Word;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E>(self, word: &str) -> Result<Word, E> {
        Ok(Word { text: word.into(), quoted: true })
    }

    fn visit_i64<E>(self, number: i64) -> Result<Word, E> {
        Ok(Word { text: number.to_string(), quoted: false })
    }

    fn visit_u64<E>(self, number: u64) -> Result<Word, E> {
        Ok(Word { text: number.to_string(), quoted: false })
    }
}

/// A string as TOML writes it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests;
