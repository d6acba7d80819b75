//! Elementary functions on f32 scalars and vectors, as plain arithmetic that every target has; on GPUs those made of `exp` use
//! their instruction for 2ˣ.
//!
//! Polynomials are minimax fits (Remez, 50 digits) on the reduced ranges; reductions are those of
//! Cody & Waite. Each function is within 4 ulp of the exact value (on GPUs 6), `exp` flushes results below the
//! smallest normal number to zero, `sin` and `cos` reduce their argument in f64 and hold for
//! |x| < 2³⁰. NaN gives NaN. No float-to-integer conversion is used: for arguments out of range its
//! result would be undefined, whereas adding 1.5·2²³ leaves the integer in the low bits.

use super::text::{Elem, Text, Type, Val};

/// Functions of one f32 that are emitted as instructions (`neg` and `abs` also of integers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Un {
    Neg,
    Abs,
    Exp,
    Expm1,
    Log,
    Log1p,
    Sqrt,
    Floor,
    Ceil,
    Round,
    Sin,
    Cos,
    Tanh,
    Atan,
    Asin,
    Erf,
    Not,
}

impl Un {
    /// Whether it costs many instructions, so that its value is stored rather than recomputed.
    pub(super) fn is_expensive(self) -> bool {
        use Un::*;
        matches!(self, Exp | Expm1 | Log | Log1p | Sin | Cos | Tanh | Atan | Asin | Erf)
    }

    /// Its instructions on a scalar or a vector.
    pub(super) fn emit(self, t: &mut Text, a: Val) -> Val {
        let float = a.elem == Elem::F32;
        match self {
            Un::Neg if float => t.same("arith.negf", &[a]),
            Un::Neg => {
                let zero = t.int(0, a.elem, a.width);
                t.same("arith.subi", &[zero, a])
            }
            Un::Abs => t.same(if float { "math.absf" } else { "math.absi" }, &[a]),
            Un::Exp => exp(t, a),
            Un::Expm1 => expm1(t, a),
            Un::Log => log(t, a),
            Un::Log1p => log1p(t, a),
            Un::Atan => atan(t, a),
            Un::Asin => asin(t, a),
            Un::Sqrt => t.same("math.sqrt", &[a]),
            Un::Floor => t.same("math.floor", &[a]),
            Un::Ceil => t.same("math.ceil", &[a]),
            Un::Round => t.same("math.roundeven", &[a]),
            Un::Sin => sin(t, a, false),
            Un::Cos => sin(t, a, true),
            Un::Tanh => tanh(t, a),
            Un::Erf => erf(t, a),
            Un::Not => {
                let on = t.int(if a.elem == Elem::I1 { 1 } else { -1 }, a.elem, a.width);
                t.same("arith.xori", &[a, on])
            }
        }
    }
}

/// 1.5·2²³: adding it rounds to an integer, which is then in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// 1.5·2⁵².
const MAGIC_F64: f64 = 6_755_399_441_055_744.0;
/// ln 2 in two parts, the first exact in 9 bits.
const LN2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
/// log₂e in two parts.
const LOG2_E: [f32; 2] = [std::f32::consts::LOG2_E, 1.925_963e-8];
/// π/2 in two parts.
const HALF_PI: [f64; 2] = [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17];

/// (eʳ − 1 − r)/r² on |r| ≤ ln2/2; relative error of eʳ 5e-11.
const EXP: [f32; 6] =
    [0.5, 0.166_666_66, 4.166_629_4e-2, 8.333_497e-3, 1.394_472e-3, 1.979_028_1e-4];
/// erf(x)/x − 1 in x² on |x| ≤ 0.935; relative error 2e-8.
const ERF_SMALL: [f32; 6] =
    [1.283_791_5e-1, -3.761_247e-1, 1.128_158_9e-1, -2.675_835_4e-2, 4.981_036_5e-3, -5.928_969e-4];
/// −ln(1 − erf t) on 0.925 ≤ t ≤ 3.95; error of erf 4e-11.
const ERF_LARGE: [f32; 8] = [
    -1.760_169_9e-4,
    1.129_521_3,
    6.333_34e-1,
    1.082_943_1e-1,
    -2.512_862e-2,
    4.174_552e-3,
    -4.351_823_3e-4,
    2.115_727_6e-5,
];
/// (tanh(x)/x − 1)/x² in x² on |x| ≤ 0.64; error 5e-9.
const TANH: [f32; 5] =
    [-0.333_332_73, 0.133_311_72, -5.371_524_3e-2, 2.055_437_4e-2, -5.606_052_3e-3];
