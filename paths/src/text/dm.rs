//! The table line of `dmsetup`, as read by Linux' `drivers/md/dm-mpath.c`.
//!
//! ```text
//! <start> <length> multipath <#features> [feature...] <#handler> [handler word...] <#groups> <initial group>
//!     { <selector> <#selector args> [arg...] <#paths> <#per-path args> { <device> [arg...] }... }...
//! ```

use polypath_selector::{ArgError, ArgProblem, GroupArgs, Kind, PathArgs};

use super::check::path_without_queue;
use super::error::{Rule, TextError};
use super::spec::{
    Features, GROUP_PATHS_MAX, GROUPS_MAX, GroupSpec, LENGTH_SECTORS_MAX, NoPathRetry, PathSpec, QueueMode,
    TableSpec, WORDS_MAX, path_words,
};
use super::words::{Cursor, Line, Word, Words, number_in};

/// Most feature words, with their values.
const FEATURE_WORDS_MAX: u64 = 8;

/// A dm line needs a length, and the table has none: that of its paths has to be filled in first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the table gives no length, which a dm line needs")]
pub struct NoLength;

impl TableSpec {
    /// Reads a table line as it is given to `dmsetup create --table`.
    ///
    /// ```
    /// use polypath_paths::text::TableSpec;
    ///
    /// let spec = TableSpec::parse_dm("0 1563037696 multipath 0 0 1 1 service-time 0 1 2 /dev/skd0 1000 1")?;
    /// assert_eq!(spec.length_sectors, Some(1_563_037_696));
    /// assert_eq!(spec.groups[0].paths[0].device, "/dev/skd0");
    /// # Ok::<(), polypath_paths::text::TextError>(())
    /// ```
    ///
    /// Limits and laxities are the kernel's: keywords of features in any case, a repeated feature counts with its last
    /// value, an initial group beyond the last asks for none (which is read as 1, and printed so by the kernel, too).
    /// Stricter: numbers must fit, names have no control characters.
    ///
    /// # Errors
    /// The first word that breaks a rule.
    pub fn parse_dm(line: &str) -> Result<Self, TextError> {
        let words = Words::split(line)?;
        let mut words = words.cursor();
        start(&mut words)?;
        let (length_sectors, _) = words.number("a length in sectors", 1, LENGTH_SECTORS_MAX)?;
        let word = words.word("the target `multipath`")?;
        if word.text != "multipath" {
            return Err(TextError::new(word, Rule::Target));
        }
        let mut spec = Self { length_sectors: Some(length_sectors), ..Self::default() };
        spec.read_features(&mut words)?;
        let nr_words = words.count("a number of hardware handler words", WORDS_MAX as u64)?;
        spec.hw_handler = words.words(nr_words).iter().map(|word| word.text.clone()).collect();
        spec.read_groups(&mut words)?;
        Ok(spec)
    }

    fn read_features(&mut self, words: &mut Cursor<'_>) -> Result<(), TextError> {
        let nr_words = words.count("a number of feature words", FEATURE_WORDS_MAX)?;
        let mut features = words.words(nr_words).iter();
        while let Some(feature) = features.next() {
            // No word has a default: the kernel takes one without its value for an unknown one.
            let mut value = || {
                features.next().ok_or_else(|| TextError::new(feature, Rule::FeatureValue { words: nr_words }))
            };
            match feature.text.to_ascii_lowercase().as_str() {
                "queue_if_no_path" => self.no_path_retry = Some(NoPathRetry::Queue),
                "retain_attached_hw_handler" => self.features.retain_attached_hw_handler = true,
                "pg_init_retries" => {
                    self.features.pg_init_retries = Some(bounded(value()?, Features::PG_INIT_RETRIES)?);
                }
                "pg_init_delay_msecs" => {
                    self.features.pg_init_delay_msecs = Some(bounded(value()?, Features::PG_INIT_DELAY)?);
                }
                "queue_mode" => {
                    let mode = value()?;
                    self.features.queue_mode =
                        QueueMode::parse(&mode.text).map_err(|rule| TextError::new(mode, rule))?;
                }
                _ => return Err(TextError::new(feature, Rule::Feature)),
            }
        }
        Ok(())
    }

