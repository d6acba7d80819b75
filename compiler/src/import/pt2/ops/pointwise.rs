//! Elementwise operators: arithmetic, comparison, logic, activations, element types.

use super::super::call::{
    Call, Fault, Operand, Outcome, call_entry, float, int, text, unsupported,
};
use super::super::dtype::{self, BOOL, Dtype, F32, promoted};
use super::super::translate::{Tensor, identity};
use super::{Convert, one};
use crate::import::onnx::messages::NodeProto;
use std::f64::consts::{LN_2, LN_10};

/// How the metadata of a node say that it is a `detach`.
const DETACH: &str = "detach.default](args = (_)";

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("__and__", |c| bitwise(c, "And")),
    ("__or__", |c| bitwise(c, "Or")),
    ("__xor__", |c| bitwise(c, "Xor")),
    ("_prelu_kernel", prelu),
    ("_to_copy", to),
    ("abs", |c| same(c, "Abs")),
    ("absolute", |c| same(c, "Abs")),
    ("acos", |c| unary(c, "Acos")),
    ("acosh", |c| unary(c, "Acosh")),
    ("add", |c| sum(c, "Add")),
    ("addcdiv", |c| combined(c, "Div")),
    ("addcmul", |c| combined(c, "Mul")),
    ("alias", alias),
    ("alias_copy", alias),
    ("arccos", |c| unary(c, "Acos")),
    ("arccosh", |c| unary(c, "Acosh")),
    ("arcsin", |c| unary(c, "Asin")),
    ("arcsinh", |c| unary(c, "Asinh")),
    ("arctan", |c| unary(c, "Atan")),
    ("arctanh", |c| unary(c, "Atanh")),
    ("asin", |c| unary(c, "Asin")),
    ("asinh", |c| unary(c, "Asinh")),
    ("atan", |c| unary(c, "Atan")),
    ("atanh", |c| unary(c, "Atanh")),
    ("bitwise_and", |c| bitwise(c, "And")),
    ("bitwise_not", bitwise_not),
    ("bitwise_or", |c| bitwise(c, "Or")),
    ("bitwise_xor", |c| bitwise(c, "Xor")),
    ("ceil", |c| same(c, "Ceil")),
    ("celu", |c| {
        let a = c.float("alpha", 1.0)?;
        activation(c, "Celu", &[("alpha", a)])
    }),
    ("clamp", |c| clamp(c, "min", "max")),
    ("clamp_max", |c| clamp(c, "", "max")),
    ("clamp_min", |c| clamp(c, "min", "")),
    ("clip", |c| clamp(c, "min", "max")),
    ("clone", itself),
    ("contiguous", itself),
    ("cos", |c| unary(c, "Cos")),
    ("cosh", |c| unary(c, "Cosh")),
    ("detach", |c| {
        let x = c.tensor("self")?;
        let x = if dtype::is_float(x.dtype) { detached(c, &x.name) } else { x.name };
        one(x)
    }),
    ("detach_copy", |c| {
        let x = c.tensor("self")?;
        one(detached(c, &x.name))
    }),
    ("div", div),
    ("divide", div),
    ("elu", elu),
    ("eq", |c| compare(c, "Equal", false)),
    ("erf", |c| unary(c, "Erf")),
    ("erfc", |c| {
        let (x, d) = floats(c)?;
        let y = c.add("Erf", &[&x]);
        let n = c.number(d, 1.0);
        one(c.add("Sub", &[&n, &y]))
    }),
    ("exp", |c| unary(c, "Exp")),
    ("exp2", |c| {
        let (x, d) = floats(c)?;
        let n = c.number(d, LN_2);
        let x = c.add("Mul", &[&x, &n]);
        one(c.add("Exp", &[&x]))
    }),
    ("expm1", |c| {
        let (x, d) = floats(c)?;
        let y = c.add("Exp", &[&x]);
        let n = c.number(d, 1.0);
        one(c.add("Sub", &[&y, &n]))
    }),
    ("floor", |c| same(c, "Floor")),
    ("floor_divide", |c| divided(c, "floor")),
    ("fmod", |c| remainder(c, true)),
    ("frac", |c| {
        let x = c.tensor("self")?;
        let t = truncated(c, &x.name, x.dtype);
        one(c.add("Sub", &[&x.name, &t]))
    }),
    ("ge", |c| compare(c, "GreaterOrEqual", false)),
    ("gelu", |c| {
        let x = c.tensor("self")?;
        let a = c.text("approximate", "none")?;
        one(c.with("Gelu", &[&x.name], vec![text("approximate", &a)]))
    }),
    ("glu", glu),
    ("greater", |c| compare(c, "Greater", false)),
    ("greater_equal", |c| compare(c, "GreaterOrEqual", false)),
    ("gt", |c| compare(c, "Greater", false)),
    ("hardshrink", |c| {
        let l = c.float("lambd", 0.5)?;
        activation(c, "Shrink", &[("lambd", l)])
    }),
    ("hardsigmoid", |c| activation(c, "HardSigmoid", &[("alpha", 1.0 / 6.0), ("beta", 0.5)])),
    ("hardswish", |c| activation(c, "HardSwish", &[])),
    ("hardtanh", |c| {
        let (a, b) = (c.float("min_val", -1.0)?, c.float("max_val", 1.0)?);
        let x = c.tensor("self")?;
        one(limited(c, &x, Some(a), Some(b)))
    }),
    ("isfinite", |c| {
        let n = is_nan(c)?;
        let i = is_inf(c)?;
        let o = c.add("Or", &[&n, &i]);
        one(c.add("Not", &[&o]))
    }),
    ("isinf", |c| {
        let y = is_inf(c)?;
        one(y)
    }),
    ("isnan", |c| {
        let y = is_nan(c)?;
        one(y)
    }),
    ("le", |c| compare(c, "LessOrEqual", false)),
    ("leaky_relu", |c| {
        let a = c.float("negative_slope", 0.01)?;
        activation(c, "LeakyRelu", &[("alpha", a)])
    }),
    ("lerp", lerp),
    ("less", |c| compare(c, "Less", false)),
    ("less_equal", |c| compare(c, "LessOrEqual", false)),
    ("lift_fresh", itself),
    ("lift_fresh_copy", itself),
    ("log", |c| unary(c, "Log")),
    ("log10", |c| logarithm(c, LN_10)),
    ("log1p", |c| {
        let (x, d) = floats(c)?;
        let n = c.number(d, 1.0);
        let x = c.add("Add", &[&x, &n]);
        one(c.add("Log", &[&x]))
    }),
    ("log2", |c| logarithm(c, LN_2)),
    ("log_sigmoid", log_sigmoid),
    ("log_sigmoid_forward", log_sigmoid),
    ("logical_and", |c| logical(c, "And")),
    ("logical_not", |c| {
        let x = c.tensor("self")?;
        let x = c.cast(&x.name, x.dtype, BOOL);
        one(c.add("Not", &[&x]))
    }),
    ("logical_or", |c| logical(c, "Or")),
    ("logical_xor", |c| logical(c, "Xor")),
    ("lt", |c| compare(c, "Less", false)),
    ("masked_fill", masked_fill),
    ("maximum", |c| arithmetic(c, "Max")),
    ("minimum", |c| arithmetic(c, "Min")),
    ("mish", |c| activation(c, "Mish", &[])),
    ("mul", |c| arithmetic(c, "Mul")),
    ("multiply", |c| arithmetic(c, "Mul")),
    ("ne", |c| compare(c, "Equal", true)),
    ("neg", |c| same(c, "Neg")),
    ("negative", |c| same(c, "Neg")),
    ("not_equal", |c| compare(c, "Equal", true)),
    ("pow", pow),
    ("positive", itself),
    ("prelu", prelu),
    ("reciprocal", |c| unary(c, "Reciprocal")),
    ("relu", |c| same(c, "Relu")),
    ("relu6", |c| {
        let x = c.tensor("self")?;
        one(limited(c, &x, Some(0.0), Some(6.0)))
    }),
    ("remainder", |c| remainder(c, false)),
    ("round", round),
    ("rsqrt", |c| {
        let (x, _) = floats(c)?;
        let y = c.add("Sqrt", &[&x]);
        one(c.add("Reciprocal", &[&y]))
    }),
    ("rsub", rsub),
    ("selu", |c| activation(c, "Selu", &[])),
    ("sgn", |c| same(c, "Sign")),
    ("sigmoid", |c| unary(c, "Sigmoid")),
    ("sign", |c| same(c, "Sign")),
    ("silu", |c| {
        let x = c.tensor("self")?;
        let g = c.add("Sigmoid", &[&x.name]);
        one(c.add("Mul", &[&x.name, &g]))
    }),
    ("sin", |c| unary(c, "Sin")),
    ("sinh", |c| unary(c, "Sinh")),
    ("softplus", softplus),
    ("softshrink", |c| {
        let l = c.float("lambd", 0.5)?;
        activation(c, "Shrink", &[("bias", l), ("lambd", l)])
    }),
    ("special_ndtr", |c| {
        // ½ (1 + erf(x / √2))
        let (x, d) = floats(c)?;
        let [root, half, more] = [0.5f64.sqrt(), 0.5, 1.0].map(|n| c.number(d, n));
        let x = c.add("Mul", &[&x, &root]);
        let y = c.add("Erf", &[&x]);
        let y = c.add("Add", &[&y, &more]);
        one(c.add("Mul", &[&y, &half]))
    }),
    ("sqrt", |c| unary(c, "Sqrt")),
    ("square", |c| {
        let x = c.tensor("self")?;
        one(c.add("Mul", &[&x.name, &x.name]))
    }),
    ("sub", |c| sum(c, "Sub")),
    ("subtract", |c| sum(c, "Sub")),
    ("tan", |c| unary(c, "Tan")),
    ("tanh", |c| unary(c, "Tanh")),
    ("threshold", threshold),
    ("to", to),
    ("true_divide", |c| divided(c, "")),
    ("trunc", |c| {
        let x = c.tensor("self")?;
        let y = truncated(c, &x.name, x.dtype);
        one(y)
    }),
    ("type_as", |c| {
        let (x, like) = (c.tensor("self")?, c.tensor("other")?);
        let y = c.cast(&x.name, x.dtype, like.dtype);
        one(y)
    }),
    ("where", select),
    ("xlogy", xlogy),
];

