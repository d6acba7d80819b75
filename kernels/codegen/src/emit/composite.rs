//! Decomposes elementwise operations and casts into [`Expr`]s.

use super::expr::{Bin, Dag, Expr, Id, Ty};
use super::hyperbolic::{acos, acosh, asinh, atanh, cosh, sinh};
use super::math::Un;
use super::region::unsupported;
use crate::error::Unsupported;
use frit_ir::ops::{BinaryFn, CompareFn, LogicalFn, PredicateFn, UnaryFn};
use frit_ir::{DType, Op};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// A pointwise operation other than a cast; `dtype` is that of its last operand.
pub(crate) fn pointwise(
    dag: &mut Dag,
    op: &Op,
    operands: &[Id],
    dtype: DType,
) -> Result<Id, Unsupported> {
    match (op, operands) {
        (Op::Unary(f), [x]) => unary(dag, *f, *x, dtype, op),
        (Op::Binary(f), [a, b]) => binary(dag, *f, *a, *b, dtype, op),
        (Op::Predicate(f), [x]) => Ok(match f {
            PredicateFn::IsNan => dag.compare(CompareFn::Ne, *x, *x),
            PredicateFn::IsInf => {
                let (abs, inf) = (dag.un(Un::Abs, *x), dag.float(f32::INFINITY));
                dag.compare(CompareFn::Eq, abs, inf)
            }
        }),
        (Op::Clip(clip), [x]) => {
            let mut bound = |limit: Option<f64>, f: CompareFn, x: Id| {
                let Some(limit) = limit else { return x };
                let limit = match dag.ty(x) {
                    Ty::F32 => dag.float(dtype.round(limit) as f32),
                    ty => dag.int(limit as i64, ty),
                };
                let outside = dag.compare(f, x, limit);
                dag.select(outside, limit, x)
            };
            let x = bound(clip.min, CompareFn::Lt, *x);
            Ok(bound(clip.max, CompareFn::Gt, x))
        }
        (Op::Compare(f), [a, b]) => Ok(dag.compare(*f, *a, *b)),
        (Op::Logical(f), [a, b]) => Ok(dag.logical(*f, *a, *b)),
        (Op::Select, [c, a, b]) => Ok(dag.select(*c, *a, *b)),
        _ => Err(unsupported(op, "it is not an elementwise operation")),
    }
}

fn unary(dag: &mut Dag, f: UnaryFn, x: Id, dtype: DType, op: &Op) -> Result<Id, Unsupported> {
    let float = dag.ty(x) == Ty::F32;
    Ok(match f {
        UnaryFn::Neg | UnaryFn::Not if dtype == DType::U8 => {
            let y = dag.un(if f == UnaryFn::Neg { Un::Neg } else { Un::Not }, x);
            low_byte(dag, y)
        }
        UnaryFn::Neg => dag.un(Un::Neg, x),
        UnaryFn::Detach => x,
        UnaryFn::Abs => dag.un(Un::Abs, x),
        UnaryFn::Sign => sign(dag, x),
        UnaryFn::Not => dag.un(Un::Not, x),
        _ if !float => return Err(unsupported(op, "its operand is not a float")),
        UnaryFn::Exp => dag.un(Un::Exp, x),
        UnaryFn::Expm1 => dag.un(Un::Expm1, x),
        UnaryFn::Log => dag.un(Un::Log, x),
        UnaryFn::Log1p => dag.un(Un::Log1p, x),
        UnaryFn::Sqrt => dag.un(Un::Sqrt, x),
        UnaryFn::Rsqrt => rsqrt(dag, x),
        UnaryFn::Reciprocal => {
            let one = dag.float(1.0);
            dag.over(one, x)
        }
        UnaryFn::Floor => dag.un(Un::Floor, x),
        UnaryFn::Ceil => dag.un(Un::Ceil, x),
        UnaryFn::Round => dag.un(Un::Round, x),
        UnaryFn::Sin => dag.un(Un::Sin, x),
        UnaryFn::Cos => dag.un(Un::Cos, x),
        UnaryFn::Tan => {
            let (sin, cos) = (dag.un(Un::Sin, x), dag.un(Un::Cos, x));
            dag.over(sin, cos)
        }
        UnaryFn::Tanh => dag.un(Un::Tanh, x),
        UnaryFn::Asin => dag.un(Un::Asin, x),
        UnaryFn::Atan => dag.un(Un::Atan, x),
        UnaryFn::Acos => acos(dag, x),
        UnaryFn::Sinh => sinh(dag, x),
        UnaryFn::Cosh => cosh(dag, x),
        UnaryFn::Asinh => asinh(dag, x),
        UnaryFn::Acosh => acosh(dag, x),
        UnaryFn::Atanh => atanh(dag, x),
        UnaryFn::Erf => dag.un(Un::Erf, x),
        UnaryFn::Sigmoid => sigmoid(dag, x),
        UnaryFn::Softplus => {
            // max(x, 0) + ln(1 + e^−|x|): neither part overflows.
            let (abs, zero) = (dag.un(Un::Abs, x), dag.float(0.0));
            let minus = dag.un(Un::Neg, abs);
            let e = dag.un(Un::Exp, minus);
            let (log, positive) = (dag.un(Un::Log1p, e), dag.bin(Bin::Max, x, zero));
            dag.plus(positive, log)
        }
        UnaryFn::Relu => {
            let zero = dag.float(0.0);
            dag.bin(Bin::Max, x, zero)
        }
        UnaryFn::Silu => {
            let e = exp_minus(dag, x);
            let one = dag.float(1.0);
            let denominator = dag.plus(e, one);
            dag.over(x, denominator)
        }
        UnaryFn::Gelu => {
            let phi = normal_cdf(dag, x);
            dag.times(x, phi)
        }
        UnaryFn::GeluTanh => {
            // tanh(z) = 2·sigmoid(2z) − 1 turns 0.5·x·(1 + tanh z) into x / (1 + e^−2z).
            let z = gelu_tanh_argument(dag, x);
            let e = exp_minus(dag, z);
            let one = dag.float(1.0);
            let denominator = dag.plus(e, one);
            dag.over(x, denominator)
        }
    })
}

