//! f32 powers with any exponent.
//!
//! `|x|ʸ = 2^(y·log₂|x|)` in f64, so that the product's rounding error, which the exponential magnifies, stays far below an ulp of
//! f32. Special cases follow C's `pow` (ISO C, annex F).

use super::text::{Elem, Text, Val};
use std::f64::consts::LN_2;

/// 1.5·2⁵²: adding it rounds to an integer, which is then in the low bits.
const MAGIC: f64 = 6_755_399_441_055_744.0;
/// Above every exponent of an f32, so that larger ones need not be distinguished.
const LARGEST: f64 = 200.0;

/// `aᵇ`.
pub(crate) fn power(t: &mut Text, a: Val, b: Val) -> Val {
    let width = a.width;
    let (zero, one, half) = (t.float(0.0, width), t.float(1.0, width), t.float(0.5, width));
    let (inf, nan) = (t.float(f32::INFINITY, width), t.float(f32::NAN, width));

    let wide = t.convert("arith.extf", a, Elem::F64);
    let log = log2_of_size(t, wide);
    let exponent = t.convert("arith.extf", b, Elem::F64);
    let exponent = t.same("arith.mulf", &[log, exponent]);
    let size = exp2(t, exponent);
    let size = t.convert("arith.truncf", size, Elem::F32);

    // Only odd integers keep the sign; a negative number has no other real powers than integers.
    let floor = t.same("math.floor", &[b]);
    let integer = t.cmpf("oeq", floor, b);
    let halved = t.same("arith.mulf", &[b, half]);
    let floor = t.same("math.floor", &[halved]);
    let uneven = t.cmpf("one", floor, halved);
    let odd = t.same("arith.andi", &[integer, uneven]);
    let signed = t.same("math.copysign", &[size, a]);
    let result = t.select(odd, signed, size);
    let size = t.same("math.absf", &[a]);
    let (negative, finite) = (t.cmpf("olt", a, zero), t.cmpf("olt", size, inf));
    let root = t.same("arith.andi", &[negative, finite]);
    let undefined = t.select(integer, result, nan);
    let result = t.select(root, undefined, result);

    // x⁰ and 1ʸ are 1 for any x and y, even NaN, and so is (−1)^±∞.
    let (flat, unit) = (t.cmpf("oeq", b, zero), t.cmpf("oeq", a, one));
    let steep = t.same("math.absf", &[b]);
    let (steep, of_unit) = (t.cmpf("oeq", steep, inf), t.cmpf("oeq", size, one));
    let alternating = t.same("arith.andi", &[steep, of_unit]);
    let is_one = t.same("arith.ori", &[flat, unit]);
    let is_one = t.same("arith.ori", &[is_one, alternating]);
    t.select(is_one, one, result)
}

/// `log₂|x|` of an f64 that holds an f32 (so that no subnormal occurs); relative error 4e-14.
fn log2_of_size(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    // |x| = m·2ᵉ with √½ ≤ m < √2.
    let size = t.same("math.absf", &[x]);
    let bits = t.convert("arith.bitcast", size, Elem::I64);
    let root = t.int(std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64, Elem::I64, width);
    let by = t.int(52, Elem::I64, width);
    let relative = t.same("arith.subi", &[bits, root]);
    let e = t.same("arith.shrsi", &[relative, by]);
    let exponent = t.same("arith.shli", &[e, by]);
    let m = t.same("arith.subi", &[bits, exponent]);
    let m = t.convert("arith.bitcast", m, Elem::F64);
    // Processors convert 32-bit integers; the exponent is small.
    let e = t.convert("arith.trunci", e, Elem::I32);
    let e = t.convert("arith.sitofp", e, Elem::F64);

    // ln m = 2·artanh s with s = (m − 1)/(m + 1), so |s| < 0.172: the series up to s¹⁵.
    let (minus, one) = (t.double(-1.0, width), t.double(1.0, width));
    let (below, above) = (t.same("arith.addf", &[m, minus]), t.same("arith.addf", &[m, one]));
    let s = t.same("arith.divf", &[below, above]);
    let square = t.same("arith.mulf", &[s, s]);
    let coefficients: Vec<f64> = (0..8).map(|k| 2.0 / LN_2 / f64::from(2 * k + 1)).collect();
    let series = polynomial(t, &coefficients, square);
    let log = t.same("math.fma", &[series, s, e]);

    let (zero, inf) = (t.double(0.0, width), t.double(f64::INFINITY, width));
    let minus_inf = t.double(f64::NEG_INFINITY, width);
    let finite = t.cmpf("olt", size, inf);
    let log = t.select(finite, log, size);
    let is_zero = t.cmpf("oeq", size, zero);
    t.select(is_zero, minus_inf, log)
}

/// `2ᵖ` as an f64, for results that are then rounded to f32; relative error 3e-13.
fn exp2(t: &mut Text, p: Val) -> Val {
    let width = p.width;
    let (low, high) = (t.double(-LARGEST, width), t.double(LARGEST, width));
    let (under, over) = (t.cmpf("olt", p, low), t.cmpf("ogt", p, high));
    let bounded = t.select(under, low, p);
    let bounded = t.select(over, high, bounded);
    let magic = t.double(MAGIC, width);
    let shifted = t.same("arith.addf", &[bounded, magic]);
    let n = t.same("arith.subf", &[shifted, magic]);
    let r = t.same("arith.subf", &[bounded, n]);
    // e^(r·ln 2) with |r| ≤ ½: the series up to the tenth power.
    let ln2 = t.double(LN_2, width);
    let u = t.same("arith.mulf", &[r, ln2]);
    let coefficients: Vec<f64> =
        (0..=10).map(|k| 1.0 / (1..=k).map(f64::from).product::<f64>()).collect();
    let mantissa = polynomial(t, &coefficients, u);
    // n is shifted into the exponent field.
    let n = t.convert("arith.bitcast", shifted, Elem::I64);
    let by = t.int(52, Elem::I64, width);
    let exponent = t.same("arith.shli", &[n, by]);
    let bits = t.convert("arith.bitcast", mantissa, Elem::I64);
    let bits = t.same("arith.addi", &[bits, exponent]);
    let value = t.convert("arith.bitcast", bits, Elem::F64);
    let number = t.cmpf("ord", p, p);
    t.select(number, value, p)
}

fn polynomial(t: &mut Text, coefficients: &[f64], x: Val) -> Val {
    let mut rest = coefficients.iter().rev();
    let last = *rest.next().expect("invariant: a polynomial has coefficients");
    let mut p = t.double(last, x.width);
    for &c in rest {
        let c = t.double(c, x.width);
        p = t.same("math.fma", &[p, x, c]);
    }
    p
}
