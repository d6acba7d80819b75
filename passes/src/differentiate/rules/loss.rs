//! Gradient rule of cross-entropy.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{CrossEntropy, CrossEntropyGrad, Op};
use frit_ir::{Node, ValueId};

impl Differentiate for CrossEntropy {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dlosses: ValueId) -> Gradients {
        let (x, lse) = (&node.inputs, node.outputs[1]);
        let CrossEntropy { ignore_index, classes } = *self;
        let grad = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index, classes });
        Ok(vec![Some(b.emit(grad, &[dlosses, x[0], x[1], lse])?), None])
    }
}
