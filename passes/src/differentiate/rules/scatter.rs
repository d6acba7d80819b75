//! Gradient rules of indexed writes, and of the indexed reads whose gradient is one.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::TopK;
use frit_ir::ops::{
    CompareFn, GatherElements, GatherNd, LogicalFn, Op, ScatterElements, ScatterFn, ScatterNd,
};
use frit_ir::{Node, ValueId};

/// Every cotangent is added where its slice was read.
impl Differentiate for GatherNd {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let dtype = b.grad_dtype(x[0]);
        let zeros = b.zeros(b.ty(x[0]).with_dtype(dtype))?;
        let dy = b.cast(dy, dtype)?;
        let scatter = ScatterNd { batch_dims: self.batch_dims, f: ScatterFn::Add };
        Ok(vec![Some(b.emit(Op::ScatterNd(scatter), &[zeros, x[1], dy])?), None])
    }
}

/// The cotangents of the values go where these were; no place is named twice.
impl Differentiate for TopK {
    fn vjp(&self, b: &mut Builder<'_>, node: &Node, dys: &[Option<ValueId>]) -> Gradients {
        let (x, indices) = (&node.inputs, node.outputs[1]);
        let Some(dy) = dys[0] else { return Ok(vec![None]) };
        let dtype = b.ty(dy).dtype;
        let zeros = b.zeros(b.ty(x[0]).with_dtype(dtype))?;
        let scatter = ScatterElements { axis: self.axis, f: ScatterFn::Replace };
        Ok(vec![Some(b.emit(Op::ScatterElements(scatter), &[zeros, indices, dy])?)])
    }
}

impl Differentiate for ScatterElements {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let gather = Op::GatherElements(GatherElements { axis: self.axis });
        let scattered = |f| Op::ScatterElements(ScatterElements { axis: self.axis, f });
        scatter(b, self.f, (gather, &scattered), &node.inputs, node.outputs[0], dy)
    }
}

impl Differentiate for ScatterNd {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let batch_dims = self.batch_dims;
        let gather = Op::GatherNd(GatherNd { batch_dims });
        let scattered = |f| Op::ScatterNd(ScatterNd { batch_dims, f });
        scatter(b, self.f, (gather, &scattered), &node.inputs, node.outputs[0], dy)
    }
}

/// `(data, indices, updates)`. `gather` reads what the scatter wrote; `scatter` writes at the same
/// places with another function.
fn scatter(
    b: &mut Builder<'_>,
    f: ScatterFn,
    (gather, scatter): (Op, &dyn Fn(ScatterFn) -> Op),
    x: &[ValueId],
    y: ValueId,
    dy: ValueId,
) -> Gradients {
    let (data, indices, updates) = (x[0], x[1], x[2]);
    let dtype = b.ty(dy).dtype;
    match f {
        ScatterFn::Replace => {
            let mut dx = None;
            if b.needs(0) {
                let zeros = b.zeros(b.ty(updates).with_dtype(dtype))?;
                dx = Some(b.emit(scatter(ScatterFn::Replace), &[dy, indices, zeros])?);
            }
            let du = if b.needs(2) { Some(b.emit(gather, &[dy, indices])?) } else { None };
            Ok(vec![dx, None, du])
        }
        ScatterFn::Add => {
            let du = if b.needs(2) { Some(b.emit(gather, &[dy, indices])?) } else { None };
            Ok(vec![b.needs(0).then_some(dy), None, du])
        }
        // Equal extremes share the cotangent, as in PyTorch.
        ScatterFn::Max | ScatterFn::Min => {
            let written = b.emit(gather.clone(), &[y, indices])?;
            let of_data = b.compare(CompareFn::Eq, data, y)?;
            let of_updates = b.compare(CompareFn::Eq, updates, written)?;
            let (of_data, of_updates) = (b.cast(of_data, dtype)?, b.cast(of_updates, dtype)?);
            let count = b.emit(scatter(ScatterFn::Add), &[of_data, indices, of_updates])?;
            let share = b.div(dy, count)?;
            let dx = if b.needs(0) { Some(b.mul(share, of_data)?) } else { None };
            let mut du = None;
            if b.needs(2) {
                let shares = b.emit(gather, &[share, indices])?;
                du = Some(b.mul(shares, of_updates)?);
            }
            Ok(vec![dx, None, du])
        }
        ScatterFn::Mul => {
            let zero = b.constant(dtype, 0.0)?;
            let one = b.constant(dtype, 1.0)?;
            // The product of the other factors cannot be computed by division where a factor is zero, so zeros are
            // replaced by one.
            let mut dx = None;
            if b.needs(0) {
                let is_zero = b.compare(CompareFn::Eq, data, zero)?;
                let factor = b.select(is_zero, one, data)?;
                let product = b.emit(scatter(ScatterFn::Mul), &[factor, indices, updates])?;
                let others = b.div(product, factor)?;
                dx = Some(b.mul(dy, others)?);
            }
            let mut du = None;
            if b.needs(2) {
                let is_zero = b.compare(CompareFn::Eq, updates, zero)?;
                let counted = b.cast(is_zero, dtype)?;
                let zeros = b.zeros(b.ty(data).with_dtype(dtype))?;
                let count = b.emit(scatter(ScatterFn::Add), &[zeros, indices, counted])?;
                let count = b.emit(gather.clone(), &[count, indices])?;
                let is_only = b.compare(CompareFn::Eq, count, one)?;
                let is_only = b.emit(Op::Logical(LogicalFn::And), &[is_zero, is_only])?;
                let factor = b.select(is_only, one, updates)?;
                let product = b.emit(scatter(ScatterFn::Mul), &[data, indices, factor])?;
                let product = b.mul(dy, product)?;
                let product = b.emit(gather.clone(), &[product, indices])?;
                // Two zeros at one place make every product zero.
                let divisor = b.select(is_zero, one, updates)?;
                let others = b.div(product, divisor)?;
                let of_all = b.mul(dy, y)?;
                let of_all = b.emit(gather, &[of_all, indices])?;
                let of_all = b.div(of_all, divisor)?;
                du = Some(b.select(is_only, others, of_all)?);
            }
            Ok(vec![dx, None, du])
        }
    }
}
