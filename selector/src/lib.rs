//! WHICH path: pure path-selection policy. No I/O, no threads, no clock.
#![forbid(unsafe_code)]
