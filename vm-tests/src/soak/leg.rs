//! One load with events, to its end in order or to a power cut.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use super::events::Events;
use super::world::{QUEUES, World};
use crate::front_end::Queue;
use crate::front_end::durable::{Ends, Mix, Survived, Tally, Writer};
use crate::front_end::hostile::{Hostile, Nonsense};

/// In how many legs there is a guest that keeps no rules.
const NONSENSE_PERCENT: u64 = 40;
/// It leaves the processors of a small machine to the others.
const NONSENSE_PAUSE: Duration = Duration::from_micros(200);

/// Longest time between two events.
const PAUSE_MAX: Duration = Duration::from_millis(30);

/// How a leg ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything is mended, answered, flushed and compared.
    Peace,
    /// The storage and the host lose their power.
    Power,
}

/// Ends the loads at once, unless all went well: they would be waited for without end.
struct CutOnFailure<'a> {
    ends: &'a Ends,
    is_well: bool,
}

impl Drop for CutOnFailure<'_> {
    fn drop(&mut self) {
        if !self.is_well {
            for flag in [&self.ends.stop, &self.ends.dying, &self.ends.cut] {
                flag.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// What a leg gave.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The requests.
    pub tally: Tally,
    /// What the sectors held after a cut.
    pub survived: Option<Survived>,
}

/// Loads all queues while events happen until `until`.
pub fn run(
    world: &mut World,
    writers: &mut [Writer],
    events: &mut Events,
    mix: &Mix,
    until: Instant,
    end: End,
) -> Result<Outcome> {
    let ends = Ends::default();
    let mix = Mix { write_through: world.setup.write_through, ..*mix };
    let mut tally = Tally::default();
    let (mut parts, queues) = world.parts();
    let (queues, fifth) = queues.split_at_mut(QUEUES.into());
    let nonsense = events.rng.percent(NONSENSE_PERCENT).then(|| {
        let at = usize::try_from(events.rng.below(Nonsense::ALL.len() as u64)).expect("small");
        events.note("nonsense on a fifth queue", Nonsense::ALL[at].name());
        (Nonsense::ALL[at], events.rng.next_u64())
    });
    // Its buffers are nobody else's before its ring has stopped.
    let mut hostile = None;
    std::thread::scope(|scope| -> Result<()> {
        if let (Some((what, seed)), Some(q)) = (nonsense, fifth.first_mut()) {
            let (ends, hostile) = (&ends, &mut hostile);
            scope.spawn(move || *hostile = Some(talk_nonsense(&mut q.queue, what, seed, ends)));
        }
        let loads: Vec<_> = queues
            .iter_mut()
            .zip(writers.iter_mut())
            .map(|(q, writer)| {
                let (mix, ends) = (&mix, &ends);
                scope.spawn(move || writer.run(q, mix, ends))
            })
            .collect();
        let mut guard = CutOnFailure { ends: &ends, is_well: false };
        let mut happen = || -> Result<()> {
            while Instant::now() < until && !loads.iter().any(|load| load.is_finished()) {
                events.one(&mut parts)?;
                events.look(&parts.storage())?;
                events.pause(PAUSE_MAX);
            }
            match end {
                End::Peace => {
                    events.mend_all(&parts.storage())?;
                    ends.stop.store(true, Ordering::SeqCst);
                }
                End::Power => {
                    let (seed, wait_us) = (events.rng.next_u64(), events.rng.below(20_000));
                    // The next start asks every path who it is.
                    events.put_back(&parts.storage());
                    ends.dying.store(true, Ordering::SeqCst);
                    parts.fs.power_off(seed);
                    // The back-end may live on for a moment, and must not say that anything is durable now.
                    std::thread::sleep(Duration::from_micros(wait_us));
                    parts.server.kill();
                    ends.cut.store(true, Ordering::SeqCst);
                    events.note("power cut", format_args!("{seed:x}, host {wait_us} us later"));
                }
            }
            Ok(())
        };
        let happened = happen();
        guard.is_well = happened.is_ok();
        drop(guard);
        let mut loaded = Ok(());
        for load in loads {
            match load.join().map_err(|_| anyhow!("a load panicked"))? {
                Ok(more) => tally.add(more),
                // What a load has found comes first: it may be why the events did not go as they should.
                Err(error) => loaded = Err(error.context("load")),
            }
        }
        loaded.and(happened)
    })?;
    if end == End::Power {
        events.begun_anew();
        let survived = world.come_again(writers).context("after the power cut")?;
        return Ok(Outcome { tally, survived: Some(survived) });
    }
    // The fifth queue is made good again, and is.
    world.disk.session.stop(QUEUES).context("stop the queue with the nonsense")?;
    drop(hostile);
    let fifth = world.disk.queues.get_mut(usize::from(QUEUES)).context("a fifth queue")?;
    fifth.reset();
    world.disk.session.start(&fifth.queue, 0)?;
    fifth.read(0, 8).context("the fifth queue after a reset")?;
    compare(world, writers, &mut tally)?;
    Ok(Outcome { tally, survived: None })
}

/// A driver that keeps no rules, for as long as the load goes on. Gives what its ring still points to.
fn talk_nonsense(queue: &mut Queue, what: Nonsense, seed: u64, ends: &Ends) -> Hostile {
    let mut hostile = Hostile::new(queue, what, seed);
    while !ends.stop.load(Ordering::SeqCst) && !ends.cut.load(Ordering::SeqCst) {
        hostile.poke(queue);
        std::thread::sleep(NONSENSE_PAUSE);
    }
    hostile
}

/// Everything was answered: the disk and, after a flush, the file hold it.
fn compare(world: &mut World, writers: &mut [Writer], tally: &mut Tally) -> Result<()> {
    for (q, writer) in world.disk.queues.iter_mut().zip(writers.iter()) {
        anyhow::ensure!(q.nr_pending() == 0, "{} requests left", q.nr_pending());
        tally.sectors_checked += writer.check_all(q)?;
    }
    for q in world.disk.queues.iter_mut().take(QUEUES.into()) {
        q.flush()?;
    }
    let image = world.image();
    for writer in writers.iter() {
        writer.check_file(&image)?;
    }
    world.book.all_durable();
    Ok(())
}
