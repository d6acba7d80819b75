//! Elementwise operators: arithmetic, comparison, logic, activations, element types.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::super::exporter;
use super::super::tensor::{self, Narrow};
use super::{Operator, finite, one, op};
use frit_ir::ops::{BinaryFn, Clip, CompareFn, LogicalFn, PredicateFn, UnaryFn};
use frit_ir::{DType, Op, Origin, Tensor, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("Abs", &[], |cx| unary(cx, UnaryFn::Abs)),
    op("Acos", &[], |cx| unary(cx, UnaryFn::Acos)),
    op("Acosh", &[], |cx| unary(cx, UnaryFn::Acosh)),
    op("Add", &[], |cx| binary(cx, BinaryFn::Add)),
    op("And", &[], |cx| logical(cx, LogicalFn::And)),
    op("Asin", &[], |cx| unary(cx, UnaryFn::Asin)),
    op("Asinh", &[], |cx| unary(cx, UnaryFn::Asinh)),
    op("Atan", &[], |cx| unary(cx, UnaryFn::Atan)),
    op("Atanh", &[], |cx| unary(cx, UnaryFn::Atanh)),
    op("BitShift", &["direction"], bit_shift),
    op("BitwiseAnd", &[], |cx| logical(cx, LogicalFn::And)),
    op("BitwiseNot", &[], |cx| unary(cx, UnaryFn::Not)),
    op("BitwiseOr", &[], |cx| logical(cx, LogicalFn::Or)),
    op("BitwiseXor", &[], |cx| logical(cx, LogicalFn::Xor)),
    op("Cast", &["to", "saturate"], cast),
    op("CastLike", &["saturate"], cast_like),
    op("Ceil", &[], |cx| unary(cx, UnaryFn::Ceil)),
    op("Celu", &["alpha"], celu),
    op("Clip", &[], clip),
    op("Cos", &[], |cx| unary(cx, UnaryFn::Cos)),
    op("Cosh", &[], |cx| unary(cx, UnaryFn::Cosh)),
    op("Div", &[], |cx| binary(cx, BinaryFn::Div)),
    op("Elu", &["alpha"], elu),
    op("Equal", &[], |cx| compare(cx, CompareFn::Eq)),
    op("Erf", &[], |cx| unary(cx, UnaryFn::Erf)),
    op("Exp", &[], |cx| unary(cx, UnaryFn::Exp)),
    op("Floor", &[], |cx| unary(cx, UnaryFn::Floor)),
    op("Gelu", &["approximate"], gelu),
    op("Greater", &[], |cx| compare(cx, CompareFn::Gt)),
    op("GreaterOrEqual", &[], |cx| compare(cx, CompareFn::Ge)),
    op("HardSigmoid", &["alpha", "beta"], hard_sigmoid),
    op("HardSwish", &[], hard_swish),
    op("Identity", &[], |cx| {
        let bound = cx.inputs.first().cloned().flatten().ok_or(Fault::Upstream)?;
        if exporter::is_detach(cx.node) {
            let x = cx.input(0)?;
            if cx.ty(x).dtype.is_float() {
                return unary(cx, UnaryFn::Detach);
            }
        }
        Ok(vec![bound])
    }),
    op("IsInf", &["detect_negative", "detect_positive"], is_inf),
    op("IsNaN", &[], is_nan),
    op("LeakyRelu", &["alpha"], leaky_relu),
    op("Less", &[], |cx| compare(cx, CompareFn::Lt)),
    op("LessOrEqual", &[], |cx| compare(cx, CompareFn::Le)),
    op("Log", &[], |cx| unary(cx, UnaryFn::Log)),
    op("Max", &[], maximum),
    op("Mean", &[], mean),
    op("Min", &[], minimum),
    op("Mish", &[], mish),
    op("Mod", &["fmod"], modulo),
    op("Mul", &[], |cx| binary(cx, BinaryFn::Mul)),
    op("Neg", &[], |cx| unary(cx, UnaryFn::Neg)),
    op("Not", &[], |cx| unary(cx, UnaryFn::Not)),
    op("Or", &[], |cx| logical(cx, LogicalFn::Or)),
    op("PRelu", &[], prelu),
    op("Pow", &[], pow),
    op("Reciprocal", &[], |cx| unary(cx, UnaryFn::Reciprocal)),
    op("Relu", &[], relu),
    op("Round", &[], |cx| unary(cx, UnaryFn::Round)),
    op("Selu", &["alpha", "gamma"], selu),
    op("Sigmoid", &[], |cx| unary(cx, UnaryFn::Sigmoid)),
    op("Sign", &[], |cx| unary(cx, UnaryFn::Sign)),
    op("Sin", &[], |cx| unary(cx, UnaryFn::Sin)),
    op("Sinh", &[], |cx| unary(cx, UnaryFn::Sinh)),
    op("Softplus", &[], |cx| unary(cx, UnaryFn::Softplus)),
    op("Softsign", &[], softsign),
    op("Sqrt", &[], |cx| unary(cx, UnaryFn::Sqrt)),
    op("Sub", &[], |cx| binary(cx, BinaryFn::Sub)),
    op("Sum", &[], |cx| variadic(cx, BinaryFn::Add)),
    op("Tan", &[], |cx| unary(cx, UnaryFn::Tan)),
    op("Tanh", &[], |cx| unary(cx, UnaryFn::Tanh)),
    op("ThresholdedRelu", &["alpha"], thresholded_relu),
    op("Where", &[], select),
    op("Xor", &[], |cx| logical(cx, LogicalFn::Xor)),
];

