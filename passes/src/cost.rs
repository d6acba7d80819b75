//! A first cost model: every task takes the longer of its arithmetic and its memory traffic.
//!
//! Durations are predictions for reports and for ordering; nothing is proved from them.

use frit_ir::plan::Target;

/// What a device can do, per rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Sustained floating-point operations per second of a matrix product.
    pub flops: f64,
    /// Sustained bytes per second of memory.
    pub memory: f64,
    /// Sustained bytes per second between ranks.
    pub wire: f64,
    /// Seconds that starting a task takes.
    pub launch: f64,
}

/// Rates of a target.
///
/// The CPU's are those of one core with AVX-512 as measured by `gemm_bench`; the GPUs' are vendor peaks
/// times the efficiency that large products reach.
pub fn rates(target: &Target) -> Rates {
    match target.arch.as_str() {
        "sm_80" => Rates { flops: 200e12, memory: 1.6e12, wire: 230e9, launch: 3e-6 },
        arch if arch.starts_with("sm_") => {
            Rates { flops: 600e12, memory: 3e12, wire: 360e9, launch: 3e-6 }
        }
        _ => Rates { flops: 230e9, memory: 25e9, wire: 10e9, launch: 1e-6 },
    }
}

impl Rates {
    /// Microseconds of a kernel with this many operations and bytes.
    pub fn kernel_us(&self, flops: u64, bytes: u64) -> f64 {
        1e6 * (self.launch + (flops as f64 / self.flops).max(bytes as f64 / self.memory))
    }

    /// Microseconds of a collective that sends this many bytes per rank.
    pub fn wire_us(&self, bytes: u64) -> f64 {
        1e6 * (self.launch + bytes as f64 / self.wire)
    }
}
