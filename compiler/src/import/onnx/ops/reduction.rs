//! Reductions over axes.

use super::super::context::{Fault, NodeContext, Outcome};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, CompareFn, Reduce, ReduceFn, UnaryFn};
use frit_ir::{DType, Op, ValueId};

const ATTRIBUTES: &[&str] = &["axes", "keepdims", "noop_with_empty_axes"];

pub(super) const OPERATORS: &[Operator] = &[
    op("ReduceL1", ATTRIBUTES, |cx| composed(cx, Some(UnaryFn::Abs), None)),
    op("ReduceL2", ATTRIBUTES, |cx| {
        let y = squares(cx)?;
        one(root(cx, y)?)
    }),
    op("ReduceLogSum", ATTRIBUTES, |cx| composed(cx, None, Some(UnaryFn::Log))),
    op("ReduceLogSumExp", ATTRIBUTES, log_sum_exp),
    op("ReduceMax", ATTRIBUTES, |cx| plain(cx, ReduceFn::Max)),
    op("ReduceMean", ATTRIBUTES, |cx| plain(cx, ReduceFn::Mean)),
    op("ReduceMin", ATTRIBUTES, |cx| plain(cx, ReduceFn::Min)),
    op("ReduceProd", ATTRIBUTES, |cx| plain(cx, ReduceFn::Prod)),
    op("ReduceSum", ATTRIBUTES, |cx| plain(cx, ReduceFn::Sum)),
    op("ReduceSumSquare", ATTRIBUTES, |cx| one(squares(cx)?)),
];

/// The axes: an attribute in older opsets, an operand in newer ones; none means all, unless
/// `noop_with_empty_axes` says that it means none.
fn axes(cx: &NodeContext<'_>, x: ValueId) -> Result<Vec<usize>, Fault> {
    let rank = cx.dims(x).len();
    let given = match cx.known_ints(1, "the axes")? {
        Some(axes) => axes,
        None => cx.ints("axes").unwrap_or_default(),
    };
    if given.is_empty() && cx.int("noop_with_empty_axes", 0) == 0 {
        return Ok((0..rank).collect());
    }
    cx.axes_in(rank, &given)
}

fn reduce(
    cx: &mut NodeContext<'_>,
    f: ReduceFn,
    x: ValueId,
    axes: Vec<usize>,
    keep_dims: bool,
) -> Result<ValueId, Fault> {
    if axes.is_empty() {
        return Ok(x);
    }
    cx.emit(Op::Reduce(Reduce { f, axes, keep_dims }), &[x])
}

fn keep_dims(cx: &NodeContext<'_>) -> bool {
    cx.int("keepdims", 1) != 0
}

fn plain(cx: &mut NodeContext<'_>, f: ReduceFn) -> Outcome {
    let mut x = cx.input(0)?;
    let (axes, keep) = (axes(cx, x)?, keep_dims(cx));
    let dtype = cx.ty(x).dtype;
    if dtype == DType::Bool {
        x = cx.cast(x, DType::I32)?;
    }
    let y = reduce(cx, f, x, axes, keep)?;
    one(cx.cast(y, dtype)?)
}

/// A sum with a function before or after it.
fn composed(cx: &mut NodeContext<'_>, before: Option<UnaryFn>, after: Option<UnaryFn>) -> Outcome {
    let mut x = cx.input(0)?;
    let (axes, keep) = (axes(cx, x)?, keep_dims(cx));
    if let Some(f) = before {
        x = cx.emit(Op::Unary(f), &[x])?;
    }
    let mut y = reduce(cx, ReduceFn::Sum, x, axes, keep)?;
    if let Some(f) = after {
        y = cx.emit(Op::Unary(f), &[y])?;
    }
    one(y)
}

fn squares(cx: &mut NodeContext<'_>) -> Result<ValueId, Fault> {
    let x = cx.input(0)?;
    let (axes, keep) = (axes(cx, x)?, keep_dims(cx));
    let x = cx.emit(Op::Binary(BinaryFn::Mul), &[x, x])?;
    reduce(cx, ReduceFn::Sum, x, axes, keep)
}

/// The root of a norm, whose gradient is 0 where the norm is, as PyTorch defines it; that of a square root is infinite.
fn root(cx: &mut NodeContext<'_>, x: ValueId) -> Result<ValueId, Fault> {
    let (zero, more) = (cx.scalar_like(x, 0.0)?, cx.scalar_like(x, 1.0)?);
    let is_zero = cx.emit(Op::Compare(CompareFn::Eq), &[x, zero])?;
    let safe = cx.emit(Op::Select, &[is_zero, more, x])?;
    let y = cx.emit(Op::Unary(UnaryFn::Sqrt), &[safe])?;
    cx.emit(Op::Select, &[is_zero, zero, y])
}

/// `ln Σ exp(x − m) + m` with `m` the largest element, so that nothing overflows.
fn log_sum_exp(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let (axes, keep) = (axes(cx, x)?, keep_dims(cx));
    let m = reduce(cx, ReduceFn::Max, x, axes.clone(), true)?;
    let shifted = cx.emit(Op::Binary(BinaryFn::Sub), &[x, m])?;
    let e = cx.emit(Op::Unary(UnaryFn::Exp), &[shifted])?;
    let sum = reduce(cx, ReduceFn::Sum, e, axes.clone(), true)?;
    let log = cx.emit(Op::Unary(UnaryFn::Log), &[sum])?;
    let y = cx.emit(Op::Binary(BinaryFn::Add), &[log, m])?;
    if keep {
        return one(y);
    }
    let dims = cx.dims(y);
    let dims = (0..dims.len()).filter(|i| !axes.contains(i)).map(|i| dims[i]).collect();
    one(cx.reshape(y, dims)?)
}
