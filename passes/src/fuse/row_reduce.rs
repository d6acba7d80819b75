//! Row-reduction regions: softmax, normalization and cross-entropy, their input gradients, and reductions over trailing axes.
//!
//! The iteration space is the operand's shape, split into rows and columns where the reduced axes begin.

use super::region::{Role, Space};
use frit_ir::ops::{LogSoftmax, LogSoftmaxGrad, Op, Softmax, SoftmaxGrad};
use frit_ir::{Shape, TensorType};

/// The space of an operation that reduces the rows of its operands, if it is one.
pub(super) fn space(op: &Op, operands: &[&TensorType]) -> Option<Space> {
    let shape = &operands.first()?.shape;
    let at = |split: usize| Some(Space::new(shape, split));
    match op {
        Op::Reduce(op) => at(trailing(shape, &op.axes)?),
        Op::SumTo(op) => at(trailing(shape, &op.axes(shape))?),
        Op::Softmax(Softmax { axis })
        | Op::LogSoftmax(LogSoftmax { axis })
        | Op::SoftmaxGrad(SoftmaxGrad { axis })
        | Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }) => at(trailing(shape, &[*axis])?),
        Op::LayerNorm(op) => at(op.axis),
        Op::LayerNormGradInput(op) => at(op.axis),
        Op::RmsNorm(op) => at(op.axis),
        Op::RmsNormGradInput(op) => at(op.axis),
        Op::CrossEntropy(_) => at(shape.rank().checked_sub(1)?),
        Op::CrossEntropyGrad(_) => {
            let shape = &operands.get(1)?.shape;
            Some(Space::new(shape, shape.rank().checked_sub(1)?))
        }
        _ => None,
    }
}

/// The start of the reduced axes, if they are the trailing ones (apart from axes of size 1).
fn trailing(shape: &Shape, axes: &[usize]) -> Option<usize> {
    let first = *axes.iter().min()?;
    (first..shape.rank()).all(|i| axes.contains(&i) || shape.0[i] == 1).then_some(first)
}

/// The role that operand `i` must have in the space.
pub(super) fn operand(op: &Op, i: usize) -> Role {
    match (op, i) {
        (Op::LayerNorm(_) | Op::RmsNorm(_), 1 | 2) => Role::Col,
        (Op::LayerNormGradInput(_) | Op::RmsNormGradInput(_), 2) => Role::Col,
        (Op::LayerNormGradInput(_) | Op::RmsNormGradInput(_), 3 | 4) => Role::Row,
        (Op::CrossEntropy(_), 1) | (Op::CrossEntropyGrad(_), 0 | 2 | 3) => Role::Row,
        _ => Role::Full,
    }
}

/// The role of result `i` in the space.
pub(super) fn result(op: &Op, i: usize) -> Role {
    match (op, i) {
        (Op::Reduce(_) | Op::SumTo(_) | Op::CrossEntropy(_), _) => Role::Row,
        (Op::LayerNorm(_) | Op::RmsNorm(_), 1 | 2) => Role::Row,
        _ => Role::Full,
    }
}

/// Whether a kernel iterates over the row more than once, and so recomputes what precedes the operation each time.
pub(super) fn is_multi_pass(op: &Op) -> bool {
    !matches!(op, Op::Reduce(_) | Op::SumTo(_) | Op::CrossEntropyGrad(_))
}
