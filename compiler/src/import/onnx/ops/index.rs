//! Indexed reads, and running sums.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::super::exporter;
use super::{Operator, one, op};
use frit_ir::ops::{CumSum, Embedding, Gather, GatherElements, GatherNd};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("CumSum", &["exclusive", "reverse"], cum_sum),
    op("Gather", &["axis"], gather),
    op("GatherElements", &["axis"], gather_elements),
    op("GatherND", &["batch_dims"], gather_nd),
];

/// Refuses constant indices that point outside an axis of this size.
pub(super) fn in_range(cx: &NodeContext<'_>, indices: ValueId, size: usize) -> Result<(), Fault> {
    let size = size as i64;
    let known = cx.graph.constant(indices).and_then(|t| t.as_ints());
    match known.and_then(|v| v.iter().find(|i| !(-size..size).contains(*i))) {
        Some(index) => misfit(format!("index {index} into an axis of size {size}")),
        None => Ok(()),
    }
}

fn gather(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, indices) = (cx.input(0)?, cx.input(1)?);
    let axis = cx.axis(data, cx.int("axis", 0))?;
    in_range(cx, indices, cx.dims(data)[axis])?;
    let is_table = cx.ty(data).dtype.is_float() && cx.dims(data).len() == 2 && axis == 0;
    let shown = cx.node.input.first().and_then(|name| cx.padding_rows.get(name.as_str()));
    let padding_idx = exporter::padding_idx(cx.node).or(shown.copied()).filter(|_| is_table);
    let is_param = matches!(cx.graph.def(data).op, Op::Param(_));
    let op = match is_table && (is_param || padding_idx.is_some()) {
        true => Op::Embedding(Embedding { padding_idx }),
        false => Op::Gather(Gather { axis }),
    };
    one(cx.emit(op, &[data, indices])?)
}

fn gather_elements(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, indices) = (cx.input(0)?, cx.input(1)?);
    let axis = cx.axis(data, cx.int("axis", 0))?;
    in_range(cx, indices, cx.dims(data)[axis])?;
    one(cx.emit(Op::GatherElements(GatherElements { axis }), &[data, indices])?)
}

fn gather_nd(cx: &mut NodeContext<'_>) -> Outcome {
    let (data, indices) = (cx.input(0)?, cx.input(1)?);
    let batch_dims = usize::try_from(cx.int("batch_dims", 0))
        .map_err(|_| Fault::Misfit("batch_dims is negative".into()))?;
    let op = Op::GatherNd(GatherNd { batch_dims });
    op.infer(&[&cx.ty(data), &cx.ty(indices)]).map_err(|e| Fault::Misfit(e.to_string()))?;
    // Inference has checked the depth, so each column of the indices has its axis.
    let (dims, depth) = (cx.dims(data), cx.dims(indices).last().copied().unwrap_or(0));
    if let Some(known) = cx.graph.constant(indices).and_then(|t| t.as_ints()) {
        for (i, &index) in known.iter().enumerate() {
            let size = dims[batch_dims + i % depth] as i64;
            if !(-size..size).contains(&index) {
                return misfit(format!("index {index} into an axis of size {size}"));
            }
        }
    }
    one(cx.emit(op, &[data, indices])?)
}

fn cum_sum(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.known_ints(1, "the axis")?.unwrap_or_default();
    let &[axis] = axis.as_slice() else {
        return misfit("the axis must be one number");
    };
    let axis = cx.axis(x, axis)?;
    let (exclusive, reverse) = (cx.int("exclusive", 0) != 0, cx.int("reverse", 0) != 0);
    if cx.ty(x).dtype == DType::Bool {
        return misfit("a running sum of bool");
    }
    one(cx.emit(Op::CumSum(CumSum { axis, exclusive, reverse }), &[x])?)
}
