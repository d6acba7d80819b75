//! Column-reduction regions: reductions over leading axes, and the gradients of normalization for scale and bias.

use super::region::{Role, Space};
use frit_ir::ops::Op;
use frit_ir::{Shape, TensorType};

/// The space of an operation that reduces the columns of its operands, if it is one.
pub(super) fn space(op: &Op, operands: &[&TensorType]) -> Option<Space> {
    let shape = &operands.first()?.shape;
    let split = match op {
        Op::Reduce(op) => leading(shape, &op.axes)?,
        Op::SumTo(op) => leading(shape, &op.axes(shape))?,
        Op::LayerNormGradAffine(op) => op.axis,
        Op::RmsNormGradScale(op) => op.axis,
        _ => return None,
    };
    Some(Space::new(shape, split))
}

/// The end of the reduced axes, if they are the leading ones (apart from axes of size 1).
fn leading(shape: &Shape, axes: &[usize]) -> Option<usize> {
    let last = *axes.iter().max()?;
    (0..last).all(|i| axes.contains(&i) || shape.0[i] == 1).then_some(last + 1)
}

/// The role that operand `i` must have in the space.
pub(super) fn operand(op: &Op, i: usize) -> Role {
    match (op, i) {
        (Op::LayerNormGradAffine(_) | Op::RmsNormGradScale(_), 2 | 3) => Role::Row,
        _ => Role::Full,
    }
}
