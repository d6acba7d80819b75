//! Operations that rearrange elements without computing.

use super::number::by_bits;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, axis_of};
use crate::{Shape, TensorType};
use serde::{Deserialize, Serialize};

/// The same elements in row-major order, in another shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// Shape of the result.
    pub shape: Shape,
}

impl Operation for Reshape {
    fn examples() -> Vec<Self> {
        vec![Reshape { shape: Shape::from([]) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        if inputs[0].shape.numel() != self.shape.numel() {
            return Err(OpError::new(format!(
                "{} elements do not fit shape {}",
                inputs[0].shape.numel(),
                self.shape
            )));
        }
        Ok(vec![inputs[0].with_shape(self.shape.clone())])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// Permutation of the axes: axis `i` of the result is axis `perm[i]` of the operand.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transpose {
    /// The permutation.
    pub perm: Vec<usize>,
}

impl Transpose {
    /// The permutation that undoes this one.
    pub fn inverse(&self) -> Transpose {
        let mut perm = vec![0; self.perm.len()];
        for (i, &p) in self.perm.iter().enumerate() {
            perm[p] = i;
        }
        Transpose { perm }
    }

    /// The permutation that puts axis 1 of `[N, C, …]`, the channels of images, last.
    pub fn channels_last(rank: usize) -> Transpose {
        Transpose::channels_first(rank).inverse()
    }

    /// The permutation that undoes [`Transpose::channels_last`].
    pub fn channels_first(rank: usize) -> Transpose {
        let last = rank.saturating_sub(1);
        Transpose { perm: (0..rank.min(1)).chain(last..rank).chain(1..last).collect() }
    }

    /// Whether it puts the channels of images last.
    pub fn puts_channels_last(&self) -> bool {
        self.perm.len() > 2 && *self == Transpose::channels_last(self.perm.len())
    }

    /// Whether it puts the channels of images that lie last behind the first axis.
    pub fn puts_channels_first(&self) -> bool {
        self.perm.len() > 2 && *self == Transpose::channels_first(self.perm.len())
    }
}

impl Operation for Transpose {
    fn examples() -> Vec<Self> {
        vec![Transpose { perm: vec![1, 0] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        let mut seen = self.perm.clone();
        seen.sort_unstable();
        if seen != (0..inputs[0].shape.rank()).collect::<Vec<_>>() {
            return Err(OpError::new(format!(
                "perm {:?} is no permutation of {} axes",
                self.perm,
                inputs[0].shape.rank()
            )));
        }
        let dims: Vec<usize> = self.perm.iter().map(|&p| inputs[0].shape.0[p]).collect();
        Ok(vec![inputs[0].with_shape(dims)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// Numpy's `broadcast_to`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expand {
    /// Shape of the result.
    pub shape: Shape,
}

impl Operation for Expand {
    fn examples() -> Vec<Self> {
        vec![Expand { shape: Shape::from([2, 3]) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        if inputs[0].shape.broadcast(&self.shape).as_ref() != Some(&self.shape) {
            return Err(OpError::new(format!(
                "{} does not broadcast to {}",
                inputs[0].shape, self.shape
            )));
        }
        Ok(vec![inputs[0].with_shape(self.shape.clone())])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// A strided box: along axis `i` the elements `start[i] + j·step[i]` for `j < size[i]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// First index, per axis.
    pub start: Vec<usize>,
    /// Number of elements, per axis.
    pub size: Vec<usize>,
    /// Distance, per axis; may be negative, never zero.
    pub step: Vec<isize>,
}

impl Operation for Slice {
    fn examples() -> Vec<Self> {
        vec![Slice { start: vec![3], size: vec![2], step: vec![-1] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        let dims = inputs[0].shape.dims();
        if [self.start.len(), self.size.len(), self.step.len()] != [dims.len(); 3] {
            return Err(OpError::new("start, size and step need one entry per axis"));
        }
        for (axis, &dim) in dims.iter().enumerate() {
            let (start, size, step) = (self.start[axis], self.size[axis], self.step[axis]);
            let last = start as i128 + (size as i128 - 1) * step as i128;
            let inside = |i: i128| (0..dim as i128).contains(&i);
            if step == 0 || (size > 0 && !(inside(start as i128) && inside(last))) {
                return Err(OpError::new(format!("slice leaves axis {axis} of size {dim}")));
            }
        }
        Ok(vec![inputs[0].with_shape(self.size.clone())])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// Operands one after the other along an axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Concat {
    /// The axis.
    pub axis: usize,
}

impl Operation for Concat {
    fn examples() -> Vec<Self> {
        vec![Concat { axis: 1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let first = inputs.first().ok_or_else(|| OpError::new("concat of nothing"))?;
        axis_of(first, self.axis)?;
        let mut shape = first.shape.clone();
        for other in &inputs[1..] {
            let same_elsewhere = other.shape.rank() == shape.rank()
                && (0..shape.rank())
                    .all(|i| i == self.axis || other.shape.0[i] == first.shape.0[i]);
            if !same_elsewhere || other.dtype != first.dtype {
                return Err(OpError::new(format!("{first} and {other} do not concatenate")));
            }
            shape.0[self.axis] = shape.0[self.axis].saturating_add(other.shape.0[self.axis]);
        }
        Ok(vec![first.with_shape(shape)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::PROMOTE
    }

    fn linear(&self) -> Linear {
        Linear::InAll
    }
}

/// Consecutive parts of the operand along an axis, one result each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// The axis.
    pub axis: usize,
    /// Size of each part; they sum to the size of the axis.
    pub sizes: Vec<usize>,
}

impl Operation for Split {
    fn examples() -> Vec<Self> {
        vec![Split { axis: 0, sizes: vec![1, 1] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        axis_of(inputs[0], self.axis)?;
        if self.sizes.is_empty() {
            return Err(OpError::new("split into no parts"));
        }
        if self.sizes.iter().fold(0usize, |n, &size| n.saturating_add(size))
            != inputs[0].shape.0[self.axis]
        {
            return Err(OpError::new(format!(
                "parts {:?} do not sum to {}",
                self.sizes, inputs[0].shape.0[self.axis]
            )));
        }
        let part = |&size: &usize| {
            let mut shape = inputs[0].shape.clone();
            shape.0[self.axis] = size;
            inputs[0].with_shape(shape)
        };
        Ok(self.sizes.iter().map(part).collect())
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// The operand inside a border of constant elements.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pad {
    /// Elements added before, per axis.
    pub low: Vec<usize>,
    /// Elements added after, per axis.
    pub high: Vec<usize>,
    /// The value of the border.
    #[serde(with = "super::number")]
    pub value: f64,
}

by_bits!(Pad { value } { low, high });

impl Operation for Pad {
    fn examples() -> Vec<Self> {
        vec![Pad { low: vec![1], high: vec![0], value: f64::NEG_INFINITY }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        let dims = inputs[0].shape.dims();
        if self.low.len() != dims.len() || self.high.len() != dims.len() {
            return Err(OpError::new("low and high need one entry per axis"));
        }
        let padded =
            |(i, d): (usize, &usize)| d.saturating_add(self.low[i]).saturating_add(self.high[i]);
        let dims: Vec<usize> = dims.iter().enumerate().map(padded).collect();
        Ok(vec![inputs[0].with_shape(dims)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        if self.value == 0.0 { Linear::FIRST } else { Linear::No }
    }
}
