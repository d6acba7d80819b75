//! Lemmas of elementwise operations.
//!
//! Where a function has no derivative, PyTorch's: operands that tie share the cotangent, and a bound passes it on.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::ops::{BinaryFn, Clip, CompareFn, UnaryFn};

/// `dy · f'(x)`; `None` if that is zero, or said to be.
pub(super) fn unary<'w>(f: UnaryFn, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    use UnaryFn::*;
    let (x, y) = (at.x[0], at.y[0]);
    vec![Some(match f {
        Neg => -dy,
        Abs => dy * x.unary(Sign),
        Exp => dy * y,
        Expm1 => dy * (y + 1.0),
        Log => dy / x,
        Log1p => dy / (x + 1.0),
        Sqrt => dy / (y * 2.0),
        Rsqrt => dy * (y * y * y * -0.5),
        Reciprocal => -(dy * (y * y)),
        Sin => dy * x.unary(Cos),
        Cos => -(dy * x.unary(Sin)),
        Tan => dy * (y * y + 1.0),
        Asin => dy * (-(x * x) + 1.0).unary(Rsqrt),
        Acos => -(dy * (-(x * x) + 1.0).unary(Rsqrt)),
        Atan => dy / (x * x + 1.0),
        Sinh => dy * x.unary(Cosh),
        Cosh => dy * x.unary(Sinh),
        Asinh => dy * (x * x + 1.0).unary(Rsqrt),
        Acosh => dy * (x * x - 1.0).unary(Rsqrt),
        Atanh => dy / (-(x * x) + 1.0),
        Erf => dy * ((-(x * x)).unary(Exp) * std::f64::consts::FRAC_2_SQRT_PI),
        Softplus => dy * x.unary(Sigmoid),
        Tanh => dy.binary(BinaryFn::TanhGrad, y),
        Sigmoid => dy.binary(BinaryFn::SigmoidGrad, y),
        Relu => dy.binary(BinaryFn::ReluGrad, y),
        Silu => dy.binary(BinaryFn::SiluGrad, x),
        Gelu => dy.binary(BinaryFn::GeluGrad, x),
        GeluTanh => dy.binary(BinaryFn::GeluTanhGrad, x),
        Sign | Floor | Ceil | Round | Not | Detach => return vec![None],
    })]
}

/// `dy · ∂f/∂a` and `dy · ∂f/∂b`.
pub(super) fn binary<'w>(f: BinaryFn, at: &Site<'w>, dy: Term<'w>) -> Option<Cotangents<'w>> {
    use BinaryFn::*;
    let (&[a, b], y) = (&at.x[..], at.y[0]) else { return None };
    let unless_less = |f| {
        let won = a.compare(f, b).choose(dy.number(0.0), dy);
        a.compare(CompareFn::Eq, b).choose(dy * 0.5, won)
    };
    let (da, db) = match f {
        Add => (dy, dy),
        Sub => (dy, -dy),
        Mul => (dy * b, dy * a),
        Div => (dy / b, -(dy * (y / b))),
        Pow => (pow_base(a, b, dy), pow_exponent(a, b, y, dy)),
        Max => (unless_less(CompareFn::Lt), unless_less(CompareFn::Gt)),
        Min => (unless_less(CompareFn::Gt), unless_less(CompareFn::Lt)),
        // The quotient, rounded down or toward zero, is flat.
        Mod => (dy, -(dy * (a / b).unary(UnaryFn::Floor))),
        Fmod => {
            let quotient = a / b;
            let size = quotient.unary(UnaryFn::Abs).unary(UnaryFn::Floor);
            (dy, -(dy * (quotient.unary(UnaryFn::Sign) * size)))
        }
        GeluGrad | GeluTanhGrad | SiluGrad | TanhGrad | SigmoidGrad | ReluGrad => return None,
    };
    Some(vec![Some(da), Some(db)])
}

/// `dy · b·aᵇ⁻¹`, which is 0 for b = 0 even where a is 0.
fn pow_base<'w>(a: Term<'w>, b: Term<'w>, dy: Term<'w>) -> Term<'w> {
    let slope = |b: Term<'w>| dy * (b * a.binary(BinaryFn::Pow, b - 1.0));
    match b.known() {
        Some(2.0) => dy * (a * 2.0),
        Some(exponent) if exponent != 0.0 => slope(b),
        _ => b.compare(CompareFn::Eq, b.number(0.0)).choose(dy.number(0.0), slope(b)),
    }
}

/// `dy · aᵇ·ln a`, which is 0 for a = 0 and b ≥ 0.
fn pow_exponent<'w>(a: Term<'w>, b: Term<'w>, y: Term<'w>, dy: Term<'w>) -> Term<'w> {
    let zero = a.compare(CompareFn::Eq, a.number(0.0));
    let flat = zero.and(b.compare(CompareFn::Ge, b.number(0.0)));
    flat.choose(dy.number(0.0), dy * (y * a.unary(UnaryFn::Log)))
}

/// `dy` between the bounds, and 0 at them.
pub(super) fn clip<'w>(op: &Clip, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let x = at.x[0];
    let above = op.min.map(|min| x.compare(CompareFn::Gt, x.number(min)));
    let below = op.max.map(|max| x.compare(CompareFn::Lt, x.number(max)));
    let inside = match (above, below) {
        (Some(above), Some(below)) => above.and(below),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => return vec![Some(dy)],
    };
    vec![Some(inside.choose(dy, dy.number(0.0)))]
}

/// `dy` to the operand that was chosen.
pub(super) fn select<'w>(at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (condition, zero) = (at.x[0], dy.number(0.0));
    vec![None, Some(condition.choose(dy, zero)), Some(condition.choose(zero, dy))]
}
