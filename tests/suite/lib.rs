//! Tests that cross crates are in `main.rs`; this library has what tests of all crates share.

pub mod requirements;