    fn read_groups(&mut self, words: &mut Cursor<'_>) -> Result<(), TextError> {
        let (groups, _) = words.number::<usize>("a number of groups", 0, GROUPS_MAX as u64)?;
        let (initial, word) = words.number::<usize>("an initial group", 0, GROUPS_MAX as u64)?;
        if (groups == 0) != (initial == 0) {
            return Err(TextError::new(word, Rule::InitialGroup { groups }));
        }
        self.initial_group = if initial > groups { 1 } else { initial };
        while self.groups.len() < groups {
            if words.left() == 0 {
                return Err(words.ended(Rule::GroupsMissing { groups, found: self.groups.len() }));
            }
            self.groups.push(group(words)?);
        }
        match words.word("") {
            Ok(word) => Err(TextError::new(word, Rule::GroupsExceeded { groups })),
            Err(_) => Ok(()),
        }
    }

    /// The table line. It reads back as the same table if [`no_path_retry`](Self::no_path_retry) is what a line can
    /// say: seconds become `queue_if_no_path`, and fail becomes nothing.
    ///
    /// Repeat counts are printed as they were given, and thus not as the kernel would, see
    /// [`TableStatus::table`](super::TableStatus::table).
    ///
    /// # Errors
    /// The table has no length of its own.
    pub fn to_dm(&self) -> Result<String, NoLength> {
        let mut line = Line::default();
        line.words(0).words(self.length_sectors.ok_or(NoLength)?).words("multipath");
        let queueing = matches!(self.no_path_retry, Some(NoPathRetry::Queue | NoPathRetry::Seconds(_)));
        line.counted(&self.features.words(queueing)).counted(&self.hw_handler);
        line.words(self.groups.len()).words(self.initial_group);
        for group in &self.groups {
            line.words(group.selector).words(group.args.table(group.selector));
            line.words(group.paths.len()).words(group.selector.nr_table_words());
            for path in &group.paths {
                line.quoted(&path.device).words(path_words(group.selector, &path.args).join(" "));
            }
        }
        Ok(line.finish())
    }
}

fn start(words: &mut Cursor<'_>) -> Result<(), TextError> {
    let word = words.word("the start sector, 0,")?;
    match number_in(&word.text, "", 0, 0) {
        Ok(0u64) => Ok(()),
        _ => Err(TextError::new(word, Rule::Start)),
    }
}

fn group(words: &mut Cursor<'_>) -> Result<GroupSpec, TextError> {
    let word = words.word("a path selector")?;
    let selector: Kind =
        word.text.parse().map_err(|unknown: polypath_selector::UnknownKind| TextError::new(word, unknown))?;
    let nr_args = words.count("a number of selector arguments", WORDS_MAX as u64)?;
    let args = words.words(nr_args);
    let args = GroupArgs::parse(selector, &texts(args)).map_err(|error| arg_error(error, args, word))?;
    let (nr_paths, _) = words.number::<usize>("a number of paths", 1, GROUP_PATHS_MAX as u64)?;
    let (nr_args, nr_args_word) = words.number("a number of arguments per path", 0, WORDS_MAX as u64)?;
    let mut group = GroupSpec { selector, args, paths: Vec::new() };
    let mut places = Vec::new();
    for _ in 0..nr_paths {
        let device = words.word("a device")?;
        if words.left() < nr_args {
            words.words(nr_args);
            return Err(words.ended(Rule::Missing { expected: "an argument of the last device" }));
        }
        let args = words.words(nr_args);
        places.push(args.first().unwrap_or(device));
        let args =
            PathArgs::parse(selector, &texts(args)).map_err(|error| arg_error(error, args, nr_args_word))?;
        group.paths.push(PathSpec { device: device.text.clone(), args });
    }
    match path_without_queue(&group) {
        Some(path) => Err(TextError::new(places[path], Rule::QueuesTaken)),
        None => Ok(group),
    }
}

fn texts(words: &[Word]) -> Vec<&str> {
    words.iter().map(|word| word.text.as_str()).collect()
}

/// Places an error of a selector; a missing argument is the fault of the word that did not announce it.
fn arg_error(error: ArgError, args: &[Word], announced_by: &Word) -> TextError {
    let missing = matches!(error.problem, ArgProblem::Missing { .. });
    let place = args.get(error.word).filter(|_| !missing).unwrap_or(announced_by);
    TextError::new(place, error)
}

fn bounded<T: TryFrom<u64>>(
    word: &Word,
    (name, least, most): (&'static str, u64, u64),
) -> Result<T, TextError> {
    number_in(&word.text, name, least, most).map_err(|rule| TextError::new(word, rule))
}

#[cfg(test)]
mod tests;
