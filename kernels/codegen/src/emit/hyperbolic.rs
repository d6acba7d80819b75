//! Hyperbolic and inverse trigonometric functions, expressed by the elementary functions of [`super::math`].
//!
//! The formulas avoid cancellation, and overflow only where the result does.

use super::expr::{Bin, Dag, Id};
use super::math::Un;
use frit_ir::ops::CompareFn;
use std::f32::consts::{LN_2, PI};

/// π/2 − arcsin x where that is exact enough, else by the arcsine of √((1 − |x|)/2).
pub(super) fn acos(dag: &mut Dag, x: Id) -> Id {
    let (half, minus_half, two) = (dag.float(0.5), dag.float(-0.5), dag.float(2.0));
    let (pi, quarter_turn, zero) = (dag.float(PI), dag.float(PI / 2.0), dag.float(0.0));
    let abs = dag.un(Un::Abs, x);
    let square = dag.fma(abs, minus_half, half);
    let root = dag.un(Un::Sqrt, square);
    let far = dag.un(Un::Asin, root);
    let far = dag.times(far, two);
    let rest = dag.minus(pi, far);
    let negative = dag.compare(CompareFn::Lt, x, zero);
    let far = dag.select(negative, rest, far);
    let near = dag.un(Un::Asin, x);
    let near = dag.minus(quarter_turn, near);
    let is_far = dag.compare(CompareFn::Gt, abs, half);
    dag.select(is_far, far, near)
}

/// `y` with the sign of `x`, for `y` of |x|; zero and NaN are propagated.
fn odd(dag: &mut Dag, x: Id, y: Id) -> Id {
    let zero = dag.float(0.0);
    let minus = dag.un(Un::Neg, y);
    let negative = dag.compare(CompareFn::Lt, x, zero);
    dag.select(negative, minus, y)
}

/// ½·e^|x| as a product of two factors, which overflows only where it is too large.
fn half_exp(dag: &mut Dag, abs: Id) -> Id {
    let half = dag.float(0.5);
    let exponent = dag.times(abs, half);
    let root = dag.un(Un::Exp, exponent);
    let halved = dag.times(root, half);
    dag.times(halved, root)
}

/// (e + e/(e + 1))/2 with e = e^|x| − 1.
pub(super) fn sinh(dag: &mut Dag, x: Id) -> Id {
    let (one, half, limit) = (dag.float(1.0), dag.float(0.5), dag.float(20.0));
    let abs = dag.un(Un::Abs, x);
    let e = dag.un(Un::Expm1, abs);
    let above = dag.plus(e, one);
    let ratio = dag.over(e, above);
    let sum = dag.plus(e, ratio);
    let near = dag.times(sum, half);
    let far = half_exp(dag, abs);
    let is_far = dag.compare(CompareFn::Gt, abs, limit);
    let y = dag.select(is_far, far, near);
    odd(dag, x, y)
}

/// h + ¼/h with h = ½·e^|x|.
pub(super) fn cosh(dag: &mut Dag, x: Id) -> Id {
    let quarter = dag.float(0.25);
    let abs = dag.un(Un::Abs, x);
    let half = half_exp(dag, abs);
    let rest = dag.over(quarter, half);
    dag.plus(half, rest)
}

/// ln(1 + |x| + x²/(1 + √(1 + x²))); for large |x|, ln |x| + ln 2.
pub(super) fn asinh(dag: &mut Dag, x: Id) -> Id {
    let (one, limit, ln2) = (dag.float(1.0), dag.float(1e6), dag.float(LN_2));
    let abs = dag.un(Un::Abs, x);
    let bounded = dag.bin(Bin::Min, abs, limit);
    let square = dag.times(bounded, bounded);
    let sum = dag.plus(square, one);
    let root = dag.un(Un::Sqrt, sum);
    let divisor = dag.plus(root, one);
    let part = dag.over(square, divisor);
    let argument = dag.plus(bounded, part);
    let near = dag.un(Un::Log1p, argument);
    let log = dag.un(Un::Log, abs);
    let far = dag.plus(log, ln2);
    let is_far = dag.compare(CompareFn::Gt, abs, limit);
    let y = dag.select(is_far, far, near);
    odd(dag, x, y)
}

/// ln(1 + t + √(2t + t²)) with t = x − 1; for large x, ln x + ln 2. NaN below 1.
pub(super) fn acosh(dag: &mut Dag, x: Id) -> Id {
    let (one, two, limit) = (dag.float(1.0), dag.float(2.0), dag.float(1e6));
    let (ln2, nan) = (dag.float(LN_2), dag.float(f32::NAN));
    let bounded = dag.bin(Bin::Min, x, limit);
    let t = dag.minus(bounded, one);
    let factor = dag.plus(t, two);
    let product = dag.times(t, factor);
    let root = dag.un(Un::Sqrt, product);
    let argument = dag.plus(t, root);
    let near = dag.un(Un::Log1p, argument);
    let log = dag.un(Un::Log, x);
    let far = dag.plus(log, ln2);
    let is_far = dag.compare(CompareFn::Gt, x, limit);
    let y = dag.select(is_far, far, near);
    let below = dag.compare(CompareFn::Lt, x, one);
    dag.select(below, nan, y)
}

/// ½·ln(1 + 2|x|/(1 − |x|)): infinite at ±1, NaN beyond.
pub(super) fn atanh(dag: &mut Dag, x: Id) -> Id {
    let (one, half) = (dag.float(1.0), dag.float(0.5));
    let abs = dag.un(Un::Abs, x);
    let double = dag.plus(abs, abs);
    let rest = dag.minus(one, abs);
    let ratio = dag.over(double, rest);
    let log = dag.un(Un::Log1p, ratio);
    let y = dag.times(log, half);
    odd(dag, x, y)
}
