//! A front-end that is the test itself: guest memory, rings and messages in the test's hands.
//!
//! From the bottom up: [`memory`] and [`wire`] (bytes), [`session`] and [`queue`] (the two protocols, step by step),
//! [`blk`] and [`disk`] (requests), [`verify`] and [`durable`] (load), [`inflight`], [`reconnect`] and [`dirty`] (lives of a
//! back-end, moves of a guest), and [`other`], a front-end made by others.
//!
//! ```no_run
//! # use polypath_vm_tests::front_end::{Disk, verify};
//! let mut disk = Disk::at("/tmp/sock").queues(4).open().unwrap();
//! disk.q().write(0, &[7; 4096]).unwrap();
//! assert_eq!(disk.q().read(0, 8).unwrap(), [7; 4096]);
//! verify::load(&mut disk, &verify::Plan::default(), 1).unwrap();
//! ```

pub mod blk;
pub mod chain;
pub mod config;
pub mod dirty;
pub mod disk;
pub mod durable;
pub mod hostile;
pub mod inflight;
pub mod memory;
pub mod other;
pub mod queue;
pub mod reconnect;
pub mod request;
pub mod session;
pub mod verify;
pub mod wire;

pub use blk::{BlkQueue, Done};
pub use chain::{Chain, Desc};
pub use config::{Config, feature};
pub use dirty::DirtyBits;
pub use disk::Disk;
pub use inflight::Inflight;
pub use memory::{Buf, Memory, Region};
pub use queue::{Queue, Used};
pub use reconnect::{Kept, Resume};
pub use request::{Cut, Framing, IOERR, OK, Op, Segment, UNSUPP};
pub use session::Session;
