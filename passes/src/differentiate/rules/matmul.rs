//! Gradient rule of matmul: one matmul per operand, without explicit transposes.
//!
//! With A and B the operands as the matmul reads them: dA = dY·Bᵀ, dB = Aᵀ·dY. The gradient of a weight that is broadcast over the
//! leading axes contracts them in one matmul.

use super::super::builder::{Builder, Gradients, Rule};
use super::Differentiate;
use frit_ir::ops::{MatMul, Op};
use frit_ir::{Node, ValueId};

impl Differentiate for MatMul {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        // Gradients are computed in the dtype of the matmul's operands.
        let dtype = b.ty(x[0]).dtype;
        let dy = b.cast(dy, dtype)?;
        let mut gradients = vec![None; 2];
        if b.needs(0) {
            gradients[0] = Some(if self.trans_a {
                matmul(b, (x[1], self.trans_b), (dy, true), x[0])?
            } else {
                matmul(b, (dy, false), (x[1], !self.trans_b), x[0])?
            });
        }
        if b.needs(1) {
            let (mut a, mut dy) = (x[0], dy);
            // One weight for all rows: leading axes are rows of one matmul.
            if !self.trans_a && b.ty(x[1]).shape.rank() == 2 {
                a = rows(b, a)?;
                dy = rows(b, dy)?;
            }
            gradients[1] = Some(if self.trans_b {
                matmul(b, (dy, true), (a, self.trans_a), x[1])?
            } else {
                matmul(b, (a, !self.trans_a), (dy, false), x[1])?
            });
        }
        Ok(gradients)
    }
}

/// All axes but the last as one.
fn rows(b: &mut Builder<'_>, x: ValueId) -> Rule<ValueId> {
    let dims = b.ty(x).shape.0;
    let (last, lead) = dims.split_last().expect("invariant: a matrix has axes");
    b.reshape(x, [lead.iter().product::<usize>(), *last])
}

/// The matmul of two operands, each possibly transposed, as a cotangent of `operand`. Where leading
/// axes were broadcast it is summed over them before it is rounded.
fn matmul(
    b: &mut Builder<'_>,
    (left, trans_a): (ValueId, bool),
    (right, trans_b): (ValueId, bool),
    operand: ValueId,
) -> Rule<ValueId> {
    let plain = MatMul { trans_a, trans_b, out: None };
    let (own, to) = (b.ty(left).dtype, b.grad_dtype(operand));
    let lead = |v: ValueId| {
        let dims = b.ty(v).shape.0;
        frit_ir::Shape(dims[..dims.len() - 2].to_vec())
    };
    let broadcast = lead(left).broadcast(&lead(right)) != Some(lead(operand));
    let wide = frit_ir::ops::statistics_dtype(own);
    let out = if broadcast { wide } else { to };
    let out = (out != own).then_some(out);
    let full = b.emit(Op::MatMul(MatMul { out, ..plain }), &[left, right])?;
    b.sum_to(full, operand)
}
