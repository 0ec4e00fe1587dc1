//! A table without descriptors: what was asked for.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use polypath_selector::{GroupArgs, Kind, PathArgs};

use super::error::{Rule, printable};
use super::words::number_in;

/// Most groups of a table, as in dm.
pub(super) const GROUPS_MAX: usize = 1024;
/// Most paths of a group, as in dm.
pub(super) const GROUP_PATHS_MAX: usize = 1024;
/// Most words of the hardware handler, of a selector's arguments and of a path's arguments, as in dm.
pub(super) const WORDS_MAX: usize = 1024;
/// Longest disk: its length in bytes is a 64-bit number.
pub(super) const LENGTH_SECTORS_MAX: u64 = u64::MAX / 512;

/// A table as its text describes it.
///
/// The fields may be filled by hand; [`TableSpec::check`] then says whether the text forms can express them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableSpec {
    /// Length of the disk in sectors of 512 bytes; `None`: that of its paths. A dm line always has one.
    pub length_sectors: Option<u64>,
    /// What to do with I/O while no path is usable; `None`: the table does not say, so the program's setting holds.
    ///
    /// A dm line says [`NoPathRetry::Queue`] (by `queue_if_no_path`) or nothing.
    pub no_path_retry: Option<NoPathRetry>,
    /// The other features.
    pub features: Features,
    /// Name and arguments of a SCSI device handler. Kept, and ignored: the hosts' drivers see to that.
    pub hw_handler: Vec<String>,
    /// Priority groups in order. None is legal: such a disk has no usable path.
    pub groups: Vec<GroupSpec>,
    /// The group to use first, from 1; 0 exactly if there are no groups.
    pub initial_group: usize,
}

impl TableSpec {
    /// A table of one group with these devices, everything else by default.
    pub fn one_group<D: Into<String>>(selector: Kind, devices: impl IntoIterator<Item = D>) -> Self {
        let devices: Vec<String> = devices.into_iter().map(Into::into).collect();
        let nr_paths = devices.len();
        let path = |(index, device)| PathSpec { device, args: PathArgs::for_path(selector, index, nr_paths) };
        let paths = devices.into_iter().enumerate().map(path).collect();
        let group = GroupSpec { selector, args: GroupArgs::default(), paths };
        Self { groups: vec![group], initial_group: 1, ..Self::default() }
    }

    /// All paths in table order. A device may occur in several groups.
    pub fn paths(&self) -> impl Iterator<Item = &PathSpec> {
        self.groups.iter().flat_map(|group| &group.paths)
    }
}

/// A priority group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Chooses among its paths.
    pub selector: Kind,
    /// The selector's arguments. Fields that the selector does not read are not printed.
    pub args: GroupArgs,
    /// At least one.
    pub paths: Vec<PathSpec>,
}

impl GroupSpec {
    /// The words of the group's arguments.
    pub(super) fn arg_words(&self) -> Vec<String> {
        self.args.table(self.selector).split(' ').skip(1).map(str::to_owned).collect()
    }
}

/// A path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSpec {
    /// Name of the device or file; or `major:minor`. Not empty, no control characters.
    pub device: String,
    /// Its arguments for the selector. Fields that the selector does not read are not printed.
    pub args: PathArgs,
}

/// The words of a path's arguments as they were given, [`Kind::nr_table_words`] of them; unlike [`PathArgs::table`]
/// with the repeat count.
pub(super) fn path_words(selector: Kind, args: &PathArgs) -> Vec<String> {
    match selector {
        Kind::IoAffinity => args.queue_mask.iter().map(ToString::to_string).collect(),
        Kind::ServiceTime => vec![args.repeat_count.to_string(), args.relative_throughput.to_string()],
        _ => vec![args.repeat_count.to_string()],
    }
}

/// Features of a table other than queueing. They concern device handlers and the kernel's own queues, so they are
/// kept, printed, and have no effect here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Keep a SCSI device handler that is attached already.
    pub retain_attached_hw_handler: bool,
    /// How often the start of a group may be tried again, 1 to 50.
    pub pg_init_retries: Option<u8>,
    /// Wait before it is tried again, in ms, 0 to 60000.
    pub pg_init_delay_msecs: Option<u16>,
    /// How the kernel would take its I/O.
    pub queue_mode: QueueMode,
}

