//! The cost model: durations of kernels on a device and of collectives between devices.
//!
//! One model is used for the durations in plans, padding, scheduling and the simulator. Predictions rank alternatives and inform
//! users; correctness never depends on them. All functions are pure and use no run-time measurements, so plans are deterministic.
//!
//! [`device`] describes one GPU or CPU core, [`kernel`] computes durations of kernel bodies on it, `processor` what those of a CPU take
//! beyond arithmetic and copies, [`cluster`] describes the network,
//! [`collective`] computes durations of collectives.

pub mod cluster;
pub mod collective;
pub mod device;
pub mod kernel;
mod processor;
mod step;
#[cfg(test)]
mod tests;

pub use cluster::{Cluster, Link};
pub use collective::{Exchange, Members};
pub use device::{Convolutions, Curve, Device, Narrow};
pub use kernel::{GemmShape, node_flops};
pub use step::{step_us, step_us_in_f32};
