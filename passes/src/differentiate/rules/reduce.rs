//! Gradient rules of reductions and of softmax.

use super::super::builder::{Builder, Gradients, Rule};
use super::{Differentiate, unsupported};
use frit_ir::ops::{
    AllReduce, Cast, CompareFn, Expand, LogSoftmax, LogSoftmaxGrad, Op, Reduce, ReduceFn,
    ReduceKind, Softmax, SoftmaxGrad, SumTo,
};
use frit_ir::{DType, Node, Shape, ValueId};

impl Differentiate for Reduce {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let y = node.outputs[0];
        let ty = b.ty(x);
        let mut kept = ty.shape.0.clone();
        self.axes.iter().for_each(|&axis| kept[axis] = 1);
        let n: usize = self.axes.iter().map(|&axis| ty.shape.0[axis]).product();
        let dy = b.reshape(dy, kept.clone())?;
        let dx = match self.f {
            ReduceFn::Sum => expanded(b, dy, &ty.shape)?,
            ReduceFn::Mean => {
                let share = b.scaled(dy, 1.0 / n as f64)?;
                expanded(b, share, &ty.shape)?
            }
            // Elements equal to the extreme share evenly, as torch.amax does.
            ReduceFn::Max | ReduceFn::Min => {
                let extreme = b.reshape(y, kept)?;
                let hit = b.compare(CompareFn::Eq, x, extreme)?;
                // How many there are may be more than a low dtype counts.
                let wide = if ty.dtype.is_low_precision() { DType::F32 } else { ty.dtype };
                let ones = b.emit(Op::Cast(Cast { to: wide }), &[hit])?;
                let sum = Reduce { f: ReduceFn::Sum, axes: self.axes.clone(), keep_dims: true };
                let n_hits = b.emit(Op::Reduce(sum), &[ones])?;
                let dy = b.cast(dy, wide)?;
                let share = b.div(dy, n_hits)?;
                let share = b.cast(share, ty.dtype)?;
                let zero = b.constant(ty.dtype, 0.0)?;
                b.select(hit, share, zero)?
            }
            ReduceFn::Prod => {
                let others = product_of_others(b, self, x)?;
                b.mul(dy, others)?
            }
        };
        Ok(vec![Some(dx)])
    }
}

/// For every element the product of those it is multiplied with. Zeros are left out of the product
/// that is divided by: one zero has all others as its own, and the others a zero.
fn product_of_others(b: &mut Builder<'_>, op: &Reduce, x: ValueId) -> Rule<ValueId> {
    let dtype = b.ty(x).dtype;
    let (zero, one) = (b.constant(dtype, 0.0)?, b.constant(dtype, 1.0)?);
    let is_zero = b.compare(CompareFn::Eq, x, zero)?;
    let factors = b.select(is_zero, one, x)?;
    let counted = b.emit(Op::Cast(Cast { to: dtype }), &[is_zero])?;
    let along = |f| Op::Reduce(Reduce { f, axes: op.axes.clone(), keep_dims: true });
    let product = b.emit(along(ReduceFn::Prod), &[factors])?;
    let n_zeros = b.emit(along(ReduceFn::Sum), &[counted])?;
    let (none, single) =
        (b.compare(CompareFn::Eq, n_zeros, zero)?, b.compare(CompareFn::Eq, n_zeros, one)?);
    let others = b.div(product, factors)?;
    let of_factor = b.select(none, others, zero)?;
    let of_zero = b.select(single, product, zero)?;
    b.select(is_zero, of_zero, of_factor)
}

/// Every rank reads the mean, and the loss is the mean of the ranks' losses: the cotangent of what a rank
/// put in is the mean of the ranks' cotangents.
impl Differentiate for AllReduce {
    fn vjp_first(&self, b: &mut Builder<'_>, _: &Node, dy: ValueId) -> Gradients {
        if self.reduce != ReduceKind::Mean || self.unit.is_some() {
            return Err(unsupported("a sum over ranks"));
        }
        Ok(vec![Some(b.emit(Op::AllReduce(self.clone()), &[dy])?)])
    }
}

/// Every summed element has the cotangent of its sum.
impl Differentiate for SumTo {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let ty = b.ty(x);
        let dy = b.cast(dy, ty.dtype)?;
        Ok(vec![Some(expanded(b, dy, &ty.shape)?)])
    }
}

fn expanded(b: &mut Builder<'_>, x: ValueId, shape: &Shape) -> Rule<ValueId> {
    if b.ty(x).shape == *shape {
        return Ok(x);
    }
    b.emit(Op::Expand(Expand { shape: shape.clone() }), &[x])
}

impl Differentiate for Softmax {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let grad = Op::SoftmaxGrad(SoftmaxGrad { axis: self.axis });
        Ok(vec![Some(b.emit(grad, &[dy, node.outputs[0]])?)])
    }
}

impl Differentiate for LogSoftmax {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let grad = Op::LogSoftmaxGrad(LogSoftmaxGrad { axis: self.axis });
        Ok(vec![Some(b.emit(grad, &[dy, node.outputs[0]])?)])
    }
}
