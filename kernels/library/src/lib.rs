//! Hand-written CPU kernels: GEMM, attention, convolution, embedding, strided copies, conversions and reductions; and the sources of
//! the CUDA kernels.
//!
//! Kernels take raw pointers into buffers allocated by the caller, and run on a [`pool::Pool`] owned by the caller.
//! Results do not depend on scheduling or on the number of threads: work is split by shape, and each output element is
//! summed in a fixed order.
//!
//! | module | what |
//! |---|---|
//! | [`routine`] | the kernels by name, as recorded in a plan; one file each |
//! | [`cpu`] | which instructions kernels use |
//! | [`cuda`] | sources of the CUDA kernels |
//! | [`pool`] | worker threads and their scratch memory |
//! | [`memory`] | blocks of memory, in huge pages |
//! | [`dtype`] | the floating-point element types of the kernels |
//! | [`window`] | geometry of sliding windows |
//! | [`peak`] | what the machine reaches |

pub mod cpu;
pub mod cuda;
pub mod dtype;
pub mod memory;
pub mod peak;
pub mod pool;
pub mod routine;
mod simd;
#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests;
pub mod window;
