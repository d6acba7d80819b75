//! Lemmas of indexed reads: rows of cotangents are summed where the rows were read, as `embedding_grad` says it.

use super::super::term::Term;
use super::super::{Cotangents, Site};
use frit_ir::Tensor;
use frit_ir::ops::{CompareFn, Embedding, EmbeddingGrad, Gather, GatherElements, Op};

/// Sums `rows[.., C]` into a table of `n` rows by `ids[..]`, for a table of the element type of `like`.
fn summed<'w>(like: Term<'w>, n: usize, rows: Term<'w>, ids: Term<'w>) -> Term<'w> {
    Term::of(Op::EmbeddingGrad(EmbeddingGrad { rows: n, dtype: like.dtype() }), &[rows, ids])
}

/// Without the cotangents of the row `padding_idx`.
pub(super) fn embedding<'w>(op: &Embedding, at: &Site<'w>, mut dy: Term<'w>) -> Cotangents<'w> {
    let (table, ids) = (at.x[0], at.x[1]);
    if let Some(row) = op.padding_idx {
        let mut column = ids.dims();
        column.push(1);
        let kept = ids.compare(CompareFn::Ne, ids.number(row as f64)).reshape(column);
        dy = kept.choose(dy, dy.number(0.0));
    }
    vec![Some(summed(table, table.dims()[0], dy, ids)), None]
}

/// With the axis first, the data is a table whose rows are its slices.
pub(super) fn gather<'w>(op: &Gather, at: &Site<'w>, dy: Term<'w>) -> Cotangents<'w> {
    let (data, ids) = (at.x[0], at.x[1]);
    let (dims, places, axis) = (data.dims(), ids.dims(), op.axis);
    let n = places.len();
    let rank = dims.len() - 1 + n;
    let others: Vec<usize> = [&dims[..axis], &dims[axis + 1..]].concat();
    let ids_first = (axis..axis + n).chain(0..axis).chain(axis + n..rank).collect();
    let rows = [&places[..], &[others.iter().product()]].concat();
    let table = summed(data, dims[axis], dy.transpose(ids_first).reshape(rows), ids);
    let axis_back = (1..=axis).chain([0]).chain(axis + 1..dims.len()).collect();
    let front = [&[dims[axis]], &others[..]].concat();
    vec![Some(table.reshape(front).transpose(axis_back)), None]
}

/// The data is a table of one column, whose rows are read by their place in row-major order.
pub(super) fn gather_elements<'w>(
    op: &GatherElements,
    at: &Site<'w>,
    dy: Term<'w>,
) -> Cotangents<'w> {
    let (data, ids) = (at.x[0], at.x[1]);
    let (shape, places) = (data.ty().shape, ids.ty());
    let (strides, steps, n) = (shape.strides(), places.shape.strides(), places.shape.numel());
    let across = |place: usize| -> usize {
        let other_axes = (0..shape.rank()).filter(|axis| *axis != op.axis);
        other_axes.map(|axis| place / steps[axis] % places.shape.0[axis] * strides[axis]).sum()
    };
    let across: Vec<i64> = (0..n).map(|place| across(place) as i64).collect();
    let across = ids.constant(Tensor::ints(places.dtype, places.shape.clone(), across));
    let from_end = ids + shape.0[op.axis] as f64;
    let along = ids.compare(CompareFn::Lt, ids.number(0.0)).choose(from_end, ids);
    let place = (along * strides[op.axis] as f64 + across).reshape([n]);
    let column = summed(data, shape.numel(), dy.reshape([n, 1]), place);
    vec![Some(column.reshape(shape)), None]
}
