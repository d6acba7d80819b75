//! Matmuls as library launches.

use crate::check::{Body, check, check_body, random, selected};
use frit_ir::ops::{BinaryFn, Cast, Constant, MatMul};
use frit_ir::plan::Launch;
use frit_ir::{DType, Op, Tensor, TensorType};

fn launches(op: MatMul, a: &[usize], b: &[usize]) -> usize {
    let types = [a, b].map(|shape| TensorType::new(DType::BF16, shape));
    let body = crate::check::body_of(Op::MatMul(op), &[&types[0], &types[1]]);
    let selected = selected(&body);
    assert!(selected.launches.iter().all(|l| matches!(l, Launch::Gemm(_))));
    selected.launches.len()
}

#[test]
fn transpositions_batches_and_types() {
    for (a, b, trans_a, trans_b) in [
        (vec![5, 7], vec![7, 3], false, false),
        (vec![7, 5], vec![3, 7], true, true),
        (vec![2, 3, 5, 7], vec![7, 4], false, false),
        (vec![2, 3, 7, 5], vec![7, 4], true, false),
        (vec![2, 3, 5, 7], vec![2, 3, 4, 7], false, true),
        (vec![2, 1, 5, 7], vec![3, 7, 4], false, false),
        (vec![3, 1, 2, 2, 3], vec![2, 1, 3, 2], false, false),
        (vec![5, 0], vec![0, 3], false, false),
        (vec![0, 5], vec![5, 3], false, false),
    ] {
        for (dtype, out) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::BF16, Some(DType::F32)),
            (DType::F16, Some(DType::BF16)),
            (DType::F64, Some(DType::F32)),
        ] {
            let operands = [random(dtype, &a, 1), random(dtype, &b, 2)];
            check(Op::MatMul(MatMul { trans_a, trans_b, out }), &operands, 1e-2);
        }
    }
}

#[test]
fn equal_distances_are_one_launch() {
    let plain = MatMul::default();
    assert_eq!(launches(plain.clone(), &[2, 3, 5, 7], &[2, 3, 7, 4]), 1);
    assert_eq!(launches(plain.clone(), &[2, 3, 5, 7], &[7, 4]), 1);
    assert_eq!(launches(plain, &[2, 8, 5, 7], &[8, 7, 4]), 2);
}

#[test]
fn a_bias_and_a_cast_belong_to_the_gemm() {
    for (dtype, out, cast, weights) in [
        (DType::BF16, None, None, vec![7, 6]),
        (DType::F32, None, None, vec![2, 7, 6]),
        (DType::BF16, Some(DType::F32), None, vec![7, 6]),
        (DType::BF16, Some(DType::F32), Some(DType::BF16), vec![2, 7, 6]),
    ] {
        let operands = [
            random(dtype, &[2, 5, 7], 1),
            random(dtype, &weights, 2),
            random(out.unwrap_or(dtype), &[6], 3),
        ];
        let mut body = Body::new();
        let inputs: Vec<_> = operands.iter().map(|t| body.input(&t.ty)).collect();
        let matmul = body.add(Op::MatMul(MatMul { out, ..MatMul::default() }), &inputs[..2])[0];
        let mut last = body.add(Op::Binary(BinaryFn::Add), &[matmul, inputs[2]])[0];
        if let Some(to) = cast {
            last = body.add(Op::Cast(Cast { to }), &[last])[0];
        }
        let body = body.outputs(&[last]);
        // The library may have no algorithm with a bias; then a generated kernel adds it, and casts the sum.
        let [Launch::Choice(candidates)] = &selected(&body).launches[..] else { panic!("{body}") };
        assert_eq!(candidates[0].launches.len(), if cast.is_some() { 2 } else { 1 });
        assert_eq!(candidates[1].launches.len(), 2);
        check_body(&body, &operands, 2e-2);
    }
}

#[test]
fn a_bias_is_added_to_one_batch_only() {
    let mut body = Body::new();
    let shapes = [vec![2, 8, 5, 7], vec![8, 7, 6], vec![6]];
    let inputs = shapes.map(|s| body.input(&TensorType::new(DType::BF16, s)));
    let matmul = body.add(Op::MatMul(MatMul::default()), &inputs[..2])[0];
    let sum = body.add(Op::Binary(BinaryFn::Add), &[matmul, inputs[2]])[0];
    let body = body.outputs(&[sum]);
    assert!(frit_select::cuda(&body, frit_select::Options::default()).is_none());
}

#[test]
fn an_operand_may_be_one_number() {
    let mut body = Body::new();
    let x = random(DType::F32, &[4, 3], 1);
    let input = body.input(&x.ty);
    let value = Tensor::splat(TensorType::new(DType::F32, [3, 2]), 0.5);
    let ones = body.add(Op::Constant(Constant { value }), &[])[0];
    let matmul = body.add(Op::MatMul(MatMul::default()), &[input, ones])[0];
    check_body(&body.outputs(&[matmul]), &[x], 1e-6);
}
