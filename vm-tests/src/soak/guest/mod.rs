//! The form with a real guest under QEMU: fio in the guest loads all queues and checks every block that it wrote.
//!
//! A life begins with a boot. Each leg is a load of its own shape, over and over until the events of the leg have happened and
//! everything is mended; it must have read back all that it wrote, and the guest's kernel must have seen no error of its
//! disk. Between legs the driver lets go of the disk, or the guest starts anew. In the last legs of a life polypath is
//! killed, ends in order, and the guest moves to another QEMU and another polypath.

mod load;
mod machine;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::drift::Sample;
use super::events::{Events, Stage as _};
use super::storage::{SOON, Setup};
use super::{CALM_PERCENT, Options, Record, lives};
use crate::faulty::CacheModel;
use crate::front_end::verify::Rng;
use crate::guest::Qemu;
use crate::server::wait_until;
use load::Load;
use machine::{Deck, Machine};

/// Shortest life: less than a tenth of it goes into the boot of an emulated guest.
const LIFE_MIN: Duration = Duration::from_secs(100);
/// How long events happen in a leg; its load takes some seconds more to start and to end.
const EVENTS_TIME: Duration = Duration::from_secs(3);
/// Longest time between two events.
const PAUSE_MAX: Duration = Duration::from_millis(120);
/// Requests of a load before anything happens to it.
const NR_BEFORE_EVENTS: u64 = 20;
/// How long the pass that is under way may take to its end, on a machine that has much else to do.
const PASS_TIMEOUT: Duration = Duration::from_secs(120);
/// A path that hangs is found within a leg, and one that is well answers sooner, also on a busy machine.
const PATH_TIMEOUT_MS: u64 = 500;
/// What the load needs, and something behind it.
const DISK_BYTES: u64 = load::JOBS as u64 * load::JOB_BYTES + (4 << 20);

/// What is counted, in the order in which it is shown.
const FACTS: [&str; 7] = [
    "lives",
    "legs",
    "passes of the load",
    "blocks written, read back and compared",
    "KiB written, read back and compared",
    "boots",
    "moves to another QEMU",
];

/// What can happen between two legs.
#[derive(Clone, Copy, Debug)]
enum Between {
    Nothing,
    Driver,
    Device,
    Reset,
    Reboot,
    Crash,
}

/// All of it; a boot takes an emulated guest as long as a leg, so it is not to come too often.
const BETWEEN: [Between; 10] = [
    Between::Nothing,
    Between::Driver,
    Between::Nothing,
    Between::Device,
    Between::Nothing,
    Between::Reset,
    Between::Nothing,
    Between::Reboot,
    Between::Nothing,
    Between::Crash,
];

/// Lives, one after the other, until the time is over.
pub(super) fn run(options: &Options, begun: Instant, record: &mut Record) -> Result<()> {
    record.facts = FACTS.map(|fact| (fact, 0)).into();
    let mover = match Qemu::for_moves() {
        Ok(qemu) => Some(qemu),
        Err(why) => {
            record.remarks.push(format!("the guest was not moved: {why:#}"));
            None
        }
    };
    lives(options, begun, LIFE_MIN, |seed, time, number| {
        // Front-ends differ, and not each of them can move a guest: they take turns, from the seed on.
        let is_movers_turn = options.seed.wrapping_add(number) % 2 == 1;
        let qemu = mover.filter(|_| is_movers_turn).unwrap_or_default();
        life(seed, time, qemu, mover == Some(qemu), record)
    })
}

