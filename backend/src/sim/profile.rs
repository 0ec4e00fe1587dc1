//! What kind of a run a seed makes.

use std::num::NonZeroU32;

use polypath_paths::text::NoPathRetry;
use polypath_selector::Kind;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};

use super::gaps::Gaps;
use super::lun::Faults;
use super::rng::Rng;
use crate::disk::Tuning;
use crate::gather::Alignment;
use crate::merge::MergeLimits;

/// Everything about a run that does not change while it goes on.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) ring_size: u16,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    /// Where the ring's indices begin.
    pub(crate) index: u16,
    /// How many of the ports are paths at the beginning.
    pub(crate) nr_paths: usize,
    pub(crate) nr_groups: usize,
    pub(crate) selector: Kind,
    pub(crate) align: Alignment,
    pub(crate) policy: NoPathRetry,
    /// The guest gives no kick descriptor.
    pub(crate) polled: bool,
    pub(crate) with_call: bool,
    pub(crate) features: u64,
    pub(crate) faults: Faults,
    pub(crate) nr_bad_sectors: usize,
    /// Weight, among the steps, of a port that breaks or hangs or is well again, and of one that comes or goes.
    pub(crate) breaks: u32,
    pub(crate) changes: u32,
    /// Weight of commands among the steps.
    pub(crate) commands: u32,
    pub(crate) memory_changes: bool,
    pub(crate) gaps: Gaps,
    /// Requests before the run ends.
    pub(crate) nr_requests: u64,
    /// The ring is made impossible at the end.
    pub(crate) wreck: bool,
    /// How requests wait and merge.
    pub(crate) tuning: Tuning,
}

impl From<(usize, usize)> for Alignment {
    fn from((mem_bytes, block_bytes): (usize, usize)) -> Self {
        Self { mem_bytes, block_bytes }
    }
}

impl Profile {
    /// Any.
    pub(crate) fn any(rng: &mut Rng) -> Self {
        let (flush, wce) = (1 << VIRTIO_BLK_F_FLUSH, 1 << VIRTIO_BLK_F_CONFIG_WCE);
        let faults = match rng.below(3) {
            0 => Faults::default(),
            1 => Faults { short: 10, busy: 5, interrupted: 5, path: 2, sync: 5, ..Faults::default() },
            _ => Faults {
                short: 40,
                busy: 25,
                interrupted: 10,
                path: 10,
                not_allowed: 3,
                sync: 20,
                ..Faults::default()
            },
        };
        Self {
            ring_size: rng.pick(&[4, 8, 16]),
            event_idx: rng.chance(60),
            indirect: rng.chance(70),
            index: rng.pick(&[0, 1, 32_767, 65_500, 65_530, 65_535]),
            nr_paths: rng.pick(&[1, 2, 2, 3, 4]),
            nr_groups: rng.pick(&[1, 1, 2, 3]),
            selector: rng.pick(&Kind::ALL),
            align: rng.pick(&[(1, 512), (1, 512), (4, 512), (512, 512), (4, 4096), (4096, 4096)]).into(),
            policy: match rng.below(3) {
                0 => NoPathRetry::Fail,
                1 => NoPathRetry::Queue,
                _ => NoPathRetry::Seconds(NonZeroU32::new(2).expect("2")),
            },
            polled: rng.chance(8),
            with_call: rng.chance(90),
            features: rng.pick(&[flush, flush, flush | wce, flush | wce, 0]),
            faults: Faults { no_punch: ports(rng, 30), no_zero_range: ports(rng, 40), ..faults },
            nr_bad_sectors: rng.pick(&[0, 0, 0, 1, 3]),
            breaks: rng.pick(&[0, 0, 1, 4]),
            changes: rng.pick(&[0, 0, 1, 2]),
            commands: rng.pick(&[0, 2, 5]),
            memory_changes: rng.chance(50),
            gaps: Gaps::KNOWN,
            nr_requests: 20 + rng.below(50),
            wreck: rng.chance(5),
            tuning: Tuning {
                path_depth: rng.pick(&[1, 2, 3, 64, 64]),
                merge: MergeLimits {
                    bytes_max: rng.pick(&[0, 2048, 8192, 512 << 10, 512 << 10]),
                    ranges_bytes_max: rng.pick(&[4096, 32 << 20]),
                    iovecs_max: rng.pick(&[3, 8, 1024, 1024]),
                },
                poll_ns: rng.pick(&[0, 0, 3_000, 1_000_000]),
                register_memory: false,
                sqpoll_idle_ms: 0,
                migration: true,
            },
        }
    }
}

/// The ports that cannot do something: mostly none, sometimes some, sometimes all.
fn ports(rng: &mut Rng, percent: u32) -> u64 {
    let some = rng.below(16);
    if rng.chance(percent) { rng.pick(&[u64::MAX, u64::MAX, some]) } else { 0 }
}
