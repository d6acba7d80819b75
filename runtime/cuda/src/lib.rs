//! The CUDA driver and NVIDIA's libraries behind one interface, [`driver::Driver`], loaded when they are first needed.
//! It handles operations and GEMMs, but neither plans nor the order of a step.

mod cublaslt;
pub mod cudnn;
pub mod driver;
mod error;
mod gemm;
pub mod installed;
pub mod library;
mod machine;
mod nccl;
mod nvrtc;
mod real;
pub mod recording;

pub use error::CudaError;
pub use gemm::{GemmProblem, Operand};
pub use machine::Machine;
pub use nccl::{Library as NcclLibrary, Nccl};
pub use real::{Libraries, Real};
