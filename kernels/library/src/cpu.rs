//! Which instructions the kernels of this process use.
//!
//! A GEMM has one path for each set of instructions and takes the best that the processor has. Sums are in another order on each, and
//! bf16 products are rounded otherwise, so results differ in their last bits; a process that is limited to some features computes the same
//! bits on every processor that has them and those of the path that they name.

use crate::dtype::Elem;
use crate::routine::gemm::name_of;
use serde::Serialize;

/// The paths that GEMMs take: `avx2`, `avx512`, `avx512-bf16`, `amx-bf16`, `amx-bf16x3`, `neon`, `neon-bf16`, or `gemm` for the crate of that
/// name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Paths {
    /// Of f32 and f16 operands. With `amx-bf16x3`, GEMMs of up to 16 rows, columns or depths (48 in convolutions), and attention, take `avx512`.
    pub f32: &'static str,
    /// Of bf16 operands; equal to that of f32 where they are widened.
    pub bf16: &'static str,
}

/// The paths of this process, which are chosen with the first call or GEMM.
pub fn paths() -> Paths {
    Paths { f32: name_of(Elem::F32), bf16: name_of(Elem::BF16) }
}

/// Limits the kernels of this process to features in LLVM's words, such as `+avx2,+fma,+f16c`. Without effect after the first kernel.
pub fn limit(features: &str) {
    crate::simd::limit(features);
}
