//! Losses that are part of the model.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, unary};
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{
    BinaryFn, CompareFn, CrossEntropy, Gather, GatherElements, LogSoftmax, Reduce, ReduceFn,
    UnaryFn,
};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("NegativeLogLikelihoodLoss", &["ignore_index", "reduction"], negative_log_likelihood),
    op("SoftmaxCrossEntropyLoss", &["ignore_index", "reduction"], cross_entropy),
];

/// `(scores[N, C, …], labels[N, …][, weights[C]])` → `(loss[, log_prob])`. Source: ONNX
/// SoftmaxCrossEntropyLoss-13.
fn cross_entropy(cx: &mut NodeContext<'_>) -> Outcome {
    let (scores, labels, weights) = operands(cx)?;
    let ty = cx.ty(scores);
    let rank = ty.shape.rank();
    // The classes are axis 1 in ONNX, the last axis here.
    let perm = (0..rank).filter(|i| *i != 1).chain([1]).collect();
    let logits = permute(cx, scores, perm)?;
    let ignored = ignored(cx);
    let op = Op::CrossEntropy(CrossEntropy::ignoring(ignored.unwrap_or(i64::MIN)));
    let losses = cx.emit_all(op, &[logits, labels])?[0];
    let loss = reduced(cx, losses, labels, weights, ignored)?;
    let mut results = vec![cx.cast(loss, ty.dtype)?.into()];
    if cx.node.output.len() > 1 {
        results.push(cx.emit(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[scores])?.into());
    }
    Ok(results)
}

/// `(log_probabilities[N, C, …], labels[N, …][, weights[C]])`. Source: ONNX
/// NegativeLogLikelihoodLoss-13.
fn negative_log_likelihood(cx: &mut NodeContext<'_>) -> Outcome {
    let (scores, labels, weights) = operands(cx)?;
    let rank = cx.dims(scores).len();
    let ignored = ignored(cx);
    let labels = cx.cast(labels, DType::I64)?;
    let (keep, classes) = classes(cx, labels, ignored)?;
    let perm = (0..rank).filter(|i| *i != 1).chain([1]).collect();
    let scores = permute(cx, scores, perm)?;
    let rows = cx.dims(classes);
    let ids = cx.reshape(classes, [&rows[..], &[1]].concat())?;
    let gather = GatherElements { axis: rank - 1 };
    let picked = cx.emit(Op::GatherElements(gather), &[scores, ids])?;
    let picked = cx.reshape(picked, rows)?;
    let mut losses = unary(cx, UnaryFn::Neg, picked)?;
    if let Some(keep) = keep {
        let zero = cx.scalar_like(losses, 0.0)?;
        losses = cx.emit(Op::Select, &[keep, losses, zero])?;
    }
    one(reduced(cx, losses, labels, weights, ignored)?)
}

/// Scores, labels and weights of classes.
fn operands(cx: &NodeContext<'_>) -> Result<(ValueId, ValueId, Option<ValueId>), Fault> {
    let scores = cx.input(0)?;
    let shape = cx.ty(scores).shape;
    if shape.rank() < 2 {
        return misfit(format!("the scores need a class axis, but have shape {shape}"));
    }
    Ok((scores, cx.input(1)?, cx.optional(2)?))
}

/// The label of rows that count nothing.
fn ignored(cx: &NodeContext<'_>) -> Option<i64> {
    cx.has("ignore_index").then(|| cx.int("ignore_index", 0))
}

/// Which labels count, if some may not; and the labels as classes: an ignored one, which may be no class at all, is the first.
fn classes(
    cx: &mut NodeContext<'_>,
    labels: ValueId,
    ignored: Option<i64>,
) -> Result<(Option<ValueId>, ValueId), Fault> {
    let Some(index) = ignored else { return Ok((None, labels)) };
    let index = cx.scalar_like(labels, index as f64)?;
    let keep = cx.emit(Op::Compare(CompareFn::Ne), &[labels, index])?;
    let zero = cx.scalar_like(labels, 0.0)?;
    Ok((Some(keep), cx.emit(Op::Select, &[keep, labels, zero])?))
}

/// The losses of rows, which are 0 where the label is ignored, as the attribute `reduction` says.
fn reduced(
    cx: &mut NodeContext<'_>,
    mut losses: ValueId,
    labels: ValueId,
    weights: Option<ValueId>,
    ignored: Option<i64>,
) -> Result<ValueId, Fault> {
    let counted = row_weights(cx, labels, weights, ignored, losses)?;
    if let (Some(weight), true) = (counted, weights.is_some()) {
        losses = binary(cx, BinaryFn::Mul, losses, weight)?;
    }
    let total = |cx: &mut NodeContext<'_>, x: ValueId| {
        let axes = (0..cx.dims(x).len()).collect();
        cx.emit(Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false }), &[x])
    };
    match cx.text("reduction", "mean").as_str() {
        "none" => Ok(losses),
        "sum" => total(cx, losses),
        "mean" => {
            let sum = total(cx, losses)?;
            let count = match counted {
                Some(weight) => total(cx, weight)?,
                None if cx.selections.has(losses) => {
                    let (one, dims) = (cx.scalar_like(losses, 1.0)?, cx.dims(losses));
                    let ones = cx.expand(one, dims)?;
                    cx.selections.alike(ones, losses);
                    total(cx, ones)?
                }
                None => {
                    let rows = cx.ty(losses).shape.numel();
                    cx.scalar_like(losses, rows as f64)?
                }
            };
            binary(cx, BinaryFn::Div, sum, count)
        }
        other => Err(Fault::Attribute(format!("reduction = \"{other}\""))),
    }
}

/// What each row counts in the mean: its class's weight, 0 where the label is ignored; `None` if every
/// row counts 1.
fn row_weights(
    cx: &mut NodeContext<'_>,
    labels: ValueId,
    weights: Option<ValueId>,
    ignored: Option<i64>,
    losses: ValueId,
) -> Result<Option<ValueId>, Fault> {
    let dtype = cx.ty(losses).dtype;
    let (keep, classes) = classes(cx, labels, ignored)?;
    let Some(weights) = weights else {
        return keep.map(|keep| cx.cast(keep, dtype)).transpose();
    };
    let weights = cx.cast(weights, dtype)?;
    let weight = cx.emit(Op::Gather(Gather { axis: 0 }), &[weights, classes])?;
    let Some(keep) = keep else { return Ok(Some(weight)) };
    let zero = cx.scalar_like(weight, 0.0)?;
    Ok(Some(cx.emit(Op::Select, &[keep, weight, zero])?))
}
