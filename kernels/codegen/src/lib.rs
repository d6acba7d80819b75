//! Fused regions to machine code through MLIR: shared objects for the CPU, PTX for CUDA.
//!
//! In: bodies of [`frit_ir::ops::Fusion`]. Out: vector code without library dependencies, and a description of how to call it. This is
//! the only crate that uses MLIR; the runtime only loads the result.
//!
//! [`supported`] tells whether a region can be compiled (the pass `fuse` calls it through the compiler),
//! [`compile_host`] compiles all regions of a plan into one shared object, [`compile_cuda`] into one PTX module. Both
//! targets share one emitter, so they compute the same expressions.
//!
//! # Numerics
//! f16 and bf16 are computed in f32 and rounded when stored or cast. Functions are within 4 ulp of f32, reductions use
//! several partial sums, variances take two passes. Results do not depend on how the work is divided into ranges.

mod compile;
mod emit;
mod error;
mod host;
mod llvm;
mod memo;
mod mlir;
mod ptx;

pub use compile::{
    CudaKernel, CudaModule, HostObject, KernelMeta, Unit, compile_cuda, compile_host,
    cuda_metadata, host_assembly, region_metadata, supported, supported_on_cuda,
};
pub use error::{CodegenError, Unsupported};
pub use host::HostTarget;
