//! Gradient rule of attention: one node gives the cotangents of queries, keys, values and an added mask.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{Attention, AttentionGrad, Op};
use frit_ir::{Node, ValueId};

impl Differentiate for Attention {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let y = &node.outputs;
        let mut operands = vec![dy, x[0], x[1], x[2], y[0], y[1]];
        operands.extend(&x[3..]);
        let grad = AttentionGrad::of(self, b.needs(3));
        let grads = b.emit_all(Op::AttentionGrad(grad), &operands)?;
        Ok((0..x.len()).map(|i| grads.get(i).copied().filter(|_| b.needs(i))).collect())
    }
}
