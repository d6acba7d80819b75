//! Sums that do not depend on how a step is divided into ranks and micro-steps: in a binary tree of fixed shape, or exact.

use super::{Inferred, Linear, OpError, Operation, Precision, arity, shape_is};
use crate::{DType, TensorType};

/// Elements of an exact sum of squares of f32. Element `j` is an integer, the digit of weight
/// 2^([`DIGIT_BITS`] · j + [`LEAST_EXPONENT`]). The digits of one sum are below 2^[`DIGIT_BITS`], so that f32 adds those of
/// up to 256 sums exactly.
pub const DIGITS: usize = 40;

/// Bits of a digit.
pub const DIGIT_BITS: u32 = 16;

/// Exponent of the first digit: squares of f32 are multiples of 2⁻²⁹⁸.
pub const LEAST_EXPONENT: i32 = -304;

/// Most pieces of a step that computes the same bits on any number of ranks.
pub const MAX_PIECES: usize = 64;

/// `(x, k, s₀ … s₍ₗ₋₁₎)` → `(s₀ … s₍ₗ₋₁₎)`: adds the `k`-th of 2ˡ operands to a sum in a balanced binary tree, counting from zero.
///
/// `sᵢ` is the sum of 2ⁱ consecutive operands that waits for that of the next 2ⁱ. With `t` ones at the end of `k` in binary, the
/// results are as the operands but for `s_t` = s₍ₜ₋₁₎ + (… (s₁ + (s₀ + x))). For the last `k`, where `t` is `l`, that is the
/// sum of all operands, and result 0 is it.
#[derive(Clone, Copy, Debug)]
pub struct TreeSum;

impl TreeSum {
    /// With operand `k`: how many sums that wait are added to it, and where the sum waits.
    pub fn place(k: i64, levels: usize) -> (usize, usize) {
        let merged = (k.trailing_ones() as usize).min(levels);
        (merged, if merged == levels { 0 } else { merged })
    }
}

impl Operation for TreeSum {
    fn examples() -> Vec<Self> {
        vec![TreeSum]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let [x, k, sums @ ..] = inputs else {
            return Err(OpError::new("expected an operand, its number, and sums"));
        };
        if x.dtype != DType::F32 || sums.is_empty() || sums.iter().any(|s| s != x) {
            return Err(OpError::new("the operand and all sums must be f32 of one shape"));
        }
        if **k != TensorType::scalar(DType::I64) {
            return Err(OpError::new(format!(
                "the number of an operand must be an i64 scalar, not {k}"
            )));
        }
        Ok(sums.iter().map(|s| (*s).clone()).collect())
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(stats[1 + DIGITS + 2])` → `stats[4]`: the exact sum of squares of [`GradStats`](super::GradStats), added over any number of
/// ranks, as one f32, infinite if there are non-finite elements; the elements around it stay.
#[derive(Clone, Copy, Debug)]
pub struct RoundStats;

impl Operation for RoundStats {
    fn examples() -> Vec<Self> {
        vec![RoundStats]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        shape_is(inputs[0], &[3 + DIGITS], "stats")?;
        Ok(vec![TensorType::new(DType::F32, [4])])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
