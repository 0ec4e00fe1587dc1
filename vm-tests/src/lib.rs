//! End-to-end tests against the built program as a process.
