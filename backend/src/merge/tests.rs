use super::*;

const LIMITS: MergeLimits = MergeLimits { bytes_max: 64 << 10, ranges_bytes_max: 256 << 10, iovecs_max: 16 };
const BLOCK: u64 = 4096;

/// A queue of requests of 4 KiB, each known by its block number.
struct Case {
    queue: MergeQueue<u64>,
    now_ns: u64,
}

fn span(block: u64, kind: SpanKind) -> Span {
    Span { start: block * BLOCK, end: (block + 1) * BLOCK, kind, nr_iovecs: 1 }
}

impl Case {
    fn new(limits: MergeLimits) -> Self {
        Self { queue: MergeQueue::new(64, limits), now_ns: 0 }
    }

    fn read(&mut self, blocks: &[u64]) {
        for block in blocks {
            self.queue.add(*block, span(*block, SpanKind::Read), self.now_ns);
        }
    }

    fn write(&mut self, blocks: &[u64]) {
        for block in blocks {
            self.queue.add(*block, span(*block, SpanKind::Write), self.now_ns);
        }
    }

    /// Takes the next run; None if nothing may go.
    fn next(&mut self) -> Option<Vec<u64>> {
        let (run, bytes, _) = self.queue.first()?;
        let blocks: Vec<u64> = self.queue.take(run).collect();
        assert_eq!(bytes, blocks.len() as u64 * BLOCK);
        Some(blocks)
    }

    /// Everything that may go, in order.
    fn all(&mut self) -> Vec<Vec<u64>> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// Sends the next run.
    fn fly(&mut self) -> RunId {
        let (_, bytes, kind) = self.queue.first().unwrap();
        let start = self.next().unwrap()[0] * BLOCK;
        self.queue.fly(Span { start, end: start + bytes, kind, nr_iovecs: 1 }).unwrap()
    }
}

#[test]
fn back_front_and_gap_closing() {
    let mut case = Case::new(LIMITS);
    case.read(&[10, 11, 12]);
    assert_eq!(case.all(), [[10, 11, 12]]);
    case.read(&[12, 11, 10]);
    assert_eq!(case.all(), [[10, 11, 12]]);
    case.read(&[10, 12, 11]);
    assert_eq!(case.all(), [[10, 11, 12]]);
    case.read(&[10, 11, 13, 14, 20, 12]);
    assert_eq!(case.all(), [vec![10, 11, 12, 13, 14], vec![20]]);
    assert_eq!((case.queue.is_empty(), case.queue.len()), (true, 0));
}

#[test]
fn interleaved_streams_merge_each_for_itself() {
    let mut case = Case::new(LIMITS);
    for i in 0..8 {
        case.read(&[i, 100 + i, 200 + i, 300 + i]);
    }
    let expected: Vec<Vec<u64>> = (0..4).map(|s| (0..8).map(|i| s * 100 + i).collect()).collect();
    assert_eq!(case.all(), expected);
}

#[test]
fn directions_and_flushes_keep_requests_apart() {
    let mut case = Case::new(LIMITS);
    case.read(&[1]);
    case.write(&[2]);
    case.read(&[3]);
    assert_eq!(case.all(), [[1], [2], [3]]);
    case.write(&[1]);
    case.queue.seal();
    case.write(&[2, 3]);
    assert_eq!(case.all(), [vec![1], vec![2, 3]]);
}

