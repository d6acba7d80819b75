//! Operations of one operand.

use super::super::{Options, erf, erfc, eval_op};
use super::{assert_close, bools, eval1, f32s, f64s, i64s};
use crate::ops::{Cast, Clip, PredicateFn, UnaryFn};
use crate::{DType, Op, Tensor, TensorData, TensorType};

fn values(f: UnaryFn, x: &[f64]) -> Vec<f64> {
    eval1(Op::Unary(f), &[f64s(&[x.len()], x)]).to_f64s()
}

#[test]
fn erf_agrees_with_tabulated_values() {
    // Abramowitz & Stegun, table 7.1, with further digits.
    for (x, y) in [
        (0.0, 0.0),
        (0.1, 0.112_462_916_018_284_9),
        (0.5, 0.520_499_877_813_046_5),
        (1.0, 0.842_700_792_949_714_9),
        (2.0, 0.995_322_265_018_952_7),
        (2.5, 0.999_593_047_982_555),
        (3.0, 0.999_977_909_503_001_4),
    ] {
        assert!((erf(x) - y).abs() < 1e-15, "erf({x}) = {}", erf(x));
        assert_eq!(erf(-x), -erf(x));
    }
    assert_eq!((erf(f64::INFINITY), erf(f64::NEG_INFINITY)), (1.0, -1.0));
    assert!(erf(f64::NAN).is_nan() && erfc(f64::NAN).is_nan());
    assert!((erfc(3.0) / 2.209_049_699_858_544e-5 - 1.0).abs() < 1e-13);
    assert!((erfc(10.0) / 2.088_487_583_762_545e-45 - 1.0).abs() < 1e-13);
    // Both methods meet where one takes over.
    assert!((erf(2.5 - 1e-12) - erf(2.5)).abs() < 1e-14);
}

#[test]
fn functions_of_reals() {
    let x = [-2.0, -0.5, 0.0, 1.5];
    let e = std::f64::consts::E;
    let check = |f, expected: [f64; 4]| assert_close(&values(f, &x), &expected, 1e-14);
    check(UnaryFn::Neg, [2.0, 0.5, 0.0, -1.5]);
    check(UnaryFn::Abs, [2.0, 0.5, 0.0, 1.5]);
    check(UnaryFn::Sign, [-1.0, -1.0, 0.0, 1.0]);
    check(UnaryFn::Exp, [1.0 / (e * e), 1.0 / e.sqrt(), 1.0, e * e.sqrt()]);
    check(UnaryFn::Expm1, [1.0 / (e * e) - 1.0, 1.0 / e.sqrt() - 1.0, 0.0, e * e.sqrt() - 1.0]);
    check(UnaryFn::Floor, [-2.0, -1.0, 0.0, 1.0]);
    check(UnaryFn::Ceil, [-2.0, -0.0, 0.0, 2.0]);
    check(UnaryFn::Reciprocal, [-0.5, -2.0, f64::INFINITY, 1.0 / 1.5]);
    check(UnaryFn::Relu, [0.0, 0.0, 0.0, 1.5]);
    check(UnaryFn::Sqrt, [f64::NAN, f64::NAN, 0.0, 1.5f64.sqrt()]);
    check(UnaryFn::Rsqrt, [f64::NAN, f64::NAN, f64::INFINITY, 1.0 / 1.5f64.sqrt()]);
    check(UnaryFn::Log, [f64::NAN, f64::NAN, f64::NEG_INFINITY, 1.5f64.ln()]);
    check(UnaryFn::Log1p, [f64::NAN, 0.5f64.ln(), 0.0, 2.5f64.ln()]);
    check(UnaryFn::Sin, x.map(f64::sin));
    check(UnaryFn::Cos, x.map(f64::cos));
    check(UnaryFn::Tan, x.map(|x| x.sin() / x.cos()));
    check(
        UnaryFn::Atan,
        [-2.0, -0.5, 0.0, 1.5]
            .map(|x: f64| x.signum() * (1.0 / (1.0 + x * x).sqrt()).acos())
            .map(|y| if y.abs() < 1e-300 { 0.0 } else { y }),
    );
    check(UnaryFn::Tanh, x.map(|x| ((2.0 * x).exp() - 1.0) / ((2.0 * x).exp() + 1.0)));
    check(UnaryFn::Sigmoid, x.map(|x| 1.0 / (1.0 + (-x).exp())));
    check(UnaryFn::Silu, x.map(|x| x / (1.0 + (-x).exp())));
    check(UnaryFn::Softplus, x.map(|x| (1.0 + x.exp()).ln()));
    check(UnaryFn::Erf, x.map(erf));
    // By the C library's erfc and tanh.
    check(UnaryFn::Gelu, [-0.04550026389635844, -0.15426876936299344, 0.0, 1.399789198096713]);
    check(UnaryFn::GeluTanh, [-0.04540230591222494, -0.15428599017485606, 0.0, 1.3995715769802328]);
}

