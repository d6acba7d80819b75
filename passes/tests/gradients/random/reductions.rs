//! Reductions, softmax, normalizations and the loss.

use super::super::{add, check, constant, single};
use super::{Random, numel};
use frit_ir::ops::*;
use frit_ir::{DType, Op, Tensor};

pub(super) fn case(r: &mut Random) {
    let shape = r.shape(1, 4);
    let (axes, keep_dims) = (r.axes(shape.len()), r.flag());
    let empty = r.shape_or_empty(1, 3);
    let some = r.axes(empty.len());
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        let op = Reduce { f, axes: axes.clone(), keep_dims };
        single(&format!("{op:?} {shape:?}"), Op::Reduce(op), &[&shape]);
        // Nothing has a sum and a product, but no mean and no extreme.
        let reduced = numel(&some.iter().map(|&axis| empty[axis]).collect::<Vec<_>>());
        if reduced > 0 || matches!(f, ReduceFn::Sum | ReduceFn::Prod) {
            let op = Reduce { f, axes: some.clone(), keep_dims };
            single(&format!("{op:?} {empty:?}"), Op::Reduce(op), &[&empty]);
        }
    }
    let mut rows = shape.clone();
    let axis = r.int(0, shape.len() - 1);
    if axis > 0 && r.int(0, 5) == 0 {
        rows[0] = 0;
    }
    let name = format!("axis {axis} of {rows:?}");
    single(&name, Op::Softmax(Softmax { axis }), &[&rows]);
    single(&name, Op::LogSoftmax(LogSoftmax { axis }), &[&rows]);
    let scale = &rows[axis..];
    let norm = LayerNorm { axis, eps: 0.1 };
    single(&name, Op::LayerNorm(norm.clone()), &[&rows, scale, scale]);
    single(&name, Op::LayerNorm(norm), &[&rows, scale]);
    single(&name, Op::RmsNorm(RmsNorm { axis, eps: 0.1 }), &[&rows, scale]);
    let image = [&[r.int(1, 4), r.int(1, 3)], &r.shape(0, 2)[..]].concat();
    let channels = [image[1]];
    check(&format!("batch_norm {image:?}"), &[&image, &channels, &channels], |g, p| {
        add(g, Op::BatchNorm(BatchNorm { eps: 0.1 }), p)[0]
    });
    let logits = [r.int(0, 4), r.int(1, 4)];
    let ignore_index = r.pick(&[-100, 0]);
    let labels: Vec<i64> = (0..logits[0])
        .map(|_| if r.int(0, 3) == 0 { ignore_index } else { r.int(0, logits[1] - 1) as i64 })
        .collect();
    check(&format!("cross_entropy {logits:?} {labels:?}"), &[&logits], |g, p| {
        let labels = constant(g, Tensor::ints(DType::I64, [logits[0]], labels.clone()));
        add(g, Op::CrossEntropy(CrossEntropy::ignoring(ignore_index)), &[p[0], labels])[0]
    });
}
