//! Sorted order along an axis, and random masks.

use crate::check::{check, random};
use frit_ir::ops::{ArgReduce, RandomMask, TopK};
use frit_ir::{DType, Op, Tensor};

#[test]
fn first_elements_with_ties_and_nan() {
    let values = vec![1.0, 3.0, f64::NAN, 3.0, -1.0, 1.0, 0.0, -0.0];
    for dtype in [DType::F32, DType::F16] {
        let x = Tensor::floats(dtype, [8], values.clone());
        for largest in [true, false] {
            check(Op::TopK(TopK { axis: 0, k: 8, largest }), std::slice::from_ref(&x), 0.0);
            for last in [true, false] {
                let op = ArgReduce { axis: 0, largest, last };
                check(Op::ArgReduce(op), std::slice::from_ref(&x), 0.0);
            }
        }
    }
    let many = random(DType::I64, &[2, 700, 2], 1);
    check(Op::TopK(TopK { axis: 1, k: 5, largest: true }), &[many], 0.0);
    let lines = random(DType::BF16, &[3, 40, 5], 2);
    check(Op::TopK(TopK { axis: 1, k: 3, largest: false }), std::slice::from_ref(&lines), 0.0);
    check(Op::ArgReduce(ArgReduce { axis: 2, largest: true, last: false }), &[lines], 0.0);
}

#[test]
fn masks_are_those_of_the_cpu() {
    for (n, keep, id) in [(1003, 0.9, 0), (64, 0.5, 7), (5, 1.0, 1), (5, 0.0, 1)] {
        let state = Tensor::vector_i64(vec![12345, 3, 1 << 33 | 17]);
        check(Op::RandomMask(RandomMask { shape: [n].into(), keep, id }), &[state], 0.0);
    }
}
