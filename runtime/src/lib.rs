//! Runs plans: devices, communicators, data, the step loop, metrics.
//!
//! The runtime obeys the plan and decides nothing. It knows no model format, no pass and no compiler.

pub mod arguments;
pub mod checkpoint;
pub mod comm;
pub mod compare;
pub mod data;
pub mod device;
pub mod error;
pub mod eval;
mod gradients;
pub mod init;
mod initialize;
pub mod interrupt;
pub mod metrics;
pub mod numerics;
pub mod plan_dir;
mod ranks;
mod reporter;
pub mod run;
mod save;
mod trace;
pub mod usage;
pub mod validation;
pub use save::safetensors_dtype;

pub use error::RunError;
