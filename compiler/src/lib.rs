//! The compiler: front ends, configuration, the pipeline, and the commands of the program `frit`.

pub mod audit;
pub mod bench;
pub mod clusters;
pub mod commands;
pub mod compilation;
pub mod config;
pub mod diagnostics;
pub mod export;
pub mod gradient_check;
pub mod import;
pub mod lints;
pub mod losses;
pub mod metrics;
pub mod pipeline;
pub mod plan_dir;
pub mod policy;
pub mod predict;
pub mod reference;
pub mod render;
mod repeat;
pub mod report;
pub mod reproducer;
pub mod source;
pub mod target;
pub mod tokenize;
pub mod weights;
mod wire;