/// The operand itself.
fn itself(c: &mut Call<'_>) -> Outcome {
    one(c.tensor("self")?.name)
}

/// The operand, without a gradient if a decomposition wrote a `detach` so.
fn alias(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    one(if c.node.is_detach() { detached(c, &x.name) } else { x.name })
}

/// The value without a gradient.
pub(in super::super) fn detached(c: &mut Call<'_>, x: &str) -> String {
    let y = c.add("Identity", &[x]);
    c.note_call(DETACH);
    y
}

/// A node that gives a value without its gradient.
pub(in super::super) fn detach_node(from: &str, to: &str) -> NodeProto {
    let mut node = identity(from, to);
    node.metadata_props.push(call_entry(DETACH));
    node
}

/// A function of the same element type, of which integers have one as well.
fn same(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let rounds = matches!(f, "Ceil" | "Floor");
    if rounds && !dtype::is_float(x.dtype) {
        return one(x.name);
    }
    one(c.add(f, &[&x.name]))
}

/// The operand as floats.
fn floats(c: &mut Call<'_>) -> Result<(String, Dtype), Fault> {
    let x = c.tensor("self")?;
    Ok(c.as_float(&x))
}

fn unary(c: &mut Call<'_>, f: &str) -> Outcome {
    let (x, _) = floats(c)?;
    one(c.add(f, &[&x]))
}

