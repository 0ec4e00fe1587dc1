//! Random tables for the property tests.

use std::num::NonZeroU32;

use polypath_selector::{GroupArgs, Kind, PathArgs};
use proptest::prelude::*;

use super::spec::{Features, GroupSpec, NoPathRetry, PathSpec, QueueMode, TableSpec};

/// Any name that is accepted, with quotes and spaces more often than by chance.
pub(super) fn name() -> impl Strategy<Value = String> {
    prop_oneof!["/dev/sd[a-z]{1,2}", "[0-9]{1,3}:[0-9]{1,3}", "[\\\\ '\"#a\u{a0}]{1,6}", "[^\\p{Cc}]{1,8}"]
}

fn group() -> impl Strategy<Value = GroupSpec> {
    let paths = prop::collection::vec((name(), any::<u32>(), 0u8..=100, any::<u16>()), 1..5);
    (prop::sample::select(&Kind::ALL[..]), 0u32..1024, any::<u32>(), paths).prop_map(
        |(selector, a, b, paths)| {
            let args = match selector {
                Kind::HistoricalServiceTime => vec![a.to_string(), b.to_string()],
                Kind::LearnedServiceTime => vec![a.clamp(1, 1000).to_string()],
                _ => vec![],
            };
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let path =
                |(index, (device, repeat_count, throughput, queues)): (usize, (String, u32, u8, u16))| {
                    let words = match selector {
                        // A queue of its own, and some that others may have.
                        Kind::IoAffinity => vec![format!("{queues:x},{:08x}", 1 << index)],
                        Kind::ServiceTime => vec![repeat_count.to_string(), throughput.to_string()],
                        _ => vec![repeat_count.to_string()],
                    };
                    let words: Vec<_> = words.iter().map(String::as_str).collect();
                    PathSpec { device, args: PathArgs::parse(selector, &words).unwrap() }
                };
            let paths = paths.into_iter().enumerate().map(path).collect();
            GroupSpec { selector, args: GroupArgs::parse(selector, &args).unwrap(), paths }
        },
    )
}

fn features() -> impl Strategy<Value = Features> {
    let mode = prop_oneof![Just(QueueMode::Request), Just(QueueMode::Bio)];
    (any::<bool>(), prop::option::of(1u8..=50), prop::option::of(0u16..=60_000), mode).prop_map(
        |(retain_attached_hw_handler, pg_init_retries, pg_init_delay_msecs, queue_mode)| Features {
            retain_attached_hw_handler,
            pg_init_retries,
            pg_init_delay_msecs,
            queue_mode,
        },
    )
}

fn no_path_retry() -> impl Strategy<Value = NoPathRetry> {
    let seconds = (1..=u32::MAX).prop_map(|seconds| NoPathRetry::Seconds(NonZeroU32::new(seconds).unwrap()));
    prop_oneof![Just(NoPathRetry::Fail), Just(NoPathRetry::Queue), seconds]
}

/// Any table that keeps all rules.
pub(super) fn spec() -> impl Strategy<Value = TableSpec> {
    let groups = prop::collection::vec(group(), 0..4);
    let handler = prop::collection::vec(name(), 0..3);
    let length = prop::option::of(1..=u64::MAX / 512);
    (length, prop::option::of(no_path_retry()), features(), handler, groups, any::<prop::sample::Index>())
        .prop_map(|(length_sectors, no_path_retry, features, hw_handler, groups, initial)| TableSpec {
            length_sectors,
            no_path_retry,
            features,
            hw_handler,
            initial_group: if groups.is_empty() { 0 } else { initial.index(groups.len()) + 1 },
            groups,
        })
}

/// Any table that a dm line can say.
pub(super) fn dm_spec() -> impl Strategy<Value = TableSpec> {
    (spec(), 1..=u64::MAX / 512).prop_map(|(spec, length_sectors)| TableSpec {
        length_sectors: Some(length_sectors),
        no_path_retry: spec.no_path_retry.filter(|retry| *retry == NoPathRetry::Queue),
        ..spec
    })
}
