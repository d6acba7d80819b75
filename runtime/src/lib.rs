//! Runs plans: devices, communicators, data, the step loop, metrics.
//!
//! The runtime executes the plan and makes no decisions. It depends on no model format, pass or compiler.

pub mod arguments;
pub mod calibrate;
pub mod checkpoint;
pub mod compare;
mod convert;
mod course;
pub mod device;
pub mod divergence;
mod dump;
pub mod error;
pub mod eval;
pub mod files;
pub mod first_values;
mod gradients;
mod hyper;
pub mod init;
mod initialize;
pub mod interrupt;
pub mod left_out;
mod mapped;
pub mod memory;
pub mod metrics;
pub mod numerics;
mod orders;
pub mod outputs;
pub mod plan_dir;
pub mod program;
pub mod progress;
pub mod record;
mod reporter;
pub mod run;
mod save;
mod session;
mod starting;
pub mod tensorboard;
pub mod tensors;
mod trace;
mod train;
pub mod trainer;
pub mod usage;
pub mod validation;
pub mod weight_files;
mod weight_names;
pub use convert::converted;
pub use frit_data as data;
pub use save::safetensors_dtype;

pub use error::RunError;
