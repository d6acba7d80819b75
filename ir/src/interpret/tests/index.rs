//! Operations that read by index, and running sums.

use super::super::EvalError;
use super::{eval1, f32s, i64s, try_eval};
use crate::ops::{CumSum, Embedding, EmbeddingGrad, Gather, GatherElements, GatherNd};
use crate::{DType, Op};

#[test]
fn embedding_reads_rows_and_its_gradient_adds_them() {
    let table = f32s(&[3, 2], &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    let ids = i64s(&[1, 3], &[2, -3, 2]);
    let y = eval1(Op::Embedding(Embedding::default()), &[table, ids.clone()]);
    assert_eq!(y, f32s(&[1, 3, 2], &[20.0, 21.0, 0.0, 1.0, 20.0, 21.0]));
    let dy = f32s(&[1, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let grad = EmbeddingGrad { rows: 3, dtype: DType::F32 };
    let dtable = eval1(Op::EmbeddingGrad(grad), &[dy, ids]);
    assert_eq!(dtable, f32s(&[3, 2], &[3.0, 4.0, 0.0, 0.0, 6.0, 8.0]));
}

#[test]
fn gather_along_an_axis_counts_negative_indices_from_the_end() {
    let data = i64s(&[2, 3], &[0, 1, 2, 3, 4, 5]);
    let op = Op::Gather(Gather { axis: 1 });
    let y = eval1(op, &[data.clone(), i64s(&[2, 1], &[-1, 0])]);
    assert_eq!(y, i64s(&[2, 2, 1], &[2, 0, 5, 3]));
    let row = eval1(Op::Gather(Gather { axis: 0 }), &[data, i64s(&[], &[1])]);
    assert_eq!(row, i64s(&[3], &[3, 4, 5]));
}

#[test]
fn gather_elements_picks_per_place() {
    let data = i64s(&[2, 3], &[0, 1, 2, 3, 4, 5]);
    let along = |axis, dims: &[usize], ids: &[i64]| {
        eval1(Op::GatherElements(GatherElements { axis }), &[data.clone(), i64s(dims, ids)])
    };
    assert_eq!(along(1, &[2, 2], &[2, -3, 1, 1]), i64s(&[2, 2], &[2, 0, 4, 4]));
    assert_eq!(along(0, &[1, 3], &[1, 0, -1]), i64s(&[1, 3], &[3, 1, 5]));
}

#[test]
fn gather_nd_follows_the_onnx_examples() {
    let data = i64s(&[2, 2], &[0, 1, 2, 3]);
    let nd = |batch_dims| Op::GatherNd(GatherNd { batch_dims });
    let full = eval1(nd(0), &[data.clone(), i64s(&[2, 2], &[0, 0, 1, 1])]);
    assert_eq!(full, i64s(&[2], &[0, 3]));
    let rows = eval1(nd(0), &[data, i64s(&[2, 1], &[1, -2])]);
    assert_eq!(rows, i64s(&[2, 2], &[2, 3, 0, 1]));
    let cube = i64s(&[2, 2, 2], &[0, 1, 2, 3, 4, 5, 6, 7]);
    let batched = eval1(nd(1), &[cube, i64s(&[2, 1], &[1, 0])]);
    assert_eq!(batched, i64s(&[2, 2], &[2, 3, 4, 5]));
}

#[test]
fn an_index_outside_is_an_error() {
    let data = f32s(&[2, 2], &[0.0; 4]);
    for (op, ids) in [
        (Op::Embedding(Embedding::default()), i64s(&[1], &[2])),
        (Op::Gather(Gather { axis: 0 }), i64s(&[1], &[-3])),
        (Op::GatherElements(GatherElements { axis: 0 }), i64s(&[1, 1], &[2])),
        (Op::GatherNd(GatherNd { batch_dims: 0 }), i64s(&[1, 1], &[i64::MIN])),
    ] {
        let result = try_eval(op, &[data.clone(), ids]);
        assert!(matches!(result, Err(EvalError::Index { size: 2, .. })), "{result:?}");
    }
}

#[test]
fn running_sums() {
    let sum = |exclusive, reverse, axis| {
        let op = Op::CumSum(CumSum { axis, exclusive, reverse });
        eval1(op, &[i64s(&[2, 3], &[1, 2, 3, 4, 5, 6])]).to_i64s()
    };
    assert_eq!(sum(false, false, 1), [1, 3, 6, 4, 9, 15]);
    assert_eq!(sum(true, false, 1), [0, 1, 3, 0, 4, 9]);
    assert_eq!(sum(false, true, 1), [6, 5, 3, 15, 11, 6]);
    assert_eq!(sum(true, true, 1), [5, 3, 0, 11, 6, 0]);
    assert_eq!(sum(false, false, 0), [1, 2, 3, 5, 7, 9]);
}
