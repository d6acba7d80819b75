//! Batch normalization with the statistics of the batch.

use super::number::by_bits;
use super::precision::{Class, own};
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, axis_of, elements, float, shape_is,
    statistics_dtype,
};
use crate::TensorType;
use serde::{Deserialize, Serialize};

/// `(x[N, C, …], scale[C], bias[C])` → `(y, mean[C], var[C])`: each channel (axis 1) normalized over all
/// other axes, `y = (x − mean)/√(var + eps) · scale + bias`. `var` is the biased variance; statistics are
/// f32 (f64 for f64).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNorm {
    /// Added to the variance.
    #[serde(with = "super::number")]
    pub eps: f64,
}

by_bits!(BatchNorm { eps } {  });

/// `(dy, x, scale, mean, var)` → `(dx, dscale, dbias)`: the gradient of [`BatchNorm`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNormGrad {
    /// Added to the variance.
    #[serde(with = "super::number")]
    pub eps: f64,
}

by_bits!(BatchNormGrad { eps } {  });

fn channels(x: &TensorType) -> Result<usize, OpError> {
    float(x, "x")?;
    axis_of(x, 1)?;
    if x.shape.numel() == 0 {
        return Err(OpError::new("the statistics of no elements"));
    }
    Ok(x.shape.dims()[1])
}

impl Operation for BatchNorm {
    fn examples() -> Vec<Self> {
        vec![BatchNorm { eps: 1e-5 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        let c = channels(inputs[0])?;
        shape_is(inputs[1], &[c], "scale")?;
        shape_is(inputs[2], &[c], "bias")?;
        let statistic = TensorType::new(statistics_dtype(inputs[0].dtype), [c]);
        Ok(vec![inputs[0].clone(), statistic.clone(), statistic])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        8 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        own(Class::F32Inside, "PyTorch keeps the dtype of its operand, with statistics in f32")
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

impl Operation for BatchNormGrad {
    fn examples() -> Vec<Self> {
        vec![BatchNormGrad { eps: 1e-5 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 5)?;
        let c = channels(inputs[1])?;
        shape_is(inputs[0], inputs[1].shape.dims(), "dy")?;
        for (ty, name) in inputs[2..].iter().zip(["scale", "mean", "var"]) {
            shape_is(ty, &[c], name)?;
        }
        Ok(vec![inputs[1].clone(), inputs[2].clone(), inputs[2].clone()])
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
