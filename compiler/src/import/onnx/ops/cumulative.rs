//! Running products.

use super::super::context::{NodeContext, Outcome, misfit};
use super::composed::binary;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, Pad, Slice};
use frit_ir::{Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[op("CumProd", &["exclusive", "reverse"], cum_prod)];

/// Products of `1, 2, 4 …` neighbors, each of two of the step before (Hillis and Steele 1986).
fn cum_prod(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let Some(axis) = cx.known_scalar(1, "the axis")? else { return misfit("the axis is missing") };
    let axis = cx.axis(x, axis as i64)?;
    let n = cx.dims(x)[axis];
    let reverse = cx.int("reverse", 0) != 0;
    let mut y = x;
    if cx.int("exclusive", 0) != 0 && n > 0 {
        y = moved(cx, y, axis, 1, reverse)?;
    }
    let mut reach = 1;
    while reach < n {
        let earlier = moved(cx, y, axis, reach, reverse)?;
        y = binary(cx, BinaryFn::Mul, y, earlier)?;
        reach *= 2;
    }
    one(y)
}

/// The elements `by` places further along the axis (or back, if `reverse`), ones where there are none.
fn moved(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    axis: usize,
    by: usize,
    reverse: bool,
) -> Result<ValueId, super::super::context::Fault> {
    let dims = cx.dims(x);
    let mut cut =
        Slice { start: vec![0; dims.len()], size: dims.clone(), step: vec![1; dims.len()] };
    cut.size[axis] -= by;
    let mut border = Pad { low: vec![0; dims.len()], high: vec![0; dims.len()], value: 1.0 };
    if reverse {
        cut.start[axis] = by;
        border.high[axis] = by;
    } else {
        border.low[axis] = by;
    }
    if cut.size[axis] == 0 {
        cut.start[axis] = 0;
    }
    let rest = cx.emit(Op::Slice(cut), &[x])?;
    cx.emit(Op::Pad(border), &[rest])
}
