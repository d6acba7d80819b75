//! Optimizer steps, the moving average of parameters, and values that depend on the parameter group.
//!
//! If `found_inf` is not 0, every result equals its operand bit for bit. `step` is the number of steps taken
//! before this one.

use super::muon::MuonRule;
use super::training::scalars;
use super::{
    Inferred, Linear, OpError, Operation, Precision, StateName, arity, elements, float, shape_is,
};
use crate::shape::product;
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// Scalar operands that every optimizer has after its own.
const COMMON: usize = 4;

crate::choices! {
    /// Which optimizer. With `g` the unscaled and clipped gradient, `p` the parameter:
    OptimizerKind {
        /// Adam with decoupled weight decay (Loshchilov & Hutter 2019), as `torch.optim.AdamW`.
        Adamw = "adamw",
        /// Adam (Kingma & Ba 2015), as `torch.optim.Adam`: weight decay is added to the gradient.
        Adam = "adam",
        /// Gradient descent, as `torch.optim.SGD`: weight decay is added to the gradient.
        Sgd = "sgd",
        /// As `sgd` with momentum: buffer ← momentum·buffer + (1 − dampening)·g, the first step sets it to g.
        Momentum = "momentum",
        /// As `momentum` without dampening; the step is along g + momentum·buffer (Sutskever et al. 2013).
        Nesterov = "nesterov",
        /// Lion (Chen et al. 2023): along the sign of beta1·m + (1 − beta1)·g, with decoupled weight decay.
        Lion = "lion",
        /// Adafactor (Shazeer & Stern 2018), as `torch.optim.Adafactor`. Its one state has not the parameter's
        /// shape, see [`OptimizerKind::state_shape`].
        Adafactor = "adafactor",
        /// Muon (Jordan et al. 2024), as `torch.optim.Muon`: along the momentum of a matrix, orthogonalized in bf16 by
        /// Newton-Schulz iterations, with decoupled weight decay; see [`super::muon`].
        Muon = "muon",
    }
}

impl OptimizerKind {
    /// The state tensors of the parameter of this name.
    pub fn states(self, param: &str) -> Vec<StateName> {
        match self {
            OptimizerKind::Adamw | OptimizerKind::Adam => vec![StateName::AdamM, StateName::AdamV],
            OptimizerKind::Sgd => vec![],
            OptimizerKind::Momentum | OptimizerKind::Nesterov => vec![StateName::Momentum],
            OptimizerKind::Lion => vec![StateName::LionM],
            OptimizerKind::Adafactor => vec![StateName::AdafactorV(param.into())],
            OptimizerKind::Muon => vec![StateName::MuonMomentum],
        }
    }

    /// Number of state tensors of a parameter.
    pub fn n_states(self) -> usize {
        match self {
            OptimizerKind::Adamw | OptimizerKind::Adam => 2,
            OptimizerKind::Sgd => 0,
            _ => 1,
        }
    }

    /// Whether a step acts on each element by itself, so that parameters can be stepped in parts.
    pub fn is_elementwise(self) -> bool {
        !matches!(self, OptimizerKind::Adafactor | OptimizerKind::Muon)
    }

    /// Whether its states have an element per element of the parameter, so that they are part of flat groups.
    pub fn has_states_by_element(self) -> bool {
        self != OptimizerKind::Adafactor
    }

    /// The shape of its states for a parameter of this shape: the same, or for adafactor the mean squares
    /// of the rows of the last two axes, then of their columns, or of all elements if there is one axis.
    pub fn state_shape(self, param: &Shape) -> Shape {
        match (self, param.dims()) {
            (OptimizerKind::Adafactor, [batch @ .., rows, cols]) => {
                Shape::from([product(batch).saturating_mul(rows + cols)])
            }
            (OptimizerKind::Adafactor, _) => Shape::from([param.numel()]),
            _ => param.clone(),
        }
    }

    /// Keys of its own scalar operands. The first is the learning rate, the last the weight decay.
    pub fn hypers(self) -> &'static [&'static str] {
        match self {
            OptimizerKind::Adamw | OptimizerKind::Adam => &[
                "optimizer.lr",
                "optimizer.beta1",
                "optimizer.beta2",
                "optimizer.eps",
                "optimizer.weight_decay",
            ],
            OptimizerKind::Sgd => &["optimizer.lr", "optimizer.weight_decay"],
            OptimizerKind::Momentum => &[
                "optimizer.lr",
                "optimizer.momentum",
                "optimizer.dampening",
                "optimizer.weight_decay",
            ],
            OptimizerKind::Nesterov => {
                &["optimizer.lr", "optimizer.momentum", "optimizer.weight_decay"]
            }
            OptimizerKind::Adafactor => &[
                "optimizer.lr",
                "optimizer.decay_exponent",
                "optimizer.relative_eps",
                "optimizer.update_threshold",
                "optimizer.weight_decay",
            ],
            OptimizerKind::Lion => {
                &["optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay"]
            }
            OptimizerKind::Muon => &[
                "optimizer.lr",
                "optimizer.muon_momentum",
                "optimizer.muon_ns_a",
                "optimizer.muon_ns_b",
                "optimizer.muon_ns_c",
                "optimizer.muon_ns_eps",
                "optimizer.weight_decay",
            ],
        }
    }

    /// Number of operands after parameter, gradient and states.
    pub fn n_scalars(self) -> usize {
        self.hypers().len() + COMMON
    }
}