fn unary(cx: &mut NodeContext<'_>, f: UnaryFn) -> Outcome {
    let x = cx.input(0)?;
    one(cx.emit(Op::Unary(f), &[x])?)
}

fn binary(cx: &mut NodeContext<'_>, f: BinaryFn) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    if f == BinaryFn::Div {
        nonzero_divisor(cx, b)?;
    }
    one(cx.emit(Op::Binary(f), &[a, b])?)
}

/// Refuses an integer division by a constant zero, which has no result.
fn nonzero_divisor(cx: &NodeContext<'_>, divisor: ValueId) -> Result<(), Fault> {
    match cx.graph.constant(divisor).and_then(Tensor::as_ints) {
        Some(values) if values.contains(&0) => misfit("division of integers by zero"),
        _ => Ok(()),
    }
}

fn compare(cx: &mut NodeContext<'_>, f: CompareFn) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    one(cx.emit(Op::Compare(f), &[a, b])?)
}

fn logical(cx: &mut NodeContext<'_>, f: LogicalFn) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    one(cx.emit(Op::Logical(f), &[a, b])?)
}

fn fold_all(cx: &mut NodeContext<'_>, f: BinaryFn) -> Result<(ValueId, usize), Fault> {
    let values = cx.variadic()?;
    let mut result = values[0];
    for &value in &values[1..] {
        result = cx.emit(Op::Binary(f), &[result, value])?;
    }
    Ok((result, values.len()))
}

fn variadic(cx: &mut NodeContext<'_>, f: BinaryFn) -> Outcome {
    let (result, _) = fold_all(cx, f)?;
    one(result)
}

fn maximum(cx: &mut NodeContext<'_>) -> Outcome {
    let [mut a, mut b] = cx.variadic()?[..] else { return variadic(cx, BinaryFn::Max) };
    if cx.graph.constant(b).is_some() {
        a = finite::bounded_log(cx, a)?;
    } else if cx.graph.constant(a).is_some() {
        b = finite::bounded_log(cx, b)?;
    }
    if let Some(min) = clamped_by(cx, b) {
        return one(cx.emit(Op::Clip(Clip { min: Some(min), max: None }), &[a])?);
    }
    one(cx.emit(Op::Binary(BinaryFn::Max), &[a, b])?)
}

fn minimum(cx: &mut NodeContext<'_>) -> Outcome {
    let [a, b] = cx.variadic()?[..] else { return variadic(cx, BinaryFn::Min) };
    if let Some(max) = clamped_by(cx, b) {
        return one(cx.emit(Op::Clip(Clip { min: None, max: Some(max) }), &[a])?);
    }
    one(cx.emit(Op::Binary(BinaryFn::Min), &[a, b])?)
}