fn binary(
    dag: &mut Dag,
    f: BinaryFn,
    a: Id,
    b: Id,
    dtype: DType,
    op: &Op,
) -> Result<Id, Unsupported> {
    let float = dag.ty(a) == Ty::F32;
    Ok(match f {
        BinaryFn::Add | BinaryFn::Sub | BinaryFn::Mul | BinaryFn::Pow => {
            let result = match f {
                BinaryFn::Add => dag.plus(a, b),
                BinaryFn::Sub => dag.minus(a, b),
                BinaryFn::Mul => dag.times(a, b),
                _ => power(dag, a, b),
            };
            if dtype == DType::U8 { low_byte(dag, result) } else { result }
        }
        BinaryFn::Max => dag.bin(Bin::Max, a, b),
        BinaryFn::Min => dag.bin(Bin::Min, a, b),
        BinaryFn::Div => dag.over(a, b),
        BinaryFn::Mod => dag.bin(Bin::Mod, a, b),
        BinaryFn::Fmod => dag.bin(Bin::Rem, a, b),
        _ if !float => return Err(unsupported(op, "its operands are not floats")),
        BinaryFn::GeluGrad => {
            // Φ(x) + x·φ(x)
            let cdf = normal_cdf(dag, b);
            let (square, half) = (dag.times(b, b), dag.float(-0.5));
            let exponent = dag.times(square, half);
            let (e, scale) = (dag.un(Un::Exp, exponent), dag.float((0.5 / PI).sqrt() as f32));
            let density = dag.times(e, scale);
            let slope = dag.fma(b, density, cdf);
            dag.times(a, slope)
        }
        BinaryFn::GeluTanhGrad => {
            // s + x·s·(1 − s)·z′ with s = sigmoid(z), z = 2√(2/π)·(x + 0.044715·x³)
            let z = gelu_tanh_argument(dag, b);
            let square = dag.times(b, b);
            let (c3, c1) = (dag.float((3.0 * GELU_TANH[1]) as f32), dag.float(GELU_TANH[0] as f32));
            let dz = dag.fma(square, c3, c1);
            let x_dz = dag.times(b, dz);
            sigmoid_product_slope(dag, a, z, x_dz)
        }
        BinaryFn::SiluGrad => sigmoid_product_slope(dag, a, b, b),
        BinaryFn::TanhGrad => {
            let (one, minus) = (dag.float(1.0), dag.un(Un::Neg, b));
            let slope = dag.fma(minus, b, one);
            dag.times(a, slope)
        }
        BinaryFn::SigmoidGrad => {
            let one = dag.float(1.0);
            let rest = dag.minus(one, b);
            let slope = dag.times(b, rest);
            dag.times(a, slope)
        }
        BinaryFn::ReluGrad => {
            let zero = dag.float(0.0);
            let positive = dag.compare(CompareFn::Gt, b, zero);
            dag.select(positive, a, zero)
        }
    })
}

/// `dy · (s + s·(1 − s)·w)` with s = sigmoid(z): the derivative of `x·sigmoid(z)` where `w` = x·z′.
///
/// 1 − s is computed as s·e⁻ᶻ, which does not cancel; the bound on e⁻ᶻ avoids 0·∞.
fn sigmoid_product_slope(dag: &mut Dag, dy: Id, z: Id, w: Id) -> Id {
    let (minus, bound, one) = (dag.un(Un::Neg, z), dag.float(80.0), dag.float(1.0));
    let bounded = dag.bin(Bin::Min, minus, bound);
    let e = dag.un(Un::Exp, bounded);
    let denominator = dag.plus(e, one);
    let s = dag.over(one, denominator);
    let rest = dag.times(s, e);
    let product = dag.times(s, rest);
    let slope = dag.fma(product, w, s);
    dag.times(dy, slope)
}

