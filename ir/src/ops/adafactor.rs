//! Adafactor's step for a parameter of which this rank holds some elements, in the parts between which
//! ranks exchange sums.
//!
//! The parameter lies in a flat tensor of which each rank has a part, from element `begin` of that part
//! on; elements before or behind the part are other ranks'. All parts of a step read, in this order, `begin`
//! (i64) and this rank's part of the gradients, then:
//!
//! - `sums`: `(parameters, clip_value, factor)` → the sums of squares that the state is made of, then that of
//!   the parameter
//! - `moments`: `(sums, state, decay_exponent, clip_value, step, factor, found_inf)` → the state, and the sum of
//!   squares of the update
//! - `step`: `(parameters, state, squares of the parameter, of the update, lr, relative_eps,
//!   update_threshold, weight_decay, clip_value, step, factor, found_inf)` → this rank's part of the parameters
//!
//! Sums are of this rank's elements alone and are added over ranks before the next part reads them.

use super::number::by_bits;
use super::{Inferred, Linear, OpError, Operation, OptimizerKind, Precision, arity, shape_is};
use crate::shape::product;
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// Which part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdafactorPart {
    /// Sums over the elements of a rank.
    Sums,
    /// The second moment, from sums over all ranks.
    Moments,
    /// The parameter, from sums over all ranks.
    Step,
}

/// A part of a step for one parameter.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adafactor {
    /// Which part.
    pub part: AdafactorPart,
    /// The whole parameter's shape.
    pub shape: Shape,
    /// Factor of sums: 1 over the number of ranks with the same elements.
    #[serde(with = "super::number")]
    pub share: f64,
}

by_bits!(Adafactor { share } { part, shape });

impl Adafactor {
    /// Elements of the state.
    pub fn state_len(&self) -> usize {
        OptimizerKind::Adafactor.state_shape(&self.shape).numel()
    }

    /// Matrices, their rows and columns; a vector has no rows.
    pub fn matrices(&self) -> (usize, usize, usize) {
        match self.shape.dims() {
            [matrices @ .., rows, cols] => (product(matrices), *rows, *cols),
            _ => (1, 0, self.shape.numel()),
        }
    }

    /// Elements of the parameter that a rank touches at most.
    fn touched(&self, inputs: &[&TensorType]) -> u64 {
        self.shape.numel().min(inputs[1].shape.numel()) as u64
    }

    /// Bytes that it moves: of flat tensors only this parameter's elements.
    pub fn moved_bytes(&self, inputs: &[&TensorType]) -> u64 {
        let (tensors, others) = match self.part {
            AdafactorPart::Sums => (2, 1),
            AdafactorPart::Moments => (1, 3),
            AdafactorPart::Step => (3, 1),
        };
        4 * (tensors * self.touched(inputs) + others * self.state_len() as u64)
    }
}
impl Operation for Adafactor {
    fn examples() -> Vec<Self> {
        vec![Adafactor { part: AdafactorPart::Sums, shape: Shape::from([4, 3]), share: 0.5 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let n = match self.part {
            AdafactorPart::Sums => 5,
            AdafactorPart::Moments => 9,
            AdafactorPart::Step => 14,
        };
        arity(inputs, n)?;
        let state = [self.state_len()];
        if inputs[0].dtype != DType::I64 || inputs[0].shape.numel() != 1 {
            return Err(OpError::new("the first element must be one i64"));
        }
        if inputs[1..].iter().any(|ty| ty.dtype != DType::F32) {
            return Err(OpError::new("all other operands must be f32"));
        }
        let len = [inputs[1].shape.numel()];
        shape_is(inputs[1], &len, "a part of the gradients")?;
        let tensors = match self.part {
            AdafactorPart::Sums => {
                shape_is(inputs[2], &len, "a part of the parameters")?;
                3
            }
            AdafactorPart::Moments => {
                shape_is(inputs[2], &[state[0].saturating_add(1)], "sums")?;
                shape_is(inputs[3], &state, "the state")?;
                4
            }
            AdafactorPart::Step => {
                shape_is(inputs[2], &len, "a part of the parameters")?;
                shape_is(inputs[3], &state, "the state")?;
                4
            }
        };
        if inputs[tensors..].iter().any(|ty| ty.shape.numel() != 1) {
            return Err(OpError::new("scalar operands must have one element"));
        }
        let f32s = |n: usize| TensorType::new(DType::F32, [n]);
        Ok(match self.part {
            AdafactorPart::Sums => vec![f32s(state[0].saturating_add(1))],
            AdafactorPart::Moments => vec![inputs[3].clone(), f32s(1)],
            AdafactorPart::Step => vec![inputs[2].clone()],
        })
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        let by_element = match self.part {
            AdafactorPart::Sums => 6,
            AdafactorPart::Moments => 7,
            AdafactorPart::Step => 9,
        };
        by_element * self.touched(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
