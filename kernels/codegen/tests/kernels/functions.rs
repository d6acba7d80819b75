//! Every elementary function against f64, over its range and at its special points.

use crate::harness::{Body, Case, check, check_everywhere, check_on};
use frit_codegen::HostTarget;
use frit_ir::ops::{BinaryFn, FusionKind, UnaryFn};
use frit_ir::{DType, Op, Tensor};
use std::f64::consts::PI;

fn erf(x: f64) -> f64 {
    // Series below 3, continued fraction of erfc above: both far beyond f32.
    if x.abs() < 3.0 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * 2.0 / PI.sqrt()
    } else {
        let a = x.abs();
        let fraction = (1..60).rev().fold(a, |f, k| a + f64::from(k) / 2.0 / f);
        (1.0 - (-a * a).exp() / (fraction * PI.sqrt())).copysign(x)
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn reference(f: UnaryFn, x: f64) -> f64 {
    use UnaryFn::*;
    match f {
        Neg => -x,
        Detach => x,
        Abs => x.abs(),
        Sign => {
            if x == 0.0 || x.is_nan() {
                x
            } else {
                x.signum()
            }
        }
        Exp => x.exp(),
        Expm1 => x.exp_m1(),
        Log => x.ln(),
        Log1p => x.ln_1p(),
        Sqrt => x.sqrt(),
        Rsqrt => 1.0 / x.sqrt(),
        Reciprocal => 1.0 / x,
        Floor => x.floor(),
        Ceil => x.ceil(),
        Round => x.round_ties_even(),
        Sin => x.sin(),
        Cos => x.cos(),
        Tan => x.tan(),
        Tanh => x.tanh(),
        Asin => x.asin(),
        Acos => x.acos(),
        Atan => x.atan(),
        Sinh => x.sinh(),
        Cosh => x.cosh(),
        Asinh => x.asinh(),
        Acosh => x.acosh(),
        Atanh => x.atanh(),
        Erf => erf(x),
        Sigmoid => sigmoid(x),
        Softplus => (-x.abs()).exp().ln_1p() + if x.is_nan() { x } else { x.max(0.0) },
        Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Silu => x * sigmoid(x),
        Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        GeluTanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
        Not => unreachable!(),
    }
}

/// Points of a range, dense near zero too.
fn points(low: f64, high: f64) -> Vec<f64> {
    let mut points: Vec<f64> =
        (0..4001).map(|i| low + (high - low) * f64::from(i) / 4000.0).collect();
    for e in -120..0 {
        points.push(1.37 * 2f64.powi(e));
        points.push(-1.37 * 2f64.powi(e));
    }
    points.retain(|x| (low..=high).contains(x));
    points.iter().map(|&x| f64::from(x as f32)).collect()
}

fn case(f: UnaryFn, xs: Vec<f64>, tolerance: f64, floor: f64) -> Case {
    let mut body = Body::new();
    let x = body.input(DType::F32, &[xs.len()]);
    let y = body.one(Op::Unary(f), &[x]);
    let expected = vec![xs.iter().map(|&x| reference(f, x)).collect()];
    Case {
        name: f.name().into(),
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        inputs: vec![Tensor::floats(DType::F32, [xs.len()], xs)],
        expected,
        tolerance,
        floor,
    }
}

/// 4 ulp of f32, relative.
const ULPS: f64 = 4.0 / 16_777_216.0 * 2.0;

fn cases() -> Vec<Case> {
    use UnaryFn::*;
    let mut cases = Vec::new();
    for (f, low, high) in [
        (Neg, -10.0, 10.0),
        (Detach, -10.0, 10.0),
        (Abs, -10.0, 10.0),
        (Sign, -10.0, 10.0),
        (Exp, -87.3, 88.7),
        (Expm1, -90.0, 88.7),
        (Log, 0.0, 1e4),
        (Log1p, -0.9999, 1e4),
        (Sqrt, 0.0, 1e6),
        (Rsqrt, 1e-30, 1e6),
        (Reciprocal, -1e3, 1e3),
        (Floor, -1e3, 1e3),
        (Ceil, -1e3, 1e3),
        (Round, -100.0, 100.0),
        (Tanh, -20.0, 20.0),
        (Asin, -1.0, 1.0),
        (Acos, -1.0, 1.0),
        (Atan, -30.0, 30.0),
        (Atan, -1e6, 1e6),
        (Sinh, -88.0, 88.0),
        (Cosh, -88.0, 88.0),
        (Asinh, -20.0, 20.0),
        (Asinh, -1e8, 1e8),
        (Acosh, 1.0, 20.0),
        (Acosh, 1.0, 1e8),
        (Atanh, -0.999, 0.999),
        (Erf, -6.0, 6.0),
        (Sigmoid, -87.0, 100.0),
        (Softplus, -80.0, 100.0),
        (Relu, -10.0, 10.0),
        (Silu, -80.0, 80.0),
    ] {
        cases.push(case(f, points(low, high), ULPS, 0.0));
    }
    // Relative to the function's scale: these have zeros, near which they cancel.
    for (f, low, high) in [(Sin, -1e4, 1e4), (Cos, -1e4, 1e4), (Gelu, -6.0, 30.0)] {
        cases.push(case(f, points(low, high), ULPS, 1.0));
    }
    cases.push(case(Tan, points(-1.5, 1.5), 2.0 * ULPS, 0.0));
    cases.push(case(GeluTanh, points(-9.0, 30.0), ULPS, 0.05));
    cases
}

#[test]
fn functions_are_within_four_ulp_and_six_on_a_gpu() {
    check_everywhere(&cases(), 1.5);
}

#[test]
fn functions_are_the_same_without_avx512() {
    check_on(&cases(), &HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c,+bmi2"));
}

#[test]
fn special_values_give_special_values() {
    use UnaryFn::*;
    let inf = f64::INFINITY;
    let specials = [0.0, -0.0, inf, -inf, f64::NAN, 1e30, -1e30, 89.0, -110.0, 1e-42, 1.0, -1.0]
        .map(|x| f64::from(x as f32))
        .to_vec();
    let functions = [
        Neg, Abs, Sign, Exp, Log, Log1p, Sqrt, Floor, Ceil, Round, Tanh, Erf, Sigmoid, Relu, Expm1,
        Softplus, Rsqrt, Reciprocal, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh,
    ];
    let cases: Vec<Case> = functions
        .into_iter()
        .map(|f| {
            let mut case = case(f, specials.clone(), ULPS, 1e-37);
            // Results beyond f32 are infinite, or zero.
            case.expected[0].iter_mut().for_each(|y| *y = f64::from(*y as f32));
            case
        })
        .collect();
    check_everywhere(&cases, 1.5);
}

#[test]
fn gradients_of_activations_match_finite_differences() {
    let xs = points(-6.0, 6.0);
    let h = 1e-5;
    let slope = |f: UnaryFn, x: f64| (reference(f, x + h) - reference(f, x - h)) / (2.0 * h);
    let mut cases = Vec::new();
    for (f, of) in [
        (BinaryFn::GeluGrad, UnaryFn::Gelu),
        (BinaryFn::GeluTanhGrad, UnaryFn::GeluTanh),
        (BinaryFn::SiluGrad, UnaryFn::Silu),
        (BinaryFn::TanhGrad, UnaryFn::Tanh),
        (BinaryFn::SigmoidGrad, UnaryFn::Sigmoid),
    ] {
        let of_result = matches!(f, BinaryFn::TanhGrad | BinaryFn::SigmoidGrad);
        let mut body = Body::new();
        let (dy, x) = (body.input(DType::F32, &[1]), body.input(DType::F32, &[xs.len()]));
        let dx = body.one(Op::Binary(f), &[dy, x]);
        let second: Vec<f64> =
            xs.iter().map(|&x| if of_result { reference(of, x) } else { x }).collect();
        cases.push(Case {
            name: f.name().into(),
            body: body.done(&[dx]),
            kind: FusionKind::Pointwise,
            inputs: vec![
                Tensor::floats(DType::F32, [1], vec![3.0]),
                Tensor::floats(DType::F32, [xs.len()], second),
            ],
            expected: vec![xs.iter().map(|&x| 3.0 * slope(of, x)).collect()],
            tolerance: 1e-6,
            floor: 1.0,
        });
    }
    check(&cases);
}
