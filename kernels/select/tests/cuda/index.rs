//! Indexed reads and writes with repeated indices.

use crate::check::{Body, check, check_body, fault_of, random};
use frit_ir::ops::{
    Constant, Gather, GatherElements, GatherNd, ScatterElements, ScatterFn, ScatterNd,
};
use frit_ir::{DType, Op, Tensor, TensorType};

/// Indices from -size to size - 1.
fn ids(dtype: DType, shape: &[usize], size: usize, seed: u64) -> Tensor {
    let n = size as i64;
    let values = random(DType::I64, shape, seed).to_i64s();
    Tensor::ints(dtype, shape, values.iter().map(|x| x.rem_euclid(2 * n) - n).collect())
}

const FUNCTIONS: [ScatterFn; 5] =
    [ScatterFn::Replace, ScatterFn::Add, ScatterFn::Mul, ScatterFn::Max, ScatterFn::Min];

#[test]
fn gathers() {
    for (dtype, index) in
        [(DType::F32, DType::I64), (DType::BF16, DType::I32), (DType::Bool, DType::I64)]
    {
        let x = random(dtype, &[3, 5, 8], 1);
        let at = [
            (0, ids(index, &[4, 2], 3, 2)),
            (1, ids(index, &[7], 5, 3)),
            (2, ids(index, &[], 8, 4)),
        ];
        for (axis, ids) in at {
            check(Op::Gather(Gather { axis }), &[x.clone(), ids], 0.0);
        }
        let each = ids(index, &[2, 9, 8], 5, 5);
        check(Op::GatherElements(GatherElements { axis: 1 }), &[x.clone(), each], 0.0);
        let pairs = ids(index, &[6, 2], 3, 6);
        check(Op::GatherNd(GatherNd { batch_dims: 0 }), &[x.clone(), pairs], 0.0);
        let rows = ids(index, &[3, 4, 1], 5, 7);
        check(Op::GatherNd(GatherNd { batch_dims: 1 }), &[x, rows], 0.0);
    }
}

#[test]
fn scatters_take_updates_in_order() {
    for f in FUNCTIONS {
        for (dtype, index) in [(DType::F32, DType::I64), (DType::I64, DType::I32)] {
            let (x, ids) = (random(dtype, &[3, 5, 4], 1), ids(index, &[3, 70, 4], 5, 2));
            let updates = random(dtype, &[3, 70, 4], 3);
            let op = Op::ScatterElements(ScatterElements { axis: 1, f });
            check(op, &[x.clone(), ids, updates], if f == ScatterFn::Replace { 0.0 } else { 1e-4 });
        }
        let (x, ids) = (random(DType::F16, &[3, 5, 4], 4), ids(DType::I64, &[9, 1], 3, 5));
        let operands = [x, ids, random(DType::F16, &[9, 5, 4], 6)];
        check(Op::ScatterNd(ScatterNd { batch_dims: 0, f }), &operands, 1e-3);
    }
    let keep = [
        random(DType::Bool, &[4, 3], 7),
        ids(DType::I64, &[4, 6], 3, 8),
        random(DType::Bool, &[4, 6], 9),
    ];
    check(Op::ScatterElements(ScatterElements { axis: 1, f: ScatterFn::Replace }), &keep, 0.0);
}

#[test]
fn a_scatter_into_one_number_reads_no_data() {
    let value = Tensor::splat(TensorType::new(DType::F32, [6, 3]), 0.0);
    let operands = [ids(DType::I64, &[8, 1], 6, 1), random(DType::F32, &[8, 3], 2)];
    let mut body = Body::new();
    let data = body.add(Op::Constant(Constant { value }), &[])[0];
    let inputs = operands.each_ref().map(|t| body.input(&t.ty));
    let op = Op::ScatterNd(ScatterNd { batch_dims: 0, f: ScatterFn::Add });
    let out = body.add(op, &[data, inputs[0], inputs[1]])[0];
    check_body(&body.outputs(&[out]), &operands, 1e-5);
}

#[test]
fn indices_outside_are_reported() {
    let x = random(DType::F32, &[3, 2], 1);
    let outside = Tensor::ints(DType::I64, [2, 1], vec![0, -4]);
    let gather = Op::GatherNd(GatherNd { batch_dims: 0 });
    assert_eq!(fault_of(gather, &[x.clone(), outside.clone()]), Some((-4, 3)));
    let scatter = Op::ScatterNd(ScatterNd { batch_dims: 0, f: ScatterFn::Add });
    let updates = random(DType::F32, &[2, 2], 2);
    assert_eq!(fault_of(scatter, &[x, outside, updates]), Some((-4, 3)));
}
