//! Gradient rules of indexed reads and running sums. Every indexed read is reduced to the gradient of `embedding`, which sums rows
//! that were read several times.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{
    BinaryFn, CompareFn, Constant, CumSum, Embedding, EmbeddingGrad, Gather, GatherElements, Op,
    Transpose,
};
use frit_ir::{Node, Tensor, TensorType, ValueId};

/// The cotangent of the row `padding_idx` is left out before rows are summed.
impl Differentiate for Embedding {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, mut dy: ValueId) -> Gradients {
        let x = &node.inputs;
        if let Some(row) = self.padding_idx {
            let ids = b.ty(x[1]);
            let row = b.constant(ids.dtype, row as f64)?;
            let kept = b.compare(CompareFn::Ne, x[1], row)?;
            let mut column = ids.shape.0;
            column.push(1);
            let kept = b.reshape(kept, column)?;
            let zero = b.constant(b.ty(dy).dtype, 0.0)?;
            dy = b.select(kept, dy, zero)?;
        }
        let op = EmbeddingGrad { rows: b.ty(x[0]).shape.0[0], dtype: b.grad_dtype(x[0]) };
        Ok(vec![Some(b.emit(Op::EmbeddingGrad(op), &[dy, x[1]])?), None])
    }
}

/// The axis of the data goes first, the others become the columns of a table.
impl Differentiate for Gather {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let (data, ids) = (b.ty(x[0]).shape.0, b.ty(x[1]).shape.0);
        let (axis, n_ids, rank) = (self.axis, ids.len(), b.ty(dy).shape.rank());
        let mut first = dy;
        if axis > 0 && n_ids > 0 {
            let perm = (axis..axis + n_ids).chain(0..axis).chain(axis + n_ids..rank).collect();
            first = b.emit(Op::Transpose(Transpose { perm }), &[first])?;
        }
        let others: Vec<usize> = (0..data.len()).filter(|&i| i != axis).map(|i| data[i]).collect();
        let mut rows = ids;
        rows.push(others.iter().product());
        let table = b.reshape(first, rows)?;
        let grad = EmbeddingGrad { rows: data[axis], dtype: b.grad_dtype(x[0]) };
        let summed = b.emit(Op::EmbeddingGrad(grad), &[table, x[1]])?;
        let mut front = vec![data[axis]];
        front.extend(others);
        let mut dx = b.reshape(summed, front)?;
        if axis > 0 {
            let perm = (1..=axis).chain([0]).chain(axis + 1..data.len()).collect();
            dx = b.emit(Op::Transpose(Transpose { perm }), &[dx])?;
        }
        Ok(vec![Some(dx), None])
    }
}

/// Every element is a row of a table of width 1, found by its linear index.
impl Differentiate for GatherElements {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let (data, ids) = (b.ty(x[0]).shape, b.ty(x[1]));
        let strides = data.strides();
        let steps = ids.shape.strides();
        let n = ids.shape.numel();
        let elsewhere: Vec<i64> = (0..n)
            .map(|linear| {
                (0..data.rank())
                    .filter(|&axis| axis != self.axis)
                    .map(|axis| (linear / steps[axis] % ids.shape.0[axis]) * strides[axis])
                    .sum::<usize>() as i64
            })
            .collect();
        let scalar = |b: &mut Builder<'_>, value: usize| b.constant(ids.dtype, value as f64);
        let (zero, size) = (scalar(b, 0)?, scalar(b, data.0[self.axis])?);
        let stride = scalar(b, strides[self.axis])?;
        let negative = b.compare(CompareFn::Lt, x[1], zero)?;
        let from_end = b.add(x[1], size)?;
        let index = b.select(negative, from_end, x[1])?;
        let along = b.binary(BinaryFn::Mul, index, stride)?;
        let value = Tensor::ints(ids.dtype, ids.shape.clone(), elsewhere);
        let base = b.emit(Op::Constant(Constant { value }), &[])?;
        let linear = b.add(along, base)?;
        let linear = b.reshape(linear, [n])?;
        let column = b.reshape(dy, [n, 1])?;
        let grad = EmbeddingGrad { rows: data.numel(), dtype: b.grad_dtype(x[0]) };
        let summed = b.emit(Op::EmbeddingGrad(grad), &[column, linear])?;
        let TensorType { shape, .. } = b.ty(x[0]);
        Ok(vec![Some(b.reshape(summed, shape)?), None])
    }
}

/// The sums run the other way.
impl Differentiate for CumSum {
    fn vjp_first(&self, b: &mut Builder<'_>, _: &Node, dy: ValueId) -> Gradients {
        let turned = CumSum { reverse: !self.reverse, ..self.clone() };
        Ok(vec![Some(b.emit(Op::CumSum(turned), &[dy])?)])
    }
}
