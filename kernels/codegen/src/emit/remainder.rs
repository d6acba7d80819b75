//! Exact f32 remainders, as C's `fmod` and Python's `%`.
//!
//! A remainder is exact, but its quotient may have 277 bits. It is computed in six steps, with the divisor times 2²⁴⁰, 2¹⁹², … 1: each
//! quotient is below 2⁴⁹, so in f64 `r − q·d` is exact and `q` is off by at most one, which is then corrected.

use super::text::{Elem, Text, Val};

/// Bits of the quotient that one step computes.
const BITS: i32 = 48;
const STEPS: i32 = 6;

/// The remainder with the sign of `a`; NaN for an infinite `a` or `b` = 0.
pub(crate) fn truncated(t: &mut Text, a: Val, b: Val) -> Val {
    let r = in_f64(t, a, b);
    t.convert("arith.truncf", r, Elem::F32)
}

/// The remainder with the sign of `b`; NaN for an infinite `a` or `b` = 0.
pub(crate) fn floored(t: &mut Text, a: Val, b: Val) -> Val {
    let width = a.width;
    let r = in_f64(t, a, b);
    let zero = t.double(0.0, width);
    let b = t.convert("arith.extf", b, Elem::F64);
    let (below, of_negative) = (t.cmpf("olt", r, zero), t.cmpf("olt", b, zero));
    let differs = t.same("arith.xori", &[below, of_negative]);
    let some = t.cmpf("one", r, zero);
    let moved = t.same("arith.andi", &[differs, some]);
    let other = t.same("arith.addf", &[r, b]);
    let r = t.select(moved, other, r);
    t.convert("arith.truncf", r, Elem::F32)
}

fn in_f64(t: &mut Text, a: Val, b: Val) -> Val {
    let width = a.width;
    let [a, b] = [a, b].map(|x| t.convert("arith.extf", x, Elem::F64));
    let (dividend, divisor) = (t.same("math.absf", &[a]), t.same("math.absf", &[b]));
    let zero = t.double(0.0, width);
    let mut r = dividend;
    for step in (0..STEPS).rev() {
        let scale = t.double(2f64.powi(BITS * step), width);
        let d = t.same("arith.mulf", &[divisor, scale]);
        let q = t.same("arith.divf", &[r, d]);
        let q = t.same("math.floor", &[q]);
        let minus = t.same("arith.negf", &[q]);
        r = t.same("math.fma", &[minus, d, r]);
        let (below, up) = (t.cmpf("olt", r, zero), t.same("arith.addf", &[r, d]));
        r = t.select(below, up, r);
        let (above, down) = (t.cmpf("oge", r, d), t.same("arith.subf", &[r, d]));
        r = t.select(above, down, r);
    }
    // The remainder by infinity is the number itself.
    let inf = t.double(f64::INFINITY, width);
    let (unbounded, finite) = (t.cmpf("oeq", divisor, inf), t.cmpf("olt", dividend, inf));
    let own = t.same("arith.andi", &[unbounded, finite]);
    let r = t.select(own, dividend, r);
    t.same("math.copysign", &[r, a])
}
