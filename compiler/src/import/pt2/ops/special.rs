//! Elementwise functions that ONNX has no operator for, as compositions.

use super::super::call::{Call, Fault, Outcome, int};
use super::super::dtype::{BF16, BOOL, Dtype, F16, F32, F64, is_float};
use super::pointwise::operands;
use super::{Convert, one};
use std::f64::consts::{LN_2, PI};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("arctan2", atan2),
    ("atan2", atan2),
    ("conj", itself),
    ("conj_physical", itself),
    ("copysign", |c| {
        let (a, b, d) = floats(c)?;
        let size = c.add("Abs", &[&a]);
        let (zero, other) = (c.number(d, 0.0), c.add("Neg", &[&size]));
        let is_negative = c.add("Less", &[&b, &zero]);
        one(c.add("Where", &[&is_negative, &other, &size]))
    }),
    ("deg2rad", |c| times(c, PI / 180.0)),
    ("fmax", |c| extreme(c, "Max")),
    ("fmin", |c| extreme(c, "Min")),
    ("heaviside", |c| {
        let (x, at_zero, d) = operands(c, ["self", "values"])?;
        let zero = c.number(d, 0.0);
        let (is_zero, above) = (c.add("Equal", &[&x, &zero]), c.add("Greater", &[&x, &zero]));
        let step = c.cast(&above, BOOL, d);
        one(c.add("Where", &[&is_zero, &at_zero, &step]))
    }),
    ("hypot", |c| {
        let (a, b, _) = floats(c)?;
        let (a, b) = (c.add("Mul", &[&a, &a]), c.add("Mul", &[&b, &b]));
        let sum = c.add("Add", &[&a, &b]);
        one(c.add("Sqrt", &[&sum]))
    }),
    ("isclose", isclose),
    ("isneginf", |c| infinite(c, false)),
    ("isposinf", |c| infinite(c, true)),
    ("ldexp", |c| {
        let (x, exponent, d) = floats(c)?;
        let ln2 = c.number(d, LN_2);
        let exponent = c.add("Mul", &[&exponent, &ln2]);
        let power = c.add("Exp", &[&exponent]);
        one(c.add("Mul", &[&x, &power]))
    }),
    ("logaddexp", |c| {
        let (a, b, d) = floats(c)?;
        one(log_add_exp(c, &a, &b, d))
    }),
    ("logaddexp2", |c| {
        let (a, b, d) = floats(c)?;
        let ln2 = c.number(d, LN_2);
        let (a, b) = (c.add("Mul", &[&a, &ln2]), c.add("Mul", &[&b, &ln2]));
        let y = log_add_exp(c, &a, &b, d);
        one(c.add("Div", &[&y, &ln2]))
    }),
    ("logit", logit),
    ("nan_to_num", nan_to_num),
    ("rad2deg", |c| times(c, 180.0 / PI)),
    ("real", itself),
    ("resolve_conj", itself),
    ("resolve_neg", itself),
    ("signbit", |c| {
        let x = c.tensor("self")?;
        let zero = c.number(x.dtype, 0.0);
        one(c.add("Less", &[&x.name, &zero]))
    }),
    ("sinc", sinc),
    ("special_logit", logit),
    ("special_sinc", sinc),
    ("special_xlog1py", |c| {
        let (x, y, d) = floats(c)?;
        let [zero, more, least] = [0.0, 1.0, -1.0].map(|n| c.number(d, n));
        let (is_zero, is_least) =
            (c.add("Equal", &[&x, &zero]), c.add("LessOrEqual", &[&y, &least]));
        let is_undefined = c.add("And", &[&is_zero, &is_least]);
        let safe = c.add("Where", &[&is_undefined, &zero, &y]);
        let safe = c.add("Add", &[&safe, &more]);
        let log = c.add("Log", &[&safe]);
        one(c.add("Mul", &[&x, &log]))
    }),
];

/// The operand itself, of a real tensor.
fn itself(c: &mut Call<'_>) -> Outcome {
    one(c.tensor("self")?.name)
}

/// Both operands as floats of one type.
fn floats(c: &mut Call<'_>) -> Result<(String, String, Dtype), Fault> {
    let (a, b, d) = operands(c, ["self", "other"])?;
    let to = if is_float(d) { d } else { F32 };
    Ok((c.cast(&a, d, to), c.cast(&b, d, to), to))
}

fn times(c: &mut Call<'_>, factor: f64) -> Outcome {
    let x = c.tensor("self")?;
    let (x, d) = c.as_float(&x);
    let factor = c.number(d, factor);
    one(c.add("Mul", &[&x, &factor]))
}

/// The angle of the point `(other, self)`: of the quotient that is at most 1, so that no gradient is infinite.
fn atan2(c: &mut Call<'_>) -> Outcome {
    let (y, x, d) = floats(c)?;
    let [zero, more, half, whole] = [0.0, 1.0, PI / 2.0, PI].map(|n| c.number(d, n));
    let (tall, wide) = (c.add("Abs", &[&y]), c.add("Abs", &[&x]));
    let is_steep = c.add("Greater", &[&tall, &wide]);
    let (small, large) =
        (c.add("Where", &[&is_steep, &x, &y]), c.add("Where", &[&is_steep, &y, &x]));
    let is_origin = c.add("Equal", &[&large, &zero]);
    let small = c.add("Where", &[&is_origin, &zero, &small]);
    let large = c.add("Where", &[&is_origin, &more, &large]);
    let quotient = c.add("Div", &[&small, &large]);
    let angle = c.add("Atan", &[&quotient]);
    let is_below = c.add("Less", &[&y, &zero]);
    let with_sign = |c: &mut Call<'_>, n: &str| {
        let other = c.add("Neg", &[n]);
        c.add("Where", &[&is_below, &other, n])
    };
    let (quarter, turn) = (with_sign(c, &half), with_sign(c, &whole));
    let steep = c.add("Sub", &[&quarter, &angle]);
    let is_left = c.add("Less", &[&x, &zero]);
    let left = c.add("Where", &[&is_left, &turn, &zero]);
    let flat = c.add("Add", &[&angle, &left]);
    one(c.add("Where", &[&is_steep, &steep, &flat]))
}

