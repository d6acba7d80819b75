//! Reductions over axes.

use super::{Inferred, Linear, OpError, Operation, Precision, arity, axis_of};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceFn {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Largest element; NaN if any is.
    Max,
    /// Smallest element; NaN if any is.
    Min,
    /// Product.
    Prod,
}

/// Reduction over axes. Low-precision floats accumulate in f32 and are rounded once.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// How elements are combined.
    pub f: ReduceFn,
    /// The axes, ascending; none reduces nothing.
    pub axes: Vec<usize>,
    /// Whether reduced axes stay, with size 1.
    #[serde(default)]
    pub keep_dims: bool,
}

impl Operation for Reduce {
    fn examples() -> Vec<Self> {
        use ReduceFn::{Max, Mean, Min, Prod, Sum};
        [Sum, Mean, Max, Min, Prod].map(|f| Reduce { f, axes: vec![0], keep_dims: true }).into()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        for &axis in &self.axes {
            axis_of(inputs[0], axis)?;
        }
        if self.axes.windows(2).any(|w| w[0] >= w[1]) {
            return Err(OpError::new("axes must ascend"));
        }
        if inputs[0].dtype == DType::Bool {
            return Err(OpError::new("reduction of bool"));
        }
        let mut dims = Vec::new();
        for (i, &d) in inputs[0].shape.dims().iter().enumerate() {
            match self.axes.contains(&i) {
                false => dims.push(d),
                true if self.keep_dims => dims.push(1),
                true => {}
            }
        }
        Ok(vec![inputs[0].with_shape(dims)])
    }

    fn precision(&self) -> Precision {
        match self.f {
            ReduceFn::Sum | ReduceFn::Prod => Precision::F32,
            // A mean accumulates in f32 inside.
            ReduceFn::Mean | ReduceFn::Max | ReduceFn::Min => Precision::UNLISTED,
        }
    }

    fn linear(&self) -> Linear {
        match self.f {
            ReduceFn::Sum | ReduceFn::Mean => Linear::FIRST,
            ReduceFn::Prod | ReduceFn::Max | ReduceFn::Min => Linear::No,
        }
    }
}

/// Sums the operand over the axes along which `shape` was broadcast to the operand's shape.
///
/// Accumulates in f32 (f64 for f64) and writes `dtype`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumTo {
    /// Shape of the result.
    pub shape: Shape,
    /// Element type of the result; the operand's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
}

impl SumTo {
    /// The axes of an operand of shape `from` that are summed away.
    pub fn axes(&self, from: &Shape) -> Vec<usize> {
        let missing = from.rank() - self.shape.rank();
        (0..from.rank())
            .filter(|&i| i < missing || (self.shape.0[i - missing] == 1 && from.0[i] != 1))
            .collect()
    }
}
impl Operation for SumTo {
    fn examples() -> Vec<Self> {
        vec![SumTo { shape: Shape::from([1]), dtype: Some(DType::F64) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        if self.shape.broadcast_strides(&inputs[0].shape).is_none() {
            return Err(OpError::new(format!(
                "{} does not broadcast to {}",
                self.shape, inputs[0].shape
            )));
        }
        let (from, to) = (inputs[0].dtype, self.dtype.unwrap_or(inputs[0].dtype));
        if from != to && !(from.is_float() && to.is_float()) {
            return Err(OpError::new(format!("sums of {from} as {to}")));
        }
        Ok(vec![TensorType::new(to, self.shape.clone())])
    }

    fn precision(&self) -> Precision {
        Precision::F32
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}
