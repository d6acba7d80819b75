//! Operations of two and three operands.

use super::super::EvalError;
use super::{assert_close, bools, eval1, f32s, f64s, i64s, noise, numeric_gradient, try_eval};
use crate::ops::{BinaryFn, CompareFn, LogicalFn, UnaryFn};
use crate::{DType, Op, Tensor};

fn pairs(f: BinaryFn, a: &[f64], b: &[f64]) -> Vec<f64> {
    eval1(Op::Binary(f), &[f64s(&[a.len()], a), f64s(&[b.len()], b)]).to_f64s()
}

fn int_pairs(f: BinaryFn, a: &[i64], b: &[i64]) -> Vec<i64> {
    eval1(Op::Binary(f), &[i64s(&[a.len()], a), i64s(&[b.len()], b)]).to_i64s()
}

#[test]
fn arithmetic() {
    let (a, b) = ([7.0, -7.0, 1.0], [2.0, 2.0, 0.0]);
    assert_eq!(pairs(BinaryFn::Add, &a, &b), [9.0, -5.0, 1.0]);
    assert_eq!(pairs(BinaryFn::Sub, &a, &b), [5.0, -9.0, 1.0]);
    assert_eq!(pairs(BinaryFn::Mul, &a, &b), [14.0, -14.0, 0.0]);
    assert_eq!(pairs(BinaryFn::Div, &a, &b), [3.5, -3.5, f64::INFINITY]);
    assert_eq!(pairs(BinaryFn::Pow, &a, &b), [49.0, 49.0, 1.0]);
}

#[test]
fn remainders_take_the_sign_they_should() {
    let (a, b) = ([-4.5, 4.5, 7.0, -6.0], [2.0, -2.0, 3.0, 3.0]);
    assert_eq!(pairs(BinaryFn::Mod, &a, &b), [1.5, -1.5, 1.0, 0.0]);
    assert_eq!(pairs(BinaryFn::Fmod, &a, &b), [-0.5, 0.5, 1.0, 0.0]);
    let (a, b) = ([-4, 4, 7, -6], [3, -3, 3, 3]);
    assert_eq!(int_pairs(BinaryFn::Mod, &a, &b), [2, -2, 1, 0]);
    assert_eq!(int_pairs(BinaryFn::Fmod, &a, &b), [-1, 1, 1, 0]);
}

#[test]
fn largest_and_smallest_keep_nan() {
    let (a, b) = ([1.0, f64::NAN, 3.0], [2.0, 0.0, f64::NAN]);
    assert_close(&pairs(BinaryFn::Max, &a, &b), &[2.0, f64::NAN, f64::NAN], 0.0);
    assert_close(&pairs(BinaryFn::Min, &a, &b), &[1.0, f64::NAN, f64::NAN], 0.0);
}

#[test]
fn integers_truncate_wrap_and_refuse_zero() {
    assert_eq!(int_pairs(BinaryFn::Div, &[7, -7], &[2, 2]), [3, -3]);
    assert_eq!(int_pairs(BinaryFn::Pow, &[2, -2, 3, -1], &[10, 3, -1, -3]), [1024, -8, 0, -1]);
    let i32s = |x: i64| Tensor::ints(DType::I32, [1], vec![x]);
    let sum = eval1(Op::Binary(BinaryFn::Add), &[i32s(i32::MAX.into()), i32s(1)]);
    assert_eq!(sum.to_i64s(), [i64::from(i32::MIN)]);
    for f in [BinaryFn::Div, BinaryFn::Mod, BinaryFn::Fmod] {
        let result = try_eval(Op::Binary(f), &[i64s(&[1], &[1]), i64s(&[1], &[0])]);
        assert!(matches!(result, Err(EvalError::DivisionByZero)), "{}", f.name());
    }
}

