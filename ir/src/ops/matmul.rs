//! Matmul.

use super::{Inferred, Linear, OpError, Operation, Precision, arity, float, float_result};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `a[.., M, K] · b[.., K, N]` → `[.., M, N]`, leading axes broadcast as in numpy.
///
/// Accumulates in f32 (f64 for f64 operands) and rounds once to the result's dtype.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatMul {
    /// Whether the last two axes of `a` are swapped first.
    #[serde(default)]
    pub trans_a: bool,
    /// Whether the last two axes of `b` are swapped first.
    #[serde(default)]
    pub trans_b: bool,
    /// Element type of the result; that of the operands if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

/// The sizes of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatMulDims {
    /// Number of independent matmuls.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The contracted size.
    pub k: usize,
}

impl MatMul {
    /// Sizes of the matmul of operands that passed inference. A `b` of two axes is one matrix for
    /// all of `a`, so leading axes of `a` that is not transposed count as rows.
    pub fn dims(&self, a: &TensorType, b: &TensorType) -> MatMulDims {
        let (m, k) = last_two(a, self.trans_a);
        let (_, n) = last_two(b, self.trans_b);
        let lead = |t: &TensorType| crate::Shape(t.shape.0[..t.shape.rank() - 2].to_vec());
        let batch = lead(a).broadcast(&lead(b)).map_or(0, |s| s.numel());
        if b.shape.rank() == 2 && !self.trans_a {
            MatMulDims { batch: 1, m: m * batch, n, k }
        } else {
            MatMulDims { batch, m, n, k }
        }
    }
}

impl Operation for MatMul {
    fn examples() -> Vec<Self> {
        vec![MatMul { trans_a: false, trans_b: true, out: Some(DType::F32) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        let (a, b) = (inputs[0], inputs[1]);
        float(a, "a")?;
        if a.dtype != b.dtype {
            return Err(OpError::new(format!("operands of dtypes {} and {}", a.dtype, b.dtype)));
        }
        if a.shape.rank() < 2 || b.shape.rank() < 2 {
            return Err(OpError::new("operands need at least 2 axes"));
        }
        let (m, ka) = last_two(a, self.trans_a);
        let (kb, n) = last_two(b, self.trans_b);
        if ka != kb {
            return Err(OpError::new(format!("contracted sizes are {ka} and {kb}")));
        }
        let lead = |t: &TensorType| crate::Shape(t.shape.0[..t.shape.rank() - 2].to_vec());
        let mut shape = lead(a)
            .broadcast(&lead(b))
            .ok_or_else(|| OpError::new("leading axes do not broadcast"))?;
        shape.0.extend([m, n]);
        Ok(vec![TensorType::new(float_result(self.out, a.dtype)?, shape)])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        let d = self.dims(inputs[0], inputs[1]);
        [d.batch, d.m, d.n, d.k].iter().fold(2, |n, &d| n.saturating_mul(d as u64))
    }

    fn precision(&self) -> Precision {
        Precision::LOWER
    }

    fn linear(&self) -> Linear {
        Linear::InEach
    }
}

fn last_two(ty: &TensorType, swap: bool) -> (usize, usize) {
    let dims = ty.shape.dims();
    let (r, c) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    if swap { (c, r) } else { (r, c) }
}
