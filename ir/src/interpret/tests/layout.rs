//! Operations that rearrange elements.

use super::{bools, eval, eval1, f32s, i64s};
use crate::ops::{Concat, Expand, Pad, Reshape, Slice, Split, Transpose};
use crate::{DType, Op, Tensor};

/// 0, 1, 2 … in this shape.
fn iota(dims: &[usize]) -> Tensor {
    let n: usize = dims.iter().product();
    i64s(dims, &(0..n as i64).collect::<Vec<_>>())
}

#[test]
fn reshape_keeps_the_order() {
    let op = Op::Reshape(Reshape { shape: [3, 2].into() });
    assert_eq!(eval1(op, &[iota(&[2, 3])]), i64s(&[3, 2], &[0, 1, 2, 3, 4, 5]));
}

#[test]
fn transpose_permutes_axes() {
    let op = Op::Transpose(Transpose { perm: vec![2, 0, 1] });
    let x = iota(&[2, 2, 3]);
    let y = eval1(op, std::slice::from_ref(&x));
    assert_eq!(y, i64s(&[3, 2, 2], &[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]));
    let back = Transpose { perm: vec![2, 0, 1] }.inverse();
    assert_eq!(eval1(Op::Transpose(back), &[y]), x);
}

#[test]
fn transpose_of_a_scalar_and_of_nothing() {
    let op = |perm| Op::Transpose(Transpose { perm });
    assert_eq!(eval1(op(vec![]), &[f32s(&[], &[5.0])]), f32s(&[], &[5.0]));
    assert_eq!(eval1(op(vec![1, 0]), &[f32s(&[0, 4], &[])]), f32s(&[4, 0], &[]));
}

#[test]
fn expand_repeats() {
    let op = Op::Expand(Expand { shape: [2, 2, 3].into() });
    let y = eval1(op, &[i64s(&[2, 1], &[7, 8])]);
    assert_eq!(y, i64s(&[2, 2, 3], &[7, 7, 7, 8, 8, 8, 7, 7, 7, 8, 8, 8]));
}

#[test]
fn slices_step_forward_and_backward() {
    let slice = |start, size, step| {
        eval1(Op::Slice(Slice { start, size, step }), &[iota(&[3, 4])]).to_i64s()
    };
    assert_eq!(slice(vec![1, 0], vec![2, 2], vec![1, 2]), [4, 6, 8, 10]);
    assert_eq!(slice(vec![2, 3], vec![2, 2], vec![-2, -3]), [11, 8, 3, 0]);
    assert!(slice(vec![0, 0], vec![0, 4], vec![1, 1]).is_empty());
}

#[test]
fn split_undoes_concat() {
    let (a, b) = (iota(&[2, 1, 2]), i64s(&[2, 2, 2], &[10, 11, 12, 13, 14, 15, 16, 17]));
    let joined = eval1(Op::Concat(Concat { axis: 1 }), &[a.clone(), b.clone()]);
    assert_eq!(joined.to_i64s(), [0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17]);
    let parts = eval(Op::Split(Split { axis: 1, sizes: vec![1, 2] }), &[joined]);
    assert_eq!(parts, [a, b]);
    let floats = eval1(
        Op::Concat(Concat { axis: 0 }),
        &[f32s(&[1], &[1.0]), f32s(&[0], &[]), f32s(&[2], &[2.0, 3.0])],
    );
    assert_eq!(floats, f32s(&[3], &[1.0, 2.0, 3.0]));
}

#[test]
fn pad_surrounds() {
    let pad = |low, high, value| Op::Pad(Pad { low, high, value });
    let y = eval1(pad(vec![1, 0], vec![0, 2], 9.0), &[i64s(&[1, 2], &[1, 2])]);
    assert_eq!(y, i64s(&[2, 4], &[9, 9, 9, 9, 1, 2, 9, 9]));
    let y = eval1(pad(vec![0], vec![1], f64::NEG_INFINITY), &[f32s(&[1], &[1.0])]);
    assert_eq!(y, f32s(&[2], &[1.0, f64::NEG_INFINITY]));
    let x = Tensor::floats(DType::BF16, [0], vec![]);
    assert_eq!(eval1(pad(vec![1], vec![0], 0.1), &[x]).to_f64s(), [DType::BF16.round(0.1)]);
    let y = eval1(pad(vec![0], vec![1], 1.0), &[bools(&[1], &[0])]);
    assert_eq!(y, bools(&[2], &[0, 1]));
}
