//! Embedding and its gradient with repeated indices.

use crate::check::{check, fault_of, random};
use frit_ir::ops::{Embedding, EmbeddingGrad};
use frit_ir::{DType, Op, Tensor};

/// Indices into `rows` rows; every third is the same, some count from the end.
fn ids(dtype: DType, count: usize, rows: usize) -> Tensor {
    let id = |i: usize| match i % 3 {
        0 => 2 % rows as i64,
        1 => (i * i * 7 % rows) as i64,
        _ => -1 - (i * 5 % rows) as i64,
    };
    Tensor::ints(dtype, [count], (0..count).map(id).collect())
}

#[test]
fn rows_of_a_table() {
    for (table, index) in [(DType::F32, DType::I64), (DType::BF16, DType::I32)] {
        for width in [16, 5] {
            let operands = [random(table, &[11, width], 1), ids(index, 9, 11)];
            check(Op::Embedding(Embedding::default()), &operands, 0.0);
        }
    }
}

#[test]
fn gradients_sum_rows_that_repeat() {
    for (dy, dtype, index) in [
        (DType::F32, DType::F32, DType::I64),
        (DType::BF16, DType::F32, DType::I32),
        (DType::F16, DType::F16, DType::I64),
    ] {
        for (count, rows, width) in [(1500, 700, 3), (300, 5, 40), (70, 1, 2), (3, 70_000, 1)] {
            let operands = [random(dy, &[count, width], 1), ids(index, count, rows)];
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-3 };
            let op = Op::EmbeddingGrad(EmbeddingGrad { rows, dtype });
            check(op.clone(), &operands, tolerance);
            let [first, ids] = operands;
            check(op, &[first, ids, random(dtype, &[rows, width], 7)], tolerance);
        }
    }
    let nothing = [random(DType::F32, &[0, 4], 1), ids(DType::I64, 0, 3)];
    check(Op::EmbeddingGrad(EmbeddingGrad { rows: 3, dtype: DType::F32 }), &nothing, 0.0);
}

#[test]
fn indices_outside_are_reported() {
    let ids = |id| Tensor::ints(DType::I64, [2], vec![1, id]);
    let table = random(DType::F32, &[3, 4], 1);
    let fault = |id| fault_of(Op::Embedding(Embedding::default()), &[table.clone(), ids(id)]);
    assert_eq!(fault(3), Some((3, 3)));
    assert_eq!(fault(-4), Some((-4, 3)));
    assert_eq!(fault(-3), None);
    let gradient = Op::EmbeddingGrad(EmbeddingGrad { rows: 3, dtype: DType::F32 });
    assert_eq!(fault_of(gradient, &[random(DType::F32, &[2, 4], 1), ids(7)]), Some((7, 3)));
}
