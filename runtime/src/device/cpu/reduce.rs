//! Reductions and running sums of the graph as parameters of the library's kernels.

use super::operand::elem;
use frit_ir::ops::{CumSum as CumSumOp, Reduce, ReduceFn};
use frit_ir::{DType, Op, TensorType};
use frit_kernels::cum_sum::{CumSum, SumElem};
use frit_kernels::reduce_axes::{Fold, ReduceAxes};

/// Running sums of `x`.
pub(super) fn cum_sum(op: &CumSumOp, x: &TensorType) -> Option<CumSum> {
    let dims = x.shape.dims();
    let elem = match x.dtype {
        DType::I32 => SumElem::I32,
        DType::I64 => SumElem::I64,
        other => SumElem::Float(elem(other)?),
    };
    Some(CumSum {
        outer: dims[..op.axis].iter().product(),
        size: dims[op.axis],
        inner: dims[op.axis + 1..].iter().product(),
        exclusive: op.exclusive,
        reverse: op.reverse,
        elem,
    })
}

/// A reduction of `x` to `out`.
pub(super) fn axes(op: &Op, x: &TensorType, out: &TensorType) -> Option<ReduceAxes> {
    let (from, to) = (elem(x.dtype)?, elem(out.dtype)?);
    let rank = x.shape.rank();
    let (fold, gone): (Fold, Vec<bool>) = match op {
        Op::Reduce(Reduce { f, axes, .. }) => {
            let fold = match f {
                ReduceFn::Sum => Fold::Sum,
                ReduceFn::Mean => Fold::Mean,
                ReduceFn::Prod => Fold::Prod,
                ReduceFn::Max => Fold::Max,
                ReduceFn::Min => Fold::Min,
            };
            (fold, (0..rank).map(|axis| axes.contains(&axis)).collect())
        }
        Op::SumTo(_) => {
            let missing = rank - out.shape.rank();
            let gone = |axis: usize| axis < missing || out.shape.0[axis - missing] == 1;
            (Fold::Sum, (0..rank).map(gone).collect())
        }
        _ => return None,
    };
    Some(ReduceAxes::new(fold, x.shape.dims(), &gone, from, to))
}