fn activation(c: &mut Call<'_>, f: &str, attributes: &[(&str, f64)]) -> Outcome {
    let (x, _) = floats(c)?;
    one(c.with(f, &[&x], attributes.iter().map(|(name, value)| float(name, *value)).collect()))
}

fn logarithm(c: &mut Call<'_>, base: f64) -> Outcome {
    let (x, d) = floats(c)?;
    let y = c.add("Log", &[&x]);
    let n = c.number(d, 1.0 / base);
    one(c.add("Mul", &[&y, &n]))
}

/// The operands in their promoted type.
pub(super) fn operands(
    c: &mut Call<'_>,
    names: [&str; 2],
) -> Result<(String, String, Dtype), Fault> {
    let (a, b) = (c.operand(names[0])?, c.operand(names[1])?);
    let dtype = promoted(&[a.weighted(), b.weighted()]);
    Ok((c.operand_as(&a, dtype), c.operand_as(&b, dtype), dtype))
}

fn arithmetic(c: &mut Call<'_>, f: &str) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    if dtype == BOOL {
        let f = match f {
            "Mul" | "Min" => "And",
            _ => "Or",
        };
        return one(c.add(f, &[&a, &b]));
    }
    one(c.add(f, &[&a, &b]))
}

/// `self ± alpha · other`
fn sum(c: &mut Call<'_>, f: &str) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    if dtype == BOOL {
        return one(c.add("Or", &[&a, &b]));
    }
    let b = scaled(c, &b, dtype, "alpha")?;
    one(c.add(f, &[&a, &b]))
}

