//! Gradient rules of the boundaries of functions with a precision of their own: the identity.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{EnterPrecision, LeavePrecision};
use frit_ir::{Node, ValueId};

impl Differentiate for EnterPrecision {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let to = b.grad_dtype(node.inputs[0]);
        Ok(vec![Some(b.cast(dy, to)?)])
    }
}

impl Differentiate for LeavePrecision {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let to = b.ty(node.inputs[0]).dtype;
        Ok(vec![Some(b.cast(dy, to)?)])
    }
}