#[test]
fn rounding_goes_to_even() {
    let x = [0.5, 1.5, 2.5, -0.5, -1.5, 2.4];
    assert_eq!(values(UnaryFn::Round, &x), [0.0, 2.0, 2.0, -0.0, -2.0, 2.0]);
}

#[test]
fn nothing_overflows_that_has_a_limit() {
    let x = [-1000.0, 1000.0];
    assert_eq!(values(UnaryFn::Sigmoid, &x), [0.0, 1.0]);
    assert_eq!(values(UnaryFn::Softplus, &x), [0.0, 1000.0]);
    assert_eq!(values(UnaryFn::Silu, &x), [-0.0, 1000.0]);
    assert_eq!(values(UnaryFn::Gelu, &x), [-0.0, 1000.0]);
}

#[test]
fn nan_goes_through() {
    for f in UnaryFn::ALL.iter().filter(|f| **f != UnaryFn::Not) {
        assert!(values(*f, &[f64::NAN])[0].is_nan(), "{}", f.name());
    }
}

#[test]
fn results_are_rounded_to_their_dtype() {
    let third = eval1(Op::Unary(UnaryFn::Reciprocal), &[f32s(&[], &[3.0])]);
    assert_eq!(third.to_f64s(), [f64::from(1.0f32 / 3.0)]);
    let large = eval1(Op::Unary(UnaryFn::Exp), &[f32s(&[], &[100.0])]);
    assert_eq!(large.to_f64s(), [f64::INFINITY]);
    let x = Tensor::floats(DType::BF16, [1], vec![3.0]);
    assert_eq!(eval1(Op::Unary(UnaryFn::Reciprocal), &[x]).to_f64s(), [0.333_984_375]);
}

#[test]
fn integers_and_bools() {
    let x = i64s(&[3], &[-4, 0, 9]);
    let ints = |f| eval1(Op::Unary(f), std::slice::from_ref(&x)).to_i64s();
    assert_eq!(ints(UnaryFn::Neg), [4, 0, -9]);
    assert_eq!(ints(UnaryFn::Abs), [4, 0, 9]);
    assert_eq!(ints(UnaryFn::Sign), [-1, 0, 1]);
    assert_eq!(eval1(Op::Unary(UnaryFn::Not), &[bools(&[2], &[0, 1])]), bools(&[2], &[1, 0]));
}

#[test]
fn predicates() {
    let x = f32s(&[4], &[1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    let test = |f| eval1(Op::Predicate(f), std::slice::from_ref(&x)).to_i64s();
    assert_eq!(test(PredicateFn::IsNan), [0, 1, 0, 0]);
    assert_eq!(test(PredicateFn::IsInf), [0, 0, 1, 1]);
}

#[test]
fn casts_round_truncate_and_saturate() {
    let cast = |x: Tensor, to| eval1(Op::Cast(Cast { to }), &[x]);
    let x = || f32s(&[4], &[1.0 + 1.0 / 256.0, -2.7, 70000.0, 0.0]);
    assert_eq!(cast(x(), DType::BF16).to_f64s(), [1.0, -2.703_125, 70144.0, 0.0]);
    assert_eq!(cast(x(), DType::F16).to_f64s()[2], f64::INFINITY);
    assert_eq!(cast(x(), DType::I64).to_i64s(), [1, -2, 70000, 0]);
    assert_eq!(cast(x(), DType::Bool).to_i64s(), [1, 1, 1, 0]);
    assert_eq!(cast(f32s(&[2], &[3e9, f64::NAN]), DType::I32).to_i64s(), [i32::MAX.into(), 0]);
    assert_eq!(cast(f32s(&[2], &[-1.0, 300.0]), DType::U8).to_i64s(), [0, 255]);
    assert_eq!(cast(f32s(&[1], &[0.5]), DType::Bool).to_i64s(), [1]);
    assert_eq!(cast(bools(&[2], &[0, 1]), DType::F32).to_f64s(), [0.0, 1.0]);
}

#[test]
fn exact_casts_between_floats_change_nothing() {
    let x = 1.0 + 1e-12;
    let t = Tensor::exact(TensorType::new(DType::F32, [1]), TensorData::Float(vec![x]));
    let op = Op::Cast(Cast { to: DType::BF16 });
    let y = eval_op(&op, &[&t], Options::EXACT).expect("a value").remove(0);
    assert_eq!((y.dtype(), y.to_f64s()), (DType::BF16, vec![x]));
}

#[test]
fn clip_limits_and_keeps_nan() {
    let clip = |min, max, x: Tensor| eval1(Op::Clip(Clip { min, max }), &[x]);
    let x = f32s(&[4], &[-3.0, 0.5, 7.0, f64::NAN]);
    assert_close(
        &clip(Some(-1.0), Some(2.0), x.clone()).to_f64s(),
        &[-1.0, 0.5, 2.0, f64::NAN],
        0.0,
    );
    assert_close(&clip(None, Some(0.0), x).to_f64s(), &[-3.0, 0.0, 0.0, f64::NAN], 0.0);
    assert_eq!(clip(Some(-1.5), None, i64s(&[2], &[-9, 9])).to_i64s(), [-1, 9]);
}
