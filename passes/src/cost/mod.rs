//! The cost model: how long work takes on a device, and an exchange between devices.
//!
//! One model for everything that predicts or decides by time: the durations in plans, padding,
//! scheduling, the simulator. Predictions order alternatives and inform people; nothing is proved from
//! them. All functions are pure and free of tables measured at run time, so plans are deterministic.
//!
//! [`device`] describes one GPU or CPU core, [`kernel`] gives the durations of kernel bodies on it,
//! [`cluster`] describes how devices are connected, [`collective`] gives the durations of exchanges.

pub mod cluster;
pub mod collective;
pub mod device;
pub mod kernel;
mod step;
#[cfg(test)]
mod tests;

pub use cluster::{Cluster, Link};
pub use collective::{Exchange, Members};
pub use device::Device;
pub use kernel::{Product, node_flops};
pub use step::{step_us, step_us_in_f32};
