//! `vm-tests/bench`: see `--help`.

use anyhow::Result;
use polypath_vm_tests::bench::{HELP, Options, main as run};

fn main() -> Result<()> {
    match Options::parse(std::env::args().skip(1))? {
        Some(options) => run(&options),
        None => {
            print!("{HELP}");
            Ok(())
        }
    }
}
