//! A piece of the soak (`vm-tests/soak`): load, faults of all kinds and power cuts, and no drift.

use std::path::Path;

use polypath_vm_tests::soak::piece;

use crate::common::need;

#[test]
fn random_events_under_load() {
    need!(faulty);
    piece::run(Path::new(env!("CARGO_BIN_EXE_polypath-soak")), &["--seconds", "120"]).unwrap();
}
