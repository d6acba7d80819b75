//! Tests that cross crates; see `main.rs`.