/// 2√(2/π) and 0.044715 times it.
const GELU_TANH: [f64; 2] = [1.595_769_121_605_730_8, 0.071_354_816_272_600_25];

fn gelu_tanh_argument(dag: &mut Dag, x: Id) -> Id {
    let (c1, c3) = (dag.float(GELU_TANH[0] as f32), dag.float(GELU_TANH[1] as f32));
    let square = dag.times(x, x);
    let inner = dag.fma(square, c3, c1);
    dag.times(inner, x)
}

fn exp_minus(dag: &mut Dag, x: Id) -> Id {
    let minus = dag.un(Un::Neg, x);
    dag.un(Un::Exp, minus)
}

fn sigmoid(dag: &mut Dag, x: Id) -> Id {
    let (e, one) = (exp_minus(dag, x), dag.float(1.0));
    let denominator = dag.plus(e, one);
    dag.over(one, denominator)
}

/// Φ(x) = (1 + erf(x/√2)) / 2.
fn normal_cdf(dag: &mut Dag, x: Id) -> Id {
    let (scale, half) = (dag.float(FRAC_1_SQRT_2 as f32), dag.float(0.5));
    let argument = dag.times(x, scale);
    let erf = dag.un(Un::Erf, argument);
    dag.fma(erf, half, half)
}

/// 1/√x by an exact root and an exact division.
pub(crate) fn rsqrt(dag: &mut Dag, x: Id) -> Id {
    let (root, one) = (dag.un(Un::Sqrt, x), dag.float(1.0));
    dag.over(one, root)
}

/// −1, 0 or 1; zero and NaN are returned unchanged.
pub(crate) fn sign(dag: &mut Dag, x: Id) -> Id {
    let constant = |dag: &mut Dag, v: i64| match dag.ty(x) {
        Ty::F32 => dag.float(v as f32),
        ty => dag.int(v, ty),
    };
    let (zero, one, minus) = (constant(dag, 0), constant(dag, 1), constant(dag, -1));
    let negative = dag.compare(CompareFn::Lt, x, zero);
    let positive = dag.compare(CompareFn::Gt, x, zero);
    let rest = dag.select(negative, minus, x);
    dag.select(positive, one, rest)
}

/// Powers: small constant integers by multiplication, ±½ by roots.
fn power(dag: &mut Dag, base: Id, exponent: Id) -> Id {
    let ty = dag.ty(base);
    let constant = match *dag.get(exponent) {
        Expr::Float(bits) => f32::from_bits(bits),
        // Negative exponents of integers have a rule of their own.
        Expr::Int(x @ 0..=16, _) => x as f32,
        _ => f32::NAN,
    };
    if constant.abs() == 0.5 {
        return if constant > 0.0 { dag.un(Un::Sqrt, base) } else { rsqrt(dag, base) };
    }
    if constant.fract() != 0.0 || constant.abs() > 16.0 {
        return dag.bin(Bin::Pow, base, exponent);
    }
    let one = if ty == Ty::F32 { dag.float(1.0) } else { dag.int(1, ty) };
    let (mut result, mut square, mut n) = (one, base, constant.abs() as u32);
    while n > 0 {
        if n & 1 == 1 {
            result = if result == one { square } else { dag.times(result, square) };
        }
        n >>= 1;
        if n > 0 {
            square = dag.times(square, square);
        }
    }
    if constant < 0.0 { dag.over(one, result) } else { result }
}

/// An i32 as a byte.
fn low_byte(dag: &mut Dag, x: Id) -> Id {
    let byte = dag.int(0xFF, Ty::I32);
    dag.logical(LogicalFn::And, x, byte)
}

/// A cast from `from` to `to`, rounding to nearest even where `to` is a narrower float. Integers keep
/// their low bytes; floats saturate.
pub(crate) fn cast(
    dag: &mut Dag,
    x: Id,
    from: DType,
    to: DType,
    op: &Op,
) -> Result<Id, Unsupported> {
    let ty = Ty::of(to).ok_or_else(|| unsupported(op, "its element type is not supported"))?;
    let narrow = to == DType::U8 && from != DType::Bool && from != DType::U8;
    let x = if narrow && from.is_float() {
        let (zero, most) = (dag.float(0.0), dag.float(255.0));
        let positive = dag.bin(Bin::Max, x, zero);
        dag.bin(Bin::Min, positive, most)
    } else {
        x
    };
    let mut converted = dag.convert(ty, x);
    if narrow && !from.is_float() {
        converted = low_byte(dag, converted);
    }
    Ok(if to.is_low_precision() && from != to {
        dag.add(Expr::Round(to, converted), Ty::F32)
    } else {
        converted
    })
}

/// `a and b`, for callers that build conditions.
pub(crate) fn both(dag: &mut Dag, a: Id, b: Id) -> Id {
    dag.logical(LogicalFn::And, a, b)
}
