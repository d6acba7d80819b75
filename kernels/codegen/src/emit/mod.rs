//! Emits MLIR text for a fused region, for the host and for CUDA.
//!
//! [`region`] turns the body into expressions over an iteration space ([`view`], [`expr`]) with the help of [`composite`],
//! [`hyperbolic`], [`optimizer`] and [`row_ops`]. One file per region kind and target emits the loops around them; [`point`] evaluates
//! expressions inside the loops with [`arithmetic`], [`integer`], [`math`], [`power`], [`remainder`] and [`load_store`].

mod arithmetic;
mod col_reduce;
mod composite;
mod cuda_block;
mod cuda_col_reduce;
pub(crate) mod cuda_function;
mod cuda_kept_row;
pub(crate) mod cuda_multi_tensor;
mod cuda_pointwise;
mod cuda_row_col_reduce;
mod cuda_row_reduce;
mod expr;
pub(crate) mod host_function;
mod hyperbolic;
mod integer;
mod load_store;
mod math;
mod optimizer;
mod point;
pub(crate) mod pointwise;
mod power;
pub(crate) mod region;
mod remainder;
mod row_ops;
mod row_reduce;
mod scalars;
mod text;
mod view;
