//! What fio does in a leg.

use crate::front_end::verify::Rng;
use crate::guest::{Accel, Fio};

/// As many as there are queues.
pub const JOBS: u32 = 4;
/// Each job has so much of the disk to itself.
pub const JOB_BYTES: u64 = 4 << 20;

/// The shape of a load.
#[derive(Clone, Debug)]
pub struct Load {
    rw: &'static str,
    engine: &'static str,
    depth: u64,
    /// Size of a block.
    pub block_bytes: u64,
    /// A flush after so many writes; 0: none.
    fsync: u64,
    /// Whether the guest sees a disk without a cache.
    pub write_through: bool,
    /// Order and content of the first pass.
    pub seed: u32,
}

impl Load {
    /// Everything from a seed.
    pub fn random(rng: &mut Rng) -> Self {
        let at = |rng: &mut Rng, nr: usize| usize::try_from(rng.below(nr as u64)).expect("small");
        let of = |rng: &mut Rng, words: &[&'static str]| words[at(rng, words.len())];
        let rw = of(rng, &["randwrite", "randrw", "randwrite", "write"]);
        let engine = of(rng, &["io_uring", "libaio"]);
        let block_bytes = [512, 4096, 4096, 4096, 16 << 10, 64 << 10][at(rng, 6)];
        Self {
            rw,
            engine,
            depth: 1 + rng.below(32),
            block_bytes,
            fsync: if rng.percent(30) { 4 + rng.below(60) } else { 0 },
            write_through: rng.percent(15),
            seed: u32::try_from(rng.below(1 << 30)).expect("below"),
        }
    }

    /// Blocks that a job goes through in a pass, which is to take a second or two.
    fn nr_blocks_of_job(&self) -> u64 {
        let nr = if Accel::best() == Accel::Kvm { 1024 } else { 256 };
        (JOB_BYTES / self.block_bytes).min(nr)
    }

    /// Blocks that all jobs go through in a pass.
    pub fn nr_blocks(&self) -> u64 {
        u64::from(JOBS) * self.nr_blocks_of_job()
    }

    /// The load on a disk of the guest.
    pub fn fio(&self, disk: &str) -> Fio {
        let fio = Fio::new(&format!("/dev/{disk}"), self.rw)
            .jobs(JOBS, &(self.nr_blocks_of_job() * self.block_bytes).to_string())
            .with("offset_increment", JOB_BYTES)
            .with("bs", self.block_bytes)
            .with("iodepth", self.depth)
            .with("ioengine", self.engine)
            .verify();
        if self.fsync > 0 { fio.with("fsync", self.fsync) } else { fio }
    }
}
