//! Softmax and normalizations.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, LayerNorm, LogSoftmax, RmsNorm, Softmax};
use frit_ir::shape::product;
use frit_ir::{Op, Tensor, TensorType, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("GroupNormalization", &["epsilon", "num_groups", "stash_type"], group),
    op("InstanceNormalization", &["epsilon"], instance),
    op("LayerNormalization", &["axis", "epsilon", "stash_type"], layer),
    op("LogSoftmax", &["axis"], |cx| softmax(cx, |axis| Op::LogSoftmax(LogSoftmax { axis }))),
    op("RMSNormalization", &["axis", "epsilon", "stash_type"], rms),
    op("Softmax", &["axis"], |cx| softmax(cx, |axis| Op::Softmax(Softmax { axis }))),
];

fn softmax(cx: &mut NodeContext<'_>, make: fn(usize) -> Op) -> Outcome {
    let x = cx.input(0)?;
    if cx.opset < 13 {
        // All axes from the given one on were one.
        let dims = cx.dims(x);
        let axis = cx.axis(x, cx.int("axis", 1))?;
        let rows = vec![product(&dims[..axis]), product(&dims[axis..])];
        let rows = cx.reshape(x, rows)?;
        let y = cx.emit(make(1), &[rows])?;
        return one(cx.reshape(y, dims)?);
    }
    let axis = cx.axis(x, cx.int("axis", -1))?;
    one(cx.emit(make(axis), &[x])?)
}

/// Statistics are f32 in Frit, as `stash_type = 1` asks.
fn stash(cx: &NodeContext<'_>) -> Result<(), Fault> {
    match cx.int("stash_type", 1) {
        1 => Ok(()),
        other => Err(Fault::Attribute(format!("stash_type = {other}"))),
    }
}

fn layer(cx: &mut NodeContext<'_>) -> Outcome {
    stash(cx)?;
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.optional(2)?);
    let axis = cx.axis(x, cx.int("axis", -1))?;
    let tail = cx.dims(x)[axis..].to_vec();
    let mut operands = vec![x, cx.expand(scale, tail.clone())?];
    if let Some(bias) = bias {
        operands.push(cx.expand(bias, tail)?);
    }
    let eps = cx.float("epsilon", 1e-5);
    let results = cx.emit_all(Op::LayerNorm(LayerNorm { axis, eps }), &operands)?;
    // ONNX keeps the normalized axes of the statistics, with size 1.
    let mut kept = cx.dims(x);
    kept[axis..].fill(1);
    let mut outputs = vec![results[0].into()];
    for &statistic in &results[1..] {
        if outputs.len() < cx.node.output.len() {
            outputs.push(cx.reshape(statistic, kept.clone())?.into());
        }
    }
    Ok(outputs)
}

fn rms(cx: &mut NodeContext<'_>) -> Outcome {
    stash(cx)?;
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let axis = cx.axis(x, cx.int("axis", -1))?;
    let tail = cx.dims(x)[axis..].to_vec();
    let scale = cx.expand(scale, tail)?;
    let eps = cx.float("epsilon", 1e-5);
    one(cx.emit(Op::RmsNorm(RmsNorm { axis, eps }), &[x, scale])?)
}

/// `(x − mean)/√(var + eps)` over `groups` equal groups of the channels (axis 1) of each example.
fn normalized(cx: &mut NodeContext<'_>, x: ValueId, groups: usize) -> Result<ValueId, Fault> {
    let ty = cx.ty(x);
    let &[n, c, ..] = ty.shape.dims() else {
        return misfit(format!("the operand needs a channel axis, but has shape {}", ty.shape));
    };
    if groups == 0 || c % groups != 0 {
        return misfit(format!("{c} channels in {groups} groups"));
    }
    let width = c / groups * product(&ty.shape.dims()[2..]);
    let rows = cx.reshape(x, vec![n * groups, width])?;
    let one = cx.constant(Tensor::splat(TensorType::scalar(ty.dtype), 1.0))?;
    let ones = cx.expand(one, vec![width])?;
    let eps = cx.float("epsilon", 1e-5);
    let y = cx.emit_all(Op::LayerNorm(LayerNorm { axis: 1, eps }), &[rows, ones])?[0];
    cx.reshape(y, ty.shape.0)
}

/// `x·scale + bias` with scale and bias `[C]` along axis 1.
fn affine(cx: &mut NodeContext<'_>, x: ValueId, scale: ValueId, bias: ValueId) -> Outcome {
    let dims = cx.dims(x);
    if dims.len() < 2 {
        return misfit(format!("the operand needs a channel axis, but is {}", cx.ty(x)));
    }
    let along = |cx: &mut NodeContext<'_>, v: ValueId| {
        let mut shape = vec![1; dims.len()];
        shape[1] = dims[1];
        cx.reshape(v, shape)
    };
    let (scale, bias) = (along(cx, scale)?, along(cx, bias)?);
    let y = cx.emit(Op::Binary(BinaryFn::Mul), &[x, scale])?;
    one(cx.emit(Op::Binary(BinaryFn::Add), &[y, bias])?)
}

fn instance(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let channels = cx.dims(x).get(1).copied().unwrap_or(0);
    let y = normalized(cx, x, channels)?;
    affine(cx, y, scale, bias)
}

/// Scale and bias belong to a group before opset 21, to a channel since.
fn group(cx: &mut NodeContext<'_>) -> Outcome {
    stash(cx)?;
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let groups = cx.count("num_groups", 0);
    let y = normalized(cx, x, groups)?;
    if cx.opset >= 21 {
        return affine(cx, y, scale, bias);
    }
    let channels = cx.dims(x)[1];
    let spread = |cx: &mut NodeContext<'_>, v: ValueId| {
        let v = cx.reshape(v, vec![groups, 1])?;
        let v = cx.expand(v, vec![groups, channels / groups])?;
        cx.reshape(v, vec![channels])
    };
    let (scale, bias) = (spread(cx, scale)?, spread(cx, bias)?);
    affine(cx, y, scale, bias)
}
