//! Muon's step of a matrix, and the parts of it that act on each element by itself.
//!
//! Between momentum and step, plans gather the momentum of a flat group and orthogonalize each of its matrices whole,
//! by matmuls; see `passes/src/lower/muon.rs`.
//!
//! - `muon_momentum`: `(grad, momentum, coefficient, clip_value, factor, found_inf)` → the momentum, and in bf16 what is
//!   to be orthogonalized
//! - `muon_step`: `(param, direction, lr, ratio, weight_decay, found_inf)` → the parameter; the direction is bf16

use super::training::scalars;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, elements, float, shape_is};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

crate::choices! {
    /// By what the learning rate of a matrix with R rows and C columns is multiplied.
    AdjustLr {
        /// The root of max(1, R/C).
        Original = "original",
        /// 0.2 times the root of max(R, C), with which AdamW's learning rate and weight decay fit.
        MatchRmsAdamw = "match_rms_adamw",
        /// The root of R/C.
        SpectralUnclamped = "spectral_unclamped",
    }
}

impl AdjustLr {
    /// The factor for a matrix of this shape.
    pub fn ratio(self, matrix: &Shape) -> f64 {
        let &[rows, cols] = matrix.dims() else { return 1.0 };
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            AdjustLr::Original => (rows / cols).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
            AdjustLr::SpectralUnclamped => (rows / cols).sqrt(),
        }
    }
}

/// What of Muon's rule is not a scalar operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MuonRule {
    /// Whether the gradient is mixed into the momentum once more.
    pub nesterov: bool,
    /// Newton-Schulz iterations.
    pub ns_steps: usize,
    /// The factor of the learning rate.
    pub adjust_lr: AdjustLr,
}

impl Default for MuonRule {
    fn default() -> Self {
        MuonRule { nesterov: true, ns_steps: 5, adjust_lr: AdjustLr::Original }
    }
}

impl MuonRule {
    /// Whether it is the default, which attributes leave out.
    pub(super) fn is_default(&self) -> bool {
        *self == MuonRule::default()
    }
}

/// The momentum of gradients, and what is to be orthogonalized.
///
/// The gradient is multiplied by `factor` in f32 first, then limited to ±`clip_value` unless that is 0. If
/// `found_inf` is not 0, the momentum is kept and the other result is zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MuonMomentum {
    /// Whether the gradient is mixed into the momentum once more.
    pub nesterov: bool,
}

impl Operation for MuonMomentum {
    fn examples() -> Vec<Self> {
        vec![MuonMomentum { nesterov: true }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 6)?;
        float(inputs[0], "the gradient")?;
        shape_is(inputs[1], inputs[0].shape.dims(), "the momentum")?;
        if inputs[1].dtype != DType::F32 {
            return Err(OpError::new("the momentum must be f32"));
        }
        scalars(&inputs[2..], "scalar operands")?;
        Ok(vec![inputs[1].clone(), inputs[1].with_dtype(DType::BF16)])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// The step along orthogonalized momentum. Learning rate, ratio and weight decay may also have the parameter's shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MuonStep {
    /// Of what the ratio is.
    pub adjust_lr: AdjustLr,
}

impl Operation for MuonStep {
    fn examples() -> Vec<Self> {
        vec![MuonStep { adjust_lr: AdjustLr::MatchRmsAdamw }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 6)?;
        float(inputs[0], "the parameter")?;
        shape_is(inputs[1], inputs[0].shape.dims(), "the direction")?;
        float(inputs[1], "the direction")?;
        for ty in &inputs[2..5] {
            if !(ty.shape == inputs[0].shape && ty.dtype == DType::F32) {
                scalars(&[ty], "scalar operands")?;
            }
        }
        scalars(&inputs[5..], "scalar operands")?;
        Ok(vec![inputs[0].clone()])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        4 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