/// The bound, if it is a number, of a `torch.clamp` that the exporter writes as a maximum or minimum: its gradient is 0 at the bound; those of
/// `torch.maximum` and of a clamp by tensors are a half.
fn clamped_by(cx: &NodeContext<'_>, bound: ValueId) -> Option<f64> {
    let call = exporter::call(cx.node)?;
    let mut bounds = (1..call.arguments.len()).filter_map(|position| call.value_at(position));
    let is_clamp = call.op.starts_with("clamp") && bounds.all(|b| b.starts_with("scalar_tensor"));
    let is_number = |t: &&Tensor| t.ty.shape.rank() == 0 && t.ty.dtype.is_float();
    let bound = cx.graph.constant(bound).filter(|t| is_clamp && is_number(t))?;
    bound.as_splat().filter(|b| !b.is_nan())
}

fn mean(cx: &mut NodeContext<'_>) -> Outcome {
    let (sum, n) = fold_all(cx, BinaryFn::Add)?;
    let n = cx.scalar_like(sum, n as f64)?;
    one(cx.emit(Op::Binary(BinaryFn::Div), &[sum, n])?)
}

fn modulo(cx: &mut NodeContext<'_>) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    nonzero_divisor(cx, b)?;
    let f = if cx.int("fmod", 0) == 0 { BinaryFn::Mod } else { BinaryFn::Fmod };
    one(cx.emit(Op::Binary(f), &[a, b])?)
}

fn pow(cx: &mut NodeContext<'_>) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let (base, exponent) = (cx.ty(a).dtype, cx.ty(b).dtype);
    if base.is_float() || !exponent.is_float() {
        let b = cx.cast(b, base)?;
        let a = finite::norm_base(cx, a, b)?;
        return one(cx.emit(Op::Binary(BinaryFn::Pow), &[a, b])?);
    }
    // An integer to a real power is computed as a real number and truncated.
    let a = cx.cast(a, exponent)?;
    let y = cx.emit(Op::Binary(BinaryFn::Pow), &[a, b])?;
    one(cx.cast(y, base)?)
}

fn select(cx: &mut NodeContext<'_>) -> Outcome {
    let (c, a, b) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let b = finite::sinc_quotient(cx, c, b)?;
    one(cx.emit(Op::Select, &[c, a, b])?)
}

fn cast(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let to = cx.dtype_attribute("to", cx.int("to", 0))?;
    let x = unrounded(cx, x, to)?;
    let y = cx.cast(x, to)?;
    match tensor::narrow(cx.int("to", 0)) {
        Some(narrow) if narrow.bytes < to.size() => one(wrapped(cx, y, narrow)?),
        _ => one(y),
    }
}

/// A parameter, or its transpose, before it was rounded to the dtype that the file stores it in, if it is read
/// in f32: what is trained is f32, and the storage alone is no reason to round it.
fn unrounded(cx: &mut NodeContext<'_>, x: ValueId, to: DType) -> Result<ValueId, Fault> {
    // The model's own casts have an origin, unless their nodes have no names.
    let wide = |v: ValueId| {
        let node = cx.graph.def(v);
        let Op::Cast(frit_ir::ops::Cast { to: narrow }) = node.op else { return None };
        let wide = *node.inputs.first()?;
        let Op::Param(param) = &cx.graph.def(wide).op else { return None };
        let is_stored_so = cx.weights.get(&param.name).is_some_and(|w| w.stored == narrow);
        let is_undone = node.origin == Origin::none() && is_stored_so;
        (is_undone && cx.graph.ty(wide).dtype == to).then_some(wide)
    };
    if to != DType::F32 {
        return Ok(x);
    }
    let node = cx.graph.def(x);
    match (&node.op, wide(x)) {
        (_, Some(wide)) => Ok(wide),
        (Op::Transpose(op), _) => match wide(node.inputs[0]) {
            Some(wide) => cx.emit(Op::Transpose(op.clone()), &[wide]),
            None => Ok(x),
        },
        _ => Ok(x),
    }
}

