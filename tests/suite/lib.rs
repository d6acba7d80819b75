//! Tests that cross crates are in `main.rs`; this library is what tests of all crates share.

pub mod requirements;
