//! The FUSE face of the server: turns kernel requests into jobs.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use super::names::Name;
use super::rule::Kind;
use super::serve::{FIRST_NODE, Job, Shared, Work, entry_ok};

#[derive(Debug)]
pub(super) struct Fs {
    pub shared: Arc<Shared>,
    pub async_io: bool,
}

/// Attributes of a name as stat shows them.
pub(super) fn attr(name: &Name) -> io::Result<FileAttr> {
    let size = match name.size {
        Some(size) => size,
        None => name.file.metadata()?.len(),
    };
    Ok(plain_attr(name.ino, FileType::RegularFile, size))
}

fn plain_attr(ino: u64, kind: FileType, size: u64) -> FileAttr {
    let time: SystemTime = UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: if kind == FileType::Directory { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Fs {
    fn submit(
        &self,
        kind: Kind,
        ino: INodeNo,
        fh: FileHandle,
        (offset, len): (u64, u64),
        mode: i32,
        work: Work,
    ) {
        // The kernel asks only for node ids that lookup gave out.
        let name = Shared::index(ino).expect("a known node id");
        self.shared.arrive(Job { kind, name, offset, len, fh: fh.0, mode, work });
    }
}

impl Filesystem for Fs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without asynchronous direct I/O each request would occupy a kernel worker until answered, and a test could not
        // hold more of them than the kernel has workers.
        if self.async_io {
            let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        }
        let _ = config.set_max_background(u16::MAX);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(index) = self.shared.lookup(name) else { return reply.error(Errno::ENOENT) };
        let mut attr = attr(&self.shared.core().names[index]);
        if let Ok(attr) = &mut attr {
            // The node id, which must differ by name, travels in this field; stat asks again and gets the shared number.
            attr.ino = INodeNo(FIRST_NODE + index as u64);
        }
        entry_ok(reply, attr);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        if Shared::index(ino).is_none() {
            return reply.attr(&Duration::ZERO, &plain_attr(1, FileType::Directory, 0));
        }
        self.submit(Kind::Stat, ino, fh.unwrap_or(FileHandle(0)), (0, 0), 0, Work::Stat { reply });
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let Some(index) = Shared::index(ino) else { return reply.error(Errno::EPERM) };
        let core = self.shared.core();
        let name = &core.names[index];
        let changed = size.map_or(Ok(()), |size| name.file.set_len(size));
        match changed.and_then(|()| attr(name)) {
            Ok(attr) => reply.attr(&Duration::ZERO, &attr),
            Err(e) => reply.error(e.into()),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let fh = {
            let mut core = self.shared.core();
            core.next_fh += 1;
            core.next_fh
        };
        self.submit(Kind::Open, ino, FileHandle(fh), (0, 0), 0, Work::Open { reply });
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let work = Work::Read { size: size as usize, reply };
        self.submit(Kind::Read, ino, fh, (offset, size.into()), 0, work);
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let work = Work::Write { data: data.to_vec(), reply };
        let durable = flags.0 & libc::O_DSYNC;
        self.submit(Kind::Write, ino, fh, (offset, data.len() as u64), durable, work);
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(index) = Shared::index(ino) {
            let counts = &mut self.shared.core().names[index].counts;
            counts.releases += 1;
            counts.open = counts.open.saturating_sub(1);
        }
        reply.ok();
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.submit(Kind::Fsync, ino, fh, (0, 0), 0, Work::Fsync { reply });
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.submit(Kind::Fallocate, ino, fh, (offset, length), mode, Work::Fallocate { reply });
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let core = self.shared.core();
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, name) in core.names.iter().enumerate().filter(|(_, n)| !n.gone).skip(skip) {
            let at = index as u64;
            if reply.add(INodeNo(FIRST_NODE + at), at + 1, FileType::RegularFile, &name.name) {
                break;
            }
        }
        reply.ok();
    }
}
