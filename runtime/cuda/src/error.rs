//! Errors on a GPU, each one sentence with a remedy.

use super::library::LibraryError;

/// Why the GPU cannot be used, or failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library is missing or too old.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The driver is older than the plan's code.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, and CUDA 12.0 is needed; install driver 525 or later",
        found.0, found.1
    )]
    DriverTooOld {
        /// The supported version.
        found: (u32, u32),
    },
    /// The device does not exist.
    #[error(
        "no GPU {wanted}: the driver sees {found}; start fewer processes, set CUDA_VISIBLE_DEVICES, or, \
         to let processes share a GPU in tests, give each its own NCCL_HOSTID"
    )]
    NoDevice {
        /// Its index.
        wanted: usize,
        /// Number of devices.
        found: usize,
    },
    /// The device is older than the plan's code.
    #[error(
        "the plan is for {arch}, and {name} is sm_{}{}; compile it with target.arch = \"sm_{}{}\"",
        capability.0, capability.1, capability.0, capability.1
    )]
    Architecture {
        /// The plan's target.
        arch: String,
        /// The device.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// Too little device memory.
    #[error(
        "out of GPU memory: the plan needs {wanted} bytes on each rank ({detail}), {free} of {total} are \
         free; use a smaller batch (--bind batch), more ranks, or another GPU"
    )]
    OutOfMemory {
        /// Requested bytes.
        wanted: usize,
        /// The parts of these bytes.
        detail: String,
        /// Free bytes.
        free: usize,
        /// Total bytes.
        total: usize,
    },
    /// Code that the driver refuses.
    #[error("the kernels of {name} cannot be loaded: {reason}; compile the plan again")]
    Module {
        /// The file.
        name: String,
        /// The driver's message.
        reason: String,
    },
    /// CUDA C++ that cannot be compiled.
    #[error("{file}.cu cannot be compiled for this GPU by {compiler}: {reason}")]
    Compile {
        /// The file.
        file: String,
        /// The compiler and its version.
        compiler: String,
        /// Its message.
        reason: String,
    },
    /// The library has no algorithm for a GEMM.
    #[error("{library} has no algorithm for {problem}; install a newer one")]
    NoAlgorithm {
        /// The library and its version.
        library: String,
        /// The GEMM.
        problem: String,
    },
    /// A call failed.
    #[error("{call} failed: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its message.
        reason: String,
    },
}
