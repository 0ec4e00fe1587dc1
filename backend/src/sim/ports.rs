//! The monitor's part: paths break, hang, go, come back, and tables are published.

use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use polypath_paths::{Group, MapState, Path, Table, TableCell};
use polypath_selector::{GroupArgs, PathArgs};

use super::fixture::{CACHED, Links};
use super::lun::{NR_PORTS, PATH_ERRORS};
use super::profile::Profile;
use super::rng::Rng;
use super::world::{Outstanding, World};
use crate::disk::{Disk, DiskOptions};
use crate::dispatch;

/// Which port a path is: its name is the number.
pub(crate) fn port_of(path: &Path) -> usize {
    let digit = path.name().as_os_str().as_bytes().last().expect("a name from Links");
    usize::from(digit - b'0')
}

/// The disk of a run, with its first table.
pub(crate) fn disk(rng: &mut Rng, profile: &Profile, links: &Links) -> Disk {
    let mut groups: Vec<Group> = (0..profile.nr_groups).map(|_| group(profile)).collect();
    for port in 0..profile.nr_paths {
        let path = links.path(port, CACHED, 1);
        let index = rng.index(groups.len());
        groups[index].paths.push((path, PathArgs::default()));
    }
    let map = Arc::new(MapState::new(1, profile.policy, || {}));
    let table = table(rng, groups, map, profile);
    Disk::new(
        TableCell::new(table),
        DiskOptions { nr_queues: 1, queue_size: 128, id: None, tuning: profile.tuning, cpus: None },
    )
}

fn group(profile: &Profile) -> Group {
    let (selector, args) = (profile.selector, GroupArgs::default());
    Group { paths: Vec::new(), selector, args, bypassed: false }
}

fn table(rng: &mut Rng, mut groups: Vec<Group>, map: Arc<MapState>, profile: &Profile) -> Table {
    groups.retain(|group| !group.paths.is_empty());
    for group in &mut groups {
        let nr = group.paths.len();
        for (i, (_, args)) in group.paths.iter_mut().enumerate() {
            *args = PathArgs::for_path(group.selector, i, nr);
        }
    }
    let mut limits = groups[0].paths[0].0.limits().clone();
    // Paths that ask for more may come and go.
    let mem_bytes = profile.align.mem_bytes.max(rng.pick(&[1, 1, 512, profile.align.block_bytes]));
    limits.mem_align_bytes = u32::try_from(mem_bytes).expect("small");
    limits.logical_block_bytes = u32::try_from(profile.align.block_bytes).expect("small");
    let table = Table::with_limits(groups, map, Some(limits), false).expect("table");
    dispatch::check_selectors(&table).expect("selectors");
    table
}

impl World {
    pub(crate) fn table(&self) -> Arc<Table> {
        self.disk.table().load()
    }

    /// Ports with an active path in the table, as bits.
    pub(crate) fn active_ports(&self) -> u64 {
        self.table().paths().iter().filter(|p| p.is_active()).fold(0, |bits, p| bits | 1 << port_of(p))
    }

    fn publish_table(&mut self, groups: Vec<Group>) {
        let old = self.table();
        let new = table(&mut self.rng, groups, Arc::clone(self.disk.map()), &self.profile);
        let is_gone = |path: &&Arc<Path>| !new.paths().iter().any(|p| Arc::ptr_eq(p, path));
        self.old_paths.extend(old.paths().iter().filter(is_gone).map(Arc::downgrade));
        let has_moved = new.groups().len() != old.groups().len();
        let current = old.current_group();
        self.disk.table().publish(new);
        self.table().switch_group(current.filter(|_| !has_moved));
    }

    /// Something happens to a port.
    pub(crate) fn disturb(&mut self) {
        let port = self.rng.index(NR_PORTS);
        match self.rng.below(6) {
            0 | 1 => {
                let errno = self.rng.pick(&PATH_ERRORS);
                self.say(format_args!("port {port} breaks: errno {errno}"));
                self.lun.broken[port] = Some(errno);
            }
            2 => {
                self.say(format_args!("port {port} hangs"));
                self.lun.hung[port] = true;
            }
            _ => {
                self.say(format_args!("port {port} is well"));
                self.lun.broken[port] = None;
                self.lun.hung[port] = false;
            }
        }
    }

