//! The guest's side: sends requests, looks at what comes back, and whether that is right.

use super::lun::{Last, NR_PORTS, Record};
use super::model::{SECTOR, ZEROS, content_of};
use super::plan::{self, Expect, IOERR, OK, Plan, Told, What};
use super::slot::Slot;
use super::world::{Ended, Outstanding, Volatile, World};

/// A time of the worker's own may be so much later than one seen from here.
const SLACK_NS: u64 = 1_000_000;

impl World {
    pub(crate) fn can_send(&self) -> bool {
        self.nr_sent < self.profile.nr_requests && !self.control.is_wrecked
    }

    pub(crate) fn send_and_publish(&mut self) {
        if self.can_send() && self.send() {
            self.publish();
        }
    }

    /// Sends one more request if there is room for it. True if something was put into the ring.
    pub(crate) fn send(&mut self) -> bool {
        if self.rng.chance(2) {
            return self.driver.offer_bad_head(&mut self.rng);
        }
        let nr_slots = if self.control.has_second { self.slots.len() } else { self.slots.len() / 2 };
        let is_free = |slot: &usize| self.outstanding.values().all(|o| o.slot != *slot);
        let free: Vec<usize> = (0..nr_slots).filter(is_free).collect();
        if free.is_empty() {
            return false;
        }
        let slot = self.rng.pick(&free);
        let id = self.nr_sent + 1;
        let told = Told {
            discard: self.disk.limits().discard,
            indirect: self.profile.indirect,
            block: self.profile.align.block_bytes as u64 / 512,
            nothing: !self.profile.gaps.nothing,
        };
        let plan = plan::any(&mut self.rng, id, told);
        let placed = self.slots[slot].place(&mut self.rng, &plan);
        let (pieces, table) = (&placed.pieces, placed.table);
        let Some((head, descriptors)) = self.driver.chain(&mut self.rng, pieces, plan.twist, table) else {
            return false;
        };
        // The table is part of what must not change.
        self.slots[slot].remember();
        self.nr_sent = id;
        self.clock += 1;
        self.say(format_args!(
            "head {head} is {:?} {:?} {:?} slot {slot}",
            plan.what, plan.sectors, plan.twist
        ));
        if let Some(content) = written(&plan, id) {
            for sectors in &plan.sectors {
                self.model.begin(id, content, sectors, self.clock);
            }
        }
        let request = Outstanding {
            id,
            plan,
            slot,
            placed,
            descriptors,
            since: self.now(),
            is_published: false,
            record: Record::default(),
            is_stuck: false,
            may_be_lost: false,
            ended: None,
        };
        let before = self.outstanding.insert(head, request);
        assert!(before.is_none(), "the driver gave head {head} twice");
        true
    }

    /// Tells the device; kicks if it wants that.
    pub(crate) fn publish(&mut self) {
        let wanted = self.driver.publish();
        self.outstanding.values_mut().for_each(|o| o.is_published = true);
        self.say(format_args!("available up to {}, kick wanted: {wanted}", self.driver.published()));
        if wanted && !self.profile.polled {
            self.control.kick = true;
        }
    }

    /// Takes all used entries, then asks for the next call (or for none).
    pub(crate) fn look(&mut self) {
        self.note_no_path();
        self.mark_returned();
        // A call for what was shown in the middle of a turn comes at its end, when the guest has taken it already.
        self.control.was_call_due |= self.driver.is_call_due();
        self.control.nr_calls = 0;
        if self.rng.chance(50) {
            self.driver.disarm();
        }
        while let Some((head, len)) = self.driver.next_used() {
            self.clock += 1;
            let head = u16::try_from(head).expect("a head");
            let request = self.outstanding.remove(&head);
            let request =
                request.unwrap_or_else(|| panic!("head {head} is returned and was not outstanding"));
            assert!(request.is_published, "head {head} is returned before it was made available");
            self.take_back(head, request, len);
        }
        match self.rng.weighted(&[7, 2, 1]) {
            0 => self.driver.arm(0),
            1 => {
                let nr = u16::try_from(self.nr_with_device()).expect("few");
                self.driver.arm(nr * 3 / 4);
            }
            _ => self.driver.disarm(),
        }
        self.control.nr_calls_since_armed = 0;
    }