#[test]
fn operands_broadcast_as_in_numpy() {
    let add = |a: Tensor, b: Tensor| eval1(Op::Binary(BinaryFn::Sub), &[a, b]);
    let rows = f32s(&[2, 1], &[10.0, 20.0]);
    let columns = f32s(&[3], &[1.0, 2.0, 3.0]);
    assert_eq!(add(rows, columns.clone()), f32s(&[2, 3], &[9.0, 8.0, 7.0, 19.0, 18.0, 17.0]));
    assert_eq!(add(f32s(&[], &[1.0]), columns), f32s(&[3], &[0.0, -1.0, -2.0]));
    let middle = f32s(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    let lead = f32s(&[2, 1], &[0.0, 1.0]);
    assert_eq!(add(middle, lead), f32s(&[2, 2, 2], &[1.0, 2.0, 0.0, 1.0, 3.0, 4.0, 2.0, 3.0]));
    assert_eq!(add(f32s(&[0, 1], &[]), f32s(&[3], &[1.0; 3])), f32s(&[0, 3], &[]));
}

#[test]
fn comparisons_with_nan_are_false_except_ne() {
    let (a, b) = (f32s(&[3], &[1.0, 2.0, f64::NAN]), f32s(&[3], &[2.0, 2.0, 1.0]));
    let test = |f| eval1(Op::Compare(f), &[a.clone(), b.clone()]).to_i64s();
    assert_eq!(test(CompareFn::Eq), [0, 1, 0]);
    assert_eq!(test(CompareFn::Ne), [1, 0, 1]);
    assert_eq!(test(CompareFn::Lt), [1, 0, 0]);
    assert_eq!(test(CompareFn::Le), [1, 1, 0]);
    assert_eq!(test(CompareFn::Gt), [0, 0, 0]);
    assert_eq!(test(CompareFn::Ge), [0, 1, 0]);
    let big = i64::MAX - 1;
    let near = [i64s(&[1], &[big]), i64s(&[1], &[big + 1])];
    assert_eq!(eval1(Op::Compare(CompareFn::Lt), &near).to_i64s(), [1]);
}

#[test]
fn logic() {
    let (a, b) = (bools(&[4], &[0, 0, 1, 1]), bools(&[4], &[0, 1, 0, 1]));
    let test = |f| eval1(Op::Logical(f), &[a.clone(), b.clone()]).to_i64s();
    assert_eq!(test(LogicalFn::And), [0, 0, 0, 1]);
    assert_eq!(test(LogicalFn::Or), [0, 1, 1, 1]);
    assert_eq!(test(LogicalFn::Xor), [0, 1, 1, 0]);
}

#[test]
fn select_broadcasts_three_operands() {
    let condition = bools(&[2, 1], &[1, 0]);
    let result =
        eval1(Op::Select, &[condition, f32s(&[2], &[1.0, 2.0]), f32s(&[], &[f64::NEG_INFINITY])]);
    assert_eq!(result, f32s(&[2, 2], &[1.0, 2.0, f64::NEG_INFINITY, f64::NEG_INFINITY]));
    let ints = [bools(&[2], &[0, 1]), i64s(&[2], &[1, 2]), i64s(&[2], &[3, 4])];
    assert_eq!(eval1(Op::Select, &ints), i64s(&[2], &[3, 2]));
}

#[test]
fn gradients_agree_with_differences() {
    let n = 12;
    let x: Vec<f64> = noise(1, n).into_iter().map(|x| 4.0 * x).collect();
    let (x, dy) = (f64s(&[n], &x), f64s(&[n], &noise(2, n)));
    for (forward, backward, of_result) in [
        (UnaryFn::Gelu, BinaryFn::GeluGrad, false),
        (UnaryFn::GeluTanh, BinaryFn::GeluTanhGrad, false),
        (UnaryFn::Silu, BinaryFn::SiluGrad, false),
        (UnaryFn::Tanh, BinaryFn::TanhGrad, true),
        (UnaryFn::Sigmoid, BinaryFn::SigmoidGrad, true),
        (UnaryFn::Relu, BinaryFn::ReluGrad, true),
    ] {
        let forward = Op::Unary(forward);
        let second =
            if of_result { eval1(forward.clone(), std::slice::from_ref(&x)) } else { x.clone() };
        let found = eval1(Op::Binary(backward), &[dy.clone(), second]);
        let expected = numeric_gradient(&forward, std::slice::from_ref(&x), 0, &dy);
        assert_close(&found.to_f64s(), &expected, 1e-8);
    }
}
