//! Runs compiled kernels and looks at their code. One program, because each links all of LLVM.

mod arithmetic;
mod col_reduce;
mod cuda;
mod functions;
mod harness;
mod optimizer;
mod pointwise;
mod ptx_machine;
mod random;
mod row_reduce;
mod structure;
mod throughput;
