//! Telling a front-end something by a descriptor that it gave: an eventfd, if it keeps to the rules.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};

/// A descriptor to write to. Whatever it is, and however full, writing to it does not hold up the worker: who waited for the
/// worker would wait for ever, the end of the session included.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    /// Whether a write would wait for room. Front-ends as a rule give one that does not. It is theirs as well, so this is not
    /// changed: they may wait in reading it.
    may_wait: bool,
}

impl Notifier {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let may_wait = fcntl_getfl(&fd).map_or(true, |flags| !flags.contains(OFlags::NONBLOCK));
        Self { fd, may_wait }
    }

    /// Tells it, unless there is no room for it: then nobody reads what was told before.
    #[inline]
    pub(crate) fn notify(&self) {
        if !self.may_wait || self.has_room() {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    fn has_room(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|nr| nr != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Whether it comes back, however late on a loaded machine.
    fn comes_back(fd: OwnedFd) -> bool {
        let (done, wait) = mpsc::channel();
        std::thread::spawn(move || {
            Notifier::new(fd).notify();
            let _ = done.send(());
        });
        wait.recv_timeout(Duration::from_secs(20)).is_ok()
    }

    #[test]
    fn a_full_eventfd_does_not_hold_up_the_worker() {
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            let full = eventfd(0, flags).unwrap();
            rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            assert!(comes_back(full));
        }
    }

    #[test]
    fn a_full_socket_does_not_hold_up_the_worker() {
        let (_reader, writer) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        writer.set_nonblocking(false).unwrap();
        assert!(comes_back(writer.into()));
    }

    #[test]
    fn what_has_room_is_told() {
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            let event = eventfd(0, flags).unwrap();
            let notifier = Notifier::new(event.try_clone().unwrap());
            notifier.notify();
            notifier.notify();
            let mut count = [0; 8];
            rustix::io::read(&event, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 2);
            // Its flags are the front-end's affair.
            let is_nonblocking = fcntl_getfl(&event).unwrap().contains(OFlags::NONBLOCK);
            assert_eq!(is_nonblocking, flags == EventfdFlags::NONBLOCK);
        }
    }
}
