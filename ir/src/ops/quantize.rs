//! Rounding to 8-bit floats, for GEMMs.
//!
//! A value is multiplied by the power of two that maps the recent amax (the largest magnitude in its history)
//! just below the largest number of the format, rounded to the format, and divided by that power again. It keeps
//! its dtype. bf16 represents every such number exactly, so a GEMM of rounded values equals a GEMM on 8-bit
//! matrix units with the inverse scales.
//! Source: Micikevicius et al. 2022 (arXiv 2209.05433); delayed scaling as in NVIDIA's Transformer Engine.

use super::{Inferred, Linear, OpError, Operation, Precision, arity_in, float};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `quantize`: `(x[, recent: f32[tensors]])` → `(y, amax: f32[])`, with the largest finite magnitude of `x`.
///
/// The scale follows from `recent[index]`; if that is zero or absent, from `x` itself. Finite values saturate; NaN
/// stays, and an infinity becomes NaN in `f8e4m3`, which has none.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantize {
    /// `f8e4m3` or `f8e5m2`.
    pub to: DType,
    /// Which of the tensors this is.
    pub index: usize,
}

impl Operation for Quantize {
    fn examples() -> Vec<Self> {
        vec![Quantize { to: DType::F8E4M3, index: 1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity_in(inputs, 1, 2)?;
        float(inputs[0], "the operand")?;
        if !matches!(self.to, DType::F8E4M3 | DType::F8E5M2) {
            return Err(OpError::new(format!("{} is no 8-bit float", self.to)));
        }
        if let Some(recent) = inputs.get(1) {
            let fits = recent.shape.rank() == 1 && self.index < recent.shape.numel();
            if recent.dtype != DType::F32 || !fits {
                return Err(OpError::new(format!("no magnitude {} in {recent}", self.index)));
            }
        }
        Ok(vec![inputs[0].clone(), TensorType::scalar(DType::F32)])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        // Rounding keeps the factor: the scale that follows the magnitude is divided out again.
        Linear::FIRST
    }
}