    fn take_back(&mut self, head: u16, request: Outstanding, len: u32) {
        let Outstanding { id, plan, slot, placed, descriptors, since, record, ended, may_be_lost, .. } =
            request;
        let status = match plan.expect {
            Expect::Nothing => None,
            Expect::Status(status) => Some(status),
            Expect::Served => placed.status(&self.slots[slot]),
        };
        self.say(format_args!("head {head} is back: status {status:?} len {len}"));
        let is_ok = status == Some(OK);
        let (room, is_read) = (u64::from(plan.room) - 1, plan.what == What::Read);
        let written_len = match plan.what {
            What::Read if is_ok => room,
            What::GetId => room.min(20),
            _ => 0,
        };
        let expected_len = if status.is_some() { written_len + 1 } else { 0 };
        assert_eq!(u64::from(len), expected_len, "used length of head {head}");
        // What a failed read has left in its buffers, nobody knows.
        let touched = if is_read { room } else { written_len };
        let data = placed.check(&self.slots[slot], status, touched);
        self.slots[slot].remember();

        match plan.what {
            What::Read if is_ok => self.check_read(&plan, since.clock, &data),
            What::GetId => assert_eq!(data[..], self.disk.id()[..data.len()]),
            What::Flush if is_ok => self.check_durable(since.clock),
            What::Write | What::Discard | What::Zeroes
                if is_ok && self.is_write_through_since(since.clock) =>
            {
                self.assert_written_through(&record.parts, since.clock);
            }
            _ => {}
        }
        let has_waited = !matches!(record.last, Last::Success | Last::Final(_));
        let is_lost = may_be_lost && has_waited && status == Some(IOERR);
        if plan.expect == Expect::Served && !is_lost {
            let ended = ended.expect("looked at after the turn that returned it");
            self.check_status(head, &plan, since.clock, &record, ended, status);
        }
        if written(&plan, id).is_some() {
            // A discard may leave what it likes.
            let is_sure = is_ok && plan.what != What::Discard;
            for sectors in &plan.sectors {
                self.model.end(id, sectors, is_sure, self.clock);
            }
            if is_ok {
                self.volatile.push(Volatile { answered: self.clock, parts: record.parts });
            }
        }
        self.driver.release(&descriptors);
    }

    fn check_read(&self, plan: &Plan, since: u64, data: &[u8]) {
        for (sector, bytes) in plan.sectors[0].clone().zip(data.chunks(SECTOR)) {
            let content = content_of(bytes, sector);
            let content = content.unwrap_or_else(|| panic!("sector {sector} reads as what nobody wrote"));
            assert!(self.model.allows(sector, content, since), "sector {sector} reads as {content}");
        }
    }

    /// Whether the status is what the answers of the paths make of it.
    fn check_status(
        &self,
        head: u16,
        plan: &Plan,
        since: u64,
        record: &Record,
        ended: Ended,
        status: Option<u8>,
    ) {
        // What was decided while the ring was out of reach was decided under who knows what.
        let is_vague = self.control.unreachable_until >= since;
        let without_path = is_vague || self.may_fail_without_path(record, ended);
        let all_refused = ended.active & !record.refused == 0;
        let is_nothing = plan.sectors.iter().all(|s| s.is_empty());
        let expected = match record.last {
            _ if plan.what == What::Flush => {
                let errors = self.flushes.iter().any(|(at, last)| *at >= since && *last != Last::Retry);
                let may_fail = errors || without_path;
                assert!(
                    status == Some(OK) || (status == Some(IOERR) && may_fail),
                    "flush {head}: {status:?}"
                );
                return;
            }
            // Written, but not made durable when the last path went.
            Last::Success if status == Some(IOERR) && without_path && self.is_write_through() => IOERR,
            Last::Success => OK,
            Last::Final(status) => status,
            Last::Nothing if is_nothing || plan.what == What::Discard && status == Some(OK) => OK,
            // Every path that was active when that was decided has refused it.
            Last::PathError if all_refused && ended.active_before & record.refused != 0 => IOERR,
            // Those that are not there are not waited for.
            Last::NotAllowed(status) if all_refused => status,
            last => {
                let is_blocked = ended.stopping && ended.active != 0 && last == Last::Nothing;
                let may_be_failed = self.profile.gaps.blocked || is_vague;
                assert!(!is_blocked || may_be_failed, "head {head} was failed by a stop with a path there");
                assert!(without_path, "head {head} gave up after {last:?} with {record:?}, {ended:?}");
                IOERR
            }
        };
        assert_eq!(status, Some(expected), "head {head}: {:?} after {:?}", plan.what, record.last);
    }

