//! Which disk is meant: by its socket, by its name, or the only one that is served here.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use super::{Failure, Target};

/// How control sockets are named. Sockets for front-ends must not be connected to: that would be a front-end.
const SUFFIX: &str = "control";

/// The sockets that are meant, sorted by name.
pub(super) fn all(target: &Target) -> Result<Vec<PathBuf>, Failure> {
    if let Some(socket) = &target.control {
        return Ok(vec![socket.clone()]);
    }
    if let Some(name) = &target.disk {
        return Ok(vec![target.run_dir.join(format!("{name}.{SUFFIX}"))]);
    }
    let dir = target.run_dir.display();
    let entries = match std::fs::read_dir(&target.run_dir) {
        Ok(entries) => entries,
        Err(error) => {
            return Err(Failure::NotThere(format!(
                "{dir}: {error}; name the control socket of the disk: --control SOCKET"
            )));
        }
    };
    let is_socket = |path: &Path| {
        path.extension().is_some_and(|suffix| suffix == SUFFIX)
            && std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
    };
    let mut sockets: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_socket(path)).collect();
    sockets.sort();
    if sockets.is_empty() {
        return Err(Failure::NotThere(format!(
            "no disk is served here: there is no {dir}/NAME.{SUFFIX}; name another control socket with --control SOCKET"
        )));
    }
    Ok(sockets)
}

/// The one socket that is meant.
pub(super) fn one(target: &Target) -> Result<PathBuf, Failure> {
    let mut sockets = all(target)?;
    match sockets.len() {
        1 => Ok(sockets.remove(0)),
        n => {
            let names: Vec<&str> = sockets.iter().filter_map(|socket| socket.file_stem()?.to_str()).collect();
            Err(Failure::Refused(format!(
                "{n} disks are served here: say which, by --disk {}",
                names.join(" or --disk ")
            )))
        }
    }
}

/// What a disk is called: its socket's name without the ending.
pub(super) fn name(socket: &Path) -> String {
    socket.file_stem().unwrap_or(socket.as_os_str()).to_string_lossy().into_owned()
}
