//! What the fuzz targets do with their input. Each takes bytes, makes something that is mostly lawful of them, gives it to
//! the code of the product, and panics where the answer breaks a rule.

#![allow(missing_docs)]

pub mod control;
pub mod guest;
pub mod inflight;
pub mod input;
pub mod ring;
pub mod session;
pub mod table_text;