/// (ln(1 + f) − f + f²/2)/f³ on √½ ≤ 1 + f ≤ √2; error 9e-10.
const LOG: [f32; 9] = [
    0.333_333_2,
    -0.250_000_1,
    0.200_018_68,
    -0.166_677_9,
    0.142_234_75,
    -0.124_107_73,
    0.118_686_79,
    -0.116_418_75,
    6.745_804e-2,
];
/// (sin(r)/r − 1)/r² and (cos(r) − 1 + r²/2)/r⁴ in r² on |r| ≤ π/4; errors 5e-12 and 1e-13.
const SIN: [f32; 4] = [-0.166_666_67, 8.333_329e-3, -1.983_933_6e-4, 2.718_313_2e-6];
const COS: [f32; 4] = [4.166_666_7e-2, -1.388_888_4e-3, 2.479_953_8e-5, -2.721_148_6e-7];

/// (atan(x)/x − 1)/x² in x² on |x| ≤ tan(π/8); relative error 7e-10.
const ATAN: [f32; 5] = [-0.333_333_16, 0.199_984_36, -0.142_427_41, 0.105_873_65, -6.060_532e-2];
/// (arcsin(x)/x − 1)/x² in x² on |x| ≤ ½; relative error 5e-9.
const ASIN: [f32; 5] = [0.166_667_54, 7.495_233e-2, 4.547_833_3e-2, 2.414_103_6e-2, 4.223_047e-2];

fn polynomial(t: &mut Text, coefficients: &[f32], x: Val) -> Val {
    let mut rest = coefficients.iter().rev();
    let last = *rest.next().expect("invariant: a polynomial has coefficients");
    let mut p = t.float(last, x.width);
    for &c in rest {
        let c = t.float(c, x.width);
        p = t.same("math.fma", &[p, x, c]);
    }
    p
}

/// x = n·ln 2 + r: (1.5·2²³ + n, n, eʳ − 1).
fn exp_parts(t: &mut Text, x: Val) -> (Val, Val, Val) {
    let (scale, magic) = (t.float(std::f32::consts::LOG2_E, x.width), t.float(MAGIC, x.width));
    let shifted = t.same("math.fma", &[x, scale, magic]);
    let n = t.same("arith.subf", &[shifted, magic]);
    let (hi, lo) = (t.float(-LN2[0], x.width), t.float(-LN2[1], x.width));
    let r = t.same("math.fma", &[n, hi, x]);
    let r = t.same("math.fma", &[n, lo, r]);
    let p = polynomial(t, &EXP, r);
    let square = t.same("arith.mulf", &[r, r]);
    (shifted, n, t.same("math.fma", &[p, square, r]))
}

/// eˣ.
fn exp(t: &mut Text, x: Val) -> Val {
    if t.has_exp2 {
        return exp_by_exp2(t, x);
    }
    let width = x.width;
    let (shifted, _, rest) = exp_parts(t, x);
    let one = t.float(1.0, width);
    let mantissa = t.same("arith.addf", &[rest, one]);
    // n is shifted into the exponent field; the bits above it are zero in 1.5·2²³.
    let n = t.convert("arith.bitcast", shifted, Elem::I32);
    let by = t.int(23, Elem::I32, width);
    let exponent = t.same("arith.shli", &[n, by]);
    let bits = t.convert("arith.bitcast", mantissa, Elem::I32);
    let bits = t.same("arith.addi", &[bits, exponent]);
    let value = t.convert("arith.bitcast", bits, Elem::F32);
    // Arguments whose result leaves the normal range: below ln 2⁻¹²⁶, above ln of the largest.
    let (low, high) = (t.float(-87.336_54, width), t.float(88.722_84, width));
    let (zero, inf) = (t.float(0.0, width), t.float(f32::INFINITY, width));
    let under = t.cmpf("olt", x, low);
    let value = t.select(under, zero, value);
    let over = t.cmpf("ogt", x, high);
    t.select(over, inf, value)
}