#[test]
fn ranges_merge_with_their_like_up_to_a_limit_of_their_own() {
    use SpanKind::{Discard, Write, Zero, ZeroUnmap};
    let mut case = Case::new(MergeLimits { ranges_bytes_max: 4 * BLOCK, bytes_max: 2 * BLOCK, ..LIMITS });
    let add = |case: &mut Case, spans: &[(u64, SpanKind)]| {
        for (block, kind) in spans {
            let span = Span { nr_iovecs: 0, ..span(*block, *kind) };
            case.queue.add(*block, span, 0);
        }
    };
    add(&mut case, &[(0, Discard), (1, Discard), (2, Discard), (3, Discard), (4, Discard)]);
    assert_eq!(case.all(), [vec![0, 1, 2, 3], vec![4]]);
    add(&mut case, &[(3, Zero), (1, Zero), (2, Zero)]);
    assert_eq!(case.all(), [[1, 2, 3]]);
    // What keeps the space, what gives it back and what does not care are different things.
    add(&mut case, &[(0, Discard), (1, Zero), (2, ZeroUnmap), (3, Write), (4, ZeroUnmap)]);
    assert_eq!(case.all(), [[0], [1], [2], [3], [4]]);
    add(&mut case, &[(0, Discard)]);
    case.queue.seal();
    add(&mut case, &[(1, Discard)]);
    assert_eq!(case.all(), [[0], [1]]);
    let mut off = Case::new(MergeLimits { bytes_max: 0, ..LIMITS });
    add(&mut off, &[(0, Discard), (1, Discard)]);
    assert_eq!(off.all(), [[0], [1]]);
}

#[test]
fn f04_what_overlaps_is_not_merged() {
    let mut case = Case::new(LIMITS);
    let wide = |start: u64, blocks: u64| Span {
        start: start * BLOCK,
        end: (start + blocks) * BLOCK,
        kind: SpanKind::Write,
        nr_iovecs: 1,
    };
    for (spans, expected) in [
        (vec![wide(0, 2), wide(0, 2)], vec![vec![0], vec![1]]),
        (vec![wide(0, 4), wide(1, 1)], vec![vec![0], vec![1]]),
        (vec![wide(0, 4), wide(0, 2)], vec![vec![0], vec![1]]),
        (vec![wide(0, 2), wide(1, 2)], vec![vec![0], vec![1]]),
        // The third fills the gap between the first two.
        (vec![wide(0, 2), wide(4, 2), wide(2, 2)], vec![vec![0, 2, 1]]),
        // It fills more than the gap.
        (vec![wide(0, 2), wide(4, 2), wide(2, 3)], vec![vec![0, 2], vec![1]]),
    ] {
        for (i, span) in spans.iter().enumerate() {
            case.queue.add(i as u64, *span, 0);
        }
        let all: Vec<Vec<u64>> = std::iter::from_fn(|| {
            let (run, ..) = case.queue.first()?;
            Some(case.queue.take(run).collect())
        })
        .collect();
        assert_eq!(all, expected, "{spans:?}");
    }
}

#[test]
fn f15_runs_keep_to_the_limits() {
    let mut case = Case::new(MergeLimits { bytes_max: 4 * BLOCK, iovecs_max: 100, ..LIMITS });
    case.read(&[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(case.all(), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8]]);
    // Closing a gap would make too much of it.
    case.read(&[0, 1, 3, 4, 2]);
    assert_eq!(case.all(), [vec![0, 1, 2], vec![3, 4]]);
    let mut case = Case::new(MergeLimits { bytes_max: 1 << 20, iovecs_max: 2, ..LIMITS });
    case.read(&[0, 1, 2, 3, 4]);
    assert_eq!(case.all(), [vec![0, 1], vec![2, 3], vec![4]]);
    let mut case = Case::new(MergeLimits { bytes_max: 0, iovecs_max: 100, ..LIMITS });
    case.read(&[0, 1, 2]);
    assert_eq!(case.all(), [[0], [1], [2]], "merging is off");
}

#[test]
fn the_oldest_member_gives_a_run_its_place() {
    let mut case = Case::new(LIMITS);
    case.read(&[50, 7, 51, 90, 8]);
    assert_eq!(case.all(), [vec![50, 51], vec![7, 8], vec![90]]);
    // United runs stand where the older one stood.
    case.read(&[10, 40, 12, 11]);
    assert_eq!(case.all(), [vec![10, 11, 12], vec![40]]);
    // Also if the older one is the latter on the disk.
    for block in [12, 40, 10, 11] {
        case.read(&[block]);
        case.now_ns += 1;
    }
    assert_eq!(case.all(), [vec![10, 11, 12], vec![40]]);
}

