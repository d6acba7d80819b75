//! Hand-written CPU kernels of the training runtime: matrix products, attention, embedding,
//! strided copies, conversions and reductions.
//!
//! Everything works on raw pointers into buffers that the caller has planned, and runs on a
//! [`pool::Pool`] that the caller owns. Result bits never depend on scheduling, nor on the number
//! of threads of the pool: work is split by shape, and each output element is summed in one order.
//!
//! | module | what |
//! |---|---|
//! | [`pool`] | worker threads and their scratch memory |
//! | [`dtype`] | the floating-point element types of the kernels |
//! | [`gemm`] | batched matrix product with bias and accumulation |
//! | [`conv`] | convolution and its gradients |
//! | [`pooling`] | maxima and sums of windows |
//! | [`batch_norm`] | batch normalization and its gradient |
//! | [`window`] | how windows slide |
//! | [`attention`] | scaled dot-product attention, forward and backward |
//! | [`embedding`] | row gather and its gradient |
//! | [`index`] | reads and writes at indexed places |
//! | [`copy`] | strided copies and transposes |
//! | [`convert`] | casts between element types |
//! | [`reduce`] | sums and sums of squares |
//! | [`reduce_axes`] | reductions over any axes |
//! | [`order`] | the largest or smallest elements |
//! | [`adafactor`] | a step of Adafactor |
//! | [`quantize`] | rounding to 8-bit floats |
//! | [`random`] | random numbers and masks from a counter-based generator |
//! | [`cum_sum`] | running sums |
//! | [`routine`] | all of these by name, as a plan writes them down |
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
