//! What must hold on any machine: ratios with much room, and never a time.

use anyhow::{Result, ensure};

use super::disk::DiskKind;
use super::measured::{DEVICE_KIB, Line, MERGED, OWN_MERGED, Row};
use super::program::Program;

/// Complains of everything that does not hold. What was not measured is passed over, but something must have been.
pub(super) fn check(rows: &[Row<'_>]) -> Result<()> {
    let mut nr = 0;
    let mut broken = Vec::new();
    for row in rows {
        for (what, value, least) in rules(row) {
            if value.is_nan() {
                continue;
            }
            nr += 1;
            let verdict = if value >= least { "holds" } else { "BROKEN" };
            let line =
                format!("{} {}: {what}: {value:.2}, at least {least}", row.disk.name(), row.workload.name);
            println!("{verdict}: {line}");
            if value < least {
                broken.push(line);
            }
        }
    }
    ensure!(broken.is_empty(), "what must hold on any machine does not:\n{}", broken.join("\n"));
    ensure!(nr > 0, "nothing to check was measured");
    Ok(())
}

/// Name, value (not a number if it was not measured) and lower limit.
fn rules(row: &Row<'_>) -> Vec<(&'static str, f64, f64)> {
    use Program::{Depth8, Depth8NoMerge, NoMerge, Polypath, TwoPaths};
    // At depth 1 every request is a wake or two, which a busy machine's scheduler makes as long as it likes.
    if row.workload.depth == 1 {
        return Vec::new();
    }
    // Of the best rounds: the ones that the rest of the machine disturbed least.
    let best = |is_one: &dyn Fn(Program) -> bool| {
        let lines = row.lines.iter().filter(|line| is_one(line.program));
        lines.map(Line::best).fold(f64::NAN, f64::max)
    };
    let iops = |program| best(&|other| other == program);
    let mut rules = vec![
        ("polypath's IOPS as a part of qsd's", iops(Polypath) / best(&Program::is_polling_qsd), 0.5),
        ("two paths' IOPS as a part of one's", iops(TwoPaths) / iops(Polypath), 0.5),
        ("merging's IOPS as a part of those without", iops(Polypath) / iops(NoMerge), 0.5),
        ("the same with a depth of 8", iops(Depth8) / iops(Depth8NoMerge), 0.5),
    ];
    // Elsewhere I/O ends at once, and there is less to merge the faster the program is.
    if row.disk == DiskKind::Loop && row.workload.can_merge() && row.workload.depth >= 64 {
        let kib = |program| row.median(program, &DEVICE_KIB);
        rules.push(("per cent merged by its own count", row.median(Polypath, &OWN_MERGED), 90.0));
        rules.push(("per cent merged at the device", row.median(Polypath, &MERGED), 90.0));
        rules.push(("per cent merged at the device with two paths", row.median(TwoPaths, &MERGED), 90.0));
        rules.push(("size of an I/O as a part of that without merging", kib(Polypath) / kib(NoMerge), 1.5));
    }
    rules
}
