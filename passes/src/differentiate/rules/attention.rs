//! Gradient rule of attention: one node gives the cotangents of queries, keys, values and an added mask.

use super::super::builder::{Builder, Gradients};
use frit_ir::ValueId;
use frit_ir::ops::{Attention, AttentionGrad, Op};

pub(super) fn attention(
    b: &mut Builder<'_>,
    op: &Attention,
    x: &[ValueId],
    y: &[ValueId],
    dy: ValueId,
) -> Gradients {
    let mut operands = vec![dy, x[0], x[1], x[2], y[0], y[1]];
    operands.extend(x.get(3));
    let mask_grad = b.needs(3);
    let grad = AttentionGrad { scale: op.scale, causal: op.causal, window: op.window, mask_grad };
    let grads = b.emit_all(Op::AttentionGrad(grad), &operands)?;
    Ok((0..x.len()).map(|i| grads.get(i).copied().filter(|_| b.needs(i))).collect())
}
