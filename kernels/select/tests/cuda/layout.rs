//! Strided copies for every element size.

use crate::check::{check, random};
use frit_ir::ops::{Concat, Expand, Pad, Reshape, Slice, Split, Transpose};
use frit_ir::{DType, Op};

const SIZES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::Bool];

#[test]
fn transposes() {
    for (shape, perm) in [
        (vec![33, 70], vec![1, 0]),
        (vec![2, 3, 40, 35], vec![1, 0, 3, 2]),
        (vec![2, 5, 3, 16], vec![0, 2, 1, 3]),
        (vec![3, 5, 2], vec![2, 0, 1]),
    ] {
        for dtype in SIZES {
            let perm = perm.clone();
            check(Op::Transpose(Transpose { perm }), &[random(dtype, &shape, 1)], 0.0);
        }
    }
}

#[test]
fn slices_expansions_and_borders() {
    for dtype in SIZES {
        let x = random(dtype, &[4, 6, 16], 2);
        let (start, size) = (vec![3, 1, 0], vec![4, 2, 16]);
        check(
            Op::Slice(Slice { start, size, step: vec![-1, 3, 1] }),
            std::slice::from_ref(&x),
            0.0,
        );
        let (start, size) = (vec![0, 0, 15], vec![4, 6, 8]);
        check(
            Op::Slice(Slice { start, size, step: vec![1, 1, -2] }),
            std::slice::from_ref(&x),
            0.0,
        );
        let empty = Slice { start: vec![0; 3], size: vec![4, 0, 2], step: vec![1; 3] };
        check(Op::Slice(empty), std::slice::from_ref(&x), 0.0);
        check(Op::Reshape(Reshape { shape: [24, 16].into() }), std::slice::from_ref(&x), 0.0);
        let (low, high) = (vec![1, 0, 2], vec![0, 3, 1]);
        check(Op::Pad(Pad { low, high, value: 1.0 }), &[x], 0.0);
        let column = random(dtype, &[3, 1, 5], 3);
        check(Op::Expand(Expand { shape: [2, 3, 4, 5].into() }), &[column], 0.0);
    }
}

#[test]
fn parts_and_their_joins() {
    for dtype in SIZES {
        for axis in [0, 2] {
            let parts = [random(dtype, &[2, 3, 8], 4), random(dtype, &[2, 3, 8], 5)];
            check(Op::Concat(Concat { axis }), &parts, 0.0);
        }
        let x = random(dtype, &[2, 6, 48], 6);
        check(Op::Split(Split { axis: 2, sizes: vec![16, 16, 16] }), std::slice::from_ref(&x), 0.0);
        check(Op::Split(Split { axis: 1, sizes: vec![1, 0, 5] }), &[x], 0.0);
    }
}