/// An integer cut to the bits of the type that it stands for.
fn wrapped(cx: &mut NodeContext<'_>, x: ValueId, narrow: Narrow) -> Result<ValueId, Fault> {
    let range = 2f64.powi(8 * narrow.bytes as i32);
    let low = if narrow.signed { -range / 2.0 } else { 0.0 };
    let above = shifted(cx, x, -low)?;
    let range = cx.scalar_like(x, range)?;
    let rest = cx.emit(Op::Binary(BinaryFn::Mod), &[above, range])?;
    shifted(cx, rest, low)
}

/// `a·2ᵇ`, or `a/2ᵇ` rounded down; `a` is unsigned.
fn bit_shift(cx: &mut NodeContext<'_>) -> Outcome {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let two = cx.scalar_like(a, 2.0)?;
    let power = cx.emit(Op::Binary(BinaryFn::Pow), &[two, b])?;
    match cx.text("direction", "").as_str() {
        "LEFT" => one(cx.emit(Op::Binary(BinaryFn::Mul), &[a, power])?),
        "RIGHT" => one(cx.emit(Op::Binary(BinaryFn::Div), &[a, power])?),
        other => Err(Fault::Attribute(format!("direction = \"{other}\""))),
    }
}

fn cast_like(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, like) = (cx.input(0)?, cx.input(1)?);
    let to = cx.ty(like).dtype;
    one(cx.cast(x, to)?)
}

fn is_nan(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    one(cx.emit(Op::Predicate(PredicateFn::IsNan), &[x])?)
}

fn is_inf(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let inf = match (cx.int("detect_negative", 1) != 0, cx.int("detect_positive", 1) != 0) {
        (true, true) => return one(cx.emit(Op::Predicate(PredicateFn::IsInf), &[x])?),
        (false, true) => f64::INFINITY,
        (true, false) => f64::NEG_INFINITY,
        (false, false) => return Err(Fault::Attribute("detecting no infinity".into())),
    };
    let inf = cx.scalar_like(x, inf)?;
    one(cx.emit(Op::Compare(CompareFn::Eq), &[x, inf])?)
}

fn clip(cx: &mut NodeContext<'_>) -> Outcome {
    let mut x = cx.input(0)?;
    let mut limits = [None, None];
    for (i, f) in [(1, BinaryFn::Max), (2, BinaryFn::Min)] {
        let Some(limit) = cx.optional(i)? else { continue };
        match cx.graph.constant(limit).map(Tensor::to_f64s).as_deref() {
            Some(&[value]) => limits[i - 1] = Some(value),
            _ => x = cx.emit(Op::Binary(f), &[x, limit])?,
        }
    }
    match limits {
        [None, None] => one(x),
        [min, max] => {
            if min.is_some() {
                x = finite::bounded_log(cx, x)?;
            }
            one(cx.emit(Op::Clip(Clip { min, max }), &[x])?)
        }
    }
}

fn relu(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    if cx.ty(x).dtype.is_float() {
        return one(cx.emit(Op::Unary(UnaryFn::Relu), &[x])?);
    }
    one(cx.emit(Op::Clip(Clip { min: Some(0.0), max: None }), &[x])?)
}

fn gelu(cx: &mut NodeContext<'_>) -> Outcome {
    match cx.text("approximate", "none").as_str() {
        "none" => unary(cx, UnaryFn::Gelu),
        "tanh" => unary(cx, UnaryFn::GeluTanh),
        other => Err(Fault::Attribute(format!("approximate = \"{other}\""))),
    }
}

/// `x` where it is above zero, else `low`, of which PyTorch takes the gradient at zero.
fn where_positive(cx: &mut NodeContext<'_>, x: ValueId, low: ValueId) -> Result<ValueId, Fault> {
    let zero = cx.scalar_like(x, 0.0)?;
    let positive = cx.emit(Op::Compare(CompareFn::Gt), &[x, zero])?;
    cx.emit(Op::Select, &[positive, x, low])
}

fn scaled(cx: &mut NodeContext<'_>, x: ValueId, factor: f64) -> Result<ValueId, Fault> {
    if factor == 1.0 {
        return Ok(x);
    }
    let factor = cx.scalar_like(x, factor)?;
    cx.emit(Op::Binary(BinaryFn::Mul), &[x, factor])
}

