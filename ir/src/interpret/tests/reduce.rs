//! Reductions and matmuls.

use super::super::EvalError;
use super::{assert_close, eval1, f32s, f64s, i64s, noise, try_eval};
use crate::ops::{MatMul, Reduce, ReduceFn, SumTo, Transpose};
use crate::{DType, Op, Tensor};

fn reduce(f: ReduceFn, axes: &[usize], x: Tensor) -> Tensor {
    eval1(Op::Reduce(Reduce { f, axes: axes.to_vec(), keep_dims: false }), &[x])
}

#[test]
fn reductions_over_each_axis() {
    let x = || f32s(&[2, 3], &[1.0, 5.0, 3.0, 4.0, 2.0, 6.0]);
    assert_eq!(reduce(ReduceFn::Sum, &[1], x()), f32s(&[2], &[9.0, 12.0]));
    assert_eq!(reduce(ReduceFn::Sum, &[0], x()), f32s(&[3], &[5.0, 7.0, 9.0]));
    assert_eq!(reduce(ReduceFn::Mean, &[0, 1], x()), f32s(&[], &[3.5]));
    assert_eq!(reduce(ReduceFn::Max, &[1], x()), f32s(&[2], &[5.0, 6.0]));
    assert_eq!(reduce(ReduceFn::Min, &[1], x()), f32s(&[2], &[1.0, 2.0]));
    assert_eq!(reduce(ReduceFn::Prod, &[1], x()), f32s(&[2], &[15.0, 48.0]));
    assert_eq!(reduce(ReduceFn::Sum, &[], x()), x());
    let kept = Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: true });
    assert_eq!(eval1(kept, &[x()]), f32s(&[1, 3], &[5.0, 7.0, 9.0]));
}

#[test]
fn reductions_of_nan_and_of_nothing() {
    let x = || f32s(&[2], &[f64::NAN, 1.0]);
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        assert!(reduce(f, &[0], x()).to_f64s()[0].is_nan(), "{f:?}");
    }
    let of_nothing = |f| reduce(f, &[0], f32s(&[0], &[])).to_f64s()[0];
    assert_eq!(of_nothing(ReduceFn::Sum), 0.0);
    assert_eq!(of_nothing(ReduceFn::Prod), 1.0);
    assert_eq!(of_nothing(ReduceFn::Max), f64::NEG_INFINITY);
    assert_eq!(of_nothing(ReduceFn::Min), f64::INFINITY);
    assert!(of_nothing(ReduceFn::Mean).is_nan());
}

#[test]
fn integer_reductions() {
    let x = || i64s(&[3], &[-7, 2, 0]);
    let int = |f| reduce(f, &[0], x()).to_i64s()[0];
    assert_eq!(int(ReduceFn::Sum), -5);
    assert_eq!(int(ReduceFn::Mean), -1);
    assert_eq!(int(ReduceFn::Max), 2);
    assert_eq!(int(ReduceFn::Min), -7);
    assert_eq!(int(ReduceFn::Prod), 0);
    let mean = Op::Reduce(Reduce { f: ReduceFn::Mean, axes: vec![0], keep_dims: false });
    assert!(matches!(try_eval(mean, &[i64s(&[0], &[])]), Err(EvalError::DivisionByZero)));
}

#[test]
fn low_precision_sums_are_rounded_once() {
    let x = Tensor::floats(DType::BF16, [1000], vec![1.0; 1000]);
    assert_eq!(reduce(ReduceFn::Sum, &[0], x).to_f64s(), [1000.0]);
}

#[test]
fn sum_to_undoes_broadcasting() {
    let x = f32s(&[2, 2, 3], &(0..12).map(f64::from).collect::<Vec<_>>());
    let sum_to = |shape: Vec<usize>, dtype| {
        eval1(Op::SumTo(SumTo { shape: shape.into(), dtype }), std::slice::from_ref(&x))
    };
    assert_eq!(sum_to(vec![3], None), f32s(&[3], &[18.0, 22.0, 26.0]));
    assert_eq!(sum_to(vec![2, 1], None), f32s(&[2, 1], &[24.0, 42.0]));
    assert_eq!(sum_to(vec![], None), f32s(&[], &[66.0]));
    assert_eq!(sum_to(vec![], Some(DType::F64)), f64s(&[], &[66.0]));
    assert_eq!(sum_to(vec![2, 2, 3], None), x);
}

#[test]
fn matmul_by_hand() {
    let (a, b) = (f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), f32s(&[2, 1], &[5.0, 6.0]));
    assert_eq!(eval1(Op::MatMul(MatMul::default()), &[a, b]), f32s(&[2, 1], &[17.0, 39.0]));
    let empty = [f32s(&[2, 0], &[]), f32s(&[0, 2], &[])];
    assert_eq!(eval1(Op::MatMul(MatMul::default()), &empty), f32s(&[2, 2], &[0.0; 4]));
}

#[test]
fn every_transposition_gives_the_same_result() {
    let (a, b) = (f64s(&[2, 1, 3, 4], &noise(1, 24)), f64s(&[5, 4, 2], &noise(2, 40)));
    let plain = eval1(Op::MatMul(MatMul::default()), &[a.clone(), b.clone()]);
    assert_eq!(plain.shape().dims(), [2, 5, 3, 2]);
    let at = |i: usize, j: usize, r: usize, c: usize| -> f64 {
        (0..4).map(|k| a.to_f64s()[(i * 3 + r) * 4 + k] * b.to_f64s()[(j * 4 + k) * 2 + c]).sum()
    };
    assert_close(
        &plain.to_f64s()[(5 + 3) * 6 + 2 * 2..][..2],
        &[at(1, 3, 2, 0), at(1, 3, 2, 1)],
        1e-15,
    );
    let swap = |t: &Tensor| {
        let r = t.shape().rank();
        let mut perm: Vec<usize> = (0..r).collect();
        perm.swap(r - 1, r - 2);
        eval1(Op::Transpose(Transpose { perm }), std::slice::from_ref(t))
    };
    for (trans_a, trans_b) in [(true, false), (false, true), (true, true)] {
        let a = if trans_a { swap(&a) } else { a.clone() };
        let b = if trans_b { swap(&b) } else { b.clone() };
        let found = eval1(Op::MatMul(MatMul { trans_a, trans_b, out: None }), &[a, b]);
        assert_close(&found.to_f64s(), &plain.to_f64s(), 1e-15);
    }
}

#[test]
fn a_matmul_may_be_wider_than_its_operands() {
    let low = |x: f64| Tensor::floats(DType::BF16, [1, 1], vec![x]);
    let x = 1.0 + 1.0 / 128.0;
    let matmul = |out| {
        let op = MatMul { out, ..MatMul::default() };
        eval1(Op::MatMul(op), &[low(x), low(x)]).to_f64s()[0]
    };
    assert_eq!(matmul(Some(DType::F32)), x * x);
    assert_eq!(matmul(None), DType::BF16.round(x * x));
}
