//! The listening socket: made, taken over from whoever started us, or refused.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::umask;

use crate::clock;
use crate::logging::LineLimit;

/// First descriptor that systemd passes (sd_listen_fds(3)).
const LISTEN_FDS_START: RawFd = 3;

/// Longest socket path: `sun_path` with its terminating 0.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How long the control loop waits when a connection cannot be accepted: while no descriptor is left, it would be told of
/// that connection again and again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Lines about that, of all listening sockets together.
static LINES: LineLimit = LineLimit::new();

/// A listening socket. Its file, if we made one, is removed at the end.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    name: String,
    /// The file that we made.
    file: Option<SocketFile>,
}

/// The file of a socket that we made.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct SocketFile {
    #[serde(with = "crate::as_text::bytes")]
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
}

impl SocketFile {
    /// Takes it away, unless somebody has put another one there.
    pub fn remove(&self) {
        let now = fs::symlink_metadata(&self.path).map(|meta| (meta.dev(), meta.ino()));
        if now.is_ok_and(|now| now == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Who may connect beside the own user.
#[derive(Debug, Clone, Copy, Default)]
pub struct Access {
    /// The socket belongs to this user.
    pub owner: Option<u32>,
    /// This group may connect as well.
    pub group: Option<u32>,
}

impl Listener {
    /// Binds `path`, open to the own user, and to `group` if given. A dead socket is replaced; a living one, or
    /// anything else by that name, is not touched.
    pub fn bind(path: &Path, group: Option<u32>) -> anyhow::Result<Self> {
        Self::bind_for("--socket-path", path, Access { owner: None, group })
    }

    /// The same for another option, whose name is part of its errors.
    pub fn bind_for(option: &str, path: &Path, access: Access) -> anyhow::Result<Self> {
        let option = || format!("{option} {}", path.display());
        if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            bail!("{}: longer than {SOCKET_PATH_BYTES_MAX} bytes", option());
        }
        remove_dead(path).with_context(option)?;
        // The mode is right from the first moment on; no other thread runs yet that could mind.
        let old = umask(rustix::fs::Mode::from_raw_mode(0o177));
        let socket = UnixListener::bind(path);
        umask(old);
        let socket = socket.with_context(option)?;
        let Access { owner, group } = access;
        if let Some(owner) = owner {
            std::os::unix::fs::chown(path, Some(owner), None)
                .with_context(|| format!("{}: cannot give it to user {owner}", option()))?;
        }
        if let Some(group) = group {
            std::os::unix::fs::chown(path, None, Some(group))
                .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o660)))
                .with_context(|| format!("{}: cannot give it to group {group}", option()))?;
        }
        let meta = fs::symlink_metadata(path).with_context(option)?;
        Ok(Self {
            socket,
            name: path.display().to_string(),
            file: Some(SocketFile { path: path.to_owned(), id: (meta.dev(), meta.ino()) }),
        })
    }

    /// Takes over descriptor `fd` (`--fd`).
    pub fn from_fd(fd: RawFd) -> anyhow::Result<Self> {
        Self::take_over(fd).with_context(|| format!("--fd {fd}"))
    }

    /// Takes over the socket of systemd's socket activation, if there is one for us.
    pub fn from_environment() -> Option<anyhow::Result<Self>> {
        let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID")? != std::process::id() {
            return None;
        }
        match number("LISTEN_FDS")? {
            0 => None,
            1 => Some(Self::take_over(LISTEN_FDS_START).context("LISTEN_FDS")),
            n => Some(Err(anyhow::anyhow!("LISTEN_FDS: {n} sockets given, one is served"))),
        }
    }

    fn take_over(fd: RawFd) -> anyhow::Result<Self> {
        if fd < LISTEN_FDS_START {
            bail!("the standard descriptors are not sockets to serve");
        }
        // Asks the number without owning it: a wrong one must not be closed.
        if !Path::new(&format!("/proc/self/fd/{fd}")).exists() {
            bail!("not an open descriptor");
        }
        // SAFETY: the number was given to us to own, by the option or by systemd's protocol, it is open, and it is taken
        // over once, before anything else is opened by its number.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let domain = sockopt::socket_domain(fd.as_fd()).context("not a socket")?;
        let kind = sockopt::socket_type(fd.as_fd())?;
        if domain != AddressFamily::UNIX || kind != SocketType::STREAM {
            bail!("not a Unix stream socket");
        }
        if !sockopt::socket_acceptconn(fd.as_fd())? {
            bail!("not listening");
        }
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
        let socket = UnixListener::from(fd);
        let name = match socket.local_addr() {
            Ok(addr) => {
                addr.as_pathname().map_or_else(|| "(unnamed)".to_owned(), |p| p.display().to_string())
            }
            Err(_) => "(unnamed)".to_owned(),
        };
        Ok(Self { socket, name, file: None })
    }

    /// The socket.
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// The next connection of a socket that does not block; None if there is none, or none can be had now.
    pub fn accept(socket: &UnixListener, what: &str) -> Option<UnixStream> {
        loop {
            match socket.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if LINES.allows(clock::now_ns()) {
                        log::warn!("cannot accept a {what}: {error}");
                    }
                    std::thread::sleep(ACCEPT_PAUSE);
                    return None;
                }
            }
        }
    }

    /// Leaves the removing of its file, if it has one, to somebody else.
    pub fn take_file(&mut self) -> Option<SocketFile> {
        self.file.take()
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

fn remove_dead(path: &Path) -> anyhow::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if !meta.file_type().is_socket() {
        bail!("exists and is not a socket");
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!("a living server listens there"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(fs::remove_file(path)?),
        Err(error) => Err(anyhow::Error::from(error).context("cannot tell whether a server listens there")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f55_a_dead_socket_is_replaced_and_a_living_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&path, None).unwrap();
        let error = format!("{:#}", Listener::bind(&path, None).unwrap_err());
        assert!(error.contains("living server"), "{error}");
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn f55_what_is_no_socket_is_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"precious").unwrap();
        assert!(Listener::bind(&file, None).is_err());
        assert!(Listener::bind(dir.path(), None).is_err());
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        assert!(Listener::bind(&dir.path().join("missing/s"), None).is_err());
        let long = dir.path().join("x".repeat(200));
        assert!(format!("{:#}", Listener::bind(&long, None).unwrap_err()).contains("longer than"));
    }

    #[test]
    fn f57_the_socket_is_the_users_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = Listener::bind(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn another_socket_by_the_same_name_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&path, None).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
