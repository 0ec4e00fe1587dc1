//! Paths' files registered with a ring: the kernel then takes no reference to the file for each I/O, a count that all
//! workers' I/O on a path would write.
//!
//! A registered file stays open. So the ring's table goes by the worker's lanes: a lane that has left the worker's view, and
//! has no I/O under way, is let go of, and its file with it.

use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use io_uring::IoUring;
use polypath_paths::PATHS_MAX;

use crate::lane::Lane;

/// The fence's place.
const FENCE_AT: u32 = 0;
const FIRST: u32 = FENCE_AT + 1;
/// A path that returned, or was replaced, is another one: for a while there are more than a table has.
const NR: usize = 2 * PATHS_MAX;

/// The files of one ring.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// By place, from [`FIRST`] on.
    lanes: Vec<Option<Rc<Lane>>>,
    /// Whether some of them are in the view no more.
    is_leaving: bool,
    /// Whether the kernel has refused one: it is not asked for each I/O again.
    is_refused: bool,
}

impl Files {
    /// Makes room for paths, and registers the fence, if there is one. A kernel without room for paths (before 5.19) works
    /// with descriptors.
    pub(super) fn new(ring: &IoUring, fence: Option<RawFd>) -> Self {
        let submitter = ring.submitter();
        let mut files = Self::default();
        let nr = FIRST + u32::try_from(NR).unwrap_or(0);
        let kept = match submitter.register_files_sparse(nr) {
            Ok(()) => {
                files.lanes.resize_with(NR, || None);
                fence.map_or(Ok(0), |fence| submitter.register_files_update(FENCE_AT, &[fence]))
            }
            Err(error) => {
                log::debug!("no registered files: error={error}");
                fence.map_or(Ok(0), |fence| submitter.register_files(&[fence]).map(|()| 1))
            }
        };
        if let Err(error) = kept {
            log::warn!(
                "a process after this one will not wait for what it has with the kernel: error={error}"
            );
        }
        files
    }

    /// The place of the lane's file. None: it is to be used by its descriptor.
    pub(super) fn place(&mut self, ring: &IoUring, lane: &Rc<Lane>) -> Option<u32> {
        match lane.file_place() {
            Some(place) => Some(place),
            None => self.add(ring, lane),
        }
    }

    #[cold]
    fn add(&mut self, ring: &IoUring, lane: &Rc<Lane>) -> Option<u32> {
        if self.is_refused {
            return None;
        }
        let free = self.lanes.iter().position(Option::is_none)?;
        let place = FIRST + u32::try_from(free).ok()?;
        if let Err(error) = ring.submitter().register_files_update(place, &[lane.path().raw_fd()]) {
            log::debug!("paths' files are registered no more: error={error}");
            self.is_refused = true;
            return None;
        }
        lane.set_file_place(place);
        self.lanes[free] = Some(Rc::clone(lane));
        Some(place)
    }

    /// Closes all of them now: a ring that ends does so some time later, and a file system that is to be unmounted would
    /// be busy until then.
    pub(super) fn close(&mut self, ring: &IoUring) {
        // Where nothing is registered there is nothing to do.
        let _ = ring.submitter().unregister_files();
        self.lanes.clear();
    }

    /// The worker goes by another view: some lanes may have left.
    pub(super) fn note_new_view(&mut self) {
        self.is_leaving = true;
    }

    /// Lets go of lanes that have left and have nothing under way.
    pub(super) fn let_go(&mut self, ring: &IoUring) -> io::Result<()> {
        if !self.is_leaving {
            return Ok(());
        }
        self.is_leaving = false;
        for (place, slot) in (FIRST..).zip(&mut self.lanes) {
            let Some(lane) = slot.as_ref().filter(|lane| lane.has_left()) else { continue };
            if Rc::strong_count(lane) > 1 {
                self.is_leaving = true;
                continue;
            }
            ring.submitter().register_files_update(place, &[-1])?;
            // With it goes the path, and its own descriptor.
            *slot = None;
        }
        Ok(())
    }
}