impl Features {
    pub(super) const PG_INIT_RETRIES: (&str, u64, u64) = ("a number of pg_init retries", 1, 50);
    pub(super) const PG_INIT_DELAY: (&str, u64, u64) = ("a pg_init delay in ms", 0, 60_000);

    /// Feature words of a dm line, in the order in which the kernel prints them.
    pub(super) fn words(&self, queue_if_no_path: bool) -> Vec<String> {
        let mut words = Vec::new();
        if queue_if_no_path {
            words.push("queue_if_no_path".into());
        }
        if let Some(retries) = self.pg_init_retries {
            words.extend(["pg_init_retries".into(), retries.to_string()]);
        }
        if let Some(delay_msecs) = self.pg_init_delay_msecs {
            words.extend(["pg_init_delay_msecs".into(), delay_msecs.to_string()]);
        }
        if self.retain_attached_hw_handler {
            words.push("retain_attached_hw_handler".into());
        }
        if self.queue_mode != QueueMode::default() {
            words.extend(["queue_mode".into(), self.queue_mode.name().into()]);
        }
        words
    }
}

/// How the kernel's multipath takes I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueMode {
    /// `rq` or `mq`, the same since Linux 4.20.
    #[default]
    Request,
    /// `bio`.
    Bio,
}

impl QueueMode {
    /// The word that is printed for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Request => "mq",
            Self::Bio => "bio",
        }
    }

    pub(super) fn parse(given: &str) -> Result<Self, Rule> {
        match given.to_ascii_lowercase().as_str() {
            "bio" => Ok(Self::Bio),
            "rq" | "mq" => Ok(Self::Request),
            _ => Err(Rule::QueueMode),
        }
    }
}

/// What happens to I/O while no path is usable. In text: `fail`, `queue`, or a number of seconds.
///
/// multipath-tools counts checks instead of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPathRetry {
    /// It fails at once.
    Fail,
    /// It waits, however long it takes.
    Queue,
    /// It waits so long and then fails. A dm line can only say that it waits.
    Seconds(NonZeroU32),
}

impl fmt::Display for NoPathRetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fail => f.pad("fail"),
            Self::Queue => f.pad("queue"),
            Self::Seconds(seconds) => seconds.fmt(f),
        }
    }
}

/// A word that is no [`NoPathRetry`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not `fail`, `queue` or a number of seconds up to {}", printable(given), u32::MAX)]
pub struct NotNoPathRetry {
    /// The word as it was given.
    pub given: String,
}

impl FromStr for NoPathRetry {
    type Err = NotNoPathRetry;

    /// 0 seconds are [`NoPathRetry::Fail`].
    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "fail" => Ok(Self::Fail),
            "queue" => Ok(Self::Queue),
            _ => number_in::<u32>(given, "", 0, u32::MAX.into())
                .map(|seconds| NonZeroU32::new(seconds).map_or(Self::Fail, Self::Seconds))
                .map_err(|_| NotNoPathRetry { given: given.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_retry_reads_what_it_prints() {
        let seconds = NonZeroU32::new(30).map(NoPathRetry::Seconds).unwrap();
        for (value, text) in [(NoPathRetry::Fail, "fail"), (NoPathRetry::Queue, "queue"), (seconds, "30")] {
            assert_eq!((value.to_string().as_str(), text.parse()), (text, Ok(value)));
        }
        assert_eq!("0".parse(), Ok(NoPathRetry::Fail));
        for given in ["", "Fail", "forever", "-1", "30s", "4294967296", "+3", "\n"] {
            let error = given.parse::<NoPathRetry>().unwrap_err().to_string();
            assert!(error.contains("`fail`, `queue` or a number of seconds"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn one_group_holds_all_devices() {
        let spec = TableSpec::one_group(Kind::IoAffinity, ["/dev/sda", "/dev/sdb"]);
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(
            spec.paths().map(|path| path.device.as_str()).collect::<Vec<_>>(),
            ["/dev/sda", "/dev/sdb"]
        );
        assert_eq!(spec.initial_group, 1);
        let queues =
            |path: &PathSpec| path.args.queue_mask.as_ref().unwrap().queues().take(2).collect::<Vec<_>>();
        assert_eq!(spec.paths().map(queues).collect::<Vec<_>>(), [[0, 2], [1, 3]]);
    }
}
