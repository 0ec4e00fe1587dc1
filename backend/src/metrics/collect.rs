//! What is measured, by Prometheus' conventions of names: base units, `_total` for what only grows.

use std::fmt;
use std::sync::Arc;

use polypath_paths::{Path, Table};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::work;
use crate::clock;
use crate::counters::Counters;
use crate::disk::Disk;
use crate::events::Counts;

/// Where the numbers come from.
#[derive(Debug)]
pub(crate) struct Source {
    /// The disk.
    pub disk: Arc<Disk>,
    /// How often what happened.
    pub events: Counts,
    /// When the program started, in seconds since 1970.
    pub started_s: i64,
}

/// Labels of one value.
pub(super) type Labels<'a> = Vec<(&'a str, String)>;

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let table = self.disk.table().load();
        let mut out = Out(&mut encoder);
        self.program(&mut out)?;
        self.disk(&table, &mut out)?;
        paths(&table, &mut out)?;
        work::encode(&Counters::read(&self.disk, &table), &mut out)
    }
}

impl Source {
    fn program(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        out.gauges("build_info", "Always 1; the version is a label", [(version, 1_i64)])?;
        out.gauges("start_time_seconds", "When the program started, since 1970", [(vec![], self.started_s)])?;
        let counts = self.events.all();
        let nr = |name: &str| counts.iter().find(|(event, _)| event == name).map_or(0, |(_, nr)| *nr);
        let connected = nr("front_end_connected").saturating_sub(nr("front_end_disconnected"));
        out.gauges("front_end_connected", "1 while a front-end is connected", [(vec![], signed(connected))])?;
        let events = counts.into_iter().map(|(event, nr)| (vec![("event", event)], nr));
        out.counters("events", "What happened, by kind of event", events)
    }

    fn disk(&self, table: &Table, out: &mut Out<'_, '_>) -> fmt::Result {
        let now_ns = clock::now_ns();
        let map = table.map();
        out.gauges("disk_size_bytes", "Size of the disk", [(vec![], signed(self.disk.limits().size_bytes))])?;
        out.gauges("paths", "Paths of the table", [(vec![], count(table.paths().len()))])?;
        out.gauges(
            "paths_active",
            "Paths of the table that are in use",
            [(vec![], count(table.nr_active()))],
        )?;
        let no_path_ns = map.no_path_since_ns().map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        out.gauges(
            "no_path_seconds",
            "For how long there has been no path; 0: there is one",
            [(vec![], seconds(no_path_ns))],
        )?;
        let held = map.held();
        let oldest_ns = if held.nr_requests == 0 { 0 } else { now_ns.saturating_sub(held.oldest_ns) };
        out.gauges(
            "held_requests",
            "Requests that wait for a path",
            [(vec![], i64::from(held.nr_requests))],
        )?;
        out.gauges(
            "held_bytes",
            "Data of the requests that wait for a path",
            [(vec![], signed(held.bytes))],
        )?;
        out.gauges(
            "held_oldest_seconds",
            "For how long the oldest of them has waited",
            [(vec![], seconds(oldest_ns))],
        )?;
        let troubled = count(map.nr_troubled());
        out.gauges(
            "troubled_writes",
            "Writes whose first copy has not come back from a failed path",
            [(vec![], troubled)],
        )?;
        let current = table.map().current_group();
        let groups = (0..table.groups().len())
            .map(|group| (vec![("group", (group + 1).to_string())], i64::from(current == Some(group))));
        out.gauges("group_in_use", "1 for the group that requests go to", groups)
    }
}

fn paths(table: &Table, out: &mut Out<'_, '_>) -> fmt::Result {
    // A device that is in several groups is one path.
    let mut all: Vec<(Labels<'_>, &Path)> = Vec::new();
    for (index, path) in table.paths().iter().enumerate() {
        if !all.iter().any(|(_, known)| known.name() == path.name()) {
            let group = (table.group_of(index) + 1).to_string();
            all.push((vec![("path", path.name().display().to_string()), ("group", group)], path));
        }
    }
    let gauges =
        |value: fn(&Path) -> i64| all.iter().map(move |(labels, path)| (labels.clone(), value(path)));
    out.gauges("path_up", "1 while the path is in use", gauges(|path| i64::from(path.is_active())))?;
    out.gauges(
        "path_in_flight_requests",
        "Requests on the path",
        gauges(|path| i64::from(path.gauges().sum().in_flight)),
    )?;
    out.gauges(
        "path_in_flight_bytes",
        "Data of the requests on the path",
        gauges(|path| signed(path.gauges().sum().bytes)),
    )?;
    let failures = all.iter().map(|(labels, path)| (labels.clone(), u64::from(path.nr_failures())));
    out.counters("path_failures", "How often the path failed", failures)
}

/// Writes families of values.
pub(super) struct Out<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Out<'_, '_> {
    pub(super) fn gauges<'l, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, V)>,
    ) -> fmt::Result {
        let family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        write(family, values.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value))))
    }

    pub(super) fn counters<'l, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, V)>,
    ) -> fmt::Result {
        let family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        write(family, values.into_iter().map(|(labels, value)| (labels, ConstCounter::new(value))))
    }
}

impl Out<'_, '_> {
    /// Histograms: labels, sum, and numbers by upper bound, each without those below.
    pub(super) fn histograms<'l>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, f64, Vec<(f64, u64)>)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, sum, buckets) in values {
            let nr = buckets.iter().map(|(_, nr)| nr).sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, nr, &buckets, None)?;
        }
        Ok(())
    }
}

fn write<'l, M: EncodeMetric>(
    mut family: MetricEncoder<'_>,
    values: impl Iterator<Item = (Labels<'l>, M)>,
) -> fmt::Result {
    for (labels, value) in values {
        if labels.is_empty() {
            return value.encode(family);
        }
        value.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a second less in a million years")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