/// `other − alpha · self`
fn rsub(c: &mut Call<'_>) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    let a = scaled(c, &a, dtype, "alpha")?;
    one(c.add("Sub", &[&b, &a]))
}

/// The value times a number that is 1 if it is left out.
pub(super) fn scaled(c: &mut Call<'_>, x: &str, dtype: Dtype, name: &str) -> Result<String, Fault> {
    let factor = c.scalar(name)?;
    let Some(factor) = factor.filter(|f| f.value() != Some(1.0)) else { return Ok(x.into()) };
    let factor = c.scalar_as(&factor, dtype);
    Ok(c.add("Mul", &[x, &factor]))
}

/// `self + value · (tensor1 f tensor2)`
fn combined(c: &mut Call<'_>, f: &str) -> Outcome {
    let (x, a, b) = (c.tensor("self")?, c.tensor("tensor1")?, c.tensor("tensor2")?);
    let all = [x, a, b].map(Operand::Tensor);
    let dtype = promoted(&[all[0].weighted(), all[1].weighted(), all[2].weighted()]);
    let [x, a, b] = all.map(|o| c.operand_as(&o, dtype));
    let y = c.add(f, &[&a, &b]);
    let y = scaled(c, &y, dtype, "value")?;
    one(c.add("Add", &[&x, &y]))
}

fn lerp(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("self")?, c.tensor("end")?);
    let weight = c.operand("weight")?;
    let weight = c.operand_as(&weight, a.dtype);
    let d = c.add("Sub", &[&b.name, &a.name]);
    let d = c.add("Mul", &[&weight, &d]);
    one(c.add("Add", &[&a.name, &d]))
}

fn div(c: &mut Call<'_>) -> Outcome {
    let mode = c.text("rounding_mode", "")?;
    divided(c, &mode)
}

fn divided(c: &mut Call<'_>, mode: &str) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    if dtype::is_float(dtype) {
        let y = c.add("Div", &[&a, &b]);
        return match mode {
            "floor" => one(c.add("Floor", &[&y])),
            "trunc" => {
                let y = truncated(c, &y, dtype);
                one(y)
            }
            _ => one(y),
        };
    }
    match mode {
        "floor" => {
            // ONNX rounds toward zero.
            let rest = c.add("Mod", &[&a, &b]);
            let exact = c.add("Sub", &[&a, &rest]);
            one(c.add("Div", &[&exact, &b]))
        }
        "trunc" => one(c.add("Div", &[&a, &b])),
        _ => {
            let (a, b) = (c.cast(&a, dtype, F32), c.cast(&b, dtype, F32));
            one(c.add("Div", &[&a, &b]))
        }
    }
}

fn remainder(c: &mut Call<'_>, as_c: bool) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    if !dtype::is_float(dtype) || as_c {
        return one(c.with("Mod", &[&a, &b], vec![int("fmod", as_c.into())]));
    }
    // The sign of the divisor.
    let q = c.add("Div", &[&a, &b]);
    let q = c.add("Floor", &[&q]);
    let q = c.add("Mul", &[&q, &b]);
    one(c.add("Sub", &[&a, &q]))
}

/// Toward zero.
fn truncated(c: &mut Call<'_>, x: &str, dtype: Dtype) -> String {
    if !dtype::is_float(dtype) {
        return x.into();
    }
    let (sign, size) = (c.add("Sign", &[x]), c.add("Abs", &[x]));
    let size = c.add("Floor", &[&size]);
    c.add("Mul", &[&sign, &size])
}

fn round(c: &mut Call<'_>) -> Outcome {
    let decimals = c.int("decimals", 0)?;
    let x = c.tensor("self")?;
    if !dtype::is_float(x.dtype) {
        return if decimals < 0 { unsupported("decimals of integers") } else { one(x.name) };
    }
    if decimals == 0 {
        return one(c.add("Round", &[&x.name]));
    }
    // By a power of ten that is exact, if it can be.
    let power = c.number(x.dtype, 10f64.powi(decimals.unsigned_abs().min(38) as i32));
    let (up, down) = if decimals > 0 { ("Mul", "Div") } else { ("Div", "Mul") };
    let y = c.add(up, &[&x.name, &power]);
    let y = c.add("Round", &[&y]);
    one(c.add(down, &[&y, &power]))
}

