//! Hand-written CPU kernels: GEMM, attention, convolution, embedding, strided copies, conversions and reductions; and the sources of
//! the CUDA kernels.
//!
//! Kernels take raw pointers into buffers that the caller has planned, and run on a [`pool::Pool`] owned by the caller. Results do not
//! depend on scheduling or on the number of threads: work is split by shape, and each output element is summed in one order.
//!
//! | module | what |
//! |---|---|
//! | [`pool`] | worker threads and their scratch memory |
//! | [`dtype`] | the floating-point element types of the kernels |
//! | [`gemm`] | batched GEMM with bias and accumulation |
//! | [`conv`] | convolution and its gradients |
//! | [`pooling`] | max and sum pooling |
//! | [`batch_norm`] | batch normalization and its gradient |
//! | [`window`] | geometry of sliding windows |
//! | [`attention`] | scaled dot-product attention, forward and backward |
//! | [`embedding`] | row gather and its gradient |
//! | [`index`] | indexed reads and writes |
//! | [`copy`] | strided copies and transposes |
//! | [`convert`] | casts between element types |
//! | [`reduce`] | sums and sums of squares |
//! | [`reduce_axes`] | reductions over any axes |
//! | [`order`] | top-k and arg-reductions |
//! | [`adafactor`] | a step of Adafactor |
//! | [`quantize`] | quantization to 8-bit floats |
//! | [`random`] | random numbers and masks from a counter-based generator |
//! | [`cum_sum`] | running sums |
//! | [`routine`] | all of these by name, as recorded in a plan |
//! | [`cuda`] | sources of the CUDA kernels |

pub mod adafactor;
pub mod attention;
pub mod batch_norm;
pub mod conv;
pub mod convert;
pub mod copy;
pub mod cuda;
pub mod cum_sum;
pub mod dtype;
pub mod embedding;
pub mod gemm;
pub mod index;
pub mod order;
pub mod pool;
pub mod pooling;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod reduce_axes;
pub mod routine;
mod simd;
pub mod window;
