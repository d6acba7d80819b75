//! Losses that are part of the model.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::layout::permute;
use super::{Operator, op};
use frit_ir::ops::{BinaryFn, CompareFn, CrossEntropy, Gather, LogSoftmax, Reduce, ReduceFn};
use frit_ir::{Op, ValueId};

pub(super) const OPERATORS: &[Operator] =
    &[op("SoftmaxCrossEntropyLoss", &["ignore_index", "reduction"], cross_entropy)];

/// `(scores[N, C, …], labels[N, …][, weights[C]])` → `(loss[, log_prob])`. Source: ONNX
/// SoftmaxCrossEntropyLoss-13.
fn cross_entropy(cx: &mut NodeContext<'_>) -> Outcome {
    let (scores, labels, weights) = (cx.input(0)?, cx.input(1)?, cx.optional(2)?);
    let ty = cx.ty(scores);
    let rank = ty.shape.rank();
    if rank < 2 {
        return misfit(format!("the scores need a class axis, but have shape {}", ty.shape));
    }
    // The classes are axis 1 in ONNX, the last axis here.
    let perm = (0..rank).filter(|i| *i != 1).chain([1]).collect();
    let logits = permute(cx, scores, perm)?;
    let ignored = cx.has("ignore_index");
    let ignore_index = if ignored { cx.int("ignore_index", 0) } else { i64::MIN };
    let op = Op::CrossEntropy(CrossEntropy::ignoring(ignore_index));
    let mut losses = cx.emit_all(op, &[logits, labels])?[0];
    let counted = row_weights(cx, labels, weights, ignored.then_some(ignore_index), losses)?;
    if let (Some(weight), true) = (counted, weights.is_some()) {
        losses = cx.emit(Op::Binary(BinaryFn::Mul), &[losses, weight])?;
    }
    let total = |cx: &mut NodeContext<'_>, x: ValueId| {
        let axes = (0..cx.dims(x).len()).collect();
        cx.emit(Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false }), &[x])
    };
    let loss = match cx.text("reduction", "mean").as_str() {
        "none" => losses,
        "sum" => total(cx, losses)?,
        "mean" => {
            let sum = total(cx, losses)?;
            let count = match counted {
                Some(weight) => total(cx, weight)?,
                None => {
                    let n = cx.ty(losses).shape.numel();
                    if cx.selections.has(losses) {
                        let (one, dims) = (cx.scalar_like(losses, 1.0)?, cx.dims(losses));
                        let ones = cx.expand(one, dims)?;
                        cx.selections.alike(ones, losses);
                        total(cx, ones)?
                    } else {
                        cx.scalar_like(losses, n as f64)?
                    }
                }
            };
            cx.emit(Op::Binary(BinaryFn::Div), &[sum, count])?
        }
        other => return Err(Fault::Attribute(format!("reduction = \"{other}\""))),
    };
    let mut results = vec![cx.cast(loss, ty.dtype)?.into()];
    if cx.node.output.len() > 1 {
        results.push(cx.emit(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[scores])?.into());
    }
    Ok(results)
}

/// What each row counts in the mean: its class's weight, 0 where the label is ignored; `None` if every
/// row counts 1.
fn row_weights(
    cx: &mut NodeContext<'_>,
    labels: ValueId,
    weights: Option<ValueId>,
    ignore_index: Option<i64>,
    losses: ValueId,
) -> Result<Option<ValueId>, Fault> {
    let dtype = cx.ty(losses).dtype;
    let keep = match ignore_index {
        None => None,
        Some(index) => {
            let index = cx.scalar_like(labels, index as f64)?;
            Some(cx.emit(Op::Compare(CompareFn::Ne), &[labels, index])?)
        }
    };
    let weight = match (weights, keep) {
        (None, None) => return Ok(None),
        (None, Some(keep)) => cx.cast(keep, dtype)?,
        (Some(weights), keep) => {
            let weights = cx.cast(weights, dtype)?;
            // An ignored label may be no class at all: it reads the first class's weight instead.
            let classes = match keep {
                Some(keep) => {
                    let zero = cx.scalar_like(labels, 0.0)?;
                    cx.emit(Op::Select, &[keep, labels, zero])?
                }
                None => labels,
            };
            let weight = cx.emit(Op::Gather(Gather { axis: 0 }), &[weights, classes])?;
            match keep {
                Some(keep) => {
                    let zero = cx.scalar_like(weight, 0.0)?;
                    cx.emit(Op::Select, &[keep, weight, zero])?
                }
                None => weight,
            }
        }
    };
    Ok(Some(weight))
}