fn pow(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.operand("self")?, c.operand("exponent")?);
    let dtype = promoted(&[a.weighted(), b.weighted()]);
    if let (Operand::Tensor(x), Operand::Number(n)) = (&a, &b) {
        let x = c.cast(&x.name, x.dtype, dtype);
        match n.value() {
            Some(1.0) => return one(x),
            Some(2.0) => return one(c.add("Mul", &[&x, &x])),
            Some(0.5) if dtype::is_float(dtype) => return one(c.add("Sqrt", &[&x])),
            _ => {}
        }
    }
    let (a, b) = (c.operand_as(&a, dtype), c.operand_as(&b, dtype));
    one(c.add("Pow", &[&a, &b]))
}

fn compare(c: &mut Call<'_>, f: &str, not: bool) -> Outcome {
    let (mut a, mut b, dtype) = operands(c, ["self", "other"])?;
    if dtype == BOOL && f != "Equal" {
        (a, b) = (c.cast(&a, BOOL, dtype::I32), c.cast(&b, BOOL, dtype::I32));
    }
    let y = c.add(f, &[&a, &b]);
    one(if not { c.add("Not", &[&y]) } else { y })
}

fn logical(c: &mut Call<'_>, f: &str) -> Outcome {
    let (a, b) = (c.operand("self")?, c.operand("other")?);
    let (a, b) = (c.operand_as(&a, BOOL), c.operand_as(&b, BOOL));
    one(c.add(f, &[&a, &b]))
}

fn bitwise(c: &mut Call<'_>, f: &str) -> Outcome {
    let (a, b, dtype) = operands(c, ["self", "other"])?;
    let f = if dtype == BOOL { f.to_string() } else { format!("Bitwise{f}") };
    one(c.add(&f, &[&a, &b]))
}

fn bitwise_not(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    one(c.add(if x.dtype == BOOL { "Not" } else { "BitwiseNot" }, &[&x.name]))
}

fn is_nan(c: &mut Call<'_>) -> Result<String, Fault> {
    let (x, _) = floats(c)?;
    Ok(c.add("IsNaN", &[&x]))
}

fn is_inf(c: &mut Call<'_>) -> Result<String, Fault> {
    let (x, _) = floats(c)?;
    Ok(c.add("IsInf", &[&x]))
}

/// The value between limits.
pub(super) fn limited(c: &mut Call<'_>, x: &Tensor, min: Option<f64>, max: Option<f64>) -> String {
    let min = min.map_or_else(String::new, |m| c.number(x.dtype, m));
    let max = max.map_or_else(String::new, |m| c.number(x.dtype, m));
    c.add("Clip", &[&x.name, &min, &max])
}

fn clamp(c: &mut Call<'_>, min: &str, max: &str) -> Outcome {
    let x = c.tensor("self")?;
    let mut all = vec![Operand::Tensor(x.clone()).weighted()];
    let mut limits = Vec::new();
    for (name, f) in [(min, "Max"), (max, "Min")] {
        if c.argument(name).is_some() {
            let limit = c.operand(name)?;
            all.push(limit.weighted());
            limits.push((f, limit));
        }
    }
    let dtype = promoted(&all);
    let mut y = c.cast(&x.name, x.dtype, dtype);
    let known = |l: &Operand| matches!(l, Operand::Number(n) if n.value().is_some());
    if limits.iter().all(|(_, l)| known(l)) {
        let mut of = |f: &str| {
            let limit = limits.iter().find(|(g, _)| *g == f).map(|(_, l)| l.clone());
            limit.map_or_else(String::new, |l| c.operand_as(&l, dtype))
        };
        let (min, max) = (of("Max"), of("Min"));
        return one(c.add("Clip", &[&y, &min, &max]));
    }
    for (f, limit) in limits {
        let limit = c.operand_as(&limit, dtype);
        y = c.add(f, &[&y, &limit]);
    }
    one(y)
}

