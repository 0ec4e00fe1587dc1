//! A ring that takes only what the engine gives it: io_uring goes past the filters on calls, so each ring has one of its own.
//!
//! It is made switched off, restricted, and switched on, and stays restricted as long as it lives.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, Probe, opcode};

use super::buffers::{READV_FIXED, WRITEV_FIXED};

/// What the engine sends.
const OPCODES: [u8; 11] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// The same on kernels that have it.
const NEWER: [u8; 2] = [READV_FIXED, WRITEV_FIXED];

/// What is registered, and taken back, while the ring works (`enum io_uring_register_op`, io_uring.h): UNREGISTER_BUFFERS,
/// UNREGISTER_FILES, FILES_UPDATE, PROBE, BUFFERS2, BUFFERS_UPDATE.
const REGISTERING: [u8; 6] = [1, 3, 6, 8, 15, 16];

/// Restricts a ring that was made switched off, and switches it on. A kernel that does not restrict rings only does that.
pub(super) fn switch_on(ring: &IoUring) -> io::Result<()> {
    let submitter = ring.submitter();
    let mut probe = Probe::new();
    let is_known = submitter.register_probe(&mut probe).is_ok();
    let newer = NEWER.iter().filter(|opcode| is_known && probe.is_supported(**opcode));
    let mut allowed: Vec<Restriction> =
        OPCODES.iter().chain(newer).copied().map(Restriction::sqe_op).collect();
    allowed.extend(REGISTERING.map(Restriction::register_op));
    allowed.push(Restriction::sqe_flags_allowed((Flags::ASYNC | Flags::FIXED_FILE).bits()));
    if let Err(error) = submitter.register_restrictions(&mut allowed) {
        log::warn!("sandbox: not confined: a ring takes whatever the kernel does: error={error}");
    }
    submitter.register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ring;

    fn result_of(ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> i32 {
        // SAFETY: what the entries of these tests point to is static or nothing.
        unsafe { ring.submission().push(entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_does_what_the_engine_asks_and_nothing_else() {
        for mut ring in [ring::build(8, true, 0), ring::build_polled(8, true, 10)].map(Result::unwrap) {
            ring.submitter().register_files_sparse(2).unwrap();
            switch_on(&ring).unwrap();
            assert_eq!(result_of(&mut ring, &opcode::Nop::new().build()), 0);
            let at = io_uring::types::Fd(libc::AT_FDCWD);
            let entries = [
                opcode::OpenAt::new(at, c"/dev/null".as_ptr()).build(),
                opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
                opcode::UnlinkAt::new(at, c"/nonexistent/x".as_ptr()).build(),
                opcode::Close::new(io_uring::types::Fd(-1)).build(),
                // What it does, but as a part of a chain.
                opcode::Nop::new().build().flags(Flags::IO_LINK),
            ];
            for entry in &entries {
                assert_eq!(result_of(&mut ring, entry), -libc::EACCES, "{entry:?}");
            }
            // Personalities would be other credentials; what it needs itself goes on.
            assert_eq!(
                ring.submitter().register_personality().unwrap_err().raw_os_error(),
                Some(libc::EACCES)
            );
            ring.submitter().register_files_update(0, &[-1]).unwrap();
            ring.submitter().unregister_files().unwrap();
        }
    }
}
