//! Reductions.

use crate::check::{Body, check, check_launches, random};
use frit_ir::ops::{BinaryFn, CumSum, GradStats, Reduce, ReduceFn, Split, SumTo};
use frit_ir::plan::{Argument, Launch, Launches, Pointer, SourceKernel};
use frit_ir::{DType, Op, Shape, Tensor};

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

/// Floats of every exponent up to 2³³, and of both signs.
fn wide(n: usize, seed: u32) -> Tensor {
    let value = |i: u32| {
        let bits = (i + seed).wrapping_mul(2_654_435_761);
        f64::from(f32::from_bits((bits % 0x5000_0000) | (i & 1) << 31))
    };
    Tensor::floats(DType::F32, [n], (0..n as u32).map(value).collect())
}

#[test]
fn exact_statistics_are_equal_bit_for_bit() {
    let exact = Op::GradStats(GradStats { exact: true });
    // Several blocks, and blocks with several chunks; operands that are not aligned, and empty ones.
    let equal = Tensor::floats(DType::F32, [70_000], vec![1.9999999; 70_000]);
    check(exact.clone(), &[wide(150_003, 1), random(DType::F32, &[0], 2), wide(5, 7), equal], 0.0);
    let many: Vec<Tensor> = (1..300).map(|n| wide(n, n as u32)).collect();
    check(exact.clone(), &many, 0.0);
    for dtype in [DType::F16, DType::BF16] {
        check(exact.clone(), &[random(dtype, &[3000], 1)], 0.0);
    }
    let special = [0.0, -0.0, 1e-45, -3e-39, f64::from(f32::MAX), f64::NAN, f64::NEG_INFINITY, 1.0];
    for n in 0..=special.len() {
        check(exact.clone(), &[Tensor::floats(DType::F32, [n], special[..n].to_vec())], 0.0);
    }
}

#[test]
fn exact_statistics_are_rounded_once() {
    let exact = Op::GradStats(GradStats { exact: true });
    let bad = Tensor::floats(DType::F32, [2], vec![f64::INFINITY, 1.0]);
    let most = Tensor::floats(DType::F32, [3], vec![f64::from(f32::MAX); 3]);
    let least = Tensor::floats(DType::F32, [2], vec![1e-22, 3e-23]);
    for operand in [wide(4000, 3), random(DType::F32, &[70], 4), bad, most, least] {
        let digits = crate::check::result(&exact, std::slice::from_ref(&operand));
        for ranks in [1.0, 2.0, 256.0] {
            // Added over ranks, without carries.
            let mut stats: Vec<f64> = digits.to_f64s().iter().map(|x| x * ranks).collect();
            stats.extend([7.0, 8.5]);
            let n = stats.len();
            check(Op::RoundStats, &[Tensor::floats(DType::F32, [n], stats)], 0.0);
        }
    }
}

#[test]
fn sums_in_a_tree_of_micro_steps() {
    for levels in 1..=6usize {
        let n = [5, 3000][levels % 2];
        for k in 0..1i64 << levels {
            let mut operands = vec![wide(n, k as u32)];
            operands.push(Tensor::ints(DType::I64, Shape::scalar(), vec![k]));
            operands.extend((0..levels as u32).map(|level| random(DType::F32, &[n], level.into())));
            check(Op::TreeSum, &operands, 0.0);
        }
    }
}

#[test]
fn sums_in_a_tree_of_ranks() {
    for ranks in [2usize, 4, 8, 64] {
        for n in [1usize, 3001] {
            let rows = wide(ranks * n, ranks as u32);
            let mut body = Body::new();
            let all = body.input(&rows.ty);
            let mut sums = body.add(Op::Split(Split { axis: 0, sizes: vec![n; ranks] }), &[all]);
            while sums.len() > 1 {
                let add = |pair: &[_]| body.add(Op::Binary(BinaryFn::Add), pair)[0];
                sums = sums.chunks(2).map(add).collect();
            }
            let body = body.outputs(&sums);
            let kernel = SourceKernel {
                file: "rank_sum".into(),
                defines: vec![("RANKS".into(), ranks.to_string())],
                entry: "rank_sum".into(),
                grid: [2, 1, 1],
                block: 256,
                shared_bytes: 0,
                arguments: vec![
                    Argument::Pointer(Pointer::Write(0, 0)),
                    Argument::Pointer(Pointer::Read(0, 0)),
                    Argument::I64(n as i64),
                ],
            };
            let launches = Launches { launches: vec![Launch::Source(kernel)], scratch_bytes: 0 };
            check_launches(&body, launches, &[rows], 0.0);
        }
    }
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