fn elu(c: &mut Call<'_>) -> Outcome {
    let (alpha, scale) = (c.float("alpha", 1.0)?, c.float("scale", 1.0)?);
    if c.float("input_scale", 1.0)? != 1.0 {
        return unsupported("input_scale");
    }
    let (x, d) = floats(c)?;
    let y = c.with("Elu", &[&x], vec![float("alpha", alpha)]);
    if scale == 1.0 {
        return one(y);
    }
    let scale = c.number(d, scale);
    one(c.add("Mul", &[&y, &scale]))
}

/// The first half of an axis, times the sigmoid of the second.
fn glu(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", -1)?, x.dims.len())?;
    let halves =
        c.all("Split", &[&x.name], vec![int("axis", axis as i64), int("num_outputs", 2)], 2);
    let gate = c.add("Sigmoid", &[&halves[1]]);
    one(c.add("Mul", &[&halves[0], &gate]))
}

/// `−softplus(−x)`, which does not overflow.
fn log_sigmoid(c: &mut Call<'_>) -> Outcome {
    let (x, _) = floats(c)?;
    let x = c.add("Neg", &[&x]);
    let y = c.add("Softplus", &[&x]);
    one(c.add("Neg", &[&y]))
}

fn prelu(c: &mut Call<'_>) -> Outcome {
    let (x, weight) = (c.tensor("self")?, c.tensor("weight")?);
    let mut slope = weight.name.clone();
    if weight.dims.len() == 1 && x.dims.len() > 2 {
        // One number per channel, the second axis.
        let axes: Vec<i64> = (1..x.dims.len() as i64 - 1).collect();
        slope = c.unsqueeze(&slope, &axes);
    }
    one(c.add("PRelu", &[&x.name, &slope]))
}

fn softplus(c: &mut Call<'_>) -> Outcome {
    let (beta, threshold) = (c.float("beta", 1.0)?, c.float("threshold", 20.0)?);
    let (x, d) = floats(c)?;
    let number = c.number(d, beta);
    let scaled = if beta == 1.0 { x.clone() } else { c.add("Mul", &[&x, &number]) };
    let mut y = c.add("Softplus", &[&scaled]);
    if beta != 1.0 {
        y = c.add("Div", &[&y, &number]);
    }
    if threshold >= 15.0 {
        // Above it there is no difference that f32 has.
        return one(y);
    }
    let limit = c.number(d, threshold);
    let above = c.add("Greater", &[&scaled, &limit]);
    one(c.add("Where", &[&above, &x, &y]))
}

fn threshold(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let (limit, value) = (c.float("threshold", 0.0)?, c.float("value", 0.0)?);
    let (limit, value) = (c.number(x.dtype, limit), c.number(x.dtype, value));
    let above = c.add("Greater", &[&x.name, &limit]);
    one(c.add("Where", &[&above, &x.name, &value]))
}

/// `x · log y`, zero where `x` is.
fn xlogy(c: &mut Call<'_>) -> Outcome {
    let (x, y, mut d) = operands(c, ["self", "other"])?;
    let (x, y) = match dtype::is_float(d) {
        true => (x, y),
        false => {
            let from = d;
            d = F32;
            (c.cast(&x, from, F32), c.cast(&y, from, F32))
        }
    };
    let zero = c.number(d, 0.0);
    let none = c.add("Equal", &[&x, &zero]);
    let one_ = c.number(d, 1.0);
    let safe = c.add("Where", &[&none, &one_, &y]);
    let log = c.add("Log", &[&safe]);
    one(c.add("Mul", &[&x, &log]))
}

fn masked_fill(c: &mut Call<'_>) -> Outcome {
    let (x, mask) = (c.tensor("self")?, c.tensor("mask")?);
    let value = c.operand("value")?;
    let value = c.operand_as(&value, x.dtype);
    let mask = c.cast(&mask.name, mask.dtype, BOOL);
    one(c.add("Where", &[&mask, &value, &x.name]))
}

fn select(c: &mut Call<'_>) -> Outcome {
    if c.argument("self").is_none() {
        return super::index::places(c);
    }
    let condition = c.tensor("condition")?;
    let condition = c.cast(&condition.name, condition.dtype, BOOL);
    let (a, b, _) = operands(c, ["self", "other"])?;
    one(c.add("Where", &[&condition, &a, &b]))
}

/// Another element type, if one is named.
fn to(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let dtype = match c.overload {
        "other" => Some(c.tensor("other")?.dtype),
        _ => c.dtype("dtype")?,
    };
    let y = c.cast(&x.name, x.dtype, dtype.unwrap_or(x.dtype));
    one(y)
}