    /// The monitor or the operator changes something.
    pub(crate) fn change(&mut self) {
        let table = self.table();
        let index = self.rng.index(table.paths().len());
        let port = port_of(&table.paths()[index]);
        match self.rng.below(9) {
            // It hangs, or the operator says so, or another worker had an error there.
            0 | 1 => {
                self.say(format_args!("path {port} is taken out"));
                self.may_be_out[port] = true;
                let _ = table.fail_path(index, self.now_ns);
            }
            2..=4 => {
                let inactive = table.paths().iter().position(|p| !p.is_active());
                if let Some(index) = inactive {
                    self.reinstate(index);
                }
            }
            5 if self.may_remove(&table, &table.paths()[index]) => {
                self.say(format_args!("path {port} is removed"));
                let mut groups = table.groups().to_vec();
                groups.iter_mut().for_each(|g| g.paths.retain(|(p, _)| port_of(p) != port));
                // As the monitor does it: what the path carried is flushed by another from now on.
                let heir = groups.iter().flat_map(|g| &g.paths).next();
                heir.expect("another path").0.ledger().note_foreign_write();
                self.publish_table(groups);
            }
            6 => {
                let known = |port: &usize| table.paths().iter().any(|p| port_of(p) == *port);
                let Some(port) = (0..NR_PORTS).find(|port| !known(port)) else { return };
                self.say(format_args!("path {port} is added"));
                self.may_be_out[port] = false;
                let mut groups = table.groups().to_vec();
                if groups.len() < 3 && self.rng.chance(30) {
                    groups.push(group(&self.profile));
                }
                let path = (self.links.path(port, CACHED, 1), PathArgs::default());
                let index = self.rng.index(groups.len());
                groups[index].paths.push(path);
                self.publish_table(groups);
            }
            7 => {
                let group = self.rng.index(table.groups().len());
                self.say(format_args!("group {group} is put in use"));
                table.switch_group(Some(group));
            }
            _ => {
                let mut groups = table.groups().to_vec();
                let group = self.rng.index(groups.len());
                groups[group].bypassed ^= true;
                self.publish_table(groups);
                self.table().switch_group(None);
            }
        }
    }

    fn may_remove(&self, table: &Table, path: &Path) -> bool {
        let is_changing = |o: &Outstanding| o.ended.is_none() && o.record.is_started;
        let is_in_use = path.ledger().is_dirty() || self.outstanding.values().any(is_changing);
        let is_last_active = path.is_active() && table.nr_active() == 1;
        table.paths().len() > 1
            && !(is_in_use && self.profile.gaps.dirty_removal)
            && !(is_last_active && self.profile.gaps.last_removal)
    }

    /// Puts a path back: on the descriptor that it has, or opened anew as the monitor does it.
    fn reinstate(&mut self, index: usize) {
        let table = self.table();
        let old = &table.paths()[index];
        let port = port_of(old);
        self.say(format_args!("path {port} is put back"));
        self.may_be_out[port] = false;
        if self.rng.chance(30) {
            return table.reinstate_path(index);
        }
        let new = Arc::new(old.seed().open().expect("path"));
        let mut groups = table.groups().to_vec();
        for (path, _) in groups.iter_mut().flat_map(|group| group.paths.iter_mut()) {
            if Arc::ptr_eq(path, old) {
                *path = Arc::clone(&new);
            }
        }
        self.publish_table(groups);
    }

    /// Whether the monitor has something to see to.
    pub(crate) fn is_monitor_due(&self) -> bool {
        self.disk.map().epoch() != self.woken_epoch
    }

    /// The monitor looks: probes suspects, wakes the workers if anything has changed.
    pub(crate) fn monitor(&mut self) {
        let table = self.table();
        for (index, path) in table.paths().iter().enumerate() {
            let port = port_of(path);
            if path.take_suspicion() && self.lun.broken[port].is_some() {
                self.may_be_out[port] = true;
                let _ = table.fail_path(index, self.now_ns);
            }
        }
        if table.nr_active() != 0 {
            table.map().note_path_exists();
        }
        let _ = table.current_group();
        self.woken_epoch = self.disk.map().epoch();
        self.control.wake = true;
    }

    /// Everything is well again. False if it was already.
    pub(crate) fn repair(&mut self) -> bool {
        self.lun.broken = [None; NR_PORTS];
        self.lun.hung = [false; NR_PORTS];
        let inactive = self.table().paths().iter().position(|p| !p.is_active());
        inactive.map(|index| self.reinstate(index)).is_some()
    }
}
