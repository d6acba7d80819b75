//! Runs a plan directory.
fn main() {}
