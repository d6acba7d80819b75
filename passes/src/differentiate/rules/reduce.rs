//! Gradient rules of reductions and of softmax.

use super::super::builder::{Builder, Gradients, Rule};
use super::unsupported;
use frit_ir::ops::{Cast, CompareFn, Expand, Op, Reduce, ReduceFn};
use frit_ir::{Shape, ValueId};

pub(super) fn reduce(
    b: &mut Builder<'_>,
    op: &Reduce,
    x: ValueId,
    y: ValueId,
    dy: ValueId,
) -> Gradients {
    let ty = b.ty(x);
    let mut kept = ty.shape.0.clone();
    op.axes.iter().for_each(|&axis| kept[axis] = 1);
    let n: usize = op.axes.iter().map(|&axis| ty.shape.0[axis]).product();
    let dy = b.reshape(dy, kept.clone())?;
    let dx = match op.f {
        ReduceFn::Sum => expanded(b, dy, &ty.shape)?,
        ReduceFn::Mean => {
            let share = b.scaled(dy, 1.0 / n as f64)?;
            expanded(b, share, &ty.shape)?
        }
        // Elements equal to the extreme share evenly, as torch.amax does.
        ReduceFn::Max | ReduceFn::Min => {
            let extreme = b.reshape(y, kept)?;
            let hit = b.compare(CompareFn::Eq, x, extreme)?;
            let ones = b.emit(Op::Cast(Cast { to: ty.dtype }), &[hit])?;
            let sum = Reduce { f: ReduceFn::Sum, axes: op.axes.clone(), keep_dims: true };
            let n_hits = b.emit(Op::Reduce(sum), &[ones])?;
            let share = b.div(dy, n_hits)?;
            let zero = b.constant(ty.dtype, 0.0)?;
            b.select(hit, share, zero)?
        }
        ReduceFn::Prod => return Err(unsupported("`reduce` of kind `prod`")),
    };
    Ok(vec![Some(dx)])
}

/// Every summed element has the cotangent of its sum.
pub(super) fn sum_to(b: &mut Builder<'_>, x: ValueId, dy: ValueId) -> Gradients {
    let ty = b.ty(x);
    let dy = b.cast(dy, ty.dtype)?;
    Ok(vec![Some(expanded(b, dy, &ty.shape)?)])
}

fn expanded(b: &mut Builder<'_>, x: ValueId, shape: &Shape) -> Rule<ValueId> {
    if b.ty(x).shape == *shape {
        return Ok(x);
    }
    b.emit(Op::Expand(Expand { shape: shape.clone() }), &[x])
}

/// `grad` is the gradient operation of the softmax whose result is `y`.
pub(super) fn softmax(b: &mut Builder<'_>, grad: Op, y: ValueId, dy: ValueId) -> Gradients {
    Ok(vec![Some(b.emit(grad, &[dy, y])?)])
}
