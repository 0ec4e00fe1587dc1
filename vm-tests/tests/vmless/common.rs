//! What many tests need: images with known contents, a served disk, preconditions.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use polypath_vm_tests::faulty::FaultyFs;
use polypath_vm_tests::front_end::verify::pattern;
use polypath_vm_tests::front_end::{BlkQueue, Disk, Op};
use polypath_vm_tests::server::Server;
use tempfile::TempDir;

/// For anything that should happen at once.
pub const SOON: Duration = Duration::from_secs(10);
pub const MIB: u64 = 1 << 20;

/// Returns from the test, recorded as skipped, when a precondition is not met.
macro_rules! need {
    ($what:ident) => {
        if let Err(why) = polypath_vm_tests::$what::available() {
            return polypath_vm_tests::skip::skip(&format!("{}:{}", file!(), line!()), why);
        }
    };
}
pub(crate) use need;

/// A file in a directory of its own.
pub struct Image {
    dir: TempDir,
    pub path: PathBuf,
    pub bytes: u64,
}

impl Image {
    /// All zero.
    pub fn empty(bytes: u64) -> Self {
        let dir = tempfile::Builder::new().prefix("img-").tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        Self { dir, path, bytes }
    }

    /// Each sector holds its generation 1 pattern.
    pub fn filled(bytes: u64) -> Self {
        let image = Self::empty(bytes);
        let data: Vec<u8> = (0..bytes / 512).flat_map(|sector| pattern(sector, 1)).collect();
        image.file().write_all_at(&data, 0).unwrap();
        image
    }

    pub fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn sectors(&self) -> u64 {
        self.bytes / 512
    }

    pub fn at(&self, sector: u64, num: usize) -> Vec<u8> {
        let mut data = vec![0; num * 512];
        self.file().read_exact_at(&mut data, sector * 512).unwrap();
        data
    }

    /// Asserts that the sectors hold what [`Image::filled`] put there.
    pub fn assert_filled(&self, sectors: std::ops::Range<u64>) {
        for sector in sectors {
            let bytes = self.at(sector, 1);
            assert!(bytes == pattern(sector, 1), "sector {sector} holds {:x?}...", &bytes[..16]);
        }
    }
}

/// What [`Image::filled`] holds in these sectors.
pub fn filled(sector: u64, num: u64) -> Vec<u8> {
    (sector..sector + num).flat_map(|sector| pattern(sector, 1)).collect()
}

/// An image on any back-end, one queue.
pub fn serve(image: &Image) -> (Server, Disk) {
    let server = Server::any().path(&image.path).start().unwrap();
    let disk = Disk::open(server.socket()).unwrap();
    (server, disk)
}

/// An image on polypath through FUSE names.
pub fn serve_faulty(image: &Image, names: &[&str]) -> (FaultyFs, Server, Disk) {
    serve_names(FaultyFs::mount(&image.path, names).unwrap(), names)
}

/// The same where every errno reaches the program, but few requests can be held.
pub fn serve_faulty_sync(image: &Image, names: &[&str]) -> (FaultyFs, Server, Disk) {
    serve_names(FaultyFs::mount_sync(&image.path, names).unwrap(), names)
}

fn serve_names(fs: FaultyFs, names: &[&str]) -> (FaultyFs, Server, Disk) {
    let server = Server::polypath().paths(fs.paths(names)).start().unwrap();
    let disk = Disk::open(server.socket()).unwrap();
    (fs, server, disk)
}

/// The status that `op` gets.
pub fn status(q: &mut BlkQueue, op: &Op) -> u8 {
    q.run(op).unwrap().status
}

/// The statuses that `ops` get, sent in one kick.
pub fn statuses(q: &mut BlkQueue, ops: &[Op]) -> Vec<u8> {
    q.run_all(ops).unwrap().iter().map(|done| done.status).collect()
}

/// Neither taken out nor complained of.
pub fn no_path_failed(server: &Server) {
    assert_eq!(server.count_log("path failed"), 0, "{}", server.stderr());
    assert_eq!(server.count_log("path error"), 0, "{}", server.stderr());
}
