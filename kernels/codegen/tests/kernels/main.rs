//! Tests that run compiled kernels and inspect their code. One test binary, because each links all of LLVM.

mod arithmetic;
mod col_reduce;
mod cuda;
mod functions;
mod harness;
mod multi_tensor;
mod optimizer;
mod pointwise;
mod ptx_machine;
mod random;
mod row_col_reduce;
mod row_reduce;
mod structure;
mod throughput;
