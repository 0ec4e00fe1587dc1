//! A virtqueue that carries virtio-blk requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::chain::Chain;
use super::memory::{Buf, Memory};
use super::queue::Queue;
use super::request::{Cut, Framing, OK, Op, Segment, UNTOUCHED, pieces};

/// Bytes kept around status bytes and odd pieces, to see what is written beside them.
const GUARD: usize = 8;
/// What read buffers hold before the device writes them.
const STALE: u8 = 0xE5;

/// A request in the device's hands.
#[derive(Debug)]
struct Pending {
    tag: u64,
    started: Instant,
    /// Where the device may write, in order: the last byte is the status.
    into: Vec<(u64, usize)>,
    /// Bytes that must keep the guard pattern.
    guards: Vec<(u64, usize)>,
    in_len: usize,
    _bufs: Vec<Buf>,
}

/// A request that was answered.
#[derive(Clone, Debug)]
pub struct Done {
    /// Number of the submission on its queue, from 0.
    pub tag: u64,
    /// Status byte.
    pub status: u8,
    /// Length in the used entry.
    pub used_len: u32,
    /// What was read.
    pub data: Vec<u8>,
    /// Time between staging and answer.
    pub latency: Duration,
}

/// A queue with its requests.
#[derive(Debug)]
pub struct BlkQueue {
    /// The queue itself.
    pub queue: Queue,
    /// How long an answer may take.
    pub timeout: Duration,
    /// Whether to look at the ring only, without waiting for calls.
    pub polling: bool,
    mem: Arc<Memory>,
    pending: HashMap<u16, Pending>,
    next_tag: u64,
}

impl BlkQueue {
    /// Requests on `queue`.
    pub fn new(queue: Queue) -> Self {
        let mem = Arc::clone(queue.memory());
        let timeout = Duration::from_secs(10);
        Self { queue, timeout, polling: false, mem, pending: HashMap::new(), next_tag: 0 }
    }

    /// Requests not answered yet.
    pub fn nr_pending(&self) -> usize {
        self.pending.len()
    }

    /// Forgets everything, as a driver does that resets the device.
    pub fn reset(&mut self) {
        self.queue.reset();
        self.pending.clear();
    }

    /// Stages a request: its number, or `None` when the queue is full.
    pub fn stage(&mut self, op: &Op) -> Option<u64> {
        self.stage_framed(op, &Framing::Plain)
    }

    /// Stages a request in a given framing.
    pub fn stage_framed(&mut self, op: &Op, framing: &Framing) -> Option<u64> {
        let mut built = Built::default();
        match framing {
            Framing::Plain => built.plain(&self.mem, op),
            Framing::Indirect => {
                built.plain(&self.mem, op);
                built.move_to_table(&self.mem, 0);
            }
            Framing::Cut(cut) => built.cut(&self.mem, op, cut),
        }
        let head = self.queue.stage(&built.chain)?;
        let tag = self.next_tag;
        self.next_tag += 1;
        let Built { bufs, into, guards, .. } = built;
        let pending =
            Pending { tag, started: Instant::now(), into, guards, in_len: op.in_len(), _bufs: bufs };
        self.pending.insert(head, pending);
        Some(tag)
    }

    /// Publishes what was staged and kicks if the device wants it.
    pub fn kick(&mut self) {
        self.queue.kick();
    }

    /// Stages and kicks; a full queue is an error.
    pub fn submit(&mut self, op: &Op) -> Result<u64> {
        let tag = self.stage(op).context("the queue is full")?;
        self.kick();
        Ok(tag)
    }

    /// Waits for the next answer.
    pub fn done(&mut self) -> Result<Done> {
        self.done_within(self.timeout)
    }

    /// Waits for the next answer, for so long.
    pub fn done_within(&mut self, timeout: Duration) -> Result<Done> {
        let used = if self.polling { self.queue.wait_polling(timeout) } else { self.queue.wait(timeout) }?;
        self.finish(used.head, used.len)
    }

    /// The next answer if there is one now.
    pub fn done_now(&mut self) -> Result<Option<Done>> {
        match self.queue.pop()? {
            Some(used) => self.finish(used.head, used.len).map(Some),
            None => Ok(None),
        }
    }

    fn finish(&mut self, head: u16, used_len: u32) -> Result<Done> {
        let pending = self.pending.remove(&head).with_context(|| format!("head {head} is no request"))?;
        let mut data: Vec<u8> = Vec::with_capacity(pending.in_len + 1);
        for &(addr, len) in &pending.into {
            data.extend(self.mem.read_vec(addr, len));
        }
        let status = data.pop().context("a request without a status byte")?;
        for &(addr, len) in &pending.guards {
            let bytes = self.mem.read_vec(addr, len);
            ensure!(bytes.iter().all(|&b| b == UNTOUCHED), "bytes beside a buffer were written: {bytes:x?}");
        }
        let max = pending.in_len + 1;
        ensure!(used_len as usize <= max, "used length {used_len} of {max} writable bytes");
        if status == UNTOUCHED {
            bail!("request {} was answered without a status", pending.tag);
        }
        Ok(Done { tag: pending.tag, status, used_len, data, latency: pending.started.elapsed() })
    }

    /// Waits for all answers; in the order of submission.
    pub fn drain(&mut self) -> Result<Vec<Done>> {
        let mut all = Vec::new();
        while !self.pending.is_empty() {
            all.push(self.done()?);
        }
        all.sort_by_key(|done| done.tag);
        Ok(all)
    }

    /// Sends one request, with nothing else under way, and waits for its answer.
    pub fn run(&mut self, op: &Op) -> Result<Done> {
        self.run_framed(op, &Framing::Plain)
    }

