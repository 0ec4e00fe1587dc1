//! End-to-end tests without a VM: the front-end is the test itself.

mod harness;
