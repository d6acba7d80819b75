//! The boundaries that `function` writes around calls of functions with a gradient or precision of their own.

use super::super::context::{Bound, Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use crate::import::custom;
use frit_ir::ops::{Cotangent, EnterPrecision, LeavePrecision};
use frit_ir::{DType, Op, Tensor, TensorType};

/// In [`super::super::function::DOMAIN`].
pub(super) const OPERATORS: &[Operator] = &[
    op("Cotangent", &["call", "result"], cotangent),
    op("CustomGradient", &["call", "function", "gradient", "inputs", "results"], custom_gradient),
    op("EnterPrecision", &["call", "dtype"], enter),
    op("LeavePrecision", &["call"], leave),
];

fn call(cx: &mut NodeContext<'_>) -> u32 {
    let stated = cx.int("call", 0);
    cx.calls.number(stated)
}

/// The gradient of a result; a result of integers has none, and zeros stand for it.
fn cotangent(cx: &mut NodeContext<'_>) -> Outcome {
    let y = cx.input(0)?;
    let ty = cx.ty(y);
    if !ty.dtype.is_float() {
        let zero = cx.constant(Tensor::splat(TensorType::scalar(DType::F32), 0.0))?;
        return one(cx.expand(zero, ty.shape.0)?);
    }
    let result = cx.count("result", 0);
    let op = Cotangent { call: call(cx), result };
    // Never computed at import, even of constants.
    Ok(cx.add(Op::Cotangent(op), &[y])?.into_iter().map(Bound::from).collect())
}

/// `(y…, x…, dx…)` → `y…`.
fn custom_gradient(cx: &mut NodeContext<'_>) -> Outcome {
    let [results, inputs] = ["results", "inputs"].map(|name| cx.count(name, 0));
    let (mut ys, mut xs, mut dxs) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..cx.inputs.len() {
        let value = cx.optional(i)?;
        match i {
            _ if i < results => ys.push(cx.input(i)?),
            _ if i < results + inputs => xs.push(value),
            _ => dxs.push(value),
        }
    }
    let number = call(cx);
    let call = custom::Call {
        number,
        function: &cx.text("function", ""),
        gradient: &cx.text("gradient", ""),
    };
    let wrapped = custom::wrap(cx.graph, &cx.origin, &call, &ys, &xs, &dxs);
    Ok(wrapped.map_err(Fault::Gradient)?.into_iter().map(Bound::from).collect())
}

fn enter(cx: &mut NodeContext<'_>) -> Outcome {
    let Ok(dtype) = cx.text("dtype", "").parse::<DType>() else { return misfit("no dtype") };
    let op = EnterPrecision { call: call(cx), dtype };
    boundary(cx, Op::EnterPrecision(op))
}

fn leave(cx: &mut NodeContext<'_>) -> Outcome {
    let op = LeavePrecision { call: call(cx) };
    boundary(cx, Op::LeavePrecision(op))
}

/// The operand behind a boundary; sequences, integers and constants have none.
fn boundary(cx: &mut NodeContext<'_>, op: Op) -> Outcome {
    let operand = cx.inputs.first().cloned().flatten().unwrap_or(Bound::Failed);
    match operand {
        Bound::Value(x) if cx.ty(x).dtype.is_float() && cx.graph.constant(x).is_none() => {
            one(cx.emit(op, &[x])?)
        }
        Bound::Failed => Err(Fault::Upstream),
        other => Ok(vec![other]),
    }
}
