//! Functions of elements.

use super::Operand;
use crate::term::{Function, TermId, Terms};
use crate::truth::WITH_INFINITY;
use frit_ir::DType;
use frit_ir::ops::{BinaryFn, Clip, CompareFn, LogicalFn, UnaryFn};

/// Casts between floats are the identity: rounding is counted, not proved. So are those to integers that hold every value. A float may
/// be another number than the integer that it was cast from, which decides about comparisons.
pub(super) fn cast(t: &mut Terms, x: &Operand, to: DType) -> TermId {
    let from = x.ty.dtype;
    match () {
        () if to == DType::Bool && from != DType::Bool => {
            let zero = t.is_zero(x.term);
            t.not(zero)
        }
        () if from == DType::Bool || from.is_float() && to.is_float() || is_index(from, to) => {
            x.term
        }
        () if to.is_float() => t.float_of(x.term),
        () => {
            let from = if from.is_float() { DType::F64 } else { from };
            let attributes = [from as u64, to as u64];
            t.function(Function { name: "to_integer", attributes }, &[x.term])
        }
    }
}

/// Whether a cast of integers keeps all of them.
fn is_index(from: DType, to: DType) -> bool {
    from == to || !from.is_float() && !to.is_float() && from.widens_to(to)
}

pub(super) fn unary(t: &mut Terms, f: UnaryFn, x: TermId) -> TermId {
    match f {
        UnaryFn::Neg => t.scale(x, -1.0),
        UnaryFn::Detach => x,
        UnaryFn::Exp => t.exp(x),
        UnaryFn::Expm1 => {
            let exp = t.exp(x);
            t.sum(&[(exp, 1.0)], -1.0)
        }
        UnaryFn::Log => t.log(x),
        UnaryFn::Log1p => {
            let one_more = t.sum(&[(x, 1.0)], 1.0);
            t.log(one_more)
        }
        UnaryFn::Sqrt => t.power(x, 0.5),
        UnaryFn::Rsqrt => t.power(x, -0.5),
        UnaryFn::Reciprocal => t.power(x, -1.0),
        UnaryFn::Sigmoid => sigmoid(t, x),
        UnaryFn::Softplus => softplus(t, x),
        UnaryFn::Silu => {
            let sigmoid = sigmoid(t, x);
            t.mul(x, sigmoid)
        }
        UnaryFn::Gelu => {
            let inner = t.scale(x, std::f64::consts::FRAC_1_SQRT_2);
            let erf = t.apply("erf", &[inner]);
            half_of_one_more(t, x, erf)
        }
        UnaryFn::GeluTanh => {
            let cube = t.power(x, 3.0);
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let inner = t.sum(&[(x, root), (cube, root * 0.044715)], 0.0);
            let tanh = t.apply("tanh", &[inner]);
            half_of_one_more(t, x, tanh)
        }
        UnaryFn::Relu => {
            let positive = positive(t, x);
            t.mul(positive, x)
        }
        UnaryFn::Not => t.not(x),
        _ => match t.as_number(x) {
            Some(x) if f == UnaryFn::Abs => t.constant(x.abs()),
            _ => t.apply(f.name(), &[x]),
        },
    }
}

/// ½·x·(1 + y)
fn half_of_one_more(t: &mut Terms, x: TermId, y: TermId) -> TermId {
    let sum = t.sum(&[(y, 0.5)], 0.5);
    t.mul(x, sum)
}

/// 1/(1 + e⁻ˣ)
fn sigmoid(t: &mut Terms, x: TermId) -> TermId {
    let minus = t.scale(x, -1.0);
    let exp = t.exp(minus);
    let sum = t.sum(&[(exp, 1.0)], 1.0);
    t.power(sum, -1.0)
}

/// ln(1 + eˣ)
fn softplus(t: &mut Terms, x: TermId) -> TermId {
    let exp = t.exp(x);
    let sum = t.sum(&[(exp, 1.0)], 1.0);
    t.log(sum)
}

/// The truth of x > 0.
fn positive(t: &mut Terms, x: TermId) -> TermId {
    let minus = t.scale(x, -1.0);
    let not = t.not_negative(minus);
    t.not(not)
}

pub(super) fn clip(t: &mut Terms, clip: &Clip, x: TermId) -> TermId {
    let bits = |bound: Option<f64>| bound.map_or(u64::MAX, f64::to_bits);
    let attributes = [bits(clip.min), bits(clip.max)];
    t.function(Function { name: "clip", attributes }, &[x])
}

