//! Which calls which threads make. Names are those of glibc and musl on x86_64 and aarch64: what one of them has and makes
//! is allowed on all that have it.

use std::ffi::c_long;

use libc::*;

/// Every thread: memory, locks, time, a line of the log, its own end. What has a condition is in `filters.rs`.
pub(super) const EVERY: &[c_long] = &[
    SYS_read,
    SYS_write,
    SYS_writev,
    SYS_close,
    SYS_futex,
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    SYS_brk,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_restart_syscall,
    SYS_getpid,
    SYS_gettid,
    SYS_sched_yield,
    // glibc's allocator counts processors.
    SYS_sched_getaffinity,
    SYS_clock_gettime,
    SYS_gettimeofday,
    SYS_nanosleep,
    SYS_clock_nanosleep,
    SYS_getrandom,
    SYS_exit,
    SYS_exit_group,
    // Beginnings and ends of threads.
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_rseq,
    SYS_membarrier,
    // What is open may be asked about; names are refused, see FILES.
    SYS_fstat,
    SYS_newfstatat,
    SYS_statx,
    // Whether the log has room.
    SYS_ppoll,
];

/// A worker: its ring, and files in memory, which it reads and writes itself.
pub(super) const WORKER: &[c_long] = &[
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_preadv,
    SYS_pwritev,
    SYS_preadv2,
    SYS_pwritev2,
    SYS_fdatasync,
    SYS_fallocate,
    // The last one to let go of the in-flight area's lock.
    SYS_flock,
];

/// A session: the front-end's messages, its memory, and beginning workers.
pub(super) const SESSION: &[c_long] = &[
    SYS_recvmsg,
    SYS_recvfrom,
    SYS_sendmsg,
    SYS_fcntl,
    SYS_lseek,
    SYS_ftruncate,
    SYS_memfd_create,
    SYS_eventfd2,
    SYS_socketpair,
    SYS_getsockopt,
    SYS_shutdown,
    SYS_io_uring_setup,
    SYS_sched_setaffinity,
];

/// A probe: a path's first block and size, and the helper, who opens it.
pub(super) const PROBE: &[c_long] =
    &[SYS_pread64, SYS_lseek, SYS_fcntl, SYS_socketpair, SYS_sendmsg, SYS_recvmsg, SYS_recvfrom];

/// A reload: the helper, who reads the files.
pub(super) const RELOAD: &[c_long] = &[SYS_socketpair, SYS_sendmsg, SYS_recvmsg, SYS_recvfrom];

/// Metrics: connections that come.
pub(super) const METRICS: &[c_long] =
    &[SYS_accept4, SYS_recvfrom, SYS_setsockopt, SYS_fcntl, SYS_shutdown, SYS_getpeername];

/// The control loop: connections that come, and what it waits with.
pub(super) const CONTROL: &[c_long] = &[
    SYS_accept4,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_getsockname,
    SYS_getpeername,
];

/// Names that a processor has beside those above: of the control loop's, and of every thread's.
#[cfg(target_arch = "x86_64")]
pub(super) const WAITS: [&[c_long]; 2] = [&[SYS_epoll_wait], &[SYS_poll]];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const WAITS: [&[c_long]; 2] = [&[], &[]];

/// Opening and looking at files by name: forbidden, but not worth the end of the process. The libraries do it on their own
/// (a backtrace, the time zone, the number of processors) and get along without.
#[cfg(target_arch = "x86_64")]
pub(super) const FILES: &[c_long] = &[
    SYS_open,
    SYS_openat,
    SYS_openat2,
    SYS_stat,
    SYS_lstat,
    SYS_access,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_readlink,
    SYS_readlinkat,
    SYS_getcwd,
];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const FILES: &[c_long] =
    &[SYS_openat, SYS_openat2, SYS_faccessat, SYS_faccessat2, SYS_readlinkat, SYS_getcwd];