fn life(seed: u64, time: Duration, qemu: Qemu, can_move: bool, record: &mut Record) -> Result<()> {
    record.count("lives", 1);
    record.process += 1;
    let mut rng = Rng::new(seed);
    let setup = Setup {
        // No power is lost here.
        model: CacheModel::Lun,
        bytes: DISK_BYTES,
        path_timeout_ms: PATH_TIMEOUT_MS,
        ..Setup::random(&mut rng)
    };
    let mut loads = Rng::new(rng.next_u64());
    let mut machine = Machine::start(setup, qemu, can_move)?;
    record.count("boots", 1);
    let stranger = machine.beside("stranger");
    let foreign = vec![0xDD; usize::try_from(DISK_BYTES)?];
    std::fs::write(&stranger, &foreign)?;
    let mut events = Events::new(rng, stranger.clone(), machine.image());
    let begun = Instant::now();
    let lived = (|| -> Result<()> {
        let mut between = Deck::new(&BETWEEN);
        while begun.elapsed() < time || !machine.has_met_all_ends() {
            let percent = begun.elapsed().as_secs_f64() / time.as_secs_f64() * 100.0;
            events.may_end_process = percent >= CALM_PERCENT.into();
            if events.may_end_process && record.samples.last().is_some_and(|s| s.process == record.process) {
                record.process += 1;
            }
            let load = Load::random(&mut loads);
            leg(&mut machine, &mut events, &load, record)
                .with_context(|| format!("{load:?} on /dev/{}", machine.disk))?;
            ensure!(std::fs::read(&stranger)? == foreign, "another file was written to");
            if !events.may_end_process {
                let sample = Sample::of(&machine.server, record.process);
                record.samples.push(Sample { at_s: begun.elapsed().as_secs_f64(), ..sample });
            }
            happen_between(&mut machine, &mut events, between.draw(&mut loads), record)?;
        }
        machine.end()
    })();
    record.count("moves to another QEMU", machine.nr_moves);
    record.take(&mut events);
    if lived.is_err() {
        record.log = machine.log();
    }
    lived.with_context(|| format!("{:?}", machine.setup))
}

/// A load with events, until all is mended and compared.
fn leg(machine: &mut Machine, events: &mut Events, load: &Load, record: &mut Record) -> Result<()> {
    machine.choose_cache(load.write_through)?;
    machine.guest.start_passes(&load.fio(&machine.disk), load.seed)?;
    if let Err(error) = happen(machine, events) {
        // What the load has found comes first: it may be why the events did not go as they should.
        let failed = machine.guest.failed_passes().ok().flatten();
        return Err(match failed {
            Some(said) => error.context(format!("the load failed: {said}")),
            None => error,
        });
    }
    let passes = machine.guest.end_passes(PASS_TIMEOUT)?;
    ensure!(passes.result.reads == passes.nr * load.nr_blocks(), "not all was read: {passes:?}");
    ensure!(passes.result.writes > 0, "nothing was written: {passes:?}");
    let complaints = machine.guest.disk_complaints()?;
    ensure!(complaints.is_empty(), "the guest's kernel says: {complaints}");
    record.count("legs", 1);
    record.count("passes of the load", passes.nr);
    record.count("blocks written, read back and compared", passes.result.writes);
    record.count("KiB written, read back and compared", passes.result.writes * load.block_bytes / 1024);
    *record.requests.entry("read").or_default() += passes.result.reads;
    *record.requests.entry("write").or_default() += passes.result.writes;
    Ok(())
}

/// Events under a load that runs; in the end all is well.
fn happen(machine: &mut Machine, events: &mut Events) -> Result<()> {
    machine.wait_requests(NR_BEFORE_EVENTS).context("the load's first requests")?;
    let until = Instant::now() + EVENTS_TIME;
    if events.may_end_process {
        machine.own_event(events)?;
    }
    while Instant::now() < until {
        events.one(machine)?;
        events.look(&machine.storage())?;
        events.pause(PAUSE_MAX);
    }
    events.mend_all(&machine.storage())
}

fn happen_between(
    machine: &mut Machine,
    events: &mut Events,
    what: Between,
    record: &mut Record,
) -> Result<()> {
    match what {
        Between::Nothing => return Ok(()),
        Between::Driver => {
            machine.disk = machine.guest.rebind(&machine.disk, false)?;
            events.note("driver lets go of the disk", &machine.disk);
            return Ok(());
        }
        Between::Device => {
            machine.disk = machine.guest.rebind(&machine.disk, true)?;
            events.note("driver lets go of the device", &machine.disk);
            return Ok(());
        }
        Between::Reset => machine.guest.reset().map(|()| events.note("guest is reset", ""))?,
        Between::Reboot => machine.guest.reboot().map(|()| events.note("guest reboots", ""))?,
        Between::Crash => machine.guest.crash_reboot().map(|()| events.note("guest crashes", ""))?,
    }
    record.count("boots", 1);
    machine.disk = "vda".into();
    wait_until("the guest's disk", SOON, || machine.guest.disks().is_ok_and(|disks| disks == ["vda"]))
}