#[test]
fn a_stream_waits_only_while_enough_of_it_is_under_way() {
    let mut case = Case::new(LIMITS);
    case.read(&[0]);
    let first = case.fly();
    // One is under way: the next goes at once.
    case.read(&[1]);
    let second = case.fly();
    // Two are under way: what follows waits and grows, and others are not held up.
    case.read(&[2, 3, 70]);
    case.write(&[2]);
    assert_eq!(case.all(), [[70], [2]]);
    case.read(&[4]);
    assert_eq!(case.next(), None);
    assert_eq!((case.queue.len(), case.queue.is_empty()), (3, false));
    case.queue.land(first);
    assert_eq!(case.all(), [[2, 3, 4]]);
    case.queue.land(second);
}

#[test]
fn whichever_predecessor_ends_first_lets_it_go() {
    let mut case = Case::new(LIMITS);
    case.read(&[0]);
    let first = case.fly();
    case.read(&[1]);
    let second = case.fly();
    case.read(&[2]);
    assert_eq!(case.next(), None);
    case.queue.land(second);
    assert_eq!(case.all(), [[2]]);
    case.queue.land(first);
}

#[test]
fn a_full_run_does_not_wait() {
    let mut case = Case::new(MergeLimits { bytes_max: 3 * BLOCK, iovecs_max: 100, ..LIMITS });
    case.read(&[0]);
    case.fly();
    case.read(&[1]);
    case.fly();
    case.read(&[2, 3]);
    assert_eq!(case.next(), None);
    case.read(&[4, 5]);
    assert_eq!(case.all(), [vec![2, 3, 4], vec![5]], "and nothing of what is behind it is under way");
}

#[test]
fn nothing_is_parked_for_long() {
    let mut case = Case::new(LIMITS);
    case.read(&[0]);
    case.fly();
    case.read(&[1]);
    case.fly();
    case.now_ns = 1_000;
    case.read(&[2]);
    case.now_ns = 500_000;
    case.read(&[3]);
    let due_ns = case.queue.due_ns().unwrap();
    assert_eq!(due_ns, 1_000 + PARKED_NS_MAX);
    case.queue.expire(due_ns - 1);
    assert_eq!(case.next(), None);
    case.queue.expire(due_ns);
    assert_eq!(case.all(), [[2, 3]]);
    assert_eq!(case.queue.due_ns(), None);
}

#[test]
fn everything_comes_out_once_whatever_comes_in() {
    let mut seed = 7_u64;
    let mut random = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    let mut case = Case::new(MergeLimits { bytes_max: 6 * BLOCK, iovecs_max: 5, ..LIMITS });
    let (mut nr_in, mut nr_out, mut flying) = (0_u64, 0_u64, Vec::new());
    for _ in 0..200_000 {
        match random(10) {
            0..5 if case.queue.len() + flying.len() < 60 => {
                let kinds = [SpanKind::Read, SpanKind::Write, SpanKind::Discard, SpanKind::Zero];
                let (block, kind) = (random(40), kinds[usize::try_from(random(4)).unwrap()]);
                case.queue.add(block, span(block, kind), case.now_ns);
                nr_in += 1;
            }
            5 => case.queue.seal(),
            6 => {
                case.now_ns += random(PARKED_NS_MAX);
                case.queue.expire(case.now_ns);
            }
            7..9 if !flying.is_empty() => {
                let at = usize::try_from(random(flying.len() as u64)).unwrap();
                case.queue.land(flying.swap_remove(at));
            }
            _ => {
                let Some((run, bytes, kind)) = case.queue.first() else { continue };
                let blocks: Vec<u64> = case.queue.take(run).collect();
                assert!(blocks.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{blocks:?}");
                let blocks_max = if matches!(kind, SpanKind::Read | SpanKind::Write) { 5 } else { 64 };
                assert!(blocks.len() <= blocks_max && bytes == blocks.len() as u64 * BLOCK);
                nr_out += blocks.len() as u64;
                let start = blocks[0] * BLOCK;
                let span = Span { start, end: start + bytes, kind, nr_iovecs: 1 };
                flying.extend(case.queue.fly(span));
            }
        }
    }
    nr_out += case.queue.drain().len() as u64;
    assert_eq!(nr_in, nr_out);
    assert!(case.queue.is_empty() && nr_in > 20_000);
}
