//! Signals, as bytes on sockets that the control loop watches.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

/// Those that end the process, and the one that has the configuration read again.
#[derive(Debug)]
pub(crate) struct Signals {
    pub stop: UnixStream,
    pub reload: UnixStream,
}

/// Watches from now on.
pub(crate) fn watch() -> std::io::Result<Signals> {
    let watch = |numbers: &[i32]| {
        let (signals, sender) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        for signal in numbers {
            signal_hook::low_level::pipe::register(*signal, sender.try_clone()?)?;
        }
        std::io::Result::Ok(signals)
    };
    let signals = Signals { stop: watch(&[SIGTERM, SIGINT])?, reload: watch(&[SIGHUP])? };
    // By default these would end the process without a word.
    let ignored = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    Ok(signals)
}
