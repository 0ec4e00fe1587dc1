//! The route of a request without a kernel, for counting instructions:
//! `valgrind --tool=callgrind target/release/examples/route SELECTOR PATHS WORKERS KICKS` (64 requests a kick).
//! The difference between two numbers of kicks, divided by the requests in between, is the cost of one request.

#[path = "../tests/support/loopback.rs"]
mod loopback;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [selector, nr_paths, nr_workers, nr_kicks] = args.as_slice() else {
        anyhow::bail!("usage: route SELECTOR PATHS WORKERS KICKS");
    };
    let plan = loopback::Plan {
        selector: selector.parse()?,
        nr_paths: nr_paths.parse()?,
        nr_workers: nr_workers.parse()?,
        nr_kicks: nr_kicks.parse()?,
        errors: 0,
    };
    let dir = std::env::temp_dir().join(format!("polypath-route-{}", std::process::id()));
    std::fs::create_dir(&dir)?;
    let nr_requests = loopback::run(&dir, plan, |_| {});
    std::fs::remove_dir_all(&dir)?;
    println!("{nr_requests} requests");
    Ok(())
}
