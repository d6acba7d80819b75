//! Sorting, top-k and arg-reductions along an axis.

use super::super::context::{NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::Op;
use frit_ir::ops::{ArgReduce, TopK};

pub(super) const OPERATORS: &[Operator] = &[
    op("ArgMax", &["axis", "keepdims", "select_last_index"], |cx| arg_reduce(cx, true)),
    op("ArgMin", &["axis", "keepdims", "select_last_index"], |cx| arg_reduce(cx, false)),
    op("Hardmax", &["axis"], hardmax),
    op("TopK", &["axis", "largest", "sorted"], top_k),
];

fn top_k(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", -1))?;
    let k = cx.known_ints(1, "k")?.unwrap_or_default();
    let &[k] = k.as_slice() else { return misfit("k must be one number") };
    let k = cx.sizes(&[k], "k")?[0];
    let op = TopK { axis, k, largest: cx.int("largest", 1) != 0 };
    Ok(cx.emit_all(Op::TopK(op), &[x])?.into_iter().map(Into::into).collect())
}

fn arg_reduce(cx: &mut NodeContext<'_>, largest: bool) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", 0))?;
    let last = cx.int("select_last_index", 0) != 0;
    let y = cx.emit(Op::ArgReduce(ArgReduce { axis, largest, last }), &[x])?;
    let mut dims = cx.dims(y);
    if cx.int("keepdims", 1) == 0 {
        dims.remove(axis);
    }
    one(cx.reshape(y, dims)?)
}

/// One where the first largest element of the axis is, zero elsewhere.
fn hardmax(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", -1))?;
    let op = ArgReduce { axis, largest: true, last: false };
    let best = cx.emit(Op::ArgReduce(op), &[x])?;
    let hit = super::constant::at_index(cx, best, axis, cx.dims(x)[axis])?;
    let dtype = cx.ty(x).dtype;
    one(cx.cast(hit, dtype)?)
}
