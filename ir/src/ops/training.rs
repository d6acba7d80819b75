//! Loss scale, finite check, and clipping by norm.
//!
//! Scalars are f32. Let `C` be the static number of loss elements of one rank's micro-batch, `A` the accumulation
//! and `N` the number of ranks. The backward pass is seeded with scale / (C·A), and gradients are averaged over
//! ranks, so a reduced gradient is `scale · count / (C·A·N)` times the gradient of the mean over `count`
//! elements. [`Unscale`] removes that factor.

use super::number::by_bits;
use super::reproducible::DIGITS;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, float, shape_is};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

pub(super) fn scalars(inputs: &[&TensorType], what: &str) -> Result<(), OpError> {
    for ty in inputs {
        if **ty != TensorType::scalar(DType::F32) {
            return Err(OpError::new(format!("{what} must be f32 scalars, not {ty}")));
        }
    }
    Ok(())
}

pub(super) fn scalar() -> TensorType {
    TensorType::scalar(DType::F32)
}

/// `(scale)` → scale × `factor`: the seed of the backward pass, with `factor` = 1 / (C·A).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The constant factor.
    #[serde(with = "super::number")]
    pub factor: f64,
}

by_bits!(LossScale { factor } {  });

impl Operation for LossScale {
    fn examples() -> Vec<Self> {
        vec![LossScale { factor: 0.1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        scalars(inputs, "the operand")?;
        Ok(vec![scalar()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(g…)` → `[number of non-finite elements, sum of squares of all elements]`.
///
/// If `exact`, the sum of squares is exact and in [`DIGITS`](super::reproducible::DIGITS) elements: it depends on no order of
/// the elements, and sums of such sums are exact too. [`RoundStats`](super::RoundStats) makes one number of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradStats {
    /// Whether the sum is exact.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exact: bool,
}

impl Operation for GradStats {
    fn examples() -> Vec<Self> {
        vec![GradStats { exact: false }, GradStats { exact: true }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        for ty in inputs {
            float(ty, "gradients")?;
            if self.exact && ty.dtype == DType::F64 {
                return Err(OpError::new("an exact sum is of f32 or less"));
            }
        }
        let n = if self.exact { 1 + DIGITS } else { 2 };
        Ok(vec![TensorType::new(DType::F32, [n])])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(stats[4], scale, clip)` → `(factor, found_inf, grad_norm, loss)`.
///
/// `stats` = [non-finite elements, Σg², count, loss sum], summed over ranks and micro-steps.
/// With `unscale` = (capacity / max(count, 1)) / scale and `norm` = √Σg² · unscale:
/// `found_inf` = 1 if any element is non-finite, else 0; `grad_norm` = norm;
/// `factor` = unscale · min(1, clip / (norm + 1e-6)), or unscale if clip is 0;
/// `loss` = loss sum / max(count, 1). Source: `torch.nn.utils.clip_grad_norm_`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unscale {
    /// C·A·N: the number of loss elements if none is ignored.
    #[serde(with = "super::number")]
    pub capacity: f64,
}

by_bits!(Unscale { capacity } {  });

impl Operation for Unscale {
    fn examples() -> Vec<Self> {
        vec![Unscale { capacity: 32.0 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        shape_is(inputs[0], &[4], "stats")?;
        scalars(&inputs[1..], "scale and clip")?;
        Ok(vec![scalar(); 4])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(scale, tracker, found_inf, growth_factor, backoff_factor, growth_interval)` → `(scale, tracker)`.
///
/// As `torch.amp.GradScaler.update`: back off and reset on `found_inf`, otherwise count, and grow after
/// `growth_interval` good steps unless the grown scale is not finite.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpdateLossScale {}

impl Operation for UpdateLossScale {
    fn examples() -> Vec<Self> {
        vec![UpdateLossScale {}]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 6)?;
        scalars(inputs, "operands")?;
        Ok(vec![scalar(); 2])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(step, found_inf)` → step + 1, or step if `found_inf`.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStep;

impl Operation for UpdateStep {
    fn examples() -> Vec<Self> {
        vec![UpdateStep]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        scalars(inputs, "operands")?;
        Ok(vec![scalar()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
