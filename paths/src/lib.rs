//! WHAT paths exist and their health.
#![forbid(unsafe_code)]