/// One optimizer step: `(param, grad, states…, hypers…, clip_value, step, factor, found_inf)` →
/// `(param, states…)`.
///
/// The gradient is multiplied by `factor` in f32 first, then limited to ±`clip_value` unless that is 0.
/// Hypers are scalars; learning rate and weight decay may also have the parameter's shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerStep {
    /// Which optimizer.
    pub kind: OptimizerKind,
    /// More about `muon`.
    #[serde(default, skip_serializing_if = "MuonRule::is_default")]
    pub muon: MuonRule,
}

impl OptimizerStep {
    /// A step of this optimizer; by `muon` with its default rule.
    pub fn of(kind: OptimizerKind) -> OptimizerStep {
        OptimizerStep { kind, muon: MuonRule::default() }
    }
}

impl Operation for OptimizerStep {
    fn examples() -> Vec<Self> {
        vec![OptimizerStep::of(OptimizerKind::Adamw)]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let states = self.kind.n_states();
        arity(inputs, 2 + states + self.kind.n_scalars())?;
        let (tensors, rest) = inputs.split_at(2 + states);
        if self.kind == OptimizerKind::Muon && tensors[0].shape.rank() != 2 {
            return Err(OpError::new("muon steps matrices only"));
        }
        let state = self.kind.state_shape(&tensors[0].shape);
        for (i, ty) in tensors.iter().enumerate() {
            float(ty, "parameter, gradient and state")?;
            let expected = if i < 2 { &tensors[0].shape } else { &state };
            shape_is(ty, expected.dims(), "gradient and state")?;
        }
        let decay = self.kind.hypers().len() - 1;
        for (i, ty) in rest.iter().enumerate() {
            let by_element = ty.shape == tensors[0].shape && ty.dtype == DType::F32;
            if !(by_element && (i == 0 || i == decay)) {
                scalars(&[ty], "scalar operands")?;
            }
        }
        let mut results = vec![tensors[0].clone()];
        results.extend(tensors[2..].iter().map(|t| (*t).clone()));
        Ok(results)
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        let n = elements(inputs);
        match (self.kind, inputs[0].shape.dims()) {
            (OptimizerKind::Muon, &[rows, cols]) => {
                let least = rows.min(cols) as u64;
                let matmuls = n.saturating_mul(4).saturating_add(least.saturating_mul(2 * least));
                let iteration = matmuls.saturating_mul(least);
                iteration.saturating_mul(self.muon.ns_steps as u64).saturating_add(12 * n)
            }
            _ => 15 * n,
        }
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(average, param, decay, step, found_inf)` → decay·average + (1 − decay)·param, or the parameter
/// itself at the first step, as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
#[derive(Clone, Copy, Debug)]
pub struct EmaStep;

impl Operation for EmaStep {
    fn examples() -> Vec<Self> {
        vec![EmaStep]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 5)?;
        float(inputs[0], "the average")?;
        shape_is(inputs[1], inputs[0].shape.dims(), "the parameter")?;
        scalars(&inputs[2..], "scalar operands")?;
        Ok(vec![inputs[0].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(value₀, offset₁, value₁, offset₂, value₂ …)` → a flat tensor whose element `i` is the value of the last
/// parameter group that begins at or before `i`.
///
/// All operands have one element; offsets are i64 and ascending. They may lie outside the tensor, which
/// is then a part of what they count.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByParamGroup {
    /// Number of elements.
    pub len: usize,
}

impl Operation for ByParamGroup {
    fn examples() -> Vec<Self> {
        vec![ByParamGroup { len: 4 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        if inputs.len().is_multiple_of(2) {
            return Err(OpError::new("expected a value, then pairs of an offset and a value"));
        }
        for (i, ty) in inputs.iter().enumerate() {
            let expected = if i % 2 == 0 { DType::F32 } else { DType::I64 };
            if ty.dtype != expected || ty.shape.numel() != 1 {
                return Err(OpError::new(format!("operand {i} must be one {expected}, not {ty}")));
            }
        }
        Ok(vec![TensorType::new(DType::F32, [self.len])])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
