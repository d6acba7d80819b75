//! Reductions.

use crate::check::{check, random};
use frit_ir::ops::{CumSum, GradStats, Reduce, ReduceFn, SumTo};
use frit_ir::{DType, Op, Tensor};

#[test]
fn gradient_statistics_of_many_operands() {
    let operands = [
        random(DType::F32, &[40_003], 1),
        random(DType::F32, &[0], 2),
        random(DType::F32, &[3, 5], 3),
    ];
    check(Op::GradStats(GradStats::default()), &operands, 1e-6);
    // More than one launch reads.
    let many: Vec<Tensor> = (1..300).map(|n| random(DType::F32, &[n], n as u64)).collect();
    check(Op::GradStats(GradStats::default()), &many, 1e-6);
    let bad = vec![1.0, f64::NAN, f64::INFINITY, -2.0];
    check(Op::GradStats(GradStats::default()), &[Tensor::floats(DType::F32, [4], bad)], 0.0);
}

#[test]
fn every_set_of_axes() {
    for axes in [vec![], vec![0], vec![1], vec![2], vec![0, 2], vec![1, 2], vec![0, 1, 2]] {
        let op = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
        check(op, &[random(DType::F32, &[3, 4, 40], 1)], 1e-5);
    }
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Prod, ReduceFn::Max, ReduceFn::Min] {
        let op = Op::Reduce(Reduce { f, axes: vec![0, 2], keep_dims: false });
        check(op, &[random(DType::I32, &[3, 4, 40], 1)], 0.0);
    }
}

#[test]
fn long_sums_are_shared_by_blocks() {
    for (shape, axes) in
        [(vec![9000, 3], vec![0]), (vec![2, 9000], vec![1]), (vec![5000, 33], vec![0, 1])]
    {
        for (f, dtype) in [
            (ReduceFn::Sum, DType::BF16),
            (ReduceFn::Mean, DType::F64),
            (ReduceFn::Max, DType::I64),
        ] {
            let op = Op::Reduce(Reduce { f, axes: axes.clone(), keep_dims: true });
            check(op, &[random(dtype, &shape, 2)], 4e-3);
        }
    }
}

#[test]
fn nan_and_nothing() {
    let x =
        Tensor::floats(DType::F32, [2, 3], vec![1.0, f64::NAN, 3.0, f64::NEG_INFINITY, 0.0, -2.0]);
    let nothing = random(DType::F32, &[2, 0], 1);
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Prod, ReduceFn::Max, ReduceFn::Min] {
        let op = Op::Reduce(Reduce { f, axes: vec![1], keep_dims: false });
        check(op.clone(), std::slice::from_ref(&x), 0.0);
        check(op, std::slice::from_ref(&nothing), 0.0);
    }
}

#[test]
fn sums_to_a_shape() {
    for shape in [vec![40], vec![3, 1], vec![4, 1, 40], vec![]] {
        let op = SumTo { shape: shape.into(), dtype: Some(DType::F32) };
        check(Op::SumTo(op), &[random(DType::BF16, &[4, 3, 40], 3)], 1e-5);
    }
}

#[test]
fn running_sums() {
    for (exclusive, reverse) in [(false, false), (true, true)] {
        for (dtype, axis) in [(DType::F32, 1), (DType::I64, 0), (DType::BF16, 2)] {
            let op = Op::CumSum(CumSum { axis, exclusive, reverse });
            check(
                op,
                &[random(dtype, &[3, 70, 5], 4)],
                if dtype == DType::BF16 { 8e-3 } else { 1e-5 },
            );
        }
    }
}
