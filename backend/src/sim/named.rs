//! Runs about one matter each: what the random ones have found, or must never find.

use std::num::NonZeroU32;

use polypath_paths::text::NoPathRetry;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::gaps::Gaps;
use super::lun::Faults;
use super::profile::Profile;
use super::run::runs;
use crate::gather::Alignment;

/// Nothing goes wrong and nothing changes.
fn calm(profile: &mut Profile) {
    profile.faults = Faults::default();
    profile.nr_bad_sectors = 0;
    (profile.breaks, profile.changes, profile.commands) = (0, 0, 0);
    (profile.memory_changes, profile.wreck) = (false, false);
    profile.gaps = Gaps::KNOWN;
}

#[test]
fn a_calm_run() {
    runs(100, calm);
}

#[test]
fn f11_blocks_of_eight_sectors() {
    runs(60, |profile| profile.align = Alignment { mem_bytes: 512, block_bytes: 4096 });
}

#[test]
fn f14_no_path_for_longer_than_requests_wait() {
    runs(60, |profile| {
        profile.policy = NoPathRetry::Seconds(NonZeroU32::new(1).expect("1"));
        (profile.nr_paths, profile.breaks, profile.changes) = (2, 6, 0);
    });
}

#[test]
fn f16_many_flushes_and_failing_paths() {
    runs(60, |profile| {
        profile.features = 1 << VIRTIO_BLK_F_FLUSH;
        (profile.nr_paths, profile.breaks, profile.changes) = (4, 3, 2);
        profile.faults = Faults { path: 10, ..Faults::default() };
    });
}

#[test]
fn f12_a_busy_path_is_waited_for_without_spinning() {
    runs(30, |profile| {
        calm(profile);
        profile.faults.busy = 40;
        profile.polled = false;
        profile.gaps = Gaps { spinning: false, ..Gaps::KNOWN };
    });
}

#[test]
fn f10_a_flush_over_several_paths_leaves_no_load_behind() {
    runs(30, |profile| {
        calm(profile);
        (profile.nr_paths, profile.nr_groups) = (3, 1);
        profile.gaps = Gaps { load: false, ..Gaps::KNOWN };
    });
}

#[test]
fn f01_a_path_that_may_not_write_is_passed_over_whatever_the_table() {
    runs(200, |profile| {
        calm(profile);
        (profile.nr_paths, profile.changes) = (3, 4);
        profile.faults.not_allowed = 20;
        profile.gaps = Gaps { asking: false, ..Gaps::KNOWN };
    });
}

#[test]
fn f03_the_writes_of_a_removed_path_are_flushed() {
    runs(400, |profile| {
        calm(profile);
        (profile.nr_paths, profile.changes, profile.features) = (3, 4, 1 << VIRTIO_BLK_F_FLUSH);
        profile.gaps = Gaps { dirty_removal: false, ..Gaps::KNOWN };
    });
}

#[test]
fn f14_the_time_without_a_path_begins_with_a_removal() {
    runs(400, |profile| {
        calm(profile);
        (profile.nr_paths, profile.changes) = (2, 1);
        profile.policy = NoPathRetry::Seconds(NonZeroU32::new(1).expect("1"));
        profile.gaps = Gaps { last_removal: false, ..Gaps::KNOWN };
    });
}

#[test]
fn f14_what_waits_for_a_path_is_shown() {
    runs(60, |profile| {
        calm(profile);
        (profile.nr_paths, profile.breaks, profile.changes) = (2, 6, 1);
        profile.policy = NoPathRetry::Queue;
        profile.gaps = Gaps { held: false, ..Gaps::KNOWN };
    });
}
