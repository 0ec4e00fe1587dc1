use std::sync::Arc;

use polypath_paths::Table;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::memory::{GuestMap, Lessor, anonymous};
use crate::request::{Range, Segment, unreadable};
use crate::sim::fixture::{Links, table};
use crate::sim::iovecs;

mod blocks;
mod data;
mod flush;
mod write_through;
mod zeroes;

const MEMORY_BYTES: usize = 256 << 10;
const DISK_BYTES: u64 = 8 << 20;

/// Errors of a path, and errors of what is behind every path.
const PATH_ERRORS: [i32; 6] =
    [libc::EIO, libc::ENODEV, libc::ENXIO, libc::ENOLINK, libc::ETIMEDOUT, libc::ENOTCONN];
const TARGET_ERRORS: [i32; 9] = [
    libc::EREMOTEIO,
    libc::ENODATA,
    libc::EILSEQ,
    libc::EBADE,
    libc::ENOSPC,
    libc::EDQUOT,
    libc::EPERM,
    libc::EINVAL,
    libc::EFAULT,
];

/// A transfer with paths and memory around it; plays the worker.
struct Case {
    _links: Links,
    table: Snapshot,
    guest: Arc<GuestMap>,
    lease: Rc<MapLease>,
    transfer: Transfer,
}

/// What an action asks for, without its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Read { offset: u64, len: u64 },
    Write { offset: u64, len: u64 },
    Sync,
    PunchHole { offset: u64, len: u64 },
    ZeroRange { offset: u64, len: u64 },
}

impl Case {
    fn new(nr_paths: usize) -> Self {
        let (links, table) = table(nr_paths, DISK_BYTES);
        Self::on(links, table)
    }

    fn on(links: Links, table: Table) -> Self {
        let guest = anonymous(MEMORY_BYTES);
        let lease = Rc::new(Lessor::new(Arc::clone(&guest)).lease());
        Self {
            _links: links,
            table: Rc::new(View::new(Arc::new(table), None, 0)),
            guest,
            lease,
            transfer: Transfer::default(),
        }
    }

    fn begin(&mut self, operation: Operation, data_len: u64, write_through: bool) {
        self.try_begin(operation, data_len, write_through).unwrap();
    }

    fn try_begin(
        &mut self,
        operation: Operation,
        data_len: u64,
        write_through: bool,
    ) -> Result<(), OutsideMemory> {
        let mut request = unreadable(3);
        (request.operation, request.data_len) = (operation, data_len);
        let (table, lease) = (&self.table, &self.lease);
        self.transfer.begin(request, lease, table, write_through, 0)
    }

    /// A write of the pieces to the disk's start, each filled with its own letter, down path 0.
    fn write(&mut self, lens: &[u64], write_through: bool) {
        self.data(lens);
        self.begin(Operation::Write { offset: 0 }, lens.iter().sum(), write_through);
        self.transfer.set_path(0);
    }

    fn read(&mut self, offset: u64, lens: &[u64]) {
        self.data(lens);
        self.begin(Operation::Read { offset }, lens.iter().sum(), false);
        self.transfer.set_path(0);
    }

    /// Segments with a gap between each two.
    fn data(&mut self, lens: &[u64]) {
        let mut addr = 0x1000;
        self.transfer.buffers.segments.clear();
        for (letter, len) in (b'A'..).zip(lens) {
            self.transfer.buffers.segments.push(Segment { addr: GuestAddress(addr), len: *len });
            let bytes = vec![letter; usize::try_from(*len).unwrap()];
            self.guest.write_slice(&bytes, GuestAddress(addr)).unwrap();
            addr += len + 4096;
        }
    }

    /// The data as it lies in guest memory.
    fn guest_data(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for segment in &self.transfer.buffers.segments {
            let mut bytes = vec![0; usize::try_from(segment.len).unwrap()];
            self.guest.read_slice(&mut bytes, segment.addr).unwrap();
            all.extend(bytes);
        }
        all
    }

    fn ranges(&mut self, operation: Operation, ranges: &[(u64, u64, bool)], write_through: bool) {
        self.transfer.buffers.ranges = ranges
            .iter()
            .map(|(offset, len, unmap)| Range { offset: *offset, len: *len, unmap: *unmap })
            .collect();
        self.begin(operation, 0, write_through);
        self.transfer.set_path(0);
    }

    /// Begins a flush and sends it where it must go first, as the worker does.
    fn flush(&mut self) {
        self.begin(Operation::Flush, 0, false);
        let active = self.table.paths().iter().position(|path| path.is_active());
        if let Some(path) = self.transfer.required_path().or(active) {
            self.transfer.set_path(path);
        }
    }

    fn step(&mut self) -> Step {
        let sum = |iovecs: &[IoVec]| iovecs::len(iovecs) as u64;
        match self.transfer.action() {
            Action::Read { iovecs, offset } => Step::Read { offset, len: sum(iovecs) },
            Action::Write { iovecs, offset } => Step::Write { offset, len: sum(iovecs) },
            Action::Sync => Step::Sync,
            Action::Allocate { mode, offset, len } => match mode {
                3 => Step::PunchHole { offset, len },
                17 => Step::ZeroRange { offset, len },
                mode => panic!("fallocate mode {mode:#x}"),
            },
        }
    }

    /// The bytes that the next step writes.
    fn written(&mut self) -> Vec<u8> {
        match self.transfer.action() {
            Action::Write { iovecs, .. } => iovecs::read(iovecs, iovecs::len(iovecs)),
            action => panic!("{action:?}"),
        }
    }

    /// What the worker does after [`Next::Elsewhere`] for what is no flush.
    fn go_elsewhere(&mut self, path: usize) {
        let _ = self.table.fail_path(self.transfer.path_index(), 1);
        self.transfer.note_refusal(1);
        self.transfer.set_path(path);
    }

    /// Bytes written to the guest, and the status.
    fn end(&mut self, status: Status) -> (u64, Status) {
        let (request, nr_bytes, status) = self.transfer.end(status).unwrap();
        assert_eq!(request.into_head().0, 3);
        assert!(self.transfer.end(status).is_none(), "ended once");
        (nr_bytes, status)
    }

    fn is_dirty(&self, path: usize) -> bool {
        self.table.paths()[path].ledger().is_dirty()
    }

    /// All that earlier tests or processes wrote is flushed.
    fn clean(&self) {
        for path in self.table.paths() {
            let mut coverage = Coverage::default();
            path.ledger().begin_flush(&mut coverage);
            path.ledger().end_flush(&coverage);
        }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if let Some((request, ..)) = self.transfer.end(Status::IoErr) {
            let _ = request.into_head();
        }
    }
}

const OK: Next = Next::Finished(Status::Ok);
const IOERR: Next = Next::Finished(Status::IoErr);

fn moved(len: u64) -> i32 {
    i32::try_from(len).unwrap()
}
