//! What happens to a thread that makes a forbidden call: the log says which, and the process ends by SIGSYS.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the kernel says which call it was: `siginfo_t` of SIGSYS (`si_call_addr`, `si_syscall`, `si_arch`, sigaction(2)),
/// as 64-bit processors have it.
#[repr(C)]
struct Info {
    signo_errno_code: [c_int; 4],
    call_addr: *const c_void,
    syscall: c_int,
    arch: u32,
}

/// Whether lines of the log begin with the journal's priority.
static IS_JOURNAL: AtomicBool = AtomicBool::new(false);

/// From here on SIGSYS is reported.
pub(super) fn report() -> io::Result<()> {
    IS_JOURNAL.store(crate::logging::is_journal(), Ordering::Relaxed);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_violation;
    // SAFETY: an action is plain data, for which zeros are values.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler as usize;
    // The second time, which the handler brings about, it ends the process.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_NODEFER;
    // SAFETY: the handler does only what is safe in one: it fills an array of its own, and makes calls.
    if unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_violation(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO such a structure of 128 bytes, aligned for it.
    let (syscall, arch) = unsafe {
        let info = info.cast::<Info>();
        ((*info).syscall, (*info).arch)
    };
    let mut name = [0; 16];
    // SAFETY: the call writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let mut line = Line::default();
    if IS_JOURNAL.load(Ordering::Relaxed) {
        line.text(b"<2>");
    }
    line.text(b"sandbox: forbidden call: number=");
    line.number(syscall.unsigned_abs().into());
    line.text(b" arch=");
    line.number(arch.into());
    line.text(b" thread=");
    line.text(name.split(|byte| *byte == 0).next().unwrap_or_default());
    line.text(
        b"; polypath ends; `--sandbox off` lets it go on until this is mended (ARCHITECTURE.md, Sandbox)\n",
    );
    // SAFETY: the bytes are the line's. Then the signal comes once more, and ends the process.
    unsafe {
        if crate::logging::has_room(0) {
            libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len);
        }
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), libc::SIGSYS);
    }
}

/// Text that is put together without asking for memory.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 256], len: 0 }
    }
}

impl Line {
    fn text(&mut self, text: &[u8]) {
        for byte in text {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = *byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, number: u64) {
        let mut divisor = 10_000_000_000_000_000_000;
        while divisor > 1 && number < divisor {
            divisor /= 10;
        }
        while divisor != 0 {
            // One digit.
            let digit = u8::try_from(number / divisor % 10).unwrap_or(0);
            self.text(&[b'0' + digit]);
            divisor /= 10;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_whole_and_what_is_too_long_is_cut() {
        for number in [0, 9, 10, 257, u64::from(u32::MAX), u64::MAX] {
            let mut line = Line::default();
            line.number(number);
            assert_eq!(line.bytes[..line.len], *number.to_string().as_bytes());
        }
        let mut line = Line::default();
        line.text(&[b'x'; 300]);
        assert_eq!(line.len, line.bytes.len());
    }
}
