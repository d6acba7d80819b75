//! What surrounds the gradients: loss scale, finite check, clipping, optimizer, schedule.
//!
//! Scalars are f32. With `C` the static number of loss elements of one rank's micro-batch, `A` the
//! accumulation and `N` the ranks, the backward pass is seeded with scale / (C·A) and gradients are
//! averaged over ranks, so that a reduced gradient is `scale · count / (C·A·N)` times the gradient of
//! the mean over `count` elements. [`Unscale`] takes that factor out again.

use super::{Inferred, OpError, arity, float, shape_is};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

fn scalars(inputs: &[&TensorType], what: &str) -> Result<(), OpError> {
    for ty in inputs {
        if **ty != TensorType::scalar(DType::F32) {
            return Err(OpError::new(format!("{what} must be f32 scalars, not {ty}")));
        }
    }
    Ok(())
}

fn scalar() -> TensorType {
    TensorType::scalar(DType::F32)
}

/// `(scale)` → scale × `factor`: the seed of the backward pass, with `factor` = 1 / (C·A).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The constant factor.
    pub factor: f64,
}

impl LossScale {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        scalars(inputs, "the operand")?;
        Ok(vec![scalar()])
    }
}

/// `(g…)` → `[number of non-finite elements, sum of squares of all elements]`.
pub(super) fn infer_grad_stats(inputs: &[&TensorType]) -> Inferred {
    for ty in inputs {
        float(ty, "gradients")?;
    }
    Ok(vec![TensorType::new(DType::F32, [2])])
}

/// `(stats[4], scale, clip)` → `(factor, found_inf, grad_norm, loss)`.
///
/// `stats` = [non-finite elements, Σg², count, loss sum], summed over ranks and micro-steps.
/// With `unscale` = (capacity / max(count, 1)) / scale and `norm` = √Σg² · unscale:
/// `found_inf` = 1 if any element is non-finite, else 0; `grad_norm` = norm;
/// `factor` = unscale · min(1, clip / (norm + 1e-6)), or unscale if clip is 0;
/// `loss` = loss sum / max(count, 1). Source: `torch.nn.utils.clip_grad_norm_`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unscale {
    /// C·A·N: the number of loss elements if none is ignored.
    pub capacity: f64,
}

impl Unscale {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        shape_is(inputs[0], &[4], "stats")?;
        scalars(&inputs[1..], "scale and clip")?;
        Ok(vec![scalar(); 4])
    }
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019), as `torch.optim.AdamW`.
    ///
    /// `(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, factor, found_inf)` →
    /// `(param, m, v)`.
    Adamw,
    /// Gradient descent, as `torch.optim.SGD` without dampening; weight decay is added to the gradient.
    ///
    /// `(param, grad, lr, weight_decay, step, factor, found_inf)` → `(param)`.
    Sgd,
    /// As `sgd` with momentum (buffer ← momentum·buffer + g, the first step sets it to g).
    ///
    /// `(param, grad, buffer, lr, momentum, weight_decay, step, factor, found_inf)` →
    /// `(param, buffer)`.
    Momentum,
}

impl OptimizerKind {
    /// Number of state tensors per parameter.
    pub fn n_states(self) -> usize {
        match self {
            OptimizerKind::Adamw => 2,
            OptimizerKind::Sgd => 0,
            OptimizerKind::Momentum => 1,
        }
    }

    /// Number of scalar operands, after parameter, gradient and states.
    pub fn n_scalars(self) -> usize {
        match self {
            OptimizerKind::Adamw => 8,
            OptimizerKind::Sgd => 5,
            OptimizerKind::Momentum => 6,
        }
    }
}

/// One optimizer step for one parameter.
///
/// The gradient is multiplied by `factor` in f32 first. If `found_inf` is not 0 every result equals its
/// operand bit for bit. `step` is the number of steps taken before this one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerStep {
    /// Which optimizer.
    pub kind: OptimizerKind,
}

impl OptimizerStep {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let states = self.kind.n_states();
        arity(inputs, 2 + states + self.kind.n_scalars())?;
        let (tensors, rest) = inputs.split_at(2 + states);
        for ty in tensors {
            float(ty, "parameter, gradient and state")?;
            shape_is(ty, tensors[0].shape.dims(), "gradient and state")?;
        }
        scalars(rest, "scalar operands")?;
        let mut results = vec![tensors[0].clone()];
        results.extend(tensors[2..].iter().map(|t| (*t).clone()));
        Ok(results)
    }
}

/// `(scale, tracker, found_inf, growth_factor, backoff_factor, growth_interval)` → `(scale, tracker)`.
///
/// As `torch.amp.GradScaler.update`: back off and reset on `found_inf`, otherwise count, and grow after
/// `growth_interval` good steps unless the grown scale is not finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpdateLossScale {}

impl UpdateLossScale {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 6)?;
        scalars(inputs, "operands")?;
        Ok(vec![scalar(); 2])
    }
}

/// `(step, found_inf)` → step + 1, or step if `found_inf`.
pub(super) fn infer_update_step(inputs: &[&TensorType]) -> Inferred {
    arity(inputs, 2)?;
    scalars(inputs, "operands")?;
    Ok(vec![scalar()])
}

/// Shape of the learning rate over the steps taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// The base rate.
    Constant,
    /// From the base rate to `min_lr` in a straight line.
    Linear,
    /// From the base rate to `min_lr` along half a cosine (Loshchilov & Hutter 2017).
    Cosine,
}

/// `(base_lr, warmup_steps, total_steps, min_lr, step)` → the learning rate of the step about to be taken.
///
/// While `step < warmup_steps`: base_lr · (step + 1) / warmup_steps. After that the schedule runs over
/// the remaining `total_steps − warmup_steps` steps and stays at its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRate {
    /// The schedule.
    pub kind: ScheduleKind,
}

impl LearningRate {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 5)?;
        scalars(inputs, "operands")?;
        Ok(vec![scalar()])
    }
}
