//! Operators that write by index.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::index::in_range;
use super::{Operator, one, op};
use frit_ir::Op;
use frit_ir::ops::{ScatterElements, ScatterFn, ScatterNd};

pub(super) const OPERATORS: &[Operator] = &[
    op("Scatter", &["axis"], scatter_elements),
    op("ScatterElements", &["axis", "reduction"], scatter_elements),
    op("ScatterND", &["reduction"], scatter_nd),
];

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
