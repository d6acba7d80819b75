//! Gradient rule of cross-entropy.

use super::super::builder::{Builder, Gradients};
use frit_ir::ValueId;
use frit_ir::ops::{CrossEntropy, CrossEntropyGrad, Op};

pub(super) fn cross_entropy(
    b: &mut Builder<'_>,
    op: &CrossEntropy,
    x: &[ValueId],
    y: &[ValueId],
    dlosses: ValueId,
) -> Gradients {
    let grad = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index: op.ignore_index });
    Ok(vec![Some(b.emit(grad, &[dlosses, x[0], x[1], y[1]])?), None])
}
