//! What only happens to a front-end of our own: regions of memory come and go, and either end goes and comes again.

use anyhow::{Context as _, Result};

use super::events::{Events, Stage};
use super::storage::Storage;
use super::world::Parts;
use crate::front_end::{Region, Resume};

impl Stage for Parts<'_> {
    fn storage(&self) -> Storage<'_> {
        Parts::storage(self)
    }

    fn own_event(&mut self, events: &mut Events) -> Result<()> {
        if events.rng.below(9) < 4 { change_memory(self, events) } else { change_ends(self, events) }
    }
}

fn change_memory(world: &mut Parts<'_>, events: &mut Events) -> Result<()> {
    // The old memory is in use for as long as a path keeps a request.
    world.storage().mend();
    let memory = world.memory;
    let region = memory.add(Region::new(memory.end() + (1 << 20), 1 << 20, 0)?);
    if events.rng.percent(50) {
        world.session.set_mem_table(memory)?;
        memory.remove(region.guest);
        world.session.set_mem_table(memory)?;
    } else {
        world.session.add_region(&region)?;
        world.session.remove_region(&region)?;
        memory.remove(region.guest);
    }
    events.note("memory", "a region came and went");
    Ok(())
}

/// The back-end or the front-end goes and comes again.
fn change_ends(world: &mut Parts<'_>, events: &mut Events) -> Result<()> {
    let resume = if events.rng.percent(50) { Resume::Used } else { Resume::Available };
    let what = if events.may_end_process { events.rng.below(5) } else { 3 };
    // A start asks every path who it is, and a stop waits for every request.
    events.put_back(&world.storage());
    if what == 0 && events.rng.percent(50) {
        return events.kill_while_hanging(world.fs, || world.kill(resume));
    }
    world.storage().mend();
    match what {
        0 | 1 => {
            world.kill(resume).context("kill -9")?;
            events.begun_anew();
            events.note("kill -9", format_args!("{resume:?}"));
        }
        2 => {
            world.restart(resume).context("restart")?;
            events.begun_anew();
            events.note("restart", format_args!("{resume:?}"));
        }
        3 => {
            let is_in_order = events.rng.percent(50);
            world.come_anew(is_in_order).context("front-end comes anew")?;
            events.note("front-end reconnects", if is_in_order { "after a stop" } else { "without a stop" });
        }
        _ => {
            world.hand_over().context("hand-over")?;
            events.begun_anew();
            events.note("hand-over", "");
        }
    }
    Ok(())
}