    /// [`BlkQueue::run`] in a given framing.
    pub fn run_framed(&mut self, op: &Op, framing: &Framing) -> Result<Done> {
        assert!(self.pending.is_empty());
        self.stage_framed(op, framing).context("the chain does not fit the queue")?;
        self.kick();
        self.done()
    }

    /// Sends all, in one kick as far as they fit the queue, and waits for all answers.
    pub fn run_all(&mut self, ops: &[Op]) -> Result<Vec<Done>> {
        let mut all = Vec::new();
        let mut ops = ops.iter().peekable();
        while ops.peek().is_some() {
            while let Some(op) = ops.peek() {
                if self.stage(op).is_none() {
                    break;
                }
                ops.next();
            }
            self.kick();
            all.extend(self.drain()?);
        }
        Ok(all)
    }

    fn run_ok(&mut self, op: &Op) -> Result<Vec<u8>> {
        let done = self.run(op)?;
        ensure!(done.status == OK, "status {} for {}", done.status, describe(op));
        Ok(done.data)
    }

    /// Reads `num` sectors.
    pub fn read(&mut self, sector: u64, num: usize) -> Result<Vec<u8>> {
        self.run_ok(&Op::read(sector, num))
    }

    /// Writes.
    pub fn write(&mut self, sector: u64, data: &[u8]) -> Result<()> {
        self.run_ok(&Op::write(sector, data)).map(drop)
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<()> {
        self.run_ok(&Op::Flush).map(drop)
    }

    /// The identity, without what is behind its first NUL.
    pub fn get_id(&mut self) -> Result<String> {
        let id = self.run_ok(&Op::GetId)?;
        let end = id.iter().position(|&b| b == 0).unwrap_or(id.len());
        Ok(String::from_utf8_lossy(&id[..end]).into_owned())
    }

    /// Discards one range.
    pub fn discard(&mut self, sector: u64, num: u32) -> Result<()> {
        self.run_ok(&Op::Discard(vec![Segment::new(sector, num)])).map(drop)
    }

    /// Zeroes one range.
    pub fn write_zeroes(&mut self, sector: u64, num: u32, flags: u32) -> Result<()> {
        self.run_ok(&Op::WriteZeroes(vec![Segment::new(sector, num).flags(flags)])).map(drop)
    }
}

fn describe(op: &Op) -> String {
    match op {
        Op::Write { sector, data } => format!("write of {} bytes at sector {sector}", data.len()),
        other => format!("{other:?}"),
    }
}

/// A chain in the making, with the memory that it lies in.
#[derive(Debug, Default)]
struct Built {
    chain: Chain,
    bufs: Vec<Buf>,
    into: Vec<(u64, usize)>,
    guards: Vec<(u64, usize)>,
}

impl Built {
    fn plain(&mut self, mem: &Arc<Memory>, op: &Op) {
        let (header, data) = op.out_bytes();
        self.readable(mem.alloc_with(&header), header.len(), 0);
        if !data.is_empty() {
            self.readable(mem.alloc_with(&data), data.len(), 0);
        }
        if op.in_len() > 0 {
            let buf = mem.alloc(op.in_len());
            buf.fill(STALE);
            self.writable(buf, op.in_len(), 0);
        }
        self.guarded(mem, 1, GUARD);
    }

    fn cut(&mut self, mem: &Arc<Memory>, op: &Op, cut: &Cut) {
        let (header, data) = op.out_bytes();
        let out = [header, data].concat();
        let mut rest = &out[..];
        for len in pieces(out.len(), &cut.out) {
            let (piece, behind) = rest.split_at(len);
            rest = behind;
            let buf = mem.alloc(cut.misalign + len);
            mem.write(buf.addr + cut.misalign as u64, piece);
            self.readable(buf, len, cut.misalign);
        }
        for len in pieces(op.in_len() + 1, &cut.into) {
            self.guarded(mem, len, cut.misalign);
        }
        if cut.indirect {
            self.move_to_table(mem, cut.direct_pieces);
        }
    }

    fn readable(&mut self, buf: Buf, len: usize, offset: usize) {
        let chain = std::mem::take(&mut self.chain);
        self.chain = chain.readable(buf.addr + offset as u64, u32::try_from(len).expect("a sane length"));
        self.bufs.push(buf);
    }

    fn writable(&mut self, buf: Buf, len: usize, offset: usize) {
        let addr = buf.addr + offset as u64;
        let chain = std::mem::take(&mut self.chain);
        self.chain = chain.writable(addr, u32::try_from(len).expect("a sane length"));
        self.into.push((addr, len));
        self.bufs.push(buf);
    }

    /// A writable piece with guard bytes before (`offset` of them) and behind it.
    fn guarded(&mut self, mem: &Arc<Memory>, len: usize, offset: usize) {
        let buf = mem.alloc(offset + len + GUARD);
        buf.fill(UNTOUCHED);
        let addr = buf.addr + offset as u64;
        mem.fill(addr, len, STALE);
        // Whichever piece turns out to be the last: its last byte is the status, and shows whether it was written.
        mem.fill(addr + len as u64 - 1, 1, UNTOUCHED);
        self.guards.push((buf.addr, offset));
        self.guards.push((addr + len as u64, GUARD));
        self.writable(buf, len, offset);
    }

    fn move_to_table(&mut self, mem: &Arc<Memory>, direct_pieces: usize) {
        let table = mem.alloc(self.chain.len() * 16);
        let chain = std::mem::take(&mut self.chain);
        // A table without entries is no table.
        let first = direct_pieces.min(chain.len() - 1);
        self.chain = chain.indirect_from(first, table.addr);
        self.bufs.push(table);
    }
}
