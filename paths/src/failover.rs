//! What an errno says, and whom it concerns.
//!
//! The split follows the kernel's `blk_path_error()` (`include/linux/blk_types.h`), carried over to the errno that
//! `blk_status_to_errno()` (`block/blk-core.c`) makes of each status; what the kernel does not name is our own and said below.

use crate::limits::FileKind;

/// The kind of work that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Work {
    /// Reading data.
    #[default]
    Read,
    /// Writing data (zeros included).
    Write,
    /// fsync or fdatasync.
    Flush,
    /// Giving space back.
    Discard,
    /// Zeroing without data.
    WriteZeroes,
}

/// How the guest sees a request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// VIRTIO_BLK_S_IOERR.
    IoErr,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupp,
}

/// What to do with a request that came back with an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The path is at fault: take it out and send the request down another.
    PathError,
    /// The target (or we) said no; every path would: the guest sees it and no path is at fault.
    TargetError(Refusal),
    /// Resources are short for the moment: the same path again, a little later.
    Busy,
    /// A signal came in between: the same path again, now.
    Interrupted,
}

/// Judges `errno` (positive) from `work` on a path of `kind`.
///
/// | errno | verdict |
/// |---|---|
/// | EINTR | again at once |
/// | EAGAIN, ENOMEM, EBUSY, ENOBUFS | again later, a bounded number of times |
/// | EOPNOTSUPP, ENOTTY, ENOSYS | target: UNSUPP for discard and write-zeroes, IOERR otherwise |
/// | ENOSPC, EDQUOT, EFBIG, EREMOTEIO, EBADE, ENODATA, EILSEQ, EPERM, EACCES, EROFS | target: IOERR |
/// | EINVAL, EFAULT, EBADF, E2BIG | our own mistake: IOERR, no path is at fault |
/// | EIO from a flush of a regular file | target: IOERR. The host lost data that was written back; a second fsync would say OK |
/// | everything else (EIO, ENODEV, ENXIO, ENOLINK, ETIMEDOUT, ENOTCONN, ESTALE, ...) | path |
pub fn judge(work: Work, kind: FileKind, errno: i32) -> Verdict {
    match errno {
        libc::EINTR | libc::ECANCELED => Verdict::Interrupted,
        libc::EAGAIN | libc::ENOMEM | libc::EBUSY | libc::ENOBUFS => Verdict::Busy,
        libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS => Verdict::TargetError(match work {
            Work::Discard | Work::WriteZeroes => Refusal::Unsupp,
            Work::Read | Work::Write | Work::Flush => Refusal::IoErr,
        }),
        libc::ENOSPC
        | libc::EDQUOT
        | libc::EFBIG
        | libc::EREMOTEIO
        | libc::EBADE
        | libc::ENODATA
        | libc::EILSEQ
        | libc::EPERM
        | libc::EACCES
        | libc::EROFS
        | libc::EINVAL
        | libc::EFAULT
        | libc::EBADF
        | libc::E2BIG => Verdict::TargetError(Refusal::IoErr),
        libc::EIO if work == Work::Flush && kind == FileKind::Regular => Verdict::TargetError(Refusal::IoErr),
        _ => Verdict::PathError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Work; 5] = [Work::Read, Work::Write, Work::Flush, Work::Discard, Work::WriteZeroes];

    #[test]
    fn f01_only_errors_that_speak_of_the_path_fail_it() {
        let path = [
            libc::EIO,
            libc::ENODEV,
            libc::ENXIO,
            libc::ENOLINK,
            libc::ETIMEDOUT,
            libc::ENOTCONN,
            libc::ESTALE,
            libc::ECONNABORTED,
            libc::ECONNRESET,
            libc::EHOSTUNREACH,
            libc::ESHUTDOWN,
            libc::ETIME,
            4000,
        ];
        for work in ALL {
            for errno in path {
                if work != Work::Flush || errno != libc::EIO {
                    assert_eq!(judge(work, FileKind::Regular, errno), Verdict::PathError, "{work:?} {errno}");
                }
                assert_eq!(judge(work, FileKind::Block, errno), Verdict::PathError, "{work:?} {errno}");
            }
        }
    }

    #[test]
    fn f01_f35_refusals_of_the_target_and_our_own_mistakes_fail_no_path() {
        let target = [
            libc::EREMOTEIO,
            libc::ENODATA,
            libc::EILSEQ,
            libc::EBADE,
            libc::ENOSPC,
            libc::EDQUOT,
            libc::EFBIG,
            libc::EPERM,
            libc::EROFS,
            libc::EACCES,
            libc::EINVAL,
            libc::EFAULT,
        ];
        for work in ALL {
            for errno in target {
                let verdict = judge(work, FileKind::Block, errno);
                assert_eq!(verdict, Verdict::TargetError(Refusal::IoErr), "{work:?} {errno}");
            }
        }
    }

    #[test]
    fn f01_unsupported_is_unsupp_where_the_guest_can_take_it() {
        for errno in [libc::EOPNOTSUPP, libc::ENOTTY, libc::ENOSYS] {
            for work in [Work::Discard, Work::WriteZeroes] {
                assert_eq!(judge(work, FileKind::Block, errno), Verdict::TargetError(Refusal::Unsupp));
            }
            assert_eq!(judge(Work::Read, FileKind::Block, errno), Verdict::TargetError(Refusal::IoErr));
        }
    }

    #[test]
    fn f12_try_again_is_no_error() {
        for errno in [libc::EAGAIN, libc::ENOMEM, libc::EBUSY] {
            assert_eq!(judge(Work::Read, FileKind::Block, errno), Verdict::Busy);
        }
        assert_eq!(judge(Work::Write, FileKind::Block, libc::EINTR), Verdict::Interrupted);
    }

    #[test]
    fn f16_a_lost_writeback_is_not_hidden_by_another_path() {
        assert_eq!(judge(Work::Flush, FileKind::Regular, libc::EIO), Verdict::TargetError(Refusal::IoErr));
        assert_eq!(judge(Work::Flush, FileKind::Block, libc::EIO), Verdict::PathError);
        assert_eq!(judge(Work::Flush, FileKind::Regular, libc::ENOTCONN), Verdict::PathError);
    }
}
