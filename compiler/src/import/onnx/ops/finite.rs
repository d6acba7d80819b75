//! Gradients that are finite in PyTorch, of operators that exporters compose of others whose gradients are not: the product of an infinite
//! slope and a cotangent of 0 is NaN. `torch.sinc` at 0, `binary_cross_entropy` of a probability of exactly 0 or 1 and norms of any order of
//! zeros. The operand is detached at these elements: the values are the same, and the gradient is 0.

use super::super::context::{Fault, NodeContext};
use frit_ir::ops::{BinaryFn, CompareFn, Reduce, ReduceFn, UnaryFn};
use frit_ir::{Op, Tensor, ValueId};

/// Up to here the reciprocal is infinite in f32.
const LEAST_OPERAND: f64 = f64::from_bits((1023 - 128) << 52);

/// A logarithm that has a lower bound, as of `max(ln x, -100)`: nothing flows to an `x` that is 0 or nearly, which the bound replaces.
/// Those of probabilities are left as [`frit_passes::raise`] knows them, which computes them without their operand.
pub(super) fn bounded_log(cx: &mut NodeContext<'_>, y: ValueId) -> Result<ValueId, Fault> {
    let Some(x) = operand(cx, y, UnaryFn::Log) else { return Ok(y) };
    if is_probability(cx, x) || matches!(cx.graph.def(x).op, Op::Softmax(_)) {
        return Ok(y);
    }
    if let Some(probability) = complement(cx, x) {
        let one = cx.scalar_like(probability, 1.0)?;
        let rest = cx.emit(Op::Binary(BinaryFn::Sub), &[one, probability])?;
        return cx.emit(Op::Unary(UnaryFn::Log), &[rest]);
    }
    let least = cx.scalar_like(x, LEAST_OPERAND)?;
    let is_least = cx.emit(Op::Compare(CompareFn::Le), &[x, least])?;
    let x = detached_where(cx, is_least, x)?;
    cx.emit(Op::Unary(UnaryFn::Log), &[x])
}

fn is_probability(cx: &NodeContext<'_>, x: ValueId) -> bool {
    operand(cx, x, UnaryFn::Sigmoid).is_some()
}

/// The probability `p` of `1 - p` or `-p + 1`.
fn complement(cx: &NodeContext<'_>, x: ValueId) -> Option<ValueId> {
    let node = cx.graph.def(x);
    let &[a, b] = &node.inputs[..] else { return None };
    let is_one = |v: ValueId| splat(cx, v) == Some(1.0);
    let p = match node.op {
        Op::Binary(BinaryFn::Sub) if is_one(a) => Some(b),
        Op::Binary(BinaryFn::Add) if is_one(a) => operand(cx, b, UnaryFn::Neg),
        Op::Binary(BinaryFn::Add) if is_one(b) => operand(cx, a, UnaryFn::Neg),
        _ => None,
    };
    p.filter(|p| is_probability(cx, *p) && cx.dims(*p) == cx.dims(x))
}

/// `Σ|u|ᵖ`, the base of a power of `1/p`: nothing flows where it is 0, nor to an element of 0 if `p` is below 1.
pub(super) fn norm_base(
    cx: &mut NodeContext<'_>,
    mut sum: ValueId,
    exponent: ValueId,
) -> Result<ValueId, Fault> {
    let Some(root) = splat(cx, exponent) else { return Ok(sum) };
    let node = cx.graph.def(sum);
    let Op::Reduce(reduce @ Reduce { f: ReduceFn::Sum, .. }) = node.op.clone() else {
        return Ok(sum);
    };
    let power = cx.graph.def(node.inputs[0]);
    let (Op::Binary(BinaryFn::Pow), &[size, order]) = (&power.op, &power.inputs[..]) else {
        return Ok(sum);
    };
    // An exponent may be rounded to 16 bits.
    let is_norm = |p: &f64| *p > 0.0 && (p * root - 1.0).abs() < 5e-3;
    let Some(p) = splat(cx, order).filter(is_norm) else { return Ok(sum) };
    if p % 2.0 != 0.0 && operand(cx, size, UnaryFn::Abs).is_none() {
        return Ok(sum);
    }
    if p < 1.0 {
        let size = detached_at_zero(cx, size)?;
        let power = cx.emit(Op::Binary(BinaryFn::Pow), &[size, order])?;
        sum = cx.emit(Op::Reduce(reduce), &[power])?;
    }
    if p > 1.0 { detached_at_zero(cx, sum) } else { Ok(sum) }
}

/// The quotient of `z = 0 ? 1 : sin(πz)/(πz)`: nothing flows where `z` is 0.
pub(super) fn sinc_quotient(
    cx: &mut NodeContext<'_>,
    condition: ValueId,
    quotient: ValueId,
) -> Result<ValueId, Fault> {
    let node = cx.graph.def(quotient);
    let (Op::Binary(BinaryFn::Div), &[sine, angle]) = (&node.op, &node.inputs[..]) else {
        return Ok(quotient);
    };
    let test = cx.graph.def(condition);
    let is_zero = matches!(test.op, Op::Compare(CompareFn::Eq))
        && test.inputs.iter().any(|v| splat(cx, *v) == Some(0.0))
        && test.inputs.iter().any(|v| *v == angle || cx.graph.def(angle).inputs.contains(v));
    if !is_zero
        || operand(cx, sine, UnaryFn::Sin) != Some(angle)
        || cx.dims(condition) != cx.dims(angle)
    {
        return Ok(quotient);
    }
    let angle = detached_where(cx, condition, angle)?;
    let sine = cx.emit(Op::Unary(UnaryFn::Sin), &[angle])?;
    cx.emit(Op::Binary(BinaryFn::Div), &[sine, angle])
}

fn operand(cx: &NodeContext<'_>, y: ValueId, f: UnaryFn) -> Option<ValueId> {
    let node = cx.graph.def(y);
    matches!(node.op, Op::Unary(of) if of == f).then(|| node.inputs[0])
}

fn splat(cx: &NodeContext<'_>, value: ValueId) -> Option<f64> {
    cx.graph.constant(value).and_then(Tensor::as_splat)
}

fn detached_at_zero(cx: &mut NodeContext<'_>, x: ValueId) -> Result<ValueId, Fault> {
    let zero = cx.scalar_like(x, 0.0)?;
    let is_zero = cx.emit(Op::Compare(CompareFn::Eq), &[x, zero])?;
    detached_where(cx, is_zero, x)
}

fn detached_where(
    cx: &mut NodeContext<'_>,
    condition: ValueId,
    x: ValueId,
) -> Result<ValueId, Fault> {
    let detached = cx.emit(Op::Unary(UnaryFn::Detach), &[x])?;
    cx.emit(Op::Select, &[condition, detached, x])
}