/// eˣ where 2ˣ is an instruction. x·log₂e = n + r with 0 ≤ r ≤ 1, up to rounding, and −127 ≤ n ≤ 128; the exponent field of 2ⁿ
/// at the two ends is that of 0 and of infinity, and there 2ʳ is whatever is left: no argument has to be told apart.
fn exp_by_exp2(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    // A saturated sum limits n at both ends at once: of −127 … 128 it is the fraction that lies below x·log₂e − ½.
    const STEPS: f32 = 255.0;
    let (scale, first) = (t.float(LOG2_E[0] / STEPS, 1), t.float(126.5 / STEPS, 1));
    let fraction = by_lane(t, x, |t, lane| {
        let asm =
            "llvm.inline_asm asm_dialect = att \"fma.rn.sat.f32 $0, $1, $2, $3;\", \"=f,f,f,f\"";
        let types = "(f32, f32, f32) -> f32";
        t.def(lane.ty(), format_args!("{asm} {lane}, {scale}, {first} : {types}"))
    });
    let (steps, low) = (t.float(STEPS, width), t.float(MAGIC - 127.0, width));
    let shifted = t.same("math.fma", &[fraction, steps, low]);
    let (magic, scale) = (t.float(MAGIC, width), t.float(LOG2_E[0], width));
    let minus_n = t.same("arith.subf", &[magic, shifted]);
    let r = t.same("math.fma", &[x, scale, minus_n]);
    let rest = t.float(LOG2_E[1], width);
    let r = t.same("math.fma", &[x, rest, r]);
    let mantissa = exp2(t, r);
    let bits = t.convert("arith.bitcast", shifted, Elem::I32);
    let (by, bias) = (t.int(23, Elem::I32, width), t.int(127 << 23, Elem::I32, width));
    let exponent = t.same("arith.shli", &[bits, by]);
    let exponent = t.same("arith.addi", &[exponent, bias]);
    let power = t.convert("arith.bitcast", exponent, Elem::F32);
    t.same("arith.mulf", &[mantissa, power])
}

/// 2ˣ by the instruction, within 2 ulp; results below the smallest normal number are zero.
fn exp2(t: &mut Text, x: Val) -> Val {
    by_lane(t, x, |t, lane| {
        let asm = "llvm.inline_asm asm_dialect = att \"ex2.approx.ftz.f32 $0, $1;\", \"=f,f\"";
        t.def(lane.ty(), format_args!("{asm} {lane} : (f32) -> f32"))
    })
}

/// An operation that has no form for vectors, of each f32.
fn by_lane(t: &mut Text, x: Val, of_lane: impl Fn(&mut Text, Val) -> Val) -> Val {
    let (scalar, vector) = (Type(Elem::F32, 1), x.ty());
    if x.width == 1 {
        return of_lane(t, x);
    }
    let lanes: Vec<String> = (0..x.width)
        .map(|k| {
            let lane =
                t.def(scalar, format_args!("vector.extract {x}[{k}] : {scalar} from {vector}"));
            of_lane(t, lane).to_string()
        })
        .collect();
    t.def(vector, format_args!("vector.from_elements {} : {vector}", lanes.join(", ")))
}

/// eˣ − 1, accurate near 0.
fn expm1(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    // Above 20 the 1 is below the last place; below −20 the result is −1.
    let (low, high) = (t.float(-20.0, width), t.float(20.0, width));
    let above = t.cmpf("ogt", x, high);
    let below = t.cmpf("olt", x, low);
    let clamped = t.select(above, high, x);
    let clamped = t.select(below, low, clamped);
    let (shifted, _, rest) = exp_parts(t, clamped);
    let n = t.convert("arith.bitcast", shifted, Elem::I32);
    let (by, one_bits) = (t.int(23, Elem::I32, width), t.int(0x3F80_0000, Elem::I32, width));
    let exponent = t.same("arith.shli", &[n, by]);
    let bits = t.same("arith.addi", &[exponent, one_bits]);
    let power = t.convert("arith.bitcast", bits, Elem::F32);
    let one = t.float(1.0, width);
    let less = t.same("arith.subf", &[power, one]);
    let near = t.same("math.fma", &[power, rest, less]);
    let far = exp(t, x);
    t.select(above, far, near)
}

