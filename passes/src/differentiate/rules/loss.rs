//! Gradient rule of cross-entropy.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{CrossEntropy, CrossEntropyGrad, Op};
use frit_ir::{Node, ValueId};

impl Differentiate for CrossEntropy {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dlosses: ValueId) -> Gradients {
        let x = &node.inputs;
        let y = &node.outputs;
        let grad = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index: self.ignore_index });
        Ok(vec![Some(b.emit(grad, &[dlosses, x[0], x[1], y[1]])?), None])
    }
}
