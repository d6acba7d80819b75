//! Layer and root-mean-square normalization with their gradients.
//!
//! Statistics are f32 (f64 for f64) whatever the dtype of `x`; `scale` and `bias` may be wider than
//! `x`. The normalized axes are `axis` and all after it; `scale` and `bias` have their shape, the
//! statistics the shape of the axes before. Source: ONNX LayerNormalization-17, Ba et al. 2016;
//! RMSNormalization-23, Zhang & Sennrich 2019.

use super::number::by_bits;
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, arity_in, axis_of, elements, float,
    same_shape, shape_is, statistics_dtype,
};
use crate::TensorType;
use serde::{Deserialize, Serialize};

fn split(x: &TensorType, axis: usize) -> Result<(&[usize], &[usize]), OpError> {
    float(x, "x")?;
    axis_of(x, axis)?;
    Ok(x.shape.0.split_at(axis))
}

fn statistics(x: &TensorType, lead: &[usize]) -> TensorType {
    TensorType::new(statistics_dtype(x.dtype), lead)
}

/// `(x, scale[, bias])` → `(y, mean, rstd)`; `y` has the dtype of `x`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNorm {
    /// First normalized axis.
    pub axis: usize,
    /// Added to the variance.
    #[serde(with = "super::number")]
    pub eps: f64,
}

by_bits!(LayerNorm { eps } { axis });

impl Operation for LayerNorm {
    fn examples() -> Vec<Self> {
        vec![LayerNorm { axis: 2, eps: 1e-5 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity_in(inputs, 2, 3)?;
        let (lead, tail) = split(inputs[0], self.axis)?;
        for ty in &inputs[1..] {
            float(ty, "scale and bias")?;
            shape_is(ty, tail, "scale and bias")?;
        }
        let stats = statistics(inputs[0], lead);
        Ok(vec![inputs[0].clone(), stats.clone(), stats])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        // The result too: where a norm is followed by a residual sum, as in BERT, the stream stays f32 even if it began
        // in low precision.
        Precision::F32
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(dy, x, scale, mean, rstd)` → `dx`, in the dtype of `x`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNormGradInput {
    /// First normalized axis.
    pub axis: usize,
}

impl Operation for LayerNormGradInput {
    fn examples() -> Vec<Self> {
        vec![LayerNormGradInput { axis: 2 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 5)?;
        let (lead, tail) = split(inputs[1], self.axis)?;
        same_shape(inputs[0], inputs[1], "dy and x")?;
        shape_is(inputs[2], tail, "scale")?;
        shape_is(inputs[3], lead, "mean")?;
        shape_is(inputs[4], lead, "rstd")?;
        Ok(vec![inputs[1].clone()])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// `(dy, x, mean, rstd)` → `(dscale, dbias)`, in the dtype of the statistics.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNormGradAffine {
    /// First normalized axis.
    pub axis: usize,
}

impl Operation for LayerNormGradAffine {
    fn examples() -> Vec<Self> {
        vec![LayerNormGradAffine { axis: 2 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 4)?;
        let (lead, tail) = split(inputs[1], self.axis)?;
        same_shape(inputs[0], inputs[1], "dy and x")?;
        shape_is(inputs[2], lead, "mean")?;
        shape_is(inputs[3], lead, "rstd")?;
        Ok(vec![statistics(inputs[1], tail); 2])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// `(x, scale)` → `(y, rstd)`; `y` has the dtype of `x`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNorm {
    /// First normalized axis.
    pub axis: usize,
    /// Added to the mean square.
    #[serde(with = "super::number")]
    pub eps: f64,
}

by_bits!(RmsNorm { eps } { axis });

impl Operation for RmsNorm {
    fn examples() -> Vec<Self> {
        vec![RmsNorm { axis: 1, eps: 1e-6 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        let (lead, tail) = split(inputs[0], self.axis)?;
        float(inputs[1], "scale")?;
        shape_is(inputs[1], tail, "scale")?;
        Ok(vec![inputs[0].clone(), statistics(inputs[0], lead)])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        // The result too, as of `layer_norm`.
        Precision::F32
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(dy, x, scale, rstd)` → `dx`, in the dtype of `x`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNormGradInput {
    /// First normalized axis.
    pub axis: usize,
}

impl Operation for RmsNormGradInput {
    fn examples() -> Vec<Self> {
        vec![RmsNormGradInput { axis: 1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 4)?;
        let (lead, tail) = split(inputs[1], self.axis)?;
        same_shape(inputs[0], inputs[1], "dy and x")?;
        shape_is(inputs[2], tail, "scale")?;
        shape_is(inputs[3], lead, "rstd")?;
        Ok(vec![inputs[1].clone()])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// `(dy, x, rstd)` → `dscale`, in the dtype of the statistics.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNormGradScale {
    /// First normalized axis.
    pub axis: usize,
}

impl Operation for RmsNormGradScale {
    fn examples() -> Vec<Self> {
        vec![RmsNormGradScale { axis: 1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        let (lead, tail) = split(inputs[1], self.axis)?;
        same_shape(inputs[0], inputs[1], "dy and x")?;
        shape_is(inputs[2], lead, "rstd")?;
        Ok(vec![statistics(inputs[1], tail)])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}
