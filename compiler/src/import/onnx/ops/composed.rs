//! Operators composed of a few simpler ones: normalizations, activations, and selections with constant conditions.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, CompareFn, Gather, Reduce, ReduceFn, UnaryFn};
use frit_ir::{DType, Op, Tensor, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("Compress", &["axis"], compress),
    op("LpNormalization", &["axis", "p"], lp_normalization),
    op("MeanVarianceNormalization", &["axes"], mean_variance),
    op("NonZero", &[], non_zero),
    op("Shrink", &["bias", "lambd"], shrink),
    op("Swish", &["alpha"], swish),
];

pub(super) fn binary(
    cx: &mut NodeContext<'_>,
    f: BinaryFn,
    a: ValueId,
    b: ValueId,
) -> Result<ValueId, Fault> {
    cx.emit(Op::Binary(f), &[a, b])
}

pub(super) fn unary(cx: &mut NodeContext<'_>, f: UnaryFn, x: ValueId) -> Result<ValueId, Fault> {
    cx.emit(Op::Unary(f), &[x])
}

pub(super) fn with_scalar(
    cx: &mut NodeContext<'_>,
    f: BinaryFn,
    x: ValueId,
    c: f64,
) -> Result<ValueId, Fault> {
    let c = cx.scalar_like(x, c)?;
    binary(cx, f, x, c)
}

pub(super) fn reduced(
    cx: &mut NodeContext<'_>,
    f: ReduceFn,
    x: ValueId,
    axes: Vec<usize>,
) -> Result<ValueId, Fault> {
    cx.emit(Op::Reduce(Reduce { f, axes, keep_dims: true }), &[x])
}

fn swish(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let alpha = cx.float("alpha", 1.0);
    if alpha == 1.0 {
        return one(unary(cx, UnaryFn::Silu, x)?);
    }
    let gate = with_scalar(cx, BinaryFn::Mul, x, alpha)?;
    let gate = unary(cx, UnaryFn::Sigmoid, gate)?;
    one(binary(cx, BinaryFn::Mul, x, gate)?)
}

/// `x + bias` below −lambd, `x − bias` above lambd, zero between.
fn shrink(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let (bias, lambd) = (cx.float("bias", 0.0), cx.float("lambd", 0.5));
    let (high, low) = (cx.scalar_like(x, lambd)?, cx.scalar_like(x, -lambd)?);
    let above = cx.emit(Op::Compare(CompareFn::Gt), &[x, high])?;
    let below = cx.emit(Op::Compare(CompareFn::Lt), &[x, low])?;
    let less = with_scalar(cx, BinaryFn::Sub, x, bias)?;
    let more = with_scalar(cx, BinaryFn::Add, x, bias)?;
    let zero = cx.scalar_like(x, 0.0)?;
    let rest = cx.emit(Op::Select, &[below, more, zero])?;
    one(cx.emit(Op::Select, &[above, less, rest])?)
}

/// `x / ‖x‖` along an axis; zero where the norm is zero.
fn lp_normalization(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", -1))?;
    let norm = match cx.int("p", 2) {
        1 => {
            let size = unary(cx, UnaryFn::Abs, x)?;
            reduced(cx, ReduceFn::Sum, size, vec![axis])?
        }
        2 => {
            let squares = binary(cx, BinaryFn::Mul, x, x)?;
            let sum = reduced(cx, ReduceFn::Sum, squares, vec![axis])?;
            unary(cx, UnaryFn::Sqrt, sum)?
        }
        other => return Err(Fault::Attribute(format!("p = {other}"))),
    };
    let zero = cx.scalar_like(norm, 0.0)?;
    let some = cx.emit(Op::Compare(CompareFn::Gt), &[norm, zero])?;
    let one_ = cx.scalar_like(norm, 1.0)?;
    let norm = cx.emit(Op::Select, &[some, norm, one_])?;
    one(binary(cx, BinaryFn::Div, x, norm)?)
}

/// `(x − mean)/√variance` over the axes, with ONNX's 1e-9 added to the deviation.
fn mean_variance(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axes = cx.ints("axes").unwrap_or_else(|| vec![0, 2, 3]);
    let axes = cx.axes_in(cx.dims(x).len(), &axes)?;
    let mean = reduced(cx, ReduceFn::Mean, x, axes.clone())?;
    let centered = binary(cx, BinaryFn::Sub, x, mean)?;
    let squares = binary(cx, BinaryFn::Mul, centered, centered)?;
    let variance = reduced(cx, ReduceFn::Mean, squares, axes)?;
    let deviation = unary(cx, UnaryFn::Sqrt, variance)?;
    let deviation = with_scalar(cx, BinaryFn::Add, deviation, 1e-9)?;
    one(binary(cx, BinaryFn::Div, centered, deviation)?)
}

/// The slices of an axis, or the elements of all, where a known condition holds.
fn compress(cx: &mut NodeContext<'_>) -> Outcome {
    let mut x = cx.input(0)?;
    let condition = cx.input(1)?;
    let axis = match cx.has("axis") {
        true => cx.axis(x, cx.int("axis", 0))?,
        false => {
            let n = cx.ty(x).shape.numel();
            x = cx.reshape(x, vec![n])?;
            0
        }
    };
    let size = cx.dims(x)[axis];
    let Some(condition) = cx.graph.constant(condition).map(Tensor::to_i64s) else {
        let mask = cx.cast(condition, DType::Bool)?;
        let n = cx.dims(mask).iter().product::<usize>();
        if n > size {
            return misfit(format!("a condition on {n} of {size} elements"));
        }
        let rows = cx.selections.coordinates(cx.graph, cx.budget, &cx.origin, mask)?;
        let places = cx.reshape(rows, vec![n])?;
        return one(cx.emit(Op::Gather(Gather { axis }), &[x, places])?);
    };
    let places = condition.iter().take(size).enumerate().filter(|(_, c)| **c != 0);
    let places = places.map(|(i, _)| i as i64).collect();
    let places = cx.constant(Tensor::vector_i64(places))?;
    one(cx.emit(Op::Gather(Gather { axis }), &[x, places])?)
}

/// The coordinates of the elements that are not zero: one column per element.
fn non_zero(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let Some(x) = cx.graph.constant(x).filter(|_| !cx.selections.has(x)) else {
        let mask = cx.cast(x, DType::Bool)?;
        return one(cx.selections.coordinates(cx.graph, cx.budget, &cx.origin, mask)?);
    };
    let strides = x.shape().strides();
    let values = x.to_f64s();
    cx.room(&[strides.len(), values.len()])?;
    let hits: Vec<usize> = (0..values.len()).filter(|&i| values[i] != 0.0).collect();
    let coordinate = |axis: usize, i: usize| (i / strides[axis] % x.shape().0[axis]) as i64;
    let mut rows = Vec::with_capacity(strides.len() * hits.len());
    for axis in 0..strides.len() {
        rows.extend(hits.iter().map(|&i| coordinate(axis, i)));
    }
    one(cx.constant(Tensor::ints(DType::I64, [strides.len(), hits.len()], rows))?)
}
