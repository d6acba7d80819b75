//! Matmuls.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, MatMul};
use frit_ir::{Op, ValueId};

pub(super) const OPERATORS: &[Operator] =
    &[op("Gemm", &["alpha", "beta", "transA", "transB"], gemm), op("MatMul", &[], matmul)];

fn scaled(cx: &mut NodeContext<'_>, x: ValueId, factor: f64) -> Result<ValueId, Fault> {
    if factor == 1.0 {
        return Ok(x);
    }
    let factor = cx.scalar_like(x, factor)?;
    cx.emit(Op::Binary(BinaryFn::Mul), &[x, factor])
}

/// `alpha·op(a)·op(b) + beta·c`.
fn gemm(cx: &mut NodeContext<'_>) -> Outcome {
    let (a, b, c) = (cx.input(0)?, cx.input(1)?, cx.optional(2)?);
    if cx.dims(a).len() != 2 || cx.dims(b).len() != 2 {
        return misfit("the operands need 2 axes each");
    }
    let (trans_a, trans_b) = (cx.int("transA", 0) != 0, cx.int("transB", 0) != 0);
    let matmul = cx.emit(Op::MatMul(MatMul { trans_a, trans_b, out: None }), &[a, b])?;
    let mut y = scaled(cx, matmul, cx.float("alpha", 1.0))?;
    let beta = cx.float("beta", 1.0);
    if let Some(c) = c.filter(|_| beta != 0.0) {
        let to = cx.ty(y).shape;
        if cx.ty(c).shape.broadcast_strides(&to).is_none() {
            return misfit(format!("c of shape {} does not broadcast to {to}", cx.ty(c).shape));
        }
        let c = scaled(cx, c, beta)?;
        y = cx.emit(Op::Binary(BinaryFn::Add), &[y, c])?;
    }
    one(y)
}

/// As numpy's: a vector on the left is a row, on the right a column, and its axis leaves the result.
fn matmul(cx: &mut NodeContext<'_>) -> Outcome {
    let (mut a, mut b) = (cx.input(0)?, cx.input(1)?);
    let (da, db) = (cx.dims(a), cx.dims(b));
    if da.is_empty() || db.is_empty() {
        return misfit("an operand is a scalar");
    }
    if let &[k] = da.as_slice() {
        a = cx.reshape(a, vec![1, k])?;
    }
    if let &[k] = db.as_slice() {
        b = cx.reshape(b, vec![k, 1])?;
    }
    let y = cx.emit(Op::MatMul(MatMul::default()), &[a, b])?;
    let mut dims = cx.dims(y);
    if da.len() == 1 {
        dims.remove(dims.len() - 2);
    }
    if db.len() == 1 {
        dims.pop();
    }
    one(cx.reshape(y, dims)?)
}