pub(super) fn binary(t: &mut Terms, f: BinaryFn, a: TermId, b: TermId, dtype: DType) -> TermId {
    match f {
        BinaryFn::Add => t.add(a, b),
        BinaryFn::Sub => t.sub(a, b),
        BinaryFn::Mul => t.mul(a, b),
        BinaryFn::Div if dtype.is_float() => t.product(&[(a, 1.0), (b, -1.0)]),
        BinaryFn::Pow => match t.as_number(b) {
            Some(exponent) if dtype.is_float() || exponent >= 0.0 => t.power(a, exponent),
            _ => t.apply("pow", &[a, b]),
        },
        BinaryFn::Max | BinaryFn::Min => extremum(t, f.name(), a, b),
        BinaryFn::TanhGrad => {
            let square = t.power(b, 2.0);
            let slope = t.sum(&[(square, -1.0)], 1.0);
            t.mul(a, slope)
        }
        BinaryFn::SigmoidGrad => {
            let rest = t.sum(&[(b, -1.0)], 1.0);
            t.product(&[(a, 1.0), (b, 1.0), (rest, 1.0)])
        }
        BinaryFn::ReluGrad => {
            let positive = positive(t, b);
            t.mul(a, positive)
        }
        BinaryFn::GeluGrad | BinaryFn::GeluTanhGrad | BinaryFn::SiluGrad => {
            let slope = t.apply(f.name(), &[b]);
            t.mul(a, slope)
        }
        _ => t.apply(f.name(), &[a, b]),
    }
}

/// The larger or smaller of two numbers, in an order that does not depend on the names of variables.
pub(crate) fn extremum(t: &mut Terms, name: &'static str, a: TermId, b: TermId) -> TermId {
    let (a, b) = (a.min(b), a.max(b));
    if a == b {
        return a;
    }
    let (a, b) = if t.shape_of(a) <= t.shape_of(b) { (a, b) } else { (b, a) };
    t.apply(name, &[a, b])
}

pub(super) fn compare(t: &mut Terms, f: CompareFn, a: TermId, b: TermId) -> TermId {
    let infinite = |t: &Terms, x: TermId| t.as_number(x).is_some_and(f64::is_infinite);
    if infinite(t, b) {
        return with_infinity(t, f, a, b);
    }
    if infinite(t, a) {
        let swapped = match f {
            CompareFn::Lt => CompareFn::Gt,
            CompareFn::Le => CompareFn::Ge,
            CompareFn::Gt => CompareFn::Lt,
            CompareFn::Ge => CompareFn::Le,
            CompareFn::Eq | CompareFn::Ne => f,
        };
        return with_infinity(t, swapped, b, a);
    }
    let difference = |t: &mut Terms, a, b| {
        let difference = t.sub(a, b);
        t.not_negative(difference)
    };
    match f {
        CompareFn::Ge => difference(t, a, b),
        CompareFn::Le => difference(t, b, a),
        CompareFn::Lt => {
            let not = difference(t, a, b);
            t.not(not)
        }
        CompareFn::Gt => {
            let not = difference(t, b, a);
            t.not(not)
        }
        CompareFn::Eq | CompareFn::Ne => {
            let difference = t.sub(a, b);
            let equal = t.is_zero(difference);
            if f == CompareFn::Eq { equal } else { t.not(equal) }
        }
    }
}

/// A comparison with an infinity, from which nothing can be subtracted: values may be infinite, too.
fn with_infinity(t: &mut Terms, f: CompareFn, x: TermId, infinity: TermId) -> TermId {
    let (f, negated) = match f {
        CompareFn::Ne => (CompareFn::Eq, true),
        CompareFn::Lt => (CompareFn::Ge, true),
        CompareFn::Gt => (CompareFn::Le, true),
        CompareFn::Eq | CompareFn::Ge | CompareFn::Le => (f, false),
    };
    let bound = t.as_number(infinity).unwrap_or(f64::NAN);
    let truth = match t.as_number(x) {
        Some(x) => t.constant(f64::from(match f {
            CompareFn::Eq => x == bound,
            CompareFn::Ge => x >= bound,
            _ => x <= bound,
        })),
        None => t.function(
            Function { name: WITH_INFINITY, attributes: [f as u64, bound.to_bits()] },
            &[x],
        ),
    };
    if negated { t.not(truth) } else { truth }
}

pub(super) fn logical(t: &mut Terms, f: LogicalFn, a: TermId, b: TermId) -> TermId {
    let both = t.mul(a, b);
    match f {
        LogicalFn::And => both,
        LogicalFn::Or => t.sum(&[(a, 1.0), (b, 1.0), (both, -1.0)], 0.0),
        LogicalFn::Xor => t.sum(&[(a, 1.0), (b, 1.0), (both, -2.0)], 0.0),
    }
}
