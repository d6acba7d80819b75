//! Gradient rules of the normalizations, by their gradient operations.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{
    LayerNorm, LayerNormGradAffine, LayerNormGradInput, Op, RmsNorm, RmsNormGradInput,
    RmsNormGradScale,
};
use frit_ir::{Node, ValueId};

impl Differentiate for LayerNorm {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let y = &node.outputs;
        let (axis, mean, rstd) = (self.axis, y[1], y[2]);
        let mut gradients = vec![None; x.len()];
        if b.needs(0) {
            let grad = Op::LayerNormGradInput(LayerNormGradInput { axis });
            gradients[0] = Some(b.emit(grad, &[dy, x[0], x[1], mean, rstd])?);
        }
        if b.needs(1) || b.needs(2) {
            let grad = Op::LayerNormGradAffine(LayerNormGradAffine { axis });
            let affine = b.emit_all(grad, &[dy, x[0], mean, rstd])?;
            for i in 1..x.len() {
                if b.needs(i) {
                    let dtype = b.grad_dtype(x[i]);
                    gradients[i] = Some(b.cast(affine[i - 1], dtype)?);
                }
            }
        }
        Ok(gradients)
    }
}

impl Differentiate for RmsNorm {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let y = &node.outputs;
        let (axis, rstd) = (self.axis, y[1]);
        let mut gradients = vec![None; 2];
        if b.needs(0) {
            let grad = Op::RmsNormGradInput(RmsNormGradInput { axis });
            gradients[0] = Some(b.emit(grad, &[dy, x[0], x[1], rstd])?);
        }
        if b.needs(1) {
            let grad = Op::RmsNormGradScale(RmsNormGradScale { axis });
            let scale = b.emit(grad, &[dy, x[0], rstd])?;
            let dtype = b.grad_dtype(x[1]);
            gradients[1] = Some(b.cast(scale, dtype)?);
        }
        Ok(gradients)
    }
}