/// ln x.
fn log(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    let (tiny, scale) = (t.float(f32::MIN_POSITIVE, width), t.float(8_388_608.0, width));
    let (zero, down) = (t.float(0.0, width), t.float(-23.0, width));
    let subnormal = t.cmpf("olt", x, tiny);
    let scaled = t.same("arith.mulf", &[x, scale]);
    let normal = t.select(subnormal, scaled, x);
    let shift = t.select(subnormal, down, zero);
    let bits = t.convert("arith.bitcast", normal, Elem::I32);
    let (root, by) = (t.int(0x3F35_04F3, Elem::I32, width), t.int(23, Elem::I32, width));
    let relative = t.same("arith.subi", &[bits, root]);
    let e = t.same("arith.shrsi", &[relative, by]);
    let exponent = t.same("arith.shli", &[e, by]);
    let mantissa = t.same("arith.subi", &[bits, exponent]);
    let mantissa = t.convert("arith.bitcast", mantissa, Elem::F32);
    let e = t.convert("arith.sitofp", e, Elem::F32);
    let e = t.same("arith.addf", &[e, shift]);
    let minus_one = t.float(-1.0, width);
    let f = t.same("arith.addf", &[mantissa, minus_one]);
    let p = polynomial(t, &LOG, f);
    let square = t.same("arith.mulf", &[f, f]);
    let cube = t.same("arith.mulf", &[square, f]);
    let y = t.same("arith.mulf", &[cube, p]);
    let (hi, lo, half) = (t.float(LN2[0], width), t.float(LN2[1], width), t.float(-0.5, width));
    let y = t.same("math.fma", &[e, lo, y]);
    let y = t.same("math.fma", &[square, half, y]);
    let y = t.same("arith.addf", &[f, y]);
    let y = t.same("math.fma", &[e, hi, y]);
    let (inf, nan) = (t.float(f32::INFINITY, width), t.float(f32::NAN, width));
    let minus_inf = t.float(f32::NEG_INFINITY, width);
    let finite = t.cmpf("olt", x, inf);
    let y = t.select(finite, y, x);
    let is_zero = t.cmpf("oeq", x, zero);
    let y = t.select(is_zero, minus_inf, y);
    let negative = t.cmpf("olt", x, zero);
    t.select(negative, nan, y)
}

/// ln(1 + x), accurate near 0: the rounding error of 1 + x is corrected to first order.
fn log1p(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    let (one, zero, inf) =
        (t.float(1.0, width), t.float(0.0, width), t.float(f32::INFINITY, width));
    let u = t.same("arith.addf", &[x, one]);
    let y = log(t, u);
    let back = t.same("arith.subf", &[u, one]);
    let lost = t.same("arith.subf", &[x, back]);
    let correction = t.same("arith.divf", &[lost, u]);
    let positive = t.cmpf("ogt", u, zero);
    let finite = t.cmpf("olt", u, inf);
    let valid = t.same("arith.andi", &[positive, finite]);
    let correction = t.select(valid, correction, zero);
    t.same("arith.addf", &[y, correction])
}

/// tanh x: a polynomial near 0, 1 − 2/(e²ˣ + 1) elsewhere.
fn tanh(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    let square = t.same("arith.mulf", &[x, x]);
    let p = polynomial(t, &TANH, square);
    let cube = t.same("arith.mulf", &[square, x]);
    let small = t.same("math.fma", &[cube, p, x]);
    let abs = t.same("math.absf", &[x]);
    let double = t.same("arith.addf", &[abs, abs]);
    let e = exp(t, double);
    let (one, minus_two) = (t.float(1.0, width), t.float(-2.0, width));
    let denominator = t.same("arith.addf", &[e, one]);
    let rest = t.same("arith.divf", &[minus_two, denominator]);
    let large = t.same("arith.addf", &[rest, one]);
    let large = t.same("math.copysign", &[large, x]);
    let border = t.float(0.625, width);
    let is_small = t.cmpf("olt", abs, border);
    t.select(is_small, small, large)
}

/// atan x: a polynomial within tan(π/8); beyond, atan x = π/4 + atan((x − 1)/(x + 1)), and from
/// tan(3π/8) on π/2 − atan(1/x).
fn atan(t: &mut Text, x: Val) -> Val {
    use std::f32::consts::{FRAC_PI_2, FRAC_PI_4};
    let width = x.width;
    let abs = t.same("math.absf", &[x]);
    let (one, minus_one, zero) = (t.float(1.0, width), t.float(-1.0, width), t.float(0.0, width));
    let (near, far) = (t.float(0.414_213_57, width), t.float(2.414_213_7, width));
    let (is_far, is_middle) = (t.cmpf("ogt", abs, far), t.cmpf("ogt", abs, near));
    let (less, more) = (t.same("arith.subf", &[abs, one]), t.same("arith.addf", &[abs, one]));
    let numerator = t.select(is_middle, less, abs);
    let numerator = t.select(is_far, minus_one, numerator);
    let denominator = t.select(is_middle, more, one);
    let denominator = t.select(is_far, abs, denominator);
    let r = t.same("arith.divf", &[numerator, denominator]);
    let (quarter, half) = (t.float(FRAC_PI_4, width), t.float(FRAC_PI_2, width));
    let offset = t.select(is_middle, quarter, zero);
    let offset = t.select(is_far, half, offset);
    let square = t.same("arith.mulf", &[r, r]);
    let p = polynomial(t, &ATAN, square);
    let cube = t.same("arith.mulf", &[square, r]);
    let y = t.same("math.fma", &[cube, p, r]);
    let y = t.same("arith.addf", &[offset, y]);
    t.same("math.copysign", &[y, x])
}