/// The larger or smaller operand; of a number and NaN the number.
fn extreme(c: &mut Call<'_>, f: &str) -> Outcome {
    let (a, b, d) = operands(c, ["self", "other"])?;
    if !is_float(d) {
        return one(c.add(f, &[&a, &b]));
    }
    let (no_a, no_b) = (c.add("IsNaN", &[&a]), c.add("IsNaN", &[&b]));
    let left = c.add("Where", &[&no_a, &b, &a]);
    let right = c.add("Where", &[&no_b, &a, &b]);
    one(c.add(f, &[&left, &right]))
}

/// `|self − other| ≤ atol + rtol · |other|`, or equal.
fn isclose(c: &mut Call<'_>) -> Outcome {
    let (a, b, d) = floats(c)?;
    let (rtol, atol) = (c.float("rtol", 1e-5)?, c.float("atol", 1e-8)?);
    let (rtol, atol) = (c.number(d, rtol), c.number(d, atol));
    let away = c.add("Sub", &[&a, &b]);
    let away = c.add("Abs", &[&away]);
    let size = c.add("Abs", &[&b]);
    let allowed = c.add("Mul", &[&rtol, &size]);
    let allowed = c.add("Add", &[&atol, &allowed]);
    let is_near = c.add("LessOrEqual", &[&away, &allowed]);
    let infinite = c.add("IsInf", &[&allowed]);
    let finite = c.add("Not", &[&infinite]);
    let is_near = c.add("And", &[&is_near, &finite]);
    let mut same = c.add("Equal", &[&a, &b]);
    if c.bool("equal_nan", false)? {
        let (a, b) = (c.add("IsNaN", &[&a]), c.add("IsNaN", &[&b]));
        let both = c.add("And", &[&a, &b]);
        same = c.add("Or", &[&same, &both]);
    }
    one(c.add("Or", &[&same, &is_near]))
}

/// Where a float is infinite, above or below.
fn infinite(c: &mut Call<'_>, above: bool) -> Outcome {
    let x = c.tensor("self")?;
    let (x, _) = c.as_float(&x);
    let attributes =
        vec![int("detect_positive", above.into()), int("detect_negative", (!above).into())];
    one(c.with("IsInf", &[&x], attributes))
}

/// `ln(eᵃ + eᵇ)`
fn log_add_exp(c: &mut Call<'_>, a: &str, b: &str, d: Dtype) -> String {
    let most = c.add("Max", &[a, b]);
    // Two that are infinite are not apart.
    let same = c.add("Equal", &[a, b]);
    let away = c.add("Sub", &[a, b]);
    let zero = c.number(d, 0.0);
    let away = c.add("Where", &[&same, &zero, &away]);
    let away = c.add("Abs", &[&away]);
    let away = c.add("Neg", &[&away]);
    let more = c.add("Softplus", &[&away]);
    c.add("Add", &[&most, &more])
}

fn logit(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let (mut x, d) = c.as_float(&x);
    if let Some(eps) = c.float_given("eps")? {
        let (least, most) = (c.number(d, eps), c.number(d, 1.0 - eps));
        x = c.add("Clip", &[&x, &least, &most]);
    }
    let whole = c.number(d, 1.0);
    let rest = c.add("Sub", &[&whole, &x]);
    let odds = c.add("Div", &[&x, &rest]);
    one(c.add("Log", &[&odds]))
}

fn nan_to_num(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    if !is_float(x.dtype) {
        return one(x.name);
    }
    let largest = match x.dtype {
        F16 => 65504.0,
        BF16 => f64::from(half::bf16::MAX),
        F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let (above, below) = (c.float("posinf", largest)?, c.float("neginf", -largest)?);
    let mut y = x.name.clone();
    for (attributes, value) in [
        (vec![int("detect_positive", 1), int("detect_negative", 0)], above),
        (vec![int("detect_positive", 0), int("detect_negative", 1)], below),
    ] {
        let at = c.with("IsInf", &[&x.name], attributes);
        let value = c.number(x.dtype, value);
        y = c.add("Where", &[&at, &value, &y]);
    }
    let (at, value) = (c.add("IsNaN", &[&x.name]), c.float("nan", 0.0)?);
    let value = c.number(x.dtype, value);
    one(c.add("Where", &[&at, &value, &y]))
}

/// `sin(πx) / (πx)`, 1 at 0.
fn sinc(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let (x, d) = c.as_float(&x);
    let [zero, more, pi] = [0.0, 1.0, PI].map(|n| c.number(d, n));
    let is_zero = c.add("Equal", &[&x, &zero]);
    let angle = c.add("Mul", &[&x, &pi]);
    let angle = c.add("Where", &[&is_zero, &more, &angle]);
    let sine = c.add("Sin", &[&angle]);
    let y = c.add("Div", &[&sine, &angle]);
    one(c.add("Where", &[&is_zero, &more, &y]))
}
