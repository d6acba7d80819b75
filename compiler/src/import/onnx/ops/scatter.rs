//! Indexed and masked writes.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::super::selection::{BROADCAST, MASKED_SCATTER, ROWS};
use super::composed::with_scalar;
use super::index::in_range;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, CumSum, Gather, ScatterElements, ScatterFn, ScatterNd};
use frit_ir::shape::product;
use frit_ir::{DType, Op};

pub(super) const OPERATORS: &[Operator] = &[
    op("Scatter", &["axis"], scatter_elements),
    op("ScatterElements", &["axis", "reduction"], scatter_elements),
    op("ScatterND", &["reduction"], scatter_nd),
];

/// What [`super::super::selection`] writes.
pub(super) const SELECTION: Operator = op(MASKED_SCATTER, &[BROADCAST, ROWS], masked_scatter);

fn reduction(cx: &NodeContext<'_>) -> Result<ScatterFn, Fault> {
    match cx.text("reduction", "none").as_str() {
        "none" => Ok(ScatterFn::Replace),
        "add" => Ok(ScatterFn::Add),
        "mul" => Ok(ScatterFn::Mul),
        "max" => Ok(ScatterFn::Max),
        "min" => Ok(ScatterFn::Min),
        other => Err(Fault::Attribute(format!("reduction = \"{other}\""))),
    }
}

fn scatter_elements(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, indices, updates) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let axis = cx.axis(data, cx.int("axis", 0))?;
    in_range(cx, indices, cx.dims(data)[axis])?;
    let op = ScatterElements { axis, f: reduction(cx)? };
    one(cx.emit(Op::ScatterElements(op), &[data, indices, updates])?)
}

fn scatter_nd(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, indices, updates) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (dims, depth) = (cx.dims(data), cx.dims(indices).last().copied().unwrap_or(0));
    let known = cx.graph.constant(indices).and_then(|t| t.as_ints());
    for (i, &index) in known.into_iter().flatten().enumerate() {
        let size = dims.get(i % depth.max(1)).map_or(0, |d| *d as i64);
        if !(-size..size).contains(&index) {
            return misfit(format!("index {index} into an axis of size {size}"));
        }
    }
    let op = ScatterNd { batch_dims: 0, f: reduction(cx)? };
    one(cx.emit(Op::ScatterNd(op), &[data, indices, updates])?)
}

/// `(data, mask, source)` → data with what the source holds, in its order, where the mask is true.
///
/// The number of a place among those selected is the running sum of the mask. If the mask is equal along
/// trailing axes, whole rows are read by it.
fn masked_scatter(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, mask, mut source) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let mut mask = cx.cast(mask, DType::Bool)?;
    let dims = cx.dims(data);
    let mut of_mask = cx.dims(mask);
    let missing = dims.len().saturating_sub(of_mask.len());
    if cx.int(BROADCAST, 0) != 0 {
        of_mask.splice(0..0, vec![1; missing]);
    } else {
        // A mask of fewer axes selects rows.
        of_mask.resize(of_mask.len() + missing, 1);
    }
    mask = cx.reshape(mask, of_mask.clone())?;
    let selects = dims.iter().zip(&of_mask).take_while(|(a, b)| a == b).count();
    let by_rows = of_mask.len() == dims.len() && of_mask[selects..].iter().all(|n| *n == 1);
    let own = cx.dims(source);
    let broadcasts = cx.int(ROWS, 0) != 0;
    let first = own.iter().position(|n| *n != 1).unwrap_or(own.len());
    if broadcasts && by_rows && own.len() - first <= dims.len() - selects {
        let source = cx.reshape(source, own[first..].to_vec())?;
        return one(cx.emit(Op::Select, &[mask, source, data])?);
    }
    let mut row = product(&dims[selects..]);
    if broadcasts {
        if !by_rows {
            return misfit("the mask does not select rows");
        }
        let rows = own.first().into_iter().chain(&dims[selects..]).copied().collect();
        source = cx.expand(source, rows)?;
    }
    let elements = cx.ty(source).shape.numel();
    if elements == 0 {
        return misfit("the source is empty");
    }
    if !by_rows || row == 0 || !elements.is_multiple_of(row) {
        mask = cx.expand(mask, dims.clone())?;
        row = 1;
    }
    let places = cx.ty(mask).shape.numel();
    let source = cx.reshape(source, vec![elements / row, row])?;
    let selected = cx.cast(mask, DType::I64)?;
    let selected = cx.reshape(selected, vec![places])?;
    let sum = CumSum { axis: 0, exclusive: false, reverse: false };
    let number = cx.emit(Op::CumSum(sum), &[selected])?;
    // Before the first place it is −1, the last row, of which nothing is taken.
    let number = with_scalar(cx, BinaryFn::Sub, number, 1.0)?;
    let rows = cx.emit(Op::Gather(Gather { axis: 0 }), &[source, number])?;
    let rows = cx.reshape(rows, dims)?;
    one(cx.emit(Op::Select, &[mask, rows, data])?)
}
