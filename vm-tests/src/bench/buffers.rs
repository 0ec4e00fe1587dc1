//! Memory of the requests.

use std::os::fd::{AsRawFd as _, RawFd};

use anyhow::Result;

use super::workload::Workload;
use crate::front_end::Region;

/// A place for each slot, with as much room behind it that is not used: no two requests' buffers are adjacent, which
/// would spare a merged one its vector.
pub(super) struct Buffers {
    region: Region,
}

impl Buffers {
    /// Enough for any one of the loads.
    pub(super) fn new<'a>(workloads: impl Iterator<Item = &'a Workload>) -> Result<Self> {
        let bytes = workloads.map(|workload| workload.depth * 2 * workload.bytes).max().unwrap_or(4096);
        Ok(Self { region: Region::new(0, bytes as u64, 0)? })
    }

    pub(super) fn of(&self, workload: &Workload, slot: usize) -> Result<usize> {
        Ok(self.start()? + slot * 2 * workload.bytes)
    }

    pub(super) fn start(&self) -> Result<usize> {
        Ok(usize::try_from(self.region.user())?)
    }

    pub(super) fn len(&self) -> Result<usize> {
        Ok(usize::try_from(self.region.len)?)
    }

    pub(super) fn fd(&self) -> RawFd {
        self.region.as_raw_fd()
    }
}
