//! Comparisons along an axis: the largest or smallest elements and their indices.
//!
//! Among equal elements the first is chosen unless the operation says otherwise. NaN is larger than any number,
//! as in PyTorch.
//! Source: ONNX TopK-11, ArgMax-13.

use super::{Inferred, Linear, OpError, Operation, Precision, arity, axis_of};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `x` → `(values, indices)`, the `k` first elements along an axis in descending or ascending order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopK {
    /// The axis.
    pub axis: usize,
    /// How many.
    pub k: usize,
    /// Whether the largest come first.
    pub largest: bool,
}

impl Operation for TopK {
    fn examples() -> Vec<Self> {
        vec![TopK { axis: 1, k: 2, largest: true }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        axis_of(inputs[0], self.axis)?;
        let size = inputs[0].shape.0[self.axis];
        if self.k > size || inputs[0].dtype == DType::Bool {
            let what = format!("the first {} of {size} elements of {}", self.k, inputs[0].dtype);
            return Err(OpError::new(what));
        }
        let mut dims = inputs[0].shape.0.clone();
        dims[self.axis] = self.k;
        let values = inputs[0].with_shape(dims);
        let indices = values.with_dtype(DType::I64);
        Ok(vec![values, indices])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// The index of the largest or smallest element along an axis, which stays with size 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgReduce {
    /// The axis.
    pub axis: usize,
    /// Whether it is the largest that counts.
    pub largest: bool,
    /// Whether the last of equal elements counts.
    #[serde(default)]
    pub last: bool,
}

impl Operation for ArgReduce {
    fn examples() -> Vec<Self> {
        vec![ArgReduce { axis: 0, largest: false, last: true }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        axis_of(inputs[0], self.axis)?;
        let mut dims = inputs[0].shape.0.clone();
        if dims[self.axis] == 0 || inputs[0].dtype == DType::Bool {
            return Err(OpError::new(format!("the place of an extreme of {}", inputs[0])));
        }
        dims[self.axis] = 1;
        Ok(vec![TensorType::new(DType::I64, dims)])
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