/// arcsin x: a polynomial within ½; beyond, π/2 − 2·arcsin √((1 − |x|)/2). NaN outside [−1, 1].
fn asin(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    let abs = t.same("math.absf", &[x]);
    let (half, minus_half) = (t.float(0.5, width), t.float(-0.5, width));
    let is_far = t.cmpf("ogt", abs, half);
    let near_square = t.same("arith.mulf", &[abs, abs]);
    let far_square = t.same("math.fma", &[abs, minus_half, half]);
    let square = t.select(is_far, far_square, near_square);
    let root = t.same("math.sqrt", &[far_square]);
    let r = t.select(is_far, root, abs);
    let p = polynomial(t, &ASIN, square);
    let cube = t.same("arith.mulf", &[square, r]);
    let near = t.same("math.fma", &[cube, p, r]);
    let (minus_two, quarter_turn) =
        (t.float(-2.0, width), t.float(std::f32::consts::FRAC_PI_2, width));
    let far = t.same("math.fma", &[near, minus_two, quarter_turn]);
    let y = t.select(is_far, far, near);
    t.same("math.copysign", &[y, x])
}

/// Gauss's error function: a polynomial near 0, 1 − e^−P(|x|) elsewhere.
fn erf(t: &mut Text, x: Val) -> Val {
    let width = x.width;
    let square = t.same("arith.mulf", &[x, x]);
    let p = polynomial(t, &ERF_SMALL, square);
    let small = t.same("math.fma", &[x, p, x]);
    let abs = t.same("math.absf", &[x]);
    let p = polynomial(t, &ERF_LARGE, abs);
    let minus = t.same("arith.negf", &[p]);
    let e = exp(t, minus);
    let one = t.float(1.0, width);
    let large = t.same("arith.subf", &[one, e]);
    let large = t.same("math.copysign", &[large, x]);
    let border = t.float(0.93, width);
    let is_small = t.cmpf("olt", abs, border);
    t.select(is_small, small, large)
}

/// sin x, or cos x if `cosine`.
fn sin(t: &mut Text, x: Val, cosine: bool) -> Val {
    let width = x.width;
    let wide = t.convert("arith.extf", x, Elem::F64);
    let (scale, magic) = (t.double(std::f64::consts::FRAC_2_PI, width), t.double(MAGIC_F64, width));
    let shifted = t.same("math.fma", &[wide, scale, magic]);
    let n = t.same("arith.subf", &[shifted, magic]);
    let (hi, lo) = (t.double(-HALF_PI[0], width), t.double(-HALF_PI[1], width));
    let r = t.same("math.fma", &[n, hi, wide]);
    let r = t.same("math.fma", &[n, lo, r]);
    let r = t.convert("arith.truncf", r, Elem::F32);
    let quadrant = t.convert("arith.bitcast", shifted, Elem::I64);
    let quadrant = t.convert("arith.trunci", quadrant, Elem::I32);
    let square = t.same("arith.mulf", &[r, r]);
    let p = polynomial(t, &SIN, square);
    let cube = t.same("arith.mulf", &[square, r]);
    let s = t.same("math.fma", &[cube, p, r]);
    let p = polynomial(t, &COS, square);
    let (one, half) = (t.float(1.0, width), t.float(-0.5, width));
    let c = t.same("math.fma", &[square, half, one]);
    let fourth = t.same("arith.mulf", &[square, square]);
    let c = t.same("math.fma", &[fourth, p, c]);
    let one = t.int(1, Elem::I32, width);
    let quadrant = if cosine { t.same("arith.addi", &[quadrant, one]) } else { quadrant };
    let odd = t.same("arith.andi", &[quadrant, one]);
    let odd = t.cmpi("eq", odd, one);
    let value = t.select(odd, c, s);
    let two = t.int(2, Elem::I32, width);
    let half_turn = t.same("arith.andi", &[quadrant, two]);
    let turned = t.cmpi("eq", half_turn, two);
    let negative = t.same("arith.negf", &[value]);
    t.select(turned, negative, value)
}
