//! Operations on a file behind a write cache, and what is left of them when the power goes.

use std::io;
use std::sync::Arc;

use super::serve::{Core, Job, Kept, Work};

/// What the file's cache makes of a job.
pub(super) fn execute(
    core: &mut Core,
    job: &Job,
    short: Option<usize>,
    mark: u64,
    out: &mut Vec<u8>,
) -> io::Result<usize> {
    let file = Arc::clone(&core.names[job.name].file);
    let Some(cache) = &mut core.cache else { return Ok(0) };
    match &job.work {
        Work::Read { size, .. } => {
            out.resize((*size).min(short.unwrap_or(usize::MAX)), 0);
            let got = cache.read(&file, job.offset, out)?;
            out.truncate(got);
            Ok(got)
        }
        Work::Write { data, .. } => {
            let data = &data[..data.len().min(short.unwrap_or(usize::MAX))];
            cache.write(&file, (job.name, job.fh), job.offset, data)?;
            if job.mode & libc::O_DSYNC != 0 {
                cache.sync(&file, job.name, cache.mark())?;
            }
            Ok(data.len())
        }
        Work::Fsync { .. } => cache.sync(&file, job.name, mark).map(|()| 0),
        Work::Fallocate { .. } => {
            // Holes and ranges of zeros read as zeros, and are as volatile as anything that is written.
            let len = job.len.min(file.metadata()?.len().saturating_sub(job.offset));
            cache.write(
                &file,
                (job.name, job.fh),
                job.offset,
                &vec![0; usize::try_from(len).unwrap_or(0)],
            )?;
            Ok(0)
        }
        Work::Open { .. } | Work::Stat { .. } => Ok(0),
    }
}

/// The power goes. Gives what was held or delayed, which fails now.
pub(super) fn off(core: &mut Core, seed: u64) -> Result<Vec<Kept>, String> {
    let file = core.names.first().map(|name| Arc::clone(&name.file)).ok_or("no name")?;
    core.is_off = true;
    core.nr_cuts += 1;
    if let Some(cache) = &mut core.cache {
        cache.cut(&file, seed).map_err(|e| e.to_string())?;
    }
    for name in &mut core.names {
        name.clear_rules();
        name.counts.held = 0;
    }
    let delayed = std::mem::take(&mut core.delayed).into_iter().map(|delayed| delayed.kept);
    Ok(std::mem::take(&mut core.held).into_iter().chain(delayed).collect())
}