fn shifted(cx: &mut NodeContext<'_>, x: ValueId, by: f64) -> Result<ValueId, Fault> {
    let by = cx.scalar_like(x, by)?;
    cx.emit(Op::Binary(BinaryFn::Add), &[x, by])
}

fn limited(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    min: Option<f64>,
    max: Option<f64>,
) -> Result<ValueId, Fault> {
    cx.emit(Op::Clip(Clip { min, max }), &[x])
}

fn leaky_relu(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let alpha = cx.float("alpha", 0.01);
    let low = scaled(cx, x, alpha)?;
    one(where_positive(cx, x, low)?)
}

fn prelu(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, slope) = (cx.input(0)?, cx.input(1)?);
    let low = cx.emit(Op::Binary(BinaryFn::Mul), &[x, slope])?;
    one(where_positive(cx, x, low)?)
}

/// `factor·(x if x > 0 else alpha·(exp(x/width) − 1))`, the exponential of 0 where the other branch is taken, so that no infinity arises there.
fn exponential_unit(cx: &mut NodeContext<'_>, alpha: f64, width: f64, factor: f64) -> Outcome {
    let x = cx.input(0)?;
    let zero = cx.scalar_like(x, 0.0)?;
    let positive = cx.emit(Op::Compare(CompareFn::Gt), &[x, zero])?;
    let low = cx.emit(Op::Select, &[positive, zero, x])?;
    let low = scaled(cx, low, 1.0 / width)?;
    let low = cx.emit(Op::Unary(UnaryFn::Expm1), &[low])?;
    let low = scaled(cx, low, alpha)?;
    let y = cx.emit(Op::Select, &[positive, x, low])?;
    one(scaled(cx, y, factor)?)
}

fn elu(cx: &mut NodeContext<'_>) -> Outcome {
    exponential_unit(cx, cx.float("alpha", 1.0), 1.0, 1.0)
}

fn celu(cx: &mut NodeContext<'_>) -> Outcome {
    let alpha = cx.float("alpha", 1.0);
    exponential_unit(cx, alpha, alpha, 1.0)
}

fn selu(cx: &mut NodeContext<'_>) -> Outcome {
    // The constants of Klambauer et al. 2017, as ONNX states them.
    let alpha = cx.float("alpha", 1.673_263_192_176_818_8);
    let gamma = cx.float("gamma", 1.050_700_902_938_842_8);
    exponential_unit(cx, alpha, 1.0, gamma)
}

fn thresholded_relu(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let alpha = cx.scalar_like(x, cx.float("alpha", 1.0))?;
    let above = cx.emit(Op::Compare(CompareFn::Gt), &[x, alpha])?;
    let zero = cx.scalar_like(x, 0.0)?;
    one(cx.emit(Op::Select, &[above, x, zero])?)
}

fn gate(cx: &mut NodeContext<'_>, x: ValueId, alpha: f64, beta: f64) -> Result<ValueId, Fault> {
    let y = scaled(cx, x, alpha)?;
    let y = shifted(cx, y, beta)?;
    limited(cx, y, Some(0.0), Some(1.0))
}

fn hard_sigmoid(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let (alpha, beta) = (cx.float("alpha", 0.2), cx.float("beta", 0.5));
    one(gate(cx, x, alpha, beta)?)
}

fn hard_swish(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let gate = gate(cx, x, 1.0 / 6.0, 0.5)?;
    one(cx.emit(Op::Binary(BinaryFn::Mul), &[x, gate])?)
}

fn softsign(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let size = cx.emit(Op::Unary(UnaryFn::Abs), &[x])?;
    let size = shifted(cx, size, 1.0)?;
    one(cx.emit(Op::Binary(BinaryFn::Div), &[x, size])?)
}

fn mish(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let gate = cx.emit(Op::Unary(UnaryFn::Softplus), &[x])?;
    let gate = cx.emit(Op::Unary(UnaryFn::Tanh), &[gate])?;
    one(cx.emit(Op::Binary(BinaryFn::Mul), &[x, gate])?)
}
