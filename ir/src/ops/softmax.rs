//! Softmax, its logarithm, and their gradients. Low-precision operands are computed in f32 inside.

use super::{Inferred, arity, axis_of, float, same_shape};
use crate::TensorType;
use serde::{Deserialize, Serialize};

/// The axis along which elements sum to one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// The axis.
    pub axis: usize,
}

impl Softmax {
    pub(super) fn infer(&self, inputs: &[&TensorType], operands: usize) -> Inferred {
        arity(inputs, operands)?;
        axis_of(inputs[0], self.axis)?;
        for ty in inputs {
            float(ty, "the operand")?;
            same_shape(inputs[0], ty, "the operands")?;
        }
        Ok(vec![inputs[0].clone()])
    }
}
