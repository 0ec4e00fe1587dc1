//! Front-ends that we did not write.

mod driver;
mod frontend;

pub use driver::{Seen, verify};
pub use frontend::open as open_with_vhost_crate;
