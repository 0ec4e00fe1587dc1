//! What most tests start with: an image file and a server on it.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use polypath_vm_tests::server::{Builder, Server};
use tempfile::TempDir;

/// A clean stop must end within a second; the rest is for a busy machine.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

pub const MIB: u64 = 1 << 20;

/// A sparse file in a directory of its own.
#[derive(Debug)]
pub struct Image {
    dir: TempDir,
}

impl Image {
    pub fn new(mib: u64) -> Result<Self> {
        let image = Self { dir: tempfile::Builder::new().prefix("disk-").tempdir()? };
        File::create(image.path())?.set_len(mib * MIB)?;
        Ok(image)
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    /// A second name for the same file.
    pub fn hard_link(&self, name: &str) -> Result<PathBuf> {
        let link = self.dir.path().join(name);
        std::fs::hard_link(self.path(), &link)?;
        Ok(link)
    }

    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        File::open(self.path())?.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let file = File::options().write(true).open(self.path())?;
        file.write_all_at(bytes, offset)?;
        Ok(file.sync_all()?)
    }

    /// Bytes that the file system really keeps for it.
    pub fn allocated(&self) -> Result<u64> {
        let file = File::open(self.path())?;
        file.sync_all()?;
        Ok(file.metadata()?.blocks() * 512)
    }
}

/// The program under test on one path.
pub fn serve(path: &Path) -> Builder {
    Server::any().path(path)
}

/// Whether [`serve`] starts polypath, so that what it alone can do can be asked for.
pub fn serves_polypath() -> bool {
    std::env::var("POLYPATH_TEST_PROGRAM").as_deref() != Ok("qsd")
}

/// Ends the server by SIGTERM and checks that it went in peace.
pub fn stop(mut server: Server) -> Result<()> {
    let code = server.terminate(STOP_TIMEOUT)?;
    ensure!(code == 0, "exit code {code}: {}", server.stderr());
    ensure!(!server.socket().exists(), "the socket is still there");
    Ok(())
}
