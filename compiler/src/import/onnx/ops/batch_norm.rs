//! Batch normalization.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::super::trainable::batch_norm_trains;
use super::{Operator, one, op};
use frit_ir::ops::{BatchNorm, BinaryFn, ParamKind, UnaryFn};
use frit_ir::shape::product;
use frit_ir::{Op, OutputKind, ValueId};

pub(super) const OPERATORS: &[Operator] =
    &[op("BatchNormalization", &["epsilon", "momentum", "spatial", "training_mode"], batch_norm)];

fn batch_norm(cx: &mut NodeContext<'_>) -> Outcome {
    if cx.int("spatial", 1) == 0 {
        return Err(Fault::Attribute("spatial = 0".into()));
    }
    let x = cx.input(0)?;
    if cx.dims(x).len() < 2 {
        return misfit("the operand has no channel axis");
    }
    if !cx.batch_norm_trains && !batch_norm_trains(cx.node) {
        return running(cx, x);
    }
    let eps = cx.float("epsilon", 1e-5);
    let (scale, bias) = (cx.input(1)?, cx.input(2)?);
    let results = cx.emit_all(Op::BatchNorm(BatchNorm { eps }), &[x, scale, bias])?;
    let momentum = cx.float("momentum", 0.9);
    let mut outputs = vec![results[0].into()];
    for (i, &batch) in results[1..].iter().enumerate() {
        let leaf = cx.input(3 + i)?;
        let old = renewed(cx, leaf);
        let unbiased = i == 1 && cx.from_pytorch;
        let correction = if unbiased { unbiasing(&cx.dims(x), cx.batch_norm_ranks) } else { 1.0 };
        let next = blend(cx, old, batch, (momentum, (1.0 - momentum) * correction))?;
        renew(cx, leaf, next);
        if outputs.len() < cx.node.output.len() {
            outputs.push(next.into());
        }
    }
    Ok(outputs)
}

/// The statistic as nodes before this one left it: a module that is called twice renews its own twice.
fn renewed(cx: &NodeContext<'_>, leaf: ValueId) -> ValueId {
    let renewal = cx.graph.outputs.iter().find(|o| o.kind == OutputKind::Carry(leaf));
    renewal.map_or(leaf, |o| o.value)
}

/// Makes `next` the value of the statistic in the next micro-step.
fn renew(cx: &mut NodeContext<'_>, leaf: ValueId, next: ValueId) {
    let def = cx.graph.value(leaf).def;
    let Op::Param(param) = &mut cx.graph.node_mut(def).op else { return };
    if param.kind != ParamKind::Buffer {
        // It came through other nodes, which hid its kind.
        param.kind = ParamKind::Buffer;
        param.reason = "it is a running statistic of BatchNormalization.".into();
    }
    let name = param.name.clone();
    match cx.graph.outputs.iter_mut().find(|o| o.kind == OutputKind::Carry(leaf)) {
        Some(renewal) => renewal.value = next,
        None => cx.graph.add_output(&name, next, OutputKind::Carry(leaf)),
    }
}

/// What turns the variance of so many ranks' `x[N, C, …]`, a mean of squares, into an unbiased estimate.
fn unbiasing(dims: &[usize], ranks: usize) -> f64 {
    let n = product(&[ranks, dims[0], product(&dims[2..])]);
    if n > 1 { n as f64 / (n - 1) as f64 } else { 1.0 }
}

/// `old · keep + batch · take`
fn blend(
    cx: &mut NodeContext<'_>,
    old: ValueId,
    batch: ValueId,
    (keep, take): (f64, f64),
) -> Result<ValueId, Fault> {
    let dtype = cx.ty(old).dtype;
    let batch = cx.cast(batch, dtype)?;
    let (keep, take) = (cx.scalar_like(old, keep)?, cx.scalar_like(old, take)?);
    let kept = cx.emit(Op::Binary(BinaryFn::Mul), &[old, keep])?;
    let taken = cx.emit(Op::Binary(BinaryFn::Mul), &[batch, take])?;
    cx.emit(Op::Binary(BinaryFn::Add), &[kept, taken])
}

/// With the running statistics: `x · factor + shift`, one of each per channel.
fn running(cx: &mut NodeContext<'_>, x: ValueId) -> Outcome {
    let [scale, bias, mean, var] = [cx.input(1)?, cx.input(2)?, cx.input(3)?, cx.input(4)?];
    let eps = cx.scalar_like(var, cx.float("epsilon", 1e-5))?;
    let shifted = cx.emit(Op::Binary(BinaryFn::Add), &[var, eps])?;
    let rstd = cx.emit(Op::Unary(UnaryFn::Rsqrt), &[shifted])?;
    let factor = cx.emit(Op::Binary(BinaryFn::Mul), &[scale, rstd])?;
    let moved = cx.emit(Op::Binary(BinaryFn::Mul), &[mean, factor])?;
    let shift = cx.emit(Op::Binary(BinaryFn::Sub), &[bias, moved])?;
    let mut shape = vec![1; cx.dims(x).len() - 1];
    shape[0] = cx.dims(x)[1];
    let (factor, shift) = (cx.reshape(factor, shape.clone())?, cx.reshape(shift, shape)?);
    let y = cx.emit(Op::Binary(BinaryFn::Mul), &[x, factor])?;
    one(cx.emit(Op::Binary(BinaryFn::Add), &[y, shift])?)
}