    /// Whether a request may have failed because no path was there.
    fn may_fail_without_path(&self, record: &Record, ended: Ended) -> bool {
        use polypath_paths::text::NoPathRetry;

        let is_over = match (self.profile.policy, ended.no_path_ns) {
            (_, None) | (NoPathRetry::Queue, _) => false,
            (NoPathRetry::Fail, Some(_)) => true,
            (NoPathRetry::Seconds(s), Some(no_path_ns)) => {
                let began_ns = no_path_ns.min(record.troubled_ns.unwrap_or(u64::MAX));
                ended.ns + SLACK_NS >= began_ns + u64::from(s.get()) * 1_000_000_000
            }
        };
        ended.stopping || is_over
    }

    /// A flush that was sent at `since` has been answered OK.
    fn check_durable(&mut self, since: u64) {
        for write in std::mem::take(&mut self.volatile) {
            if write.answered < since {
                self.assert_durable(&write.parts, since, "flushed");
            } else {
                self.volatile.push(write);
            }
        }
    }

    /// Each port that carried a part has synced since; one whose path was out at some time since then is stood in for by
    /// any other.
    fn assert_durable(&self, parts: &[Option<u64>; NR_PORTS], since: u64, how: &str) {
        for (port, written) in parts.iter().enumerate() {
            let Some(written) = *written else { continue };
            let was_out = self.last_out[port] >= since;
            let covered = self.synced[port] > written
                || (was_out && self.synced.iter().any(|synced| *synced > written));
            assert!(
                covered,
                "port {port} carried a write that was {how} without a sync (was out: {was_out})"
            );
        }
    }

    /// The port that carried the last part has synced; what others carried before is the disk's by then.
    fn assert_written_through(&self, parts: &[Option<u64>; NR_PORTS], since: u64) {
        if self.profile.gaps.write_through {
            let last = parts.iter().flatten().max();
            assert!(
                last.is_none_or(|last| self.synced.iter().any(|s| s > last)),
                "written through and no sync"
            );
            return;
        }
        let last = parts.iter().flatten().max().copied();
        let last = parts.map(|part| part.filter(|_| part == last));
        self.assert_durable(&last, since, "written through");
    }

    fn is_write_through(&self) -> bool {
        self.disk.is_write_through(self.profile.features)
    }

    fn is_write_through_since(&self, since: u64) -> bool {
        self.is_write_through() && self.control.write_through_since <= since
    }

    /// At the end: all was returned, and the disk holds what was written.
    pub(crate) fn check_end(&self) {
        assert!(self.outstanding.is_empty(), "never returned: {:?}", self.outstanding.keys());
        self.slots.iter().for_each(Slot::assert_unchanged);
        for (sector, bytes) in (0..).zip(self.lun.data.chunks(SECTOR)) {
            let content = content_of(bytes, sector);
            let content = content.unwrap_or_else(|| panic!("sector {sector} holds what nobody wrote"));
            assert!(self.model.allows(sector, content, self.clock + 1), "sector {sector} holds {content}");
        }
    }
}

/// The content that a request gives its sectors.
fn written(plan: &Plan, id: u64) -> Option<u64> {
    match plan.what {
        What::Write => Some(id),
        What::Discard | What::Zeroes => Some(ZEROS),
        _ => None,
    }
}
