//! TODO
pub mod config;
pub mod diagnostics;
pub mod import;
pub mod weights;
