//! In-flight tracking for a front-end whose crate does not know of it.

use std::collections::BTreeSet;
use std::os::fd::FromRawFd as _;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result, ensure};

use crate::front_end::wire::{Channel, proto, req};
use crate::front_end::{Inflight, Session};

/// What has to live as long as the connection.
pub(super) struct Tracking {
    _session: Session,
    _area: Inflight,
}

/// Numbers of the sockets that this process has open.
fn sockets() -> Result<BTreeSet<i32>> {
    let mut all = BTreeSet::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let is_socket =
            std::fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"));
        if is_socket && let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            all.insert(fd);
        }
    }
    Ok(all)
}

/// Connects as `connect` does. With `is_wanted`, an in-flight area for `nr_queues` rings of `queue_size` is asked for and handed over by the
/// same connection before any ring is set up, as QEMU does.
pub(super) fn connect_with<T>(
    is_wanted: bool,
    nr_queues: u16,
    queue_size: u16,
    connect: impl FnOnce() -> Result<T>,
) -> Result<(T, Option<Tracking>)> {
    let before = sockets()?;
    let connected = connect()?;
    if !is_wanted {
        return Ok((connected, None));
    }
    let new: Vec<i32> = sockets()?.difference(&before).copied().collect();
    let [fd] = new[..] else { anyhow::bail!("{} new sockets by one connect", new.len()) };
    // SAFETY: a plain number; the result is a new descriptor that nobody else owns.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    ensure!(copy >= 0, "copy the connection: {}", std::io::Error::last_os_error());
    // SAFETY: just made.
    let stream = unsafe { UnixStream::from_raw_fd(copy) };
    let mut session = Session {
        channel: Channel::from_stream(stream),
        offered: 0,
        features: 0,
        protocol: proto::REPLY_ACK,
    };
    let offered = session.get_u64(req::GET_PROTOCOL_FEATURES)?;
    let agreed =
        proto::MQ | proto::REPLY_ACK | proto::CONFIG | proto::CONFIGURE_MEM_SLOTS | proto::INFLIGHT_SHMFD;
    ensure!(offered & agreed == agreed, "no in-flight tracking: {offered:#x}");
    session.set(req::SET_PROTOCOL_FEATURES, &agreed.to_le_bytes(), &[])?;
    session.protocol = agreed;
    let area = Inflight::get(&session, nr_queues, queue_size).context("GET_INFLIGHT_FD")?;
    area.set(&session)?;
    Ok((connected, Some(Tracking { _session: session, _area: area })))
}
