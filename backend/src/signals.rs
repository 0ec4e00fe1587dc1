//! Signals, as bytes on sockets that the control loop watches.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use signal_hook::consts::{SIGBUS, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use vmm_sys_util::signal::register_signal_handler;

/// Those that end the process, and the one that has the configuration read again.
#[derive(Debug)]
pub(crate) struct Signals {
    pub stop: UnixStream,
    pub reload: UnixStream,
}

/// From now on these do nothing; programs that are run from here are ended by them as ever.
pub(crate) fn ignore() -> std::io::Result<()> {
    let ignored = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    Ok(())
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
    register_signal_handler(SIGBUS, memory_is_gone)
        .map_err(|error| std::io::Error::from_raw_os_error(error.errno()))?;
    Ok(signals)
}

/// Memory that the front-end shares is not there: it has cut the file short, or there is no page for it. What was to be read
/// or written there cannot be made up, so the process ends; it does so with a word, which a signal alone would not give.
extern "C" fn memory_is_gone(_signal: libc::c_int, _info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    const WORD: &[u8] =
        b"polypath: memory that the front-end shares is gone (SIGBUS): its file was cut short, or its \
        huge pages or memory are used up; ending\n";
    // Only what may be called in a signal handler: a look, a write, and the end.
    if crate::logging::has_room(0) {
        let _ = rustix::io::write(rustix::stdio::stderr(), WORD);
    }
    std::process::abort();
}
