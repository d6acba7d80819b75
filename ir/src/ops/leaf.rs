//! Leaves: inputs, parameters, state, hyper-parameters, constants.

use super::number::{self, Bits, Scalar, by_bits, by_identity};
use super::{Inferred, Linear, OpError, Operation, Precision, StateName, arity};
use crate::ids::UnitId;
use crate::{DType, Tensor, TensorData, TensorType};
use serde::{Deserialize, Serialize};

/// A tensor fed from data at every micro-step; its shape is that of one rank's micro-batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Name in the model and in `--data`.
    pub name: String,
    /// Element type and shape.
    pub ty: TensorType,
}

impl Operation for Input {
    fn examples() -> Vec<Self> {
        vec![Input { name: "x".into(), ty: TensorType::new(DType::F32, [2]) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 0)?;
        Ok(vec![self.ty.clone()])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// What happens to an initializer of the model during training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamKind {
    /// Updated by the optimizer.
    Trainable,
    /// Takes part in sharding, is never updated.
    Frozen,
    /// A constant of the model: replicated, never updated.
    Buffer,
}

/// How a parameter or state starts where no file gives its value.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// From the plan's weights.
    Weights,
    /// Every element the same.
    Constant(#[serde(with = "number")] f64),
    /// Normal, mean 0, from the seed and the parameter's name.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform between `-bound` and `bound`, from the seed and the parameter's name.
    Uniform {
        /// Half the width of the range.
        bound: f64,
    },
}

impl Init {
    fn identity(&self) -> impl Eq + std::hash::Hash {
        let number = match self {
            Init::Weights => None,
            Init::Constant(x) | Init::Normal { std: x } | Init::Uniform { bound: x } => {
                Some(x.bits())
            }
        };
        (std::mem::discriminant(self), number)
    }
}

by_identity!(Init);

/// A parameter or buffer of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// The model's own name for it.
    pub name: String,
    /// Element type and logical shape.
    pub ty: TensorType,
    /// Whether it trains.
    pub kind: ParamKind,
    /// Why it trains or does not.
    pub reason: String,
    /// Its initial value.
    pub init: Init,
    /// The dtype in which it is stored, if that is not the model's; set by the pass `hold_frozen`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<DType>,
    /// The unit it is sharded in; set by the pass `shard`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitId>,
    /// Whether each rank stores only its shard; set by the pass `shard`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sharded: bool,
}

fn is_false(b: &bool) -> bool {
    !b
}

impl Operation for Param {
    fn examples() -> Vec<Self> {
        vec![Param {
            name: "w".into(),
            ty: TensorType::new(DType::F32, [2]),
            kind: ParamKind::Trainable,
            reason: "reaches the loss".into(),
            init: Init::Normal { std: 0.02 },
            held: None,
            unit: Some(UnitId(3)),
            sharded: true,
        }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 0)?;
        match self.held {
            Some(dtype) if !dtype.is_float() || !self.ty.dtype.is_float() => {
                Err(OpError::new(format!("{} cannot be held in {dtype}", self.ty)))
            }
            held => Ok(vec![self.ty.with_dtype(held.unwrap_or(self.ty.dtype))]),
        }
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// State that Frit keeps from step to step: moments, accumulated gradients, the scaler, counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// What it is.
    pub name: StateName,
    /// The parameter it belongs to, whose sharding it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Element type and logical shape.
    pub ty: TensorType,
    /// Every element's first value.
    #[serde(with = "number")]
    pub init: f64,
    /// As [`Param::sharded`].
    #[serde(default, skip_serializing_if = "is_false")]
    pub sharded: bool,
}

by_bits!(State { init } { name, of, ty, sharded });

impl Operation for State {
    fn examples() -> Vec<Self> {
        vec![State {
            name: StateName::AdamM,
            of: Some("w".into()),
            ty: TensorType::new(DType::F32, [2]),
            init: f64::INFINITY,
            sharded: false,
        }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 0)?;
        Ok(vec![self.ty.clone()])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// A scalar f32 that may be changed when a plan is run: learning rate, betas, clip norm …
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hyper {
    /// Its key in the configuration, such as `optimizer.lr`.
    pub name: String,
    /// The value it was compiled with.
    #[serde(with = "number")]
    pub default: f64,
}

by_bits!(Hyper { default } { name });

impl Operation for Hyper {
    fn examples() -> Vec<Self> {
        vec![Hyper { name: "optimizer.lr".into(), default: 0.1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 0)?;
        Ok(vec![TensorType::scalar(DType::F32)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// A tensor known at compile time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Constant {
    /// The elements.
    pub value: Tensor,
}

/// The most elements of a constant that is written as one number: few letters must not take all memory.
const MAX_SPLAT: usize = 1 << 26;

/// The serialized form of a constant: all elements, or one that stands for all.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConstantText {
    ty: TensorType,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    splat: Option<Scalar>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    values: Option<Vec<Scalar>>,
}

impl Serialize for Constant {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let t = &self.value;
        let scalar = |i: usize| match t.data() {
            TensorData::Float(v) => Scalar::of(v[i], true, 0),
            TensorData::Int(v) => Scalar::of(0.0, false, v[i]),
        };
        let mut text = ConstantText { ty: t.ty.clone(), splat: None, values: None };
        match t.as_splat() {
            Some(_) => text.splat = Some(scalar(0)),
            None => text.values = Some((0..t.numel()).map(scalar).collect()),
        }
        text.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Constant {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let text = ConstantText::deserialize(d)?;
        let bad = || D::Error::custom("a constant's elements do not fit its type");
        let numel =
            text.ty.shape.checked_numel().filter(|n| *n <= MAX_SPLAT || text.splat.is_none());
        let n = numel.ok_or_else(|| D::Error::custom("a constant that is too large"))?;
        let value = if text.ty.dtype.is_float() {
            let values: Option<Vec<f64>> = match (&text.splat, &text.values) {
                (Some(x), None) => x.float().map(|x| vec![x; n]),
                (None, Some(v)) => v.iter().map(Scalar::float).collect(),
                _ => None,
            };
            let values = values.filter(|v| v.len() == n).ok_or_else(bad)?;
            Tensor::floats(text.ty.dtype, text.ty.shape, values)
        } else {
            let values: Option<Vec<i64>> = match (&text.splat, &text.values) {
                (Some(x), None) => x.int().map(|x| vec![x; n]),
                (None, Some(v)) => v.iter().map(Scalar::int).collect(),
                _ => None,
            };
            let values = values.filter(|v| v.len() == n).ok_or_else(bad)?;
            Tensor::ints(text.ty.dtype, text.ty.shape, values)
        };
        Ok(Constant { value })
    }
}
impl Operation for Constant {
    fn examples() -> Vec<Self> {
        vec![Constant { value: Tensor::floats(DType::F32, [2], vec![1.5, f64::NAN]) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 0)?;
        Ok(vec![self.value.ty.clone()])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::GIVEN
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
